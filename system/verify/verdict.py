"""The grade of a trial and the criteria that it stands on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One thing that was to be true: `Criterion(name="answer", met=False, detail="got '8'", gate=False)`.

    A gate earns nothing; not met, it makes the reward zero.
    """

    name: str
    met: bool
    detail: str
    gate: bool

    def __post_init__(self) -> None:
        """A file's name, or what a judge quotes, may hold what no text can be written with."""
        told = self.detail.encode("utf-8", "backslashreplace").decode()
        object.__setattr__(self, "detail", told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The grade of one trial: `Verdict(reward=0.5, passed=False, criteria=(...))`; passed: all are met.

    numbers are all that a script gave, by name; empty where there is the reward alone.
    """

    reward: float
    passed: bool
    criteria: tuple[Criterion, ...]
    numbers: Mapping[str, float] = field(default_factory=dict)
