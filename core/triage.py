"""Why a trial earned no full reward: rules that turn what it left into clues for one of five causes.

Rules, not a verdict: each clue names its rule and quotes what it saw, so that a reader can disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .check import check_whole
from .clue import CAUSES, CERTAIN, FALLBACK, LIKELY, NOTED, POSSIBLE, Clue, Signs, Step, Trace
from .nearness import near_miss
from .outcome import Outcome


def clues_of(
    trace: Trace, *, signs: Signs, repeats: int, slow_share: float, flood_share: float
) -> list[Clue]:
    """Every clue, the heaviest first; at least one. The trace is of a trial that did not earn 1.

    Args:
        signs: the host's texts.
        repeats: the same call so often is a loop.
        slow_share: of the agent's time, in calls or in the engine, that explains a clock that ran out.
        flood_share: of all text, in one result, that explains a context that is full.
    """
    check_whole("repeats", repeats)
    if repeats < 2:
        raise ValueError(f"repeats must be at least 2, got {repeats}")
    for name, share in (("slow_share", slow_share), ("flood_share", flood_share)):
        if not 0 < share <= 1:
            raise ValueError(f"{name} must lie above 0 and at most at 1, got {share}")
    found = [_of_system_error(trace.outcome, signs)] if trace.outcome.kind == "system_error" else []
    found += _of_truncation(trace, slow_share, flood_share)
    found += [clue for turn in range(len(trace.steps)) for clue in _of_step(trace.steps, turn, signs)]
    found += _of_grade(trace)
    found += _of_habits(trace.steps, repeats)
    if not any(clue.weight > NOTED for clue in found):
        unmet = [criterion for criterion in trace.criteria if not criterion.met]
        quote = f"{unmet[0].name}: {unmet[0].detail}" if unmet else f"reward {trace.reward}"
        found.append(Clue("policy", "nothing_else", FALLBACK, -1, "", quote))
    return sorted(found, key=lambda clue: (-clue.weight, CAUSES.index(clue.cause), clue.turn))


def _of_system_error(outcome: Outcome, signs: Signs) -> Clue:
    quote = f"{outcome.phase}: {outcome.cause}"
    if _line(outcome.cause, signs.missing):
        return Clue("dependency", "missing_package", CERTAIN, -1, "", quote)
    if outcome.phase == "verify":
        cause = "harness" if _line(outcome.cause, signs.sandbox) else "verifier"
        return Clue(cause, "no_grade", CERTAIN, -1, "", quote)
    cause = "tool" if _line(outcome.cause, signs.server) else "harness"
    return Clue(cause, f"broke_in_{outcome.phase}", CERTAIN, -1, "", quote)


def _of_truncation(trace: Trace, slow_share: float, flood_share: float) -> list[Clue]:
    reason, steps = trace.outcome.reason, trace.steps
    if reason == "wall_clock":
        return _of_the_clock(trace, slow_share)
    if reason == "context" and steps:
        turn = _longest(steps, lambda step: len(step.result))
        length, total = len(steps[turn].result), sum(len(step.said) + len(step.result) for step in steps)
        if length and length >= flood_share * total:
            quote = f"a result of {length} of {total} characters"
            return [Clue("harness", "flooded_context", LIKELY, turn, steps[turn].tool, quote)]
    if not reason:
        return []
    quote = steps[-1].said[-200:] if steps else ""
    return [Clue("policy", f"met_{reason}", POSSIBLE, len(steps) - 1, "", quote)]


def _of_the_clock(trace: Trace, slow_share: float) -> list[Clue]:
    steps, last = trace.steps, len(trace.steps) - 1
    if steps and steps[-1].tool and steps[-1].error and not steps[-1].result:
        quote = f"{steps[-1].tool} {steps[-1].arguments}"
        return [Clue("tool", "clock_in_a_call", LIKELY, last, steps[-1].tool, quote)]
    calls_s = sum(step.seconds for step in steps)
    if calls_s > 0 and calls_s >= slow_share * trace.agent_s:
        turn = _longest(steps, lambda step: step.seconds)
        quote = f"calls took {calls_s:.1f} of {trace.agent_s:.1f} s"
        return [Clue("tool", "slow_calls", LIKELY, turn, steps[turn].tool, quote)]
    if trace.engine_s > 0 and trace.engine_s >= slow_share * trace.agent_s:
        quote = f"the engine took {trace.engine_s:.1f} of {trace.agent_s:.1f} s"
        return [Clue("harness", "slow_engine", LIKELY, -1, "", quote)]
    return [Clue("policy", "met_wall_clock", POSSIBLE, last, "", f"{len(steps)} turns")]


def _of_step(steps: tuple[Step, ...], turn: int, signs: Signs) -> list[Clue]:
    """What a result says of the tool; less, if the same tool then did its work."""
    step = steps[turn]
    if not step.tool:
        weight = NOTED if any(later.tool or not later.error for later in steps[turn + 1 :]) else POSSIBLE
        quote = (step.result or step.said)[:200]
        return [Clue("policy", "unreadable_call", weight, turn, "", quote)] if step.error else []
    recovered = any(
        later.tool == step.tool and not later.error and not _line(later.result, signs.missing)
        for later in steps[turn + 1 :]
    )
    weight = NOTED if recovered else LIKELY
    if quote := _line(step.result, signs.missing):
        return [Clue("dependency", "missing_package", weight, turn, step.tool, quote)]
    if quote := _line(step.result, signs.broken):
        return [Clue("tool", "broken_tool", weight, turn, step.tool, quote)]
    if not step.error and step.result.strip() in ("", "None", "null"):
        return [Clue("tool", "said_nothing", weight, turn, step.tool, repr(step.result))]
    if quote := _line(step.result, signs.cut):
        return [Clue("harness", "cut_result", POSSIBLE, turn, step.tool, quote)]
    if step.error and (quote := _line(step.result, signs.misused)):
        weight = NOTED if recovered else POSSIBLE
        return [Clue("policy", "misused_tool", weight, turn, step.tool, quote)]
    return []


def _of_grade(trace: Trace) -> list[Clue]:
    """Where the grade contradicts itself, or would not take another spelling of what it wants."""
    if trace.reward is None:
        return []
    unmet = [criterion for criterion in trace.criteria if not criterion.met]
    if trace.criteria and not unmet and trace.reward < 1:
        return [
            Clue("verifier", "all_met", CERTAIN, -1, "", f"reward {trace.reward} with every criterion met")
        ]
    return [
        Clue("verifier", "near_miss", LIKELY, -1, "", f"{criterion.name}: {criterion.detail}")
        for criterion in unmet
        if near_miss(criterion.expected, criterion.got)
    ]


def _of_habits(steps: tuple[Step, ...], repeats: int) -> list[Clue]:
    found: list[Clue] = []
    calls = [(step.tool, step.arguments) for step in steps if step.tool]
    for tool, arguments in dict.fromkeys(calls):
        if calls.count((tool, arguments)) >= repeats:
            turn = max(n for n, step in enumerate(steps) if (step.tool, step.arguments) == (tool, arguments))
            quote = f"{calls.count((tool, arguments))} times {tool} {arguments}"
            found.append(Clue("policy", "same_call_again", POSSIBLE, turn, tool, quote))
    if steps and not calls:
        found.append(Clue("policy", "no_call", POSSIBLE, len(steps) - 1, "", steps[-1].said[:200]))
    return found


def _longest(steps: tuple[Step, ...], size: Callable[[Step], float]) -> int:
    return max(range(len(steps)), key=lambda turn: size(steps[turn]))


def _line(text: str, signs: Sequence[str]) -> str:
    """The first line in which a sign occurs, whatever its case; "" if none does."""
    for line in text.splitlines():
        if any(sign.casefold() in line.casefold() for sign in signs):
            return line.strip()[:300]
    return ""
