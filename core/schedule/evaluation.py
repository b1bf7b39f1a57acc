"""Evaluation: all trials of one version, while no weights move."""

from __future__ import annotations

from dataclasses import replace

from .message import EvaluationEnded
from .settings import Settings
from .state import Group, Sample, State, Step


def start_evaluation(settings: Settings, state: State) -> Step:
    """Open the evaluation of the version that was just applied, if one is wanted."""
    version = state.trained
    if state.ending or version not in settings.evaluate_at:
        return state, ()
    first = state.next_group
    empty = (Sample(),) * settings.evaluation_samples
    opened = {
        first + task: Group(group_id=first + task, task=task, purpose="eval", ready=0, samples=empty)
        for task in range(settings.evaluation_tasks)
    }
    groups = {**state.groups, **opened}
    return replace(state, evaluating=version, groups=groups, next_group=first + len(opened)), ()


def end_evaluation(settings: Settings, state: State) -> Step:
    """Close the evaluation when its last trial is over."""
    evaluation = [g for g in state.groups.values() if g.purpose == "eval"]
    if state.evaluating is None or not all(g.over for g in evaluation):
        return state, ()
    kept = {k: g for k, g in state.groups.items() if g.purpose == "train"}
    ended = EvaluationEnded(version=state.evaluating)
    return replace(state, groups=kept, evaluating=None), (ended,)
