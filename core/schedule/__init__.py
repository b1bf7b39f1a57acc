"""The asynchronous loop as a pure function: `(settings, state, event) -> (state, actions)`.

No clock, no I/O, no randomness beyond a counter-based hash. The live loop, the replay of a recorded run and a
simulator drive this same function; the same events give the same actions. The shell carries actions out in
order and reports back with events:

    Opened          ->  SyncWeights: no trial starts before the engine has the weights
    TrialEnded      ->  StartTrial into the free slot; Train when a batch of groups is complete
    StepTrained     ->  SyncWeights
    WeightsApplied  ->  StartTrial, Train; or an evaluation, during which no weights are applied
    StopAsked       ->  CancelTrial; drains what is in flight, then Finished

Rollouts go on while the trainer trains. One step is in flight at a time, from Train to WeightsApplied.
"""

from .admission import task_at
from .message import (
    Action,
    CancelTrial,
    CapacityChanged,
    DropGroup,
    EvaluationEnded,
    Event,
    Finished,
    Opened,
    Reopened,
    Save,
    Saved,
    StartTrial,
    StepTrained,
    StopAsked,
    SyncWeights,
    Train,
    TrialEnded,
    WeightsApplied,
)
from .reducer import react, replay
from .settings import Settings
from .state import Group, Sample, State, begin, trial_id

__all__ = [
    "Opened",
    "Reopened",
    "Saved",
    "CapacityChanged",
    "TrialEnded",
    "StepTrained",
    "WeightsApplied",
    "StopAsked",
    "Event",
    "StartTrial",
    "CancelTrial",
    "Train",
    "SyncWeights",
    "Save",
    "DropGroup",
    "EvaluationEnded",
    "Finished",
    "Action",
    "Settings",
    "Group",
    "Sample",
    "State",
    "begin",
    "trial_id",
    "react",
    "replay",
    "task_at",
]
