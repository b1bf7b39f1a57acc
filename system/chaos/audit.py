"""What must hold of a recorded run, however often it was killed: each audit says what does not, in lines.

The journal is read again from its events and actions, without the reducer that wrote them; only `replay` asks that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from core.schedule import Event, Opened, Reopened, Settings, StepTrained, TrialEnded, begin, react, task_at
from system.journal import Entry, read_journal, replayed
from system.loop import SCORED_TRUNCATIONS
from system.record.metrics import lines_of

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a run left: its journal, its trials, its steps, and the rows that its trainer was given."""

    settings: Settings
    entries: Sequence[Entry]
    trials: Sequence[Line]
    metrics: Sequence[Line]
    rows: Sequence[Line]
    name: str
    "That begins its trial ids."


def read_history(folder: Path, *, tags: dict[str, Any], name: str) -> History:
    """One run of a folder.

    Raises:
        ValueError: the journal lacks a line, or a file holds what is no line.
    """
    settings, entries = read_journal(folder / "events.jsonl", tags=tags)
    given = folder / "trainer_input.jsonl"  # not there before the first step
    rows = lines_of(given, {}) if given.exists() else ()
    return History(
        settings=settings,
        entries=entries,
        trials=list(lines_of(folder / "trajectories.jsonl", tags)),
        metrics=list(lines_of(folder / "metrics.jsonl", tags)),
        rows=[row for row in rows if row["trial_id"].startswith(f"{name}/")],
        name=name,
    )


def surviving_steps(entries: Iterable[Entry]) -> tuple[dict[int, Line], Line | None]:
    """The steps along the surviving line of weights, by the version from which each was taken; and one in flight.

    A run that goes on from a version gives up what was trained from it and from later ones.
    """
    done: dict[int, Line] = {}
    asked: Line | None = None
    for entry in entries:
        if isinstance(entry.event, Reopened):
            done = {version: step for version, step in done.items() if version < entry.event.version}
            asked = None
        elif isinstance(entry.event, StepTrained):
            if asked is not None and asked["version"] + 1 == entry.event.version:
                done[asked["version"]] = asked
            asked = None
        # What was decided unheard, just before a run went on, was not carried out: its Reopened follows.
        asked = next((a for a in entry.actions if a["type"] == "Train"), asked)
    return done, asked


def line_faults(history: History) -> list[str]:
    """Whether the surviving line has every step once, and no group in two of them."""
    steps, _ = surviving_steps(history.entries)
    told = [event.version for event in _events(history) if isinstance(event, StepTrained | Opened | Reopened)]
    faults = [f"step {version} of the surviving line is missing" for version in _missing(steps)]
    if told and len(steps) != told[-1]:
        faults.append(f"the surviving line must have {told[-1]} steps, got {len(steps)}")
    groups = Counter(group for step in steps.values() for group in step["group_ids"])
    return faults + [f"group {group} is trained {n} times" for group, n in sorted(groups.items()) if n > 1]


def _missing(steps: Mapping[int, Line]) -> list[int]:
    return [version for version in range(max(steps, default=-1) + 1) if version not in steps]


def _events(history: History) -> list[Event]:
    return [entry.event for entry in history.entries]


@dataclass(slots=True)
class Ledger:
    """What became of each group that was drawn: trained, dropped for a reason, returned, or pending."""

    task: dict[int, int]
    fate: dict[int, str]
    drawn: list[int]
    "Tasks in the order of the epochs."
    again: list[int]
    "Tasks that are to be drawn before the epochs go on."
    faults: list[str]

    @property
    def counts(self) -> dict[str, int]:
        """How many of each."""
        return dict(sorted(Counter(self.fate.values()).items()))


def ledger(history: History) -> Ledger:
    """Every drawn group once: trained, dropped with a reason, returned when a run ended early, or pending.

    The tasks must have been drawn in the order of the epochs, but for those that were to be drawn again.
    """
    book = Ledger({}, {}, [], [], [])
    returned = _returned(history)
    ended = False
    for entry in history.entries:
        if isinstance(entry.event, Reopened) and ended:
            back = [group for group in sorted(returned) if book.fate.get(group) == "pending"]
            book.again[:0] = [book.task[group] for group in back]
            book.fate |= dict.fromkeys(back, "returned")
            ended = False
        for action in entry.actions:
            ended = ended or (action["type"] == "Finished" and action["reason"] != "all steps trained")
            if action["type"] == "StartTrial" and action["purpose"] == "train":
                _open(book, history.settings, action)
            elif action["type"] == "DropGroup":
                _drop(book, history.settings, action)
    if ended:
        book.fate |= {g: "returned" for g in returned if book.fate.get(g) == "pending"}
    _train(book, history)
    counts = Counter(book.drawn)
    if counts and max(counts.values()) - min(counts[t] for t in range(history.settings.task_count)) > 1:
        book.faults.append(f"every task must be drawn once an epoch, got {dict(sorted(counts.items()))}")
    return book


def _returned(history: History) -> set[int]:
    """Groups that the schedule knows no more, though they were neither trained nor dropped."""
    state = begin()
    try:
        for event in _events(history):
            state, _ = react(history.settings, state, event)
    except ValueError:  # an event that cannot have come: `replay_faults` tells
        pass
    alive = {g for g, group in state.groups.items() if group.purpose == "train"} | set(state.training)
    alive |= {group.group_id for batch in (*state.redo, *state.unsaved) for group in batch}
    steps, _ = surviving_steps(history.entries)
    alive |= {group for step in steps.values() for group in step["group_ids"]}
    actions = [action for entry in history.entries for action in entry.actions]
    alive |= {action["group_id"] for action in actions if action["type"] == "DropGroup"}
    return {a["group_id"] for a in actions if a["type"] == "StartTrial" and a["purpose"] == "train"} - alive


def _open(book: Ledger, settings: Settings, start: Line) -> None:
    group, task = start["group_id"], start["task"]
    if group in book.task:
        if book.task[group] != task or book.fate[group] != "pending":
            book.faults.append(
                f"group {group} of task {book.task[group]} is {book.fate[group]}, got a trial of it"
            )
        return
    book.task[group], book.fate[group] = task, "pending"
    if book.again:
        expected = book.again.pop(0)
    else:
        expected = task_at(settings, len(book.drawn))
        book.drawn.append(task)
    if task != expected:
        book.faults.append(f"group {group} must be of task {expected}, got {task}")


def _drop(book: Ledger, settings: Settings, drop: Line) -> None:
    group = drop["group_id"]
    if book.fate.get(group) != "pending" or book.task[group] != drop["task"]:
        book.faults.append(
            f"group {group} is {book.fate.get(group, 'not drawn')}, got dropped as {drop['reason']}"
        )
    book.fate[group] = drop["reason"]
    if drop["reason"] == "stale" and settings.requeue_stale:
        book.again.append(drop["task"])


def _train(book: Ledger, history: History) -> None:
    """Which groups are on the surviving line, and whether what is pending is so for the schedule as well."""
    steps, _ = surviving_steps(history.entries)
    for version, step in steps.items():
        for group in step["group_ids"]:
            if book.fate.get(group) != "pending":
                book.faults.append(
                    f"group {group} is {book.fate.get(group, 'not drawn')}, got step {version} of it"
                )
            book.fate[group] = "trained"
    ended = any(a["type"] == "Finished" for entry in history.entries for a in entry.actions)
    for group in sorted(_returned(history)):
        if not ended:
            book.faults.append(
                f"group {group} of task {book.task[group]} is lost: neither trained nor dropped nor pending"
            )


def ledger_faults(history: History) -> list[str]:
    """Whether the ledger of tasks balances."""
    return ledger(history).faults


def expected_reward(trial: Line) -> float:
    """The reward that a trial's recorded criteria come to."""
    criteria = trial["criteria"]
    if any(criterion["gate"] and not criterion["met"] for criterion in criteria):
        return 0.0
    return fmean(criterion["met"] for criterion in criteria if not criterion["gate"])


def reward_faults(
    history: History, *, judged: Callable[[str], bool] | None = None, judge: str = ""
) -> list[str]:
    """Whether every reward that was trained is the one that the trial's own record gives.

    Args:
        judged: what the judge says of an answer.
        judge: name of its criterion.
    """
    ended = [event for event in _events(history) if isinstance(event, TrialEnded)]
    told = {event.trial_id: event for event in ended if event.valid}
    trial = {line["trial_id"].removeprefix(f"{history.name}/"): line for line in history.trials}
    steps, _ = surviving_steps(history.entries)
    faults = [f"trial {name} ends {n} times in the journal" for name, n in _twice(e.trial_id for e in ended)]
    faults += [
        f"trial {name} has {n} lines" for name, n in _twice(line["trial_id"] for line in history.trials)
    ]
    for version, step in steps.items():
        for name in step["trial_ids"]:
            if name not in told or name not in trial:
                faults.append(f"trial {name} of step {version} must have ended well, got no record of that")
                continue
            faults += [
                f"trial {name}: {fault}" for fault in _reward_faults(trial[name], told[name], judged, judge)
            ]
    missing = sorted(set(told) - set(trial))
    return faults + [f"trial {name} of the journal has no line" for name in missing]


def _reward_faults(
    trial: Line, told: TrialEnded, judged: Callable[[str], bool] | None, judge: str
) -> list[str]:
    faults = []
    if (
        trial["outcome"]["kind"] not in ("solved", "failed")
        and trial["outcome"]["reason"] not in SCORED_TRUNCATIONS
    ):
        faults.append(f"a trained trial must have a valid reward, got outcome {trial['outcome']}")
    if trial["reward"] != told.reward:
        faults.append(f"its reward must be {told.reward} as in the journal, got {trial['reward']}")
    if abs(trial["reward"] - expected_reward(trial)) > 1e-12:
        faults.append(f"its reward must be {expected_reward(trial)} by its criteria, got {trial['reward']}")
    said = [criterion["met"] for criterion in trial["criteria"] if criterion["name"] == judge]
    if judged is not None and said != [judged(trial["answer"])]:
        faults.append(f"the judge must say {judged(trial['answer'])} of it once, got {said}")
    return faults


def _twice(names: Iterable[str]) -> list[tuple[str, int]]:
    return [(name, n) for name, n in sorted(Counter(names).items()) if n > 1]


def row_faults(history: History) -> list[str]:
    """Whether the trainer was given each step's trials, with the advantage that their rewards come to.

    What was trained again must be the same to the token.
    """
    steps, _ = surviving_steps(history.entries)
    ever = {action["version"] for e in history.entries for action in e.actions if action["type"] == "Train"}
    reward = {line["trial_id"]: line["reward"] for line in history.trials if line.get("reward") is not None}
    seen: dict[tuple[int, str], Line] = {}
    faults = []
    for row in history.rows:
        key = row["version"], row["row_id"]
        if seen.setdefault(key, row) != row:
            faults.append(f"row {row['row_id']} of step {row['version']} is another when it is trained again")
    for version, step in steps.items():
        faults += _step_row_faults(history, version, step, seen, reward)
    return faults + [
        f"step {v} was trained, got no decision of it" for v in sorted({v for v, _ in seen} - ever)
    ]


def _step_row_faults(
    history: History,
    version: int,
    step: Line,
    seen: Mapping[tuple[int, str], Line],
    reward: Mapping[str, float],
) -> list[str]:
    groups: dict[str, list[str]] = {}
    for trial in step["trial_ids"]:
        groups.setdefault(trial.split("-")[1], []).append(f"{history.name}/{trial}")
    known = [members for members in groups.values() if all(trial in reward for trial in members)]
    scores = {trial: [reward[member] for member in members] for members in known for trial in members}
    mean = {trial: fmean(values) for trial, values in scores.items()}
    spread = {trial: max(values) - min(values) for trial, values in scores.items()}
    rows = {row["row_id"]: row for (at, _), row in seen.items() if at == version}
    wanted = {trial for trial, width in spread.items() if width > history.settings.tolerance}
    unknown = {trial for members in groups.values() for trial in members} - scores.keys()
    got = {row["trial_id"] for row in rows.values()} - unknown
    faults = [f"step {version} must train {trial}, got no row of it" for trial in sorted(wanted - got)]
    faults += [f"step {version} must not train {trial}, got a row of it" for trial in sorted(got - wanted)]
    for row_id, row in rows.items():
        if row["trial_id"] not in mean:
            continue
        due = reward[row["trial_id"]] - mean[row["trial_id"]]
        if abs(row["advantage"] - due) > 1e-9:
            faults.append(f"row {row_id} of step {version} must have advantage {due}, got {row['advantage']}")
    return faults


def curve_faults(history: History) -> list[str]:
    """Whether metrics.jsonl has every step of the surviving line once, in order, with a reward, at times that grow.

    The last step may be told of before the journal has it.
    """
    steps, asked = surviving_steps(history.entries)
    lines = [line for line in history.metrics if "step" in line]
    told = [line["step"] for line in lines]
    due = [version + 1 for version in sorted(steps)]
    faults = []
    if told != due and (asked is None or told != [*due, asked["version"] + 1]):
        faults.append(f"metrics.jsonl must tell of steps 1 to {len(due)} once each, got {_shown(told)}")
    seconds = [line["seconds"] for line in lines]
    faults += [
        f"step {n} must come after the one before"
        for n, (a, b) in zip(told[1:], zip(seconds, seconds[1:]))
        if b < a
    ]
    return faults + [
        f"step {line['step']} must have a reward, got none" for line in lines if line["reward"] is None
    ]


def _shown(steps: Sequence[int]) -> str:
    """The first places at which the numbers do not count up by one."""
    jumps = [f"{b} after {a}" for a, b in zip([0, *steps], steps) if b != a + 1]
    return ", ".join(jumps[:5]) or f"{len(steps)} of them"


def event_faults(history: History) -> list[str]:
    """Whether every trial with a line has ended in the journal, but for those that its end cut off."""
    told = {event.trial_id for event in _events(history) if isinstance(event, TrialEnded)}
    names = [line["trial_id"].removeprefix(f"{history.name}/") for line in history.trials]
    last = max((place for place, name in enumerate(names) if name in told), default=-1)
    return [
        f"trial {name} has a line, got no end of it in the journal"
        for name in names[:last]
        if name not in told
    ]


def replay_faults(history: History) -> list[str]:
    """Whether the reducer, asked again, answers every event with the actions that were written."""
    try:
        _, difference = replayed(history.settings, list(history.entries))
    except ValueError as error:
        return [str(error)]
    return [] if difference is None else [f"event {difference.number}: the reducer says other actions"]


AUDITS: dict[str, Callable[[History], list[str]]] = {
    "ledger of tasks": ledger_faults,
    "surviving line": line_faults,
    "rewards": reward_faults,
    "trained rows": row_faults,
    "curve": curve_faults,
    "events": event_faults,
    "replay": replay_faults,
}
"""Each audit by what it holds."""
