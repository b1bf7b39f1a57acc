"""Laws of triage: every failure has a clue, what was got over weighs nothing, names decide nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.clue import CAUSES, CERTAIN, FALLBACK, NOTED, Clue, Criterion, Signs, Step, Trace, likely_cause
from core.outcome import KINDS, TRUNCATIONS, Outcome
from core.triage import clues_of

SIGNS = Signs(
    missing=("No module named",),
    broken=("broke off", "no answer within"),
    misused=("has no argument", "no such"),
    cut=("[... cut ...]",),
    server=("tool server", "tools missing"),
    sandbox=("sandbox:",),
)
TEXTS = (
    "",
    "None",
    "A2: fee | B2: 4",
    "error: No module named 'pandas'",
    "error: the tool server BROKE OFF during this call",
    "error: read has no argument page",
    "head\n[... cut ...]\ntail",
)
KNOBS: dict[str, Any] = {"signs": SIGNS, "repeats": 3, "slow_share": 0.5, "flood_share": 0.5}

steps = st.builds(
    Step,
    said=st.sampled_from(["", "<tool_call>", "I read it."]),
    tool=st.sampled_from(["", "read", "bash"]),
    arguments=st.sampled_from(["{}", '{"a": 1}']),
    result=st.sampled_from(TEXTS),
    error=st.booleans(),
    seconds=st.sampled_from([0.0, 1.0, 8.0]),
)
criteria = st.builds(
    Criterion,
    name=st.just("answer"),
    met=st.booleans(),
    detail=st.just("expected 4, got '5'"),
    expected=st.sampled_from(["", "4"]),
    got=st.sampled_from(["", "5", "it is 4"]),
)
outcomes = st.one_of(
    st.sampled_from([Outcome(kind=kind) for kind in KINDS if kind in ("solved", "failed", "cancelled")]),
    st.sampled_from([Outcome(kind="truncated", reason=reason) for reason in TRUNCATIONS]),
    st.builds(
        Outcome,
        kind=st.just("system_error"),
        phase=st.sampled_from(["start", "agent", "verify", "teardown", "process"]),
        cause=st.sampled_from(["No module named 'x'", "tool server exit 9", "sandbox: no", "OSError: disk"]),
    ),
)
traces = st.builds(
    Trace,
    outcome=outcomes,
    reward=st.sampled_from([None, 0.0, 0.5]),
    steps=st.lists(steps, max_size=6).map(tuple),
    criteria=st.lists(criteria, max_size=2).map(tuple),
    agent_s=st.sampled_from([0.0, 4.0, 40.0]),
    engine_s=st.sampled_from([0.0, 3.0, 30.0]),
)


def clues(trace: Trace, **changed: Any) -> list[Clue]:
    """With the knobs above, but for some."""
    return clues_of(trace, **(KNOBS | changed))


@given(traces)
def test_every_failure_has_a_clue_that_weighs_and_the_heaviest_stands_first(trace: Trace) -> None:
    found = clues(trace)
    assert found[0].weight > NOTED and found[0].cause == likely_cause(found)
    assert [clue.weight for clue in found] == sorted((clue.weight for clue in found), reverse=True)
    for clue in found:
        assert clue.cause in CAUSES and clue.rule and -1 <= clue.turn < max(1, len(trace.steps))
        assert clue.tool == (trace.steps[clue.turn].tool if clue.tool else "")


@given(traces)
def test_a_system_error_is_what_its_phase_and_cause_say_whatever_the_policy_did(trace: Trace) -> None:
    found = clues(trace)
    certain = [clue for clue in found if clue.weight == CERTAIN and clue.rule != "all_met"]
    assert len(certain) == (trace.outcome.kind == "system_error")
    if certain and trace.reward is None:
        alone = trace._replace(steps=(), criteria=())
        assert likely_cause(found) == likely_cause(clues(alone))


@given(traces, st.sampled_from(["read", "bash"]))
def test_a_tool_that_did_its_work_later_is_not_to_blame(trace: Trace, tool: str) -> None:
    good = Step("I go on.", tool, '{"last": 1}', "A2: fee | B2: 4", False, 0.0)
    found = clues(trace._replace(steps=(*trace.steps, good), outcome=Outcome(kind="failed")))
    for clue in found:
        if clue.tool == tool and clue.rule in (
            "missing_package",
            "broken_tool",
            "said_nothing",
            "misused_tool",
        ):
            assert clue.weight == NOTED


@given(traces)
def test_nothing_depends_on_what_the_tools_are_called(trace: Trace) -> None:
    renamed = {"": "", "read": "lesen", "bash": "shell"}
    other = trace._replace(steps=tuple(step._replace(tool=renamed[step.tool]) for step in trace.steps))
    found, again = clues(trace), clues(other)
    assert [clue[:4] for clue in found] == [clue[:4] for clue in again]
    assert [renamed[clue.tool] for clue in found] == [clue.tool for clue in again]


@given(traces)
def test_the_policy_is_only_blamed_for_want_of_anything_else_where_there_is_nothing_else(
    trace: Trace,
) -> None:
    found = clues(trace)
    fallback = [clue for clue in found if clue.weight == FALLBACK]
    others = [clue for clue in found if clue.weight > FALLBACK]
    assert len(fallback) == (not others)


def test_bad_knobs_are_refused() -> None:
    trace = Trace(Outcome(kind="failed"), 0.0, (), (), 0.0, 0.0)
    with pytest.raises(ValueError, match="repeats must be at least 2"):
        clues(trace, repeats=1)
    for name in ("slow_share", "flood_share"):
        for value in (0.0, 1.5, float("nan")):
            with pytest.raises(ValueError, match=f"{name} must lie above 0 and at most at 1, got {value}"):
                clues(trace, **{name: value})
