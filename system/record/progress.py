"""The live view of a run: one line an arm, redrawn in place; plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .finding import name
from .table import clock as clock_text
from .table import mean_staleness

_BARS = "▁▂▃▄▅▆▇█"
_WINDOW_S = 60.0
_REDRAW_S = 0.125


class Progress:
    """Shows how far each arm is, how its reward moves, how stale its data is, how long the rest will take.

    It has no thread: it redraws inside its own calls, at most eight times a second. Entering starts it.

    Args:
        steps: arm -> optimizer steps planned, over all its seeds.
        clock: seconds that only grow; a test passes its own.

    Example:
        with Progress({"prompt_mean": 57, "token_mean": 57}) as progress:
            progress.record({"arm": "prompt_mean", "seed": 0, "step": 1, "reward": 0.41})
    """

    def __init__(
        self,
        steps: Mapping[str, int],
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._clock = clock
        self._rows = {arm: _Row(planned) for arm, planned in steps.items()}
        self._started = clock()
        self._trials: deque[tuple[float, int]] = deque()
        self._drawn = float("-inf")
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._started = self._clock()
        if self._console.is_terminal:
            self._live = Live(self._view(), console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self._view(), refresh=True)
            self._live.stop()
            self._live = None

    def record(self, line: Mapping[str, Any]) -> None:
        """Takes in one line of metrics.jsonl, of a step or of an evaluation."""
        row = self._row(line["arm"])
        row.phase = ""
        if line.get("eval"):
            row.held_out = line.get("passed")
            self._plain(
                f"{name(line['arm'])} seed {line['seed']} held-out pass@1 {_number(row.held_out, '.3f')}"
            )
        else:
            row.done += 1
            row.rewards.append(line.get("reward"))
            row.staleness = mean_staleness(line.get("staleness") or {})
            row.idle = line.get("trainer_idle")
            self._plain(
                f"{name(line['arm'])} seed {line['seed']} step {line['step']} ({row.done}/{row.planned})"
                f" reward {_number(line.get('reward'), '.2f')} passed {_number(line.get('passed'), '.2f')}"
                f" staleness {row.staleness:.1f} trainer idle {_number(row.idle, '.0%')} {self._footer()}"
            )
        self._draw(force=True)

    def trial_done(self, count: int = 1) -> None:
        """Counts finished trials, for the rate."""
        self._trials.append((self._clock(), count))
        self._draw()

    def phase(self, arm: str, text: str) -> None:
        """Says what an arm does just now; the next record clears it."""
        row = self._row(arm)
        if row.phase != text:
            row.phase = text
            self._plain(f"{name(arm)}: {text}")
        self._draw(force=True)

    def note(self, text: str) -> None:
        """Prints one line that stays, above the view."""
        self._console.print(Text(text), soft_wrap=True)

    def tick(self) -> None:
        """Lets the clock move; cheap enough for a polling loop."""
        self._draw()

    def _row(self, arm: str) -> _Row:
        if arm not in self._rows:
            raise ValueError(f"arm must be one of {sorted(self._rows)}, got {arm!r}")
        return self._rows[arm]

    def _plain(self, text: str) -> None:
        if self._live is None:
            self._console.print(Text(text), soft_wrap=True)

    def _draw(self, *, force: bool = False) -> None:
        now = self._clock()
        if self._live is not None and (force or now - self._drawn >= _REDRAW_S):
            self._drawn = now
            self._live.update(self._view(), refresh=True)

    def _view(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
        for heading in ("arm", "", "step", "reward", "", "stale", "idle", "eval", ""):
            side = "right" if heading not in ("arm", "") else "left"
            table.add_column(heading, justify=side, no_wrap=heading != "arm")
        for arm, row in self._rows.items():
            table.add_row(
                Text(name(arm), style="bold"),
                ProgressBar(total=max(row.planned, 1), completed=row.done, width=8),
                f"{row.done}/{row.planned}",
                _number(row.rewards[-1] if row.rewards else None, ".2f"),
                sparkline(list(row.rewards)),
                _number(row.staleness, ".1f"),
                _number(row.idle, ".0%"),
                _number(row.held_out, ".2f"),
                Text(row.phase, style="dim"),
            )
        return Group(table, Text(self._footer(), style="dim"))

    def _footer(self) -> str:
        elapsed = self._clock() - self._started
        while self._trials and self._trials[0][0] < self._clock() - _WINDOW_S:
            self._trials.popleft()
        window = min(_WINDOW_S, max(elapsed, 1.0))
        rate = 60 * sum(count for _, count in self._trials) / window
        done = sum(row.done for row in self._rows.values())
        planned = sum(row.planned for row in self._rows.values())
        left = clock_text(elapsed * (planned - done) / done) if 0 < done <= planned else "?"
        return f"{rate:.0f} trials/min  {clock_text(elapsed)} gone  {left} left"


class _Row:
    """What is shown of one arm."""

    def __init__(self, planned: int) -> None:
        self.planned = planned
        self.done = 0
        self.rewards: deque[float | None] = deque(maxlen=12)
        self.staleness: float | None = None
        self.idle: float | None = None
        self.held_out: float | None = None
        self.phase = ""


def sparkline(values: list[float | None]) -> str:
    """Numbers between 0 and 1 as bars of eight heights; a dot where there is none.

    Example: `sparkline([0.0, 0.5, None, 1.0]) == "▁▅·█"`
    """
    return "".join("·" if value is None else _BARS[min(7, max(0, int(value * 8)))] for value in values)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
