"""core/attribution.py and its parts: formulas where there are any, every choice tried where a choice is made,
and gaps of a known cause where evidence is weighed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import oracle_attribution as oracle
import pytest
import torch
from comparing import assert_same, flags, numbers, places
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.attribution import Attribution, attribution, rounding_noise
from core.cause import (
    CAUSES,
    Alternative,
    Evidence,
    TokenFact,
    check_facts,
    check_positive,
    check_share,
    found,
    ranked,
)
from core.footprint import explain, layout, scored
from core.locate import Search, filter_fits, token
from core.locate import places as located
from core.rescore import rescored, weighted_median

# Formulas.


@given(st.floats(1e-3, 1e4), st.sampled_from([8, 11, 24]))
def test_rounding_noise_is_the_spacing_over_the_root_of_twelve(logit: float, bits: int) -> None:
    assert_same(
        rounding_noise(largest_logit=logit, significand_bits=bits), oracle.rounding_noise(logit, bits)
    )


@pytest.mark.parametrize(
    ("logit", "bits", "noise"), [(10.0, 8, 0.0625), (16.0, 8, 0.125), (10.05, 11, 2**-7)]
)
def test_rounding_noise_of_a_spacing_that_torch_shows(logit: float, bits: int, noise: float) -> None:
    dtype = {8: torch.bfloat16, 11: torch.float16}[bits]
    here = numbers([logit]).to(dtype)
    above = next(x for x in (here + k * noise / 4 for k in range(1, 9)) if x > here)
    assert_same(float(above - here), noise)
    assert_same(rounding_noise(largest_logit=logit, significand_bits=bits), noise / math.sqrt(12))


shares = st.lists(
    st.sampled_from([0.0, 0.1, 0.25]) | st.just(math.nan), min_size=len(CAUSES), max_size=len(CAUSES)
)


def evidence(share: Sequence[float]) -> Evidence:
    """Shares in the order of CAUSES."""
    return Evidence(*[torch.tensor(x, dtype=torch.float64) for x in share])


@given(shares, st.sampled_from([0.05, 0.2]))
def test_found_are_the_causes_but_precision_with_a_large_enough_share(
    share: list[float], least: float
) -> None:
    expected = [name != "precision" and x >= least for name, x in zip(CAUSES, share)]
    assert_same(found(evidence(share), min_share=least), expected)


@given(shares)
def test_ranked_is_a_stable_sort_with_nan_as_nothing(share: list[float]) -> None:
    clean = [0.0 if math.isnan(x) else x for x in share]
    expected = sorted(range(len(CAUSES)), key=lambda k: (-clean[k], k))
    assert_same(ranked(evidence(share)), expected)


def refuses(check, *arguments: object, **keywords: object) -> bool:
    """Whether a check raises ValueError."""
    try:
        check(*arguments, **keywords)
    except ValueError:
        return True
    return False


@given(st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf]) | st.floats())
def test_checks_let_thresholds_and_shares_in_their_range_through(x: float) -> None:
    assert refuses(check_positive, sigmas=x) != (0 < x < math.inf)
    assert refuses(check_share, min_share=x) != (0 < x < 1)


# Rescoring.

entries = st.integers(-8, 8).map(lambda k: k / 8)
pairs = st.lists(st.tuples(entries, entries), min_size=1, max_size=7)


@given(pairs)
def test_weighted_median_leaves_the_least_distance(rows: list[tuple[float, float]]) -> None:
    value, direction = [v for v, _ in rows], [d for _, d in rows]
    slope = weighted_median(numbers(value).unsqueeze(0), numbers(direction)).item()
    assume(any(direction))
    assert_same(oracle.distance(value, direction, slope), oracle.least_distance(value, direction))


@given(pairs)
def test_weighted_median_is_zero_where_more_than_half_of_the_direction_has_no_difference(
    rows: list[tuple[float, float]],
) -> None:
    rows = [*rows, (0.0, 0.125 + math.fsum(abs(d) for v, d in rows if v != 0))]
    slope = weighted_median(numbers([v for v, _ in rows]).unsqueeze(0), numbers([d for _, d in rows]))
    assert_same(slope, [0.0])


@st.composite
def hypotheses(draw: st.DrawFn) -> tuple[list[float], list[list[float]], list[float], bool]:
    """Differences, what up to two rescorings add to them, a direction, and whether it may be fitted."""
    count = draw(st.integers(1, 5))
    row = st.lists(st.floats(-2, 2).map(lambda x: round(x, 2)), min_size=count, max_size=count)
    difference, direction = draw(row), draw(row)
    shift = draw(st.lists(row | st.just([-d for d in difference]), max_size=2))
    return difference, shift, direction, draw(st.booleans())


@settings(max_examples=100)
@given(hypotheses(), st.sampled_from([0.05, 0.3]))
def test_rescored_leaves_least_over_every_set_whose_members_all_close_their_share(
    case: tuple[list[float], list[list[float]], list[float], bool], least: float
) -> None:
    difference, shift, direction, fit = case
    gap = math.fsum(map(abs, difference))
    assume(gap > 0)
    expected = oracle.rescored(difference, shift, direction, fit, least)
    other = oracle.rescored(difference, shift, direction, fit, least * (1 - 1e-6))
    stricter = oracle.rescored(difference, shift, direction, fit, least * (1 + 1e-6))
    assume(expected.members == other.members == stricter.members)
    result = rescored(
        numbers(difference), numbers([x for row in shift for x in row]).reshape(len(shift), len(difference)),
        numbers(direction), torch.tensor(fit), min_share=least,
    )  # fmt: skip
    assert_same(result.residual.abs().sum(), expected.left, absolute=1e-9)
    assert_same(result.residual, (numbers(difference) + result.shift.sum(0)).tolist(), absolute=1e-9)
    assert_same(result.share.sum(), (gap - expected.left) / gap, absolute=1e-9)
    used = {k for k, x in enumerate(result.share.tolist()) if x != 0}
    if used == expected.members:
        total = math.fsum(expected.last.values())
        for k in used:
            share = (gap - expected.left) / gap * expected.last[k] / total
            assert_same(result.share[k], share, absolute=1e-9)


# Footprints.


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[bool], list[int], list[int], list[bool]]:
    """usable, row, version and hit of up to eighteen tokens in up to two rows."""
    sizes = draw(st.lists(st.integers(5, 12), min_size=1, max_size=2))
    row = [k for k, size in enumerate(sizes) for _ in range(size)]
    start = draw(st.integers(0, len(row) - 1))
    end = draw(st.integers(start, len(row)))
    flip = draw(st.sets(st.integers(0, len(row) - 1), max_size=4))
    hit = [(start <= t < end) != (t in flip) for t in range(len(row))]
    usable = [draw(st.sampled_from([True, True, True, False])) for _ in row]
    version = [2 if draw(st.booleans()) else 3 for _ in sizes]
    return usable, row, [version[k] for k in row], hit


@settings(max_examples=60)
@given(layouts(), st.booleans(), st.booleans(), st.booleans())
def test_explain_earns_what_the_best_of_all_accounts_earns(
    case: tuple[list[bool], list[int], list[int], list[bool]], aged: bool, leaked: bool, free: bool
) -> None:
    usable, row, version, hit = case
    position = [row[:t].count(row[t]) for t in range(len(row))]
    marks = layout(
        flags(usable), places(row), places(position), places(position), places(version),
        trainer_version=3, boundary=1,
    )  # fmt: skip
    gain = [(oracle.HIT if h else oracle.MISS) if u else 0 for h, u in zip(hit, usable)]
    assert_same(scored(flags(hit), flags(usable)), gain)
    rules = [[bool(x) for x in rule] for rule in marks.rule.tolist()]
    onset = [[bool(x) for x in one] for one in marks.onset.tolist()]
    result = explain(flags(hit), marks, stale_version=aged, runs=(leaked, False, free))
    allowed = rules if aged else rules[1:]
    best = oracle.best_account(gain, row, onset[0], onset[2], allowed, leaked, free)
    assert result.score.item() == best


def test_layout_marks_old_tokens_heads_of_turns_late_tokens_and_where_runs_may_begin() -> None:
    marks = layout(
        flags([True, True, True, False, True, True, True, True, True, True]),
        places([5] * 6 + [7] * 4),
        places([0, 1, 2, 3, 4, 5, 0, 1, 2, 3]),
        places([0, 1, 2, 0, 1, 2, 0, 1, 2, 3]),
        places([2, 2, 2, 3, 3, 3, 1, 1, 3, 3]),
        trainer_version=3,
        boundary=1,
    )
    usable = [True] * 3 + [False] + [True] * 6
    assert_same(marks.usable, usable)
    assert_same(marks.row, [0] * 6 + [1] * 4)
    old = [v < 3 for v in [2, 2, 2, 3, 3, 3, 1, 1, 3, 3]]
    assert_same(marks.rule[0], [o and u for o, u in zip(old, usable)])
    assert_same(marks.rule[1], [t in (0, 6) for t in range(10)])  # the unusable one is never covered
    assert_same(marks.onset[0], [t in (0, 6) for t in range(10)])
    assert_same(marks.onset[1], [t in (3, 8) for t in range(10)])
    assert marks.mixed_count.item() == 2


# Gaps of a known cause.

VOCABULARY, COUNT = 12, 240


def distributions(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of many tokens and the words that were sampled."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(COUNT, VOCABULARY, generator=generator, dtype=torch.float64)
    words = torch.distributions.Categorical(logits=logits).probs
    return logits, torch.multinomial(words, 1, generator=generator).squeeze(1)


def logprob_at(logits: Tensor, words: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax of the sampled words."""
    return torch.log_softmax(logits / temperature, 1).gather(1, words.unsqueeze(1)).squeeze(1)


def fact(logits: Tensor, words: Tensor, rollout: Tensor, version: Tensor | None = None) -> TokenFact:
    """Rows of forty tokens in turns of ten."""
    index = torch.arange(COUNT)
    share = torch.softmax(logits, 1)
    return TokenFact(
        logprob=logprob_at(logits, words),
        rollout_logprob=rollout,
        loss_mask=torch.ones(COUNT, dtype=torch.bool),
        entropy=-(share * share.log()).sum(1),
        row_id=index // 40,
        position=index % 40,
        token_in_turn=index % 10,
        policy_version=torch.full((COUNT,), 3) if version is None else version,
    )


NONE = Alternative(None, None, None, None, None, None)
KNOBS = {
    "logit_noise": 1e-4, "sigmas": 6.0, "boundary": 2, "min_mass": 0.5, "growth": 2.0, "min_share": 0.1,
}  # fmt: skip


def explained(facts: TokenFact, alternative: Alternative = NONE) -> Attribution:
    """The causes under one choice of thresholds."""
    return attribution(facts, alternative, trainer_version=3, **KNOBS)  # type: ignore[arg-type]


def share_of(result: Attribution, cause: str) -> float:
    """A cause's share of the gap."""
    return getattr(result.share, cause).item()


def total(result: Attribution) -> float:
    """All shares together."""
    return math.fsum(x.item() for x in result.share)


@pytest.mark.parametrize("seed", range(3))
def test_no_gap_is_all_precision(seed: int) -> None:
    logits, words = distributions(seed)
    result = explained(fact(logits, words, logprob_at(logits, words)))
    assert_same([x.item() for x in result.share], [1.0] + [0.0] * (len(CAUSES) - 1))
    assert_same(result.temperature_ratio, 1.0)
    assert_same(result.residual, [0.0] * COUNT)


@pytest.mark.parametrize("seed", range(3))
def test_rounding_is_all_precision(seed: int) -> None:
    logits, words = distributions(seed)
    noise = torch.randn(COUNT, VOCABULARY, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    result = explained(fact(logits, words, logprob_at(logits + 1e-4 * noise, words)))
    assert share_of(result, "precision") > 0.9


@pytest.mark.parametrize("ratio", [0.97, 1.03])
def test_another_temperature_is_found_with_its_ratio_to_first_order(ratio: float) -> None:
    logits, words = distributions(0)
    result = explained(fact(logits, words, logprob_at(logits, words, ratio)))
    assert share_of(result, "temperature") > 0.7
    assert_same(result.temperature_ratio, ratio, absolute=0.005)
    assert total(result) <= 1 + 1e-9


@pytest.mark.parametrize(
    "cause", ["temperature", "retokenised", "stale_version", "stale_cache", "leaked_state"]
)
def test_a_rescoring_that_closes_the_gap_is_proof(cause: str) -> None:
    logits, words = distributions(1)
    other = logits + torch.randn(
        COUNT, VOCABULARY, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    rollout = logprob_at(other, words)
    version = torch.full((COUNT,), 2) if cause == "stale_version" else None
    result = explained(fact(logits, words, rollout, version), NONE._replace(**{cause: rollout.clone()}))
    assert_same(share_of(result, cause), 1.0, absolute=1e-6)
    assert_same(result.residual, [0.0] * COUNT, absolute=1e-9)
    assert CAUSES[int(ranked(result.share)[0])] == cause


@pytest.mark.parametrize("cause", ["retokenised", "stale_cache", "leaked_state"])
def test_a_rescoring_that_closes_nothing_refutes_its_cause(cause: str) -> None:
    logits, words = distributions(2)
    other = logits + torch.randn(
        COUNT, VOCABULARY, generator=torch.Generator().manual_seed(6), dtype=torch.float64
    )
    facts = fact(logits, words, logprob_at(other, words))
    result = explained(facts, NONE._replace(**{cause: facts.logprob.clone()}))
    assert_same(share_of(result, cause), 0.0)
    assert total(result) <= 1 + 1e-9


def changed_where(where: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, words, and the sampler's logprobs, which come from other logits at some tokens."""
    logits, words = distributions(seed)
    other = logits + torch.randn(
        COUNT, VOCABULARY, generator=torch.Generator().manual_seed(seed + 50), dtype=torch.float64
    )
    return logits, words, torch.where(where, logprob_at(other, words), logprob_at(logits, words))


def test_a_gap_at_old_tokens_is_of_the_stale_version() -> None:
    version = torch.where(torch.arange(COUNT) % 80 < 40, 2, 3)
    logits, words, rollout = changed_where(version < 3, 3)
    result = explained(fact(logits, words, rollout, version))
    assert share_of(result, "stale_version") > 0.8


def test_a_gap_at_the_heads_of_turns_is_of_the_turn_boundary() -> None:
    logits, words, rollout = changed_where(torch.arange(COUNT) % 10 < 2, 4)
    result = explained(fact(logits, words, rollout))
    assert share_of(result, "turn_boundary") > 0.8


@pytest.mark.parametrize("seed", range(3))
def test_a_gap_everywhere_without_a_shape_is_of_other_weights(seed: int) -> None:
    logits, _ = distributions(seed)
    generator = torch.Generator().manual_seed(seed + 50)
    other = logits + torch.randn(COUNT, VOCABULARY, generator=generator, dtype=torch.float64)
    words = torch.multinomial(torch.softmax(other, 1), 1, generator=generator).squeeze(1)
    result = explained(fact(logits, words, logprob_at(other, words)))
    assert share_of(result, "weights") > 0.8


def test_a_filter_moves_logprobs_one_way_only() -> None:
    logits, words = distributions(6)
    probability = torch.softmax(logits, 1)
    order = probability.sort(1, descending=True)
    kept = torch.zeros_like(probability, dtype=torch.bool).scatter(
        1, order.indices, order.values.cumsum(1) - order.values < 0.9
    )
    words = torch.where(kept.gather(1, words.unsqueeze(1)).squeeze(1), words, order.indices[:, 0])
    rollout = logprob_at(logits.masked_fill(~kept, -1e9), words)
    result = explained(fact(logits, words, rollout))
    assert share_of(result, "filtered_support") > 0.8


def searched(rollout: Tensor, logits: Tensor, words: Tensor) -> tuple[Search, TokenFact]:
    """What the search reads of the facts."""
    facts = fact(logits, words, rollout)
    read = token(facts, 1e-4)
    marks = layout(
        read.usable, facts.row_id, facts.position, facts.token_in_turn, facts.policy_version,
        trainer_version=3, boundary=2,
    )  # fmt: skip
    return Search(
        token=read, marks=marks, sigmas=6.0, log_mass=math.log(0.5), growth=2.0, given=frozenset()
    ), facts


def test_token_reads_zeros_where_nothing_may_be_read_and_the_direction_of_a_temperature() -> None:
    logits, words = distributions(7)
    facts = fact(logits, words, logprob_at(logits, words, 1.001))
    mask = torch.arange(COUNT) % 3 > 0
    junk = torch.where(mask, facts.rollout_logprob, math.nan)
    read = token(facts._replace(loss_mask=mask, rollout_logprob=junk), 1e-4)
    assert_same(read.usable, mask.tolist())
    outside = ~mask
    for field in (read.logprob, read.difference, read.direction):
        assert_same(field[outside].abs().sum(), 0.0)
    step = 1e-5
    slope = (logprob_at(logits, words, math.exp(-step)) - logprob_at(logits, words, math.exp(step))) / (
        2 * step
    )
    assert_same(read.direction[mask], slope[mask].tolist(), relative=1e-3, absolute=5e-3)
    assert_same(read.difference[mask], (facts.logprob - facts.rollout_logprob)[mask].tolist())
    assert bool((read.noise[mask] >= 1e-4 * (1 - facts.logprob.exp())[mask] * 0.999).all())


@pytest.mark.parametrize(("sign", "fits"), [(1.0, True), (-1.0, False)])
def test_filter_fits_a_sampler_that_is_surer_everywhere_and_never_one_that_is_less_sure(
    sign: float, fits: bool
) -> None:
    logits, words = distributions(8)
    rollout = logprob_at(logits, words) + sign * 0.1  # a filter raises the sampler's logprobs
    search, _ = searched(rollout, logits, words)
    assert filter_fits(search, search.token.difference, search.token.noise).item() == fits


def test_places_finds_no_place_where_there_is_no_gap_and_one_where_there_is() -> None:
    logits, words = distributions(9)
    for rollout, hits in (
        (logprob_at(logits, words), 0),
        (changed_where(torch.arange(COUNT) % 10 < 2, 9)[2], 48),
    ):
        search, _ = searched(rollout, *distributions(9))
        nothing = rescored(
            search.token.difference, numbers([]).reshape(0, COUNT), search.token.direction,
            torch.tensor(False), min_share=0.1,
        )  # fmt: skip
        cause = located(search, nothing).cause
        expected = CAUSES.index("turn_boundary") if hits else 0
        assert (cause == expected).sum().item() >= hits * 0.8
        assert hits or not bool((cause > 0).any())


@pytest.mark.parametrize("field", TokenFact._fields)
def test_check_facts_refuses_a_field_of_another_shape(field: str) -> None:
    logits, words = distributions(0)
    facts = fact(logits, words, logprob_at(logits, words))
    check_facts(facts, NONE)
    assert refuses(check_facts, facts._replace(**{field: getattr(facts, field)[:-1]}), NONE)
    assert refuses(check_facts, facts, NONE._replace(temperature=facts.logprob[:-1]))


def test_check_facts_refuses_a_step_without_a_token() -> None:
    logits, words = distributions(0)
    facts = fact(logits, words, logprob_at(logits, words))
    assert refuses(check_facts, TokenFact(*(x[:0] for x in facts)), NONE)
