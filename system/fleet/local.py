"""The fleet of one machine: forks of a warm parent process that has the office libraries loaded."""

from __future__ import annotations

import json
import math
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from core.placement import next_start, start_wait
from system.fleet import FleetError, check_spec, lost
from system.fleet.warm import read_result
from system.sandbox import clean_environment, reap, removal
from system.sandbox.scratch import abandoned

TARGET = "system.trial:run_trial"


def warm_up(kits: Iterable[str], *, policy: Path | None = None) -> tuple[str, ...]:
    """What the parent of the trials loads for tools of these kits, and for a policy's chat."""
    chat = () if policy is None else (f"system.trial:load_chat={policy.resolve()}",)
    return (*(f"system.fleet.office:load={kit}" for kit in kits), *chat)


WARM = warm_up(("brief",))


class LocalFleet:
    """Trials as processes of this machine. Example: `LocalFleet(Path("out/run/scratch"))`.

    Args:
        scratch: folder for what the trials make; what a killed earlier run left there is removed first.
        target: "module:function" that runs a trial: a dict in, a dict out, both JSON.
        warm: "module:function" or "module:function=argument", each called once by the parent, so that no trial has
            to pay for what they load.
        grace_s: a trial is killed this long after its own deadlines (`lifetime_s`).
        temporary: folder of the temporary files of the trials; the machine's if None.
        max_starting: trials that are started and have not said that they are up (`starting.started`); those beyond
            wait, and neither their deadlines nor their cost begin before.
        starts_per_s: trials that are started in a second.
    """

    def __init__(
        self,
        scratch: Path,
        *,
        target: str = TARGET,
        warm: Sequence[str] = WARM,
        grace_s: float = 5.0,
        temporary: Path | None = None,
        max_starting: float = math.inf,
        starts_per_s: float = math.inf,
    ) -> None:
        if not grace_s >= 0:
            raise ValueError(f"grace_s must not be negative, got {grace_s}")
        start_wait(
            0, max_starting=max_starting, next_s=0.0, now_s=0.0
        )  # refuses what could never start a trial
        next_start(0.0, starts_per_s=starts_per_s)
        self._scratch = scratch.resolve()
        self._scratch.mkdir(parents=True, exist_ok=True)
        self.log = self._scratch / "fleet.log"
        self._order = {
            "scratch": os.fspath(self._scratch),
            "target": target,
            "warm": list(warm),
            "grace_s": grace_s,
            "driver": os.getpid(),
            "max_starting": max_starting,
            "starts_per_s": starts_per_s,
        }
        self._environment = clean_environment()
        if temporary is not None:
            temporary.mkdir(parents=True, exist_ok=True)
            self._environment["TMPDIR"] = os.fspath(temporary.resolve())
        self._running: set[str] = set()
        self._results: list[dict[str, Any]] = []
        self._closed = False
        self._removal: subprocess.Popen[str] | None = None
        removal.reap_remote(self._scratch)
        self._start_parent()

    @property
    def running(self) -> frozenset[str]:
        """Ids of the trials that were started and not yet returned."""
        return frozenset(self._running)

    @property
    def descriptor(self) -> int | None:
        """Is readable when `poll` would take something in; None while the fleet has no parent process."""
        return None if self._parent is None else self._control.fileno()

    @property
    def parent_pid(self) -> int:
        """Pid of the parent of the trials. Raises FleetError while there is none."""
        if self._parent is None:
            raise FleetError("the fleet has no parent process")
        return self._parent.pid

    def reach(self, needed: Sequence[str]) -> None:
        """The trials run where the caller does, and have what it has."""

    def start(self, spec: dict[str, Any]) -> None:
        """Start a trial.

        Raises:
            ValueError: the spec has no proper trial_id or deadline_s, or a trial of that id is running.
            FleetError: the fleet is closed, or its parent process does not start again.
        """
        check_spec(spec, self._running)
        if self._closed:
            raise FleetError("the fleet is closed")
        if self._parent is None:
            self._start_parent()
        self._running.add(spec["trial_id"])
        self._send({"type": "start", "spec": spec})

    def poll(self, timeout_s: float) -> list[dict[str, Any]]:
        """Results that have come in; waits up to timeout_s for the first."""
        deadline = time.monotonic() + timeout_s
        while not self._results and self._parent is not None:
            if not self._receive(max(0.0, deadline - time.monotonic())):
                break
        while self._parent is not None and self._receive(0.0):
            continue
        results, self._results = self._results, []
        self._running -= {result["trial_id"] for result in results}
        if any(result.get("outcome", {}).get("kind") in ("system_error", "cancelled") for result in results):
            self._remove_abandoned()
        return results

    def _remove_abandoned(self) -> None:
        """Begin to end what trials that died left on other machines; only the trial itself knew of it."""
        if self._removal is not None:
            if self._removal.poll() is None:
                return
            removal.wait(self._removal)
        self._removal = removal.start(self._scratch)

    def cancel(self, trial_id: str) -> None:
        """Kill a trial; its result comes with the outcome "cancelled"."""
        if trial_id in self._running:
            self._send({"type": "cancel", "trial_id": trial_id})

    def pace(self, starts_per_s: float) -> None:
        """From now on start so many trials in a second."""
        next_start(0.0, starts_per_s=starts_per_s)
        self._order["starts_per_s"] = starts_per_s
        if self._parent is not None:
            self._send({"type": "pace", "starts_per_s": starts_per_s})

    def close(self) -> None:
        """Kill what still runs, end the parent, remove what they made."""
        if self._closed:
            return
        self._closed = True
        if self._parent is not None:
            # The end of the stream tells the parent to kill its trials and end; shut down, not only closed,
            # because a process that was forked meanwhile may hold the stream too.
            self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
            try:
                self._parent.wait(20)
            except subprocess.TimeoutExpired:
                self._parent.kill()
                self._parent.wait(20)
            self._parent = None
        self._running.clear()
        self._reap_the_dying()
        if self._removal is not None:
            removal.wait(self._removal)
        removal.reap_remote(self._scratch)

    def __enter__(self) -> LocalFleet:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start_parent(self) -> None:
        self._parent: subprocess.Popen[bytes] | None = None
        self._buffer = bytearray()
        self._attached: list[int] = []
        self._control, there = socket.socketpair()
        self._control.setblocking(False)
        in_main = threading.current_thread() is threading.main_thread()
        with open(self.log, "ab") as log, there:
            self._parent = subprocess.Popen(
                [sys.executable, "-m", "system.fleet.warm", str(there.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        self._ready: dict[str, Any] = {}
        self._send({**self._order, "die_with_parent": in_main})
        deadline = time.monotonic() + 120
        while not self._ready and self._parent is not None and time.monotonic() < deadline:
            self._receive(max(0.0, deadline - time.monotonic()))
        if self._ready.get("type") != "ready":
            cause = self._ready.get("cause") or f"it did not come up; see {self.log}"
            self.close()
            raise FleetError(f"the fleet's parent process failed: {cause}")

    def _send(self, message: dict[str, Any]) -> None:
        """Write a message; take in what the parent says meanwhile, so that neither side blocks."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        deadline = time.monotonic() + 30
        while data and self._parent is not None:
            readable, writable, _ = select.select([self._control], [self._control], [], 1.0)
            if readable and not self._receive(0.0):
                return
            if writable:
                try:
                    data = data[self._control.send(data) :]
                except BlockingIOError:
                    continue
                except OSError:
                    self._parent_is_gone()
                    return
            if time.monotonic() > deadline:
                raise FleetError("the fleet's parent process does not read its orders")

    def _receive(self, timeout_s: float) -> bool:
        """Take in what the parent says, waiting up to timeout_s; False if that was nothing or its end."""
        if not select.select([self._control], [], [], timeout_s)[0]:
            return False
        try:
            data, attached, _, _ = socket.recv_fds(self._control, 1 << 20, 64)
        except ConnectionError:
            data, attached = b"", []
        self._attached += attached
        if not data:
            self._parent_is_gone()
            return False
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            message = json.loads(line)
            if message["type"] == "result":
                self._results.append(self._result(message))
            else:
                self._ready = message
        return True

    def _result(self, message: dict[str, Any]) -> dict[str, Any]:
        """What the parent says of a trial, or what the trial wrote itself: the parent hands that on unread."""
        result = read_result(self._attached.pop(0)) if message["attached"] else message["result"]
        spent = {**result.get("cpu_seconds", {}), "trial": message["seconds"]}
        return {**result, "trial_id": message["trial_id"], "cpu_seconds": spent}

    def _parent_is_gone(self) -> None:
        """Give every running trial a system error; the next start makes a new parent."""
        assert self._parent is not None
        self._control.close()
        try:
            cause = f"fleet parent died: exit {self._parent.wait(5)}"
        except subprocess.TimeoutExpired:
            self._parent.kill()
            cause = f"fleet parent hung up: exit {self._parent.wait(5)}"
        self._parent = None
        known = {result["trial_id"] for result in self._results}
        self._results += [lost(trial_id, cause) for trial_id in sorted(self._running - known)]
        self._reap_the_dying()

    def _reap_the_dying(self) -> None:
        """The trials die with their parent, and not at once: what is left is theirs until they have."""
        deadline = time.monotonic() + 5
        reap(self._scratch)
        while len(list(self._scratch.glob("trial-*.json"))) > len(abandoned(self._scratch)):
            if time.monotonic() > deadline:
                print(f"trials do not die: {self._scratch}", file=sys.stderr, flush=True)
                return
            time.sleep(0.005)
            reap(self._scratch)
