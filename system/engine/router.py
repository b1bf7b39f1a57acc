"""Several engines as the loop sees them: trials are spread over those that live, weights go to all, dead ones are
started again.

The loop's thread owns all of it. What takes time is done in threads of the router's own; `poll` says what came of it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

from core.routing import assigned, empty_routes, may_restart, released
from system.engine.request import EngineError, EngineSilent, RunningEngine

MOMENTARY = (
    "running",
    "waiting",
    "sessions",
    "policy_version",
    "kv_usage",
    "kv_tokens",
    "kv_reserved_tokens",
)
"""What an engine says of the moment; the rest of its numbers only grow, and those of its earlier lives still count."""

LOOK_S = 0.05
"""How long to wait for the end of an engine that a trial has just lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRule:
    """When an engine is given up, and how often it is started again.

    Args:
        pulse_s: how often its counters are asked for.
        silence_s: without an answer for so long it is dead.
        most: restarts of one engine within the window; its next end ends the run.
        window_s: of these.
    """

    pulse_s: float = 5.0
    silence_s: float = 40.0
    most: int = 8
    window_s: float = 600.0


class Applied(NamedTuple):
    """Every engine that lives samples from `version`."""

    version: int


class Lost(NamedTuple):
    """An engine ended; its trials will fail, and it is being started again."""

    engine: int
    cause: str

    def __str__(self) -> str:
        return f"{self.cause}; it is started again"


class Back(NamedTuple):
    """An engine lives again, with the newest weights that were brought to it."""

    engine: int
    seconds: float

    def __str__(self) -> str:
        return f"engine {self.engine} is back after {self.seconds:.1f} s"


Happening = Applied | Lost | Back

Transfer = Callable[[Sequence[RunningEngine], int, str, bool], Sequence[str]]
"""Brings weights to some engines: engines, version, weights, reset_kv. For each why it does not have them, or "".

Raises EngineError where the weights are refused.
"""


def each_by_itself(
    engines: Sequence[RunningEngine], version: int, weights: str, reset_kv: bool
) -> Sequence[str]:
    """All engines are told at the same time, each takes the weights where they lie."""

    def fault(engine: RunningEngine) -> str:
        try:
            engine.update_weights(version, weights, reset_kv=reset_kv)
        except (EngineSilent, OSError) as error:
            return engine.fault(LOOK_S) or f"engine must take weights, got {type(error).__name__}: {error}"
        return ""

    if len(engines) == 1:
        return [fault(engines[0])]
    with ThreadPoolExecutor(len(engines)) as pool:
        return list(pool.map(fault, engines))


class _Update(NamedTuple):
    version: int
    weights: str
    reset_kv: bool
    number: int


@dataclass(slots=True, eq=False)
class _Place:
    """An engine's place, changed by the router: who is there, since when, and with what."""

    engine: RunningEngine
    number: int
    life: int = 0
    status: Literal["live", "ended", "bare"] = "live"
    """bare: it runs, and has not got the newest weights yet."""
    has: _Update | None = None
    cause: str = ""
    ended_at_s: list[float] = field(default_factory=list)
    restart: Future[None] | None = None
    pulse: Future[dict[str, Any]] | None = None
    pulse_at_s: float = 0.0
    told: dict[str, Any] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)


class Router:
    """The engines of a run.

    Args:
        engines: that listen, all with the same weights.
        hold: folder, on the file system of the weights, where the newest are kept for an engine that is started again.
        rule: when an engine is given up.
        transfer: how weights get to engines.
    """

    def __init__(
        self,
        engines: Sequence[RunningEngine],
        *,
        hold: Path,
        rule: RestartRule,
        transfer: Transfer = each_by_itself,
    ) -> None:
        self.rule, self.transfer, self._hold = rule, transfer, hold
        self.places = [_Place(engine, number) for number, engine in enumerate(engines)]
        self.routes = empty_routes(len(engines))
        self._lives: dict[str, int] = {}
        self._numbers = count(1)
        self._wanted: _Update | None = None
        self._unsaid = False
        self._moving: tuple[Future[Sequence[str]], _Update, list[tuple[_Place, int]]] | None = None
        self._happened: list[Happening] = []
        # An engine dies with the thread that started it: these live as long as the router.
        self._pool = ThreadPoolExecutor(2 * len(engines) + 1, thread_name_prefix="router")
        now = time.monotonic()
        for place in self.places:
            place.pulse_at_s = now

    def place(self, trial_id: str) -> str | None:
        """The address of the engine that a new trial is to use, until it is released; None while none lives."""
        alive = [place.status == "live" for place in self.places]
        self.routes, engine = assigned(self.routes, trial_id, alive=alive)
        if engine is None:
            return None
        self._lives[trial_id] = self.places[engine].life
        return self.places[engine].engine.address

    def release(self, trial_id: str, *, failed: bool) -> str:
        """Take a trial off its engine, however it ended; why that engine ended while it was there, or "".

        Args:
            failed: the trial could not go on, which may be the first sign that its engine has ended.
        """
        if trial_id not in self._lives:
            return ""
        place, life = self.places[self.routes.engine_of[trial_id]], self._lives.pop(trial_id)
        self.routes = released(self.routes, trial_id)
        if failed and place.life == life and (fault := place.engine.fault(LOOK_S)):
            self._end(place, fault)
        return place.cause if place.life != life else ""

    def begin_update(self, version: int, weights: str, *, reset_kv: bool) -> None:
        """Bring weights to every engine; `poll` says when they are there."""
        number = next(self._numbers)
        self._wanted = _Update(version, self._held(weights, number), reset_kv, number)
        self._unsaid = True
        self._bring(0.0)

    def poll(self, timeout_s: float = 0.0) -> list[Happening]:
        """What has happened; waits so long for weights that are under way.

        Raises:
            EngineError: an engine ended too often, or refuses weights.
        """
        for place in self.places:
            self._look_at(place)
        self._bring(timeout_s)
        live = [place for place in self.places if place.status == "live"]
        if self._unsaid and self._wanted and live and all(place.has is self._wanted for place in live):
            self._unsaid = False
            self._happened.append(Applied(self._wanted.version))
            self._let_go()
        happened, self._happened = self._happened, []
        return happened

    @property
    def moving(self) -> bool:
        """Whether weights are on their way to an engine."""
        return self._moving is not None

    def fault(self, timeout_s: float) -> str:
        """Why an engine does not run any more; "" if all do."""
        faults = (place.engine.fault(timeout_s) for place in self.places if place.status == "live")
        return next((fault for fault in faults if fault), "")

    def stats(self) -> dict[str, Any]:
        """The counters of all engines together, those of lives that are over included; policy_version: the oldest."""
        for place in self.places:
            if place.status == "live":
                try:
                    place.told = place.engine.stats()
                except (EngineError, OSError):  # what it said last counts; that it ended is `poll`'s to find
                    continue
        return self.heard()

    def heard(self) -> dict[str, Any]:
        """The same as they were last told, without asking: at most `pulse_s` old, and nothing before the first time."""
        total: dict[str, Any] = {}
        for numbers in [told for place in self.places for told in (place.before, place.told)]:
            for name, value in numbers.items():
                if isinstance(value, int | float) and name != "policy_version":
                    total[name] = total.get(name, 0) + value
        versions = [place.told["policy_version"] for place in self.places if "policy_version" in place.told]
        restarts = sum(place.life for place in self.places)
        return {**total, "policy_version": min(versions, default=None), "restarts": restarts}

    def close(self) -> None:
        """End every engine, one that is being started too."""
        with ThreadPoolExecutor(
            len(self.places)
        ) as pool:  # those of the other may wait for an engine that hangs
            list(pool.map(lambda place: place.engine.close(), self.places))
        for place in self.places:
            if place.restart is not None:
                wait([place.restart])
                place.engine.close()
        self._pool.shutdown()
        shutil.rmtree(self._hold, ignore_errors=True)

    def _look_at(self, place: _Place) -> None:
        if place.status == "ended":
            self._take_back(place)
        elif fault := place.engine.fault(0.0) or self._unheard(place):
            self._end(place, fault)

    def _unheard(self, place: _Place) -> str:
        """Asks for the counters when it is time; why that fails, or ""."""
        now = time.monotonic()
        if place.pulse is None:
            if now - place.pulse_at_s >= self.rule.pulse_s:
                place.pulse, place.pulse_at_s = self._pool.submit(place.engine.stats), now
            return ""
        if not place.pulse.done():
            late = now - place.pulse_at_s > self.rule.silence_s
            return f"engine must answer within {self.rule.silence_s:g} s, got silence" if late else ""
        pulse, place.pulse = place.pulse, None
        if error := pulse.exception():
            return place.engine.fault(LOOK_S) or f"engine must answer, got {type(error).__name__}: {error}"
        place.told = pulse.result()
        return ""

    def _end(self, place: _Place, fault: str) -> None:
        """An engine has ended: its trials are lost, and another is started in its place if that may be."""
        now, rule = time.monotonic(), self.rule
        place.status, place.has, place.pulse = "ended", None, None
        place.life += 1
        place.cause = f"engine {place.number}: {fault}"
        place.ended_at_s.append(now)
        for name, value in place.told.items():
            if isinstance(value, int | float) and name not in MOMENTARY:
                place.before[name] = place.before.get(name, 0) + value
        place.told = {}
        if not may_restart(place.ended_at_s, now_s=now, most=rule.most, window_s=rule.window_s):
            ends = sum(now - ended < rule.window_s for ended in place.ended_at_s)
            raise EngineError(
                f"engine {place.number} must end at most {rule.most} times in {rule.window_s:g} s, "
                f"got {ends}, the last: {fault}"
            )
        self._happened.append(Lost(place.number, place.cause))
        place.restart = self._pool.submit(place.engine.restart)

    def _take_back(self, place: _Place) -> None:
        """An engine that was started again gets its weights before it gets trials."""
        if place.restart is None or not place.restart.done():
            return
        restart, place.restart = place.restart, None
        if error := restart.exception():
            self._end(place, " ".join(f"{error}".split()))
            return
        place.status, place.pulse_at_s = "bare", time.monotonic()
        if self._wanted is None:
            self._lives_again(place)

    def _lives_again(self, place: _Place) -> None:
        place.status = "live"
        self._happened.append(Back(place.number, time.monotonic() - place.ended_at_s[-1]))

    def _bring(self, timeout_s: float) -> None:
        """Take the newest weights to whoever has them not, all of them at once."""
        update = self._wanted
        if self._moving is None and update is not None:
            behind = [place for place in self.places if place.status != "ended" and place.has is not update]
            if behind:
                told = [place.engine for place in behind], update.version, update.weights, update.reset_kv
                moving = self._pool.submit(self.transfer, *told)
                self._moving = moving, update, [(place, place.life) for place in behind]
        if self._moving is None:
            return
        moving, update, places = self._moving
        wait([moving], timeout_s)
        if not moving.done():
            return
        self._moving = None
        for (place, life), fault in zip(places, moving.result(), strict=True):
            if place.life != life:
                continue
            if fault:
                self._end(place, fault)
                continue
            place.has = update
            if place.status == "bare":
                self._lives_again(place)

    def _held(self, weights: str, number: int) -> str:
        """Another name of a file of weights, so that it stays when its writer lets it go."""
        if not Path(weights).is_file():
            return weights
        self._hold.mkdir(parents=True, exist_ok=True)
        held = self._hold / f"{number}.safetensors"
        try:
            os.link(weights, held)
        except OSError:  # another file system
            shutil.copyfile(weights, held)
        return str(held)

    def _let_go(self) -> None:
        """Remove the files of older weights; nobody will want them."""
        assert self._wanted is not None
        for path in self._hold.glob("*.safetensors"):
            if str(path) != self._wanted.weights and self._moving is None:
                path.unlink(missing_ok=True)
