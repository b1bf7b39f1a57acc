"""core/triage.py against cases that were labelled by hand."""

from __future__ import annotations

import pytest

from core.clue import Criterion, Signs, Step, Trace
from core.outcome import Outcome
from core.triage import clues_of

SIGNS = Signs(
    ("No module named", "command not found"),
    ("broke off",),
    ("no such",),
    ("[cut]",),
    ("server",),
    ("bwrap",),
)
FAILED = Outcome(kind="failed")
MISSING, BROKEN, FINE = "x\nNo module named 'pandas'\ny", "error: it broke off", "A2: fee | B2: 4"


def error(phase: str, cause: str) -> Outcome:
    return Outcome(kind="system_error", phase=phase, cause=cause)


def cut(reason: str) -> Outcome:
    return Outcome(kind="truncated", reason=reason)


def call(
    result: str, failed: bool = False, tool: str = "bash", seconds: float = 0.0, arguments: str = "{}"
) -> Step:
    return Step("I call.", tool, arguments, result, failed, seconds)


def unmet(expected: str, got: str) -> Criterion:
    return Criterion("answer", False, f"expected {expected}, got {got!r}", expected, got)


def trace(
    outcome: Outcome, *steps: Step, unmet: tuple[Criterion, ...] = (), agent_s=10.0, engine_s=1.0, reward=0.0
) -> Trace:
    return Trace(outcome, None if outcome.kind == "system_error" else reward, steps, unmet, agent_s, engine_s)


ANSWER = Step("4", "", "{}", "", False, 0.0)
BAD = Step("<tool_call>{", "", "{}", "error: not JSON", True, 0.0)

CASES = [
    # what happened, cause, rule, turn, quote
    (
        trace(error("start", "No module named 'x'")),
        "dependency",
        "missing_package",
        -1,
        "start: No module named 'x'",
    ),
    (trace(error("verify", "judge_busy: no")), "verifier", "no_grade", -1, "verify: judge_busy: no"),
    (trace(error("verify", "bwrap: no")), "harness", "no_grade", -1, "verify: bwrap: no"),
    (trace(error("start", "no server")), "tool", "broke_in_start", -1, "start: no server"),
    (trace(error("agent", "EngineError: x")), "harness", "broke_in_agent", -1, "agent: EngineError: x"),
    (
        trace(error("process", "exit -9"), call(MISSING)),
        "harness",
        "broke_in_process",
        -1,
        "process: exit -9",
    ),
    (trace(cut("turn_cap"), Step("a" * 999, "", "", "", False, 0.0)), "policy", "met_turn_cap", 0, "a" * 200),
    (trace(cut("context")), "policy", "met_context", -1, ""),
    (
        trace(cut("context"), call("x" * 50), call(FINE)),
        "harness",
        "flooded_context",
        0,
        "a result of 50 of 79 characters",
    ),
    (trace(cut("context"), ANSWER), "policy", "met_context", 0, "4"),
    (trace(cut("step_cap"), call(FINE)), "policy", "met_step_cap", 0, "I call."),
    (trace(cut("wall_clock"), call("", True)), "tool", "clock_in_a_call", 0, "bash {}"),
    (
        trace(cut("wall_clock"), call(FINE, seconds=2), call(FINE, seconds=4)),
        "tool",
        "slow_calls",
        1,
        "calls took 6.0 of 10.0 s",
    ),
    (
        trace(cut("wall_clock"), call(FINE), engine_s=6.0),
        "harness",
        "slow_engine",
        -1,
        "the engine took 6.0 of 10.0 s",
    ),
    (trace(cut("wall_clock"), call(FINE)), "policy", "met_wall_clock", 0, "1 turns"),
    (trace(FAILED, call(MISSING), ANSWER), "dependency", "missing_package", 0, "No module named 'pandas'"),
    (trace(FAILED, call(MISSING), call(FINE), ANSWER), "policy", "nothing_else", -1, "reward 0.0"),
    (
        trace(FAILED, call(MISSING), call(FINE, tool="read")),
        "dependency",
        "missing_package",
        0,
        "No module named 'pandas'",
    ),
    (
        trace(FAILED, call(MISSING), call("bash: jq: command not found")),
        "dependency",
        "missing_package",
        0,
        "No module named 'pandas'",
    ),
    (trace(FAILED, call(BROKEN, True), ANSWER), "tool", "broken_tool", 0, BROKEN),
    (trace(FAILED, call(" None "), ANSWER), "tool", "said_nothing", 0, "' None '"),
    (trace(FAILED, call("a\n[cut]\nb"), ANSWER), "harness", "cut_result", 0, "[cut]"),
    (
        trace(FAILED, call("error: no such file", True), ANSWER),
        "policy",
        "misused_tool",
        0,
        "error: no such file",
    ),
    (trace(FAILED, call("no such thing in it"), ANSWER), "policy", "nothing_else", -1, "reward 0.0"),
    (trace(FAILED, call(FINE), BAD, BAD), "policy", "unreadable_call", 1, "error: not JSON"),
    (trace(FAILED, BAD, call(FINE)), "policy", "nothing_else", -1, "reward 0.0"),
    (trace(FAILED, BAD, ANSWER), "policy", "no_call", 1, "4"),
    (trace(FAILED, ANSWER), "policy", "no_call", 0, "4"),
    (trace(FAILED, *[call(FINE)] * 3), "policy", "same_call_again", 2, "3 times bash {}"),
    (
        trace(FAILED, call(FINE), call(FINE, arguments="{1}"), unmet=(unmet("4", "5"),)),
        "policy",
        "nothing_else",
        -1,
        "answer: expected 4, got '5'",
    ),
    (
        trace(FAILED, call(FINE), unmet=(unmet("4", "4 EUR"),)),
        "verifier",
        "near_miss",
        -1,
        "answer: expected 4, got '4 EUR'",
    ),
    (
        trace(FAILED, call(FINE), unmet=(Criterion("a", True, "", "", ""),)),
        "verifier",
        "all_met",
        -1,
        "reward 0.0 with every criterion met",
    ),
    (trace(Outcome(kind="cancelled")), "policy", "nothing_else", -1, "reward 0.0"),
]


@pytest.mark.parametrize(("given_trace", "cause", "rule", "turn", "quote"), CASES)
def test_clues_are_those_that_a_person_sees(
    given_trace: Trace, cause: str, rule: str, turn: int, quote: str
) -> None:
    first, *_ = clues_of(given_trace, signs=SIGNS, repeats=3, slow_share=0.5, flood_share=0.5)
    assert (first.cause, first.rule, first.turn, first.quote) == (cause, rule, turn, quote)
