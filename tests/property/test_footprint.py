"""Laws of core.footprint: the cheapest account of where the hits are, in whole numbers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core import footprint
from core.footprint import CACHED, FREE, LEAKED, explain, layout, scored

ALL = (True, True, True)


def marks_of(row, *, usable=None, turn=None, version=None, position=None, trainer=1, boundary=2):
    size = len(row)

    def long(values, default):
        return torch.tensor(default if values is None else values)

    return layout(
        torch.tensor([True] * size if usable is None else usable),
        torch.tensor(row),
        long(position, [sum(r == row[i] for r in row[:i]) for i in range(size)]),
        long(turn, [9] * size),
        long(version, [1] * size),
        trainer_version=trainer,
        boundary=boundary,
    )


def hits(text):
    """One letter a token: x a hit, . a miss."""
    return torch.tensor([letter == "x" for letter in text])


def account(text, marks, *, stale_version=True, runs=ALL):
    found = explain(hits(text), marks, stale_version=stale_version, runs=runs)
    return int(found.score), found.rule.tolist(), found.run.tolist()


def slow_best_run(score, onset, row):
    """Of every row the largest sum of a run from an onset; the first end, then the latest begin."""
    found = {}
    for r in set(row):
        place = [i for i, other in enumerate(row) if other == r]
        found[r] = max(
            ((sum(score[b : e + 1]), -e, b) for b in place if onset[b] for e in place if e >= b),
            default=None,
        )
    return found


def slow_explain(hit, marks, stale_version, runs):
    row, usable = marks.row.tolist(), marks.usable.tolist()
    price = (footprint.LEAK_COST, 0, footprint.FREE_COST)
    best: Any = None
    for *rule, cached in product((False, True), repeat=4):
        if rule[0] and not stale_version:
            continue
        score = [(3 if h else -1) if u else 0 for h, u in zip(hit, usable)]
        total = -footprint.RULE_COST * sum(rule) - footprint.MIXED_COST * int(marks.mixed_count) * cached
        for on, marked in zip(rule, marks.rule.tolist()):
            for i, m in enumerate(marked):
                if on and m:
                    total, score[i] = total + score[i], 0
        run = [-1] * len(row)
        for _ in range(2):
            kinds: list[dict[int, Any]] = [
                slow_best_run(score, onset, row)
                if allowed and (kind != CACHED or cached)
                else dict.fromkeys(row)
                for kind, (onset, allowed) in enumerate(zip(marks.onset.tolist(), runs))
            ]
            left = list(score)
            for r in set(row):
                gain, kind = max(
                    (found[r][0] - price[kind], -kind) if found[r] else (-(10**6), -kind)
                    for kind, found in enumerate(kinds)
                )
                if gain > 0:
                    _, end, begin = kinds[-kind][r]
                    total += gain
                    for i in range(begin, -end + 1):
                        if score[i]:
                            run[i], left[i] = -kind, 0
            score = left
        if best is None or total > best[0]:
            best = (total, rule, run)
    return best


@st.composite
def steps(draw):
    """Up to three rows of up to 14 tokens, most of them in stretches of hits or misses."""
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=3))
    row = [r for r, length in enumerate(lengths) for _ in range(length)]
    size = len(row)

    def stretched(values):
        parts = draw(st.lists(st.tuples(values, st.integers(1, 9)), min_size=1, max_size=8))
        flat = [value for value, length in parts for _ in range(length)]
        return (flat * size)[:size]

    marks = marks_of(
        row,
        usable=stretched(st.sampled_from([True, True, True, False])),
        turn=stretched(st.integers(0, 4)),
        version=stretched(st.sampled_from([-1, 0, 1, 2])),
        boundary=2,
    )
    return stretched(st.booleans()), marks


def test_a_run_that_earns_one_more_than_it_costs_is_told():
    """Seven hits and two misses at 18; from its row's first token it would cost 15 and four misses more."""
    marks = marks_of([0] * 13, position=[0] * 13)
    assert account("....xx.xxx.xx", marks) == (1, [False] * 3, [-1] * 4 + [FREE] * 9)
    assert account("....xx.xxx..x", marks) == (0, [False] * 3, [-1] * 13)


@given(step=steps(), stale_version=st.booleans(), runs=st.tuples(*[st.booleans()] * 3))
def test_the_account_agrees_with_trying_every_run_of_every_row(step, stale_version, runs):
    hit, marks = step
    found = explain(torch.tensor(hit), marks, stale_version=stale_version, runs=runs)
    expected = slow_explain(hit, marks, stale_version, runs)
    assert (int(found.score), found.rule.tolist(), found.run.tolist()) == expected


def test_an_account_costs_what_it_says():
    one_row = marks_of([0] * 20)
    assert account("." * 20, one_row) == (0, [False] * 3, [-1] * 20)
    assert account("x" * 6 + "." * 14, one_row)[0] == 18 - 15
    assert account("x" * 6 + "." * 14, one_row)[2] == [LEAKED] * 6 + [-1] * 14
    assert account("x" * 5 + "." * 15, one_row)[0] == 0
    assert account("....xxxxxxx" + "." * 9, one_row)[0] == 21 - 18
    assert account("....xxxxxxx" + "." * 9, one_row)[2] == [-1] * 4 + [FREE] * 7 + [-1] * 9
    assert account("..xxxxxxx" + "." * 11, one_row)[2][2] == LEAKED
    assert account("....xxxxxx" + "." * 10, one_row)[0] == 0


def test_a_row_holds_two_runs():
    score, _, run = account("xxxxxxxx........................xxxxxxxx", marks_of([0] * 40))
    assert score == 24 - 15 + 24 - 18
    assert run == [LEAKED] * 8 + [-1] * 24 + [FREE] * 8


def test_a_run_never_crosses_into_another_row():
    marks = marks_of([0] * 4 + [1] * 4)
    assert account("xxxxxxxx", marks)[0] == 0
    assert account("xxxxxxxx", marks_of([0] * 8))[0] == 24 - 15


def test_a_stale_cache_begins_where_newer_weights_took_over():
    """Chunks 3 tokens at version 2, none, 2 at version 3: the newer weights begin at the fourth token."""
    marks = marks_of([0] * 5, version=[2, 2, 2, 3, 3], trainer=3)
    assert marks.onset[CACHED].tolist() == [False, False, False, True, False]
    assert int(marks.mixed_count) == 1
    assert marks.rule[footprint.AGED].tolist() == [True, True, True, False, False]


def test_tokens_that_nobody_sampled_hide_no_change_of_weights_and_rows_know_nothing_of_each_other():
    marks = marks_of([0] * 4 + [1] * 3, version=[0, -1, -1, 1, -1, 1, 0], trainer=1)
    assert marks.onset[CACHED].tolist() == [False] * 3 + [True] + [False] * 3
    assert marks.onset[LEAKED].tolist() == [True, False, False, False, True, False, False]
    masked = marks_of([0] * 3, usable=[False, False, True], version=[0, -1, 1])
    assert masked.onset.tolist() == [[False, False, True], [False, False, True], [False, False, True]]
    assert int(masked.mixed_count) == 1


def test_every_row_of_two_versions_must_show_a_stale_cache():
    version = [0] * 4 + [1] * 8
    text = "....xxxxxxxx"
    assert account(text, marks_of([0] * 12, version=version), stale_version=False)[2][4:] == [CACHED] * 8
    half = marks_of([0] * 12 + [1] * 12 + [2] * 12, version=version * 3)
    score, _, run = account(text + "." * 24, half, stale_version=False)
    assert run[4:12] == [FREE] * 8 and score == 24 - 18
    score, _, run = account(text * 2 + "." * 12, half, stale_version=False)
    assert run[4:12] == run[16:24] == [CACHED] * 8 and score == 48 - 24


def test_rules_mark_old_tokens_first_tokens_and_late_ones():
    marks = marks_of(
        [0] * 6, turn=[0, 1, 2, 0, 1, 2], version=[0, 0, 1, 1, 1, 2], usable=[True] * 5 + [False], boundary=2
    )
    assert marks.rule.tolist() == [
        [True, True, False, False, False, False],
        [True, True, False, True, True, False],
        [False, False, False, True, True, False],
    ]
    assert marks_of([0] * 2, turn=[0, 1], boundary=1).rule[footprint.OPENING].tolist() == [True, False]


@pytest.mark.parametrize("index, rule", [(0, {"version": 0}), (1, {"turn": 0}), (2, {})])
def test_a_rule_beats_runs_in_many_rows(index, rule):
    row = [r for r in range(6) for _ in range(12)]
    old = [i % 12 < 6 for i in range(72)]
    marks = marks_of(
        row,
        version=[0 if o and "version" in rule else 1 for o in old],
        turn=[0 if o and "turn" in rule else 5 for o in old],
    )
    text = "".join("x" if bool(m) else "." for m in marks.rule[index])
    score, chosen, run = account(text, marks)
    assert chosen == [k == index for k in range(3)] and run == [-1] * 72
    assert score == 3 * text.count("x") - 12


def test_what_was_decided_otherwise_is_not_used():
    marks = marks_of([0] * 40, version=[0] * 20 + [1] * 20)
    assert account("x" * 20 + "." * 20, marks)[1] == [True, False, False]
    assert account("x" * 20 + "." * 20, marks, stale_version=False)[2][:20] == [LEAKED] * 20
    assert account("x" * 20 + "." * 20, marks, stale_version=False, runs=(False, True, True))[2][0] == FREE
    assert (
        account("x" * 40, marks, stale_version=False, runs=(False, True, False))[2]
        == [-1] * 20 + [CACHED] * 20
    )
    assert account("x" * 40, marks, stale_version=False, runs=(False, False, False))[1] == [
        False,
        False,
        True,
    ]


def test_masked_tokens_earn_nothing_and_are_in_no_run():
    assert scored(hits("x.x."), torch.tensor([True, True, False, False])).tolist() == [3, -1, 0, 0]
    marks = marks_of([0] * 12, usable=[True] * 4 + [False] * 4 + [True] * 4)
    assert account("x" * 12, marks) == (24 - 15, [False] * 3, [LEAKED] * 4 + [-1] * 4 + [LEAKED] * 4)


def test_an_account_is_one_graph():
    marks = marks_of([0] * 12 + [1] * 12, version=([0] * 4 + [1] * 8) * 2)
    compiled = torch.compile(explain, fullgraph=True, backend="eager")
    hit = hits("....xxxxxxxx" * 2)
    for one, other in zip(
        compiled(hit, marks, stale_version=True, runs=ALL), explain(hit, marks, stale_version=True, runs=ALL)
    ):
        assert torch.equal(one, other)
