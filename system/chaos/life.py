"""A run seen from outside: started, watched through its journal, ended or found dead, and started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from system.chaos.target import descendants, kill


class End(NamedTuple):
    """How a process of the run ended: exit code and what it said on stderr."""

    code: int
    said: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """Killed, or with a line of its own: never with a traceback, never as if all were well."""
        return self.code == -signal.SIGKILL or (self.code == 1 and len(self.said) == 1)

    @property
    def told(self) -> str:
        """In one line."""
        return f"exit {self.code}" + (f": {self.said[-1]}" if self.said else "")


class Life:
    """The processes of one run, one after the other.

    Args:
        command: starts it.
        resume: what to add to the command where it goes on.
        folder: of the run; its journal tells how far it is.
        log: folder for what the processes print.
        environment: theirs.
    """

    def __init__(
        self,
        command: Sequence[str],
        resume: Sequence[str],
        *,
        folder: Path,
        log: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.commands = list(command), list(resume)
        self._events, self._log, self._environment = folder / "events.jsonl", log, dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._read = 0
        self.starts = self.version = self.opened = 0
        self.heard_at = time.monotonic()

    @property
    def pid(self) -> int:
        """Of the driver, dead or alive."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """A process of the run: the first begins it, the others go on with it."""
        self.starts += 1
        self._log.mkdir(parents=True, exist_ok=True)
        command, resume = self.commands
        with open(self._log / "stdout.log", "ab") as out, open(self._said, "wb") as said:
            self._process = subprocess.Popen(
                [*command, *(resume if self._events.exists() else [])],
                stdout=out,
                stderr=said,
                env=self._environment,
                start_new_session=True,
            )
        self.heard_at = time.monotonic()

    def end(self, timeout_s: float) -> End | None:
        """How it ended, if it does within so long."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return End(code, tuple(self._said.read_text(errors="replace").splitlines()))

    def is_up(self, timeout_s: float) -> bool:
        """Whether the journal says within so long that the run was begun or goes on."""
        opened, deadline = self.opened, time.monotonic() + timeout_s
        while self.look() == opened and time.monotonic() < deadline:
            if self.end(0.1) is not None:
                break
        return self.look() > opened

    def look(self) -> int:
        """Reads on in the journal; how often the run was begun or went on.

        A line that is cut off is not taken: a run that goes on removes it and writes on from there.
        """
        try:
            with open(self._events, "rb") as file:
                file.seek(self._read)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return self.opened
        if newline:
            self.heard_at = time.monotonic()
            self._read += len(whole) + 1
        for kind, version in re.findall(rb'"event":\{"type":"(\w+)","version":(\d+)', whole):
            if kind in (b"Opened", b"Reopened"):
                self.opened += 1
            if kind in (b"Opened", b"Reopened", b"StepTrained"):
                self.version = int(version)
        return self.opened

    def forget_the_last_line(self) -> None:
        """It was cut off."""
        self._read = self._events.read_bytes().rfind(b"\n") + 1

    def kill(self, *, all_at_once: bool) -> int:
        """SIGKILL to the driver, or to every process of the run; how many."""
        below = [process.pid for process in descendants(self.pid)] if all_at_once else []
        return kill([self.pid, *below])

    def stop(self, timeout_s: float) -> End | None:
        """Ctrl-C, and how it ended."""
        assert self._process is not None
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGINT)
        return self.end(timeout_s)

    @property
    def _said(self) -> Path:
        return self._log / f"stderr-{self.starts:03d}.log"
