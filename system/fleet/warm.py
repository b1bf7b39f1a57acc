"""`python -m system.fleet.warm FD`: the parent of all trials of a machine. One thread, no torch, all loaded.

It forks a process per trial as soon as the pace of starts allows it, kills it when it is late, and ends with all of
them when the driver ends, in whatever way the driver does. A result is written into memory of its own and handed on
unread: it tells what a task expects, and later trials are forked from here.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from core.placement import next_start, start_wait
from system.fleet import lifetime_s
from system.fleet.starting import heard, tell_over
from system.sandbox import kernel, reap

MAX_RESULT = 256 << 20
"""Longest result of a trial in bytes."""

LONGEST_WAIT_S = 3600.0
"""After so long the loop looks around, whatever happens."""

DESCRIPTORS = resource.getrlimit(resource.RLIMIT_NOFILE)
"""How many a trial may have open: as many as this process at first. Later it has two for each trial."""

FAULTY = 3
"""How a trial ends that tells of a system error: it may not have cleared up."""

Trial = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class _Running:
    trial_id: str
    pid: int
    pidfd: int
    result: int
    "Descriptor of the memory that it writes its result into."
    deadline: float
    limit_s: float
    verdict: dict[str, Any] | None = None
    "The result in place of its own, if this process killed it."


class Parent:
    """The loop: orders in, results out.

    Args:
        control: the stream to the driver.
        run: what a trial runs.
        scratch: where the trials' folders are.
        grace_s: a trial is killed this long after its deadlines.
        driver: pid of the driver; its death ends this process too.
        max_starting: trials between their fork and their word that they are up; the others wait, and their
            deadlines with them.
        starts_per_s: forks in a second.
    """

    def __init__(
        self,
        control: socket.socket,
        run: Trial,
        scratch: Path,
        grace_s: float,
        driver: int,
        *,
        max_starting: float = math.inf,
        starts_per_s: float = math.inf,
    ) -> None:
        self._control, self._run, self._scratch, self._grace_s = control, run, scratch, grace_s
        self._max_starting, self._starts_per_s = max_starting, starts_per_s
        self._trials: dict[int, _Running] = {}
        self._waiting: dict[str, dict[str, Any]] = {}
        self._starting: set[int] = set()
        self._next_start_s = -math.inf
        self._incoming = bytearray()
        self._outgoing: deque[tuple[bytearray, int]] = deque()
        self._open = True
        self._selector = selectors.DefaultSelector()
        control.setblocking(False)
        self._selector.register(control, selectors.EVENT_READ, self._on_control)
        self._up, self._told_up = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._up, selectors.EVENT_READ, self._on_up)
        try:
            self._selector.register(os.pidfd_open(driver), selectors.EVENT_READ, self._on_driver_death)
        except ProcessLookupError:
            self._open = False

    def say(self, message: dict[str, Any], attached: int = -1) -> None:
        """Queue a message for the driver, and a descriptor that goes with it and is closed here."""
        self._outgoing.append((bytearray(json.dumps(message).encode() + b"\n"), attached))
        self._flush()

    def loop(self) -> None:
        """Serve until the driver is gone, then kill every trial and remove what they made."""
        try:
            while self._open:
                for key, events in self._selector.select(min(self._admit(), self._next_deadline())):
                    key.data(events)
                self._kill_late()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for trial in self._trials.values():
                kernel_kill(trial.pid)
            for trial in self._trials.values():
                os.waitpid(trial.pid, 0)
            self._trials.clear()
            self._sweep()
            reap(self._scratch)

    def _next_deadline(self) -> float:
        due = [trial.deadline for trial in self._trials.values() if trial.verdict is None]
        return min(max(0.0, min(due, default=math.inf) - time.monotonic()), LONGEST_WAIT_S)

    def _admit(self) -> float:
        """Start of the trials that wait those that may; how long until the next may."""
        while self._waiting:
            now = time.monotonic()
            wait_s = start_wait(
                len(self._starting), max_starting=self._max_starting, next_s=self._next_start_s, now_s=now
            )
            if wait_s > 0:
                return wait_s
            self._next_start_s = next_start(now, starts_per_s=self._starts_per_s)
            self._start(self._waiting.pop(next(iter(self._waiting))))
        return math.inf

    def _kill_late(self) -> None:
        now = time.monotonic()
        for trial in self._trials.values():
            if trial.deadline <= now and trial.verdict is None:
                self._kill(trial, _system_error(f"deadline: {trial.limit_s:.1f} s"))

    def _kill(self, trial: _Running, verdict: dict[str, Any]) -> None:
        if trial.verdict is None:
            trial.verdict = verdict
        kernel_kill(trial.pid)

    def _on_driver_death(self, _events: int) -> None:
        self._open = False

    def _on_control(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if not events & selectors.EVENT_READ:
            return
        try:
            data = self._control.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._open = False
            return
        self._incoming += data
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = bytearray(rest)
        for line in lines:
            order = json.loads(line)
            if order["type"] == "start":
                self._waiting[order["spec"]["trial_id"]] = order["spec"]
                self._admit()
            elif order["type"] == "pace":
                self._starts_per_s = order["starts_per_s"]
            else:
                self._cancel(order["trial_id"])

    def _cancel(self, trial_id: str) -> None:
        cancelled = {"outcome": {"kind": "cancelled"}}
        if self._waiting.pop(trial_id, None) is not None:
            self._report(trial_id, cancelled, 0.0)
        for trial in self._trials.values():
            if trial.trial_id == trial_id:
                self._kill(trial, cancelled)

    def _on_up(self, _events: int) -> None:
        self._starting.difference_update(heard(self._up))

    def _flush(self) -> None:
        while self._outgoing:
            data, attached = self._outgoing.popleft()
            try:
                sent = (
                    socket.send_fds(self._control, [data], [attached])
                    if attached >= 0
                    else self._control.send(data)
                )
            except BlockingIOError:
                self._outgoing.appendleft((data, attached))
                break
            except OSError:  # the driver is gone; its end is noticed where it is read
                self._outgoing.clear()
                break
            if attached >= 0:
                os.close(attached)
            if data[sent:]:
                self._outgoing.appendleft((data[sent:], -1))
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        self._selector.modify(self._control, wanted, self._on_control)

    def _start(self, spec: dict[str, Any]) -> None:
        result = os.memfd_create("result")
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(result)
            self._report(spec["trial_id"], _system_error(f"fork: {error.strerror}"), 0.0)
            return
        if pid == 0:
            _become_trial(self._run, spec, result, self._told_up, parent)
        limit_s = lifetime_s(spec) + self._grace_s
        trial = _Running(
            trial_id=spec["trial_id"],
            pid=pid,
            pidfd=os.pidfd_open(pid),
            result=result,
            deadline=time.monotonic() + limit_s,
            limit_s=limit_s,
        )
        self._trials[pid] = trial
        self._starting.add(pid)
        self._selector.register(trial.pidfd, selectors.EVENT_READ, lambda _: self._on_end(trial))

    def _on_end(self, trial: _Running) -> None:
        """A trial process is dead: its result, or why there is none."""
        self._selector.unregister(trial.pidfd)
        os.close(trial.pidfd)
        _, status, usage = os.wait4(trial.pid, 0)
        del self._trials[trial.pid]
        self._starting.discard(trial.pid)
        code = os.waitstatus_to_exitcode(status)
        self._sweep()
        if code != 0:  # it may not have cleared up
            reap(self._scratch)
        verdict = _verdict(trial, code)
        if verdict is not None:
            os.close(trial.result)
        attached = trial.result if verdict is None else -1
        self._report(trial.trial_id, verdict or {}, usage.ru_utime + usage.ru_stime, attached)

    def _report(self, trial_id: str, result: dict[str, Any], seconds: float, attached: int = -1) -> None:
        message = {"type": "result", "trial_id": trial_id, "seconds": round(seconds, 6), "result": result}
        self.say(message | {"attached": attached >= 0}, attached)

    def _sweep(self) -> None:
        """Kill and reap what dead trials left: orphans come to this process, and live trials keep theirs."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            orphans = [pid for pid in kernel.children() if pid not in self._trials]
            if not orphans:
                return
            for pid in orphans:
                kernel_kill(pid)
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    continue
            time.sleep(0.001)
        print(f"processes do not die: {orphans}", file=sys.stderr, flush=True)


def kernel_kill(pid: int) -> None:
    """SIGKILL to a process and to the group that it leads."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _system_error(cause: str, phase: str = "process") -> dict[str, Any]:
    return {"outcome": {"kind": "system_error", "phase": phase, "cause": cause}}


def _verdict(trial: _Running, code: int) -> dict[str, Any] | None:
    """What to say of a dead trial: a verdict of ours, or how it died; None if its own words are to be told."""
    if trial.verdict is not None:
        return trial.verdict
    said = os.fstat(trial.result).st_size > 0
    return None if code == 0 or code == FAULTY and said else _system_error(f"exit {code}")


def read_result(fd: int) -> dict[str, Any]:
    """What a trial wrote into the memory behind a descriptor, which is closed."""
    with open(fd, "rb") as file:
        file.seek(0)
        try:
            return _checked(json.load(file))
        except (ValueError, TypeError):
            return _system_error("the trial ended without a result")


def _become_trial(run: Trial, spec: dict[str, Any], result: int, up: int, parent: int) -> NoReturn:
    """Run a trial in a fresh fork and write its result; never returns."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        kernel.die_with_parent(parent)
        kernel.adopt_orphans()
        _close_all_but(result, up)
        tell_over(up)
        end = 0
        try:
            data = json.dumps(_checked(run(spec))).encode()
            if len(data) > MAX_RESULT:
                raise ValueError(f"result must have {MAX_RESULT} bytes at most, got {len(data)}")
        except Exception as error:  # noqa: BLE001 - whatever a trial raises is recorded as a system error of it
            traceback.print_exc()
            cause = getattr(error, "cause", None) or f"{type(error).__name__}: {error}"
            data, end = json.dumps(_system_error(cause, getattr(error, "phase", "process"))).encode(), FAULTY
        view = memoryview(data)
        while view:
            view = view[os.write(result, view) :]
        status = end
    except BaseException:  # noqa: BLE001 - the last frame of a forked process: the log is the only way out
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _checked(result: object) -> dict[str, Any]:
    if not isinstance(result, dict):
        raise TypeError(f"a trial must return a dict, got {type(result).__name__}")
    return result


def _close_all_but(*kept: int) -> None:
    first = 3
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, DESCRIPTORS)


def resolve(name: str) -> Callable[..., Any]:
    """The function called "module:function"."""
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function, None)
    if found is None:
        raise ValueError(f'target must be "module:function" that exists, got {name!r}')
    return found


def main(fd: int) -> int:
    """Read the order, load everything, serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    control = socket.socket(fileno=fd)
    order = _first_line(control)
    scratch = Path(order["scratch"])
    if order["die_with_parent"]:
        kernel.die_with_parent(order["driver"], signal.SIGTERM)
    kernel.adopt_orphans()
    reap(scratch)
    try:
        run = resolve(order["target"])
        for name in order["warm"]:
            function, _, argument = name.partition("=")
            resolve(function)(*([argument] if argument else []))
        cause = _fault()
    except Exception as error:  # noqa: BLE001 - sent to the driver, which raises it
        traceback.print_exc()
        cause = f"{type(error).__name__}: {error}"
    if cause:
        control.sendall(json.dumps({"type": "failed", "cause": cause}).encode() + b"\n")
        return 1
    for name in ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHASHSEED"):
        os.environ.pop(name, None)
    gc.collect()
    gc.freeze()
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS[1], DESCRIPTORS[1]))
    pace = {name: order[name] for name in ("max_starting", "starts_per_s")}
    parent = Parent(control, run, scratch, order["grace_s"], order["driver"], **pace)
    parent.say({"type": "ready"})
    parent.loop()
    return 0


def _first_line(control: socket.socket) -> dict[str, Any]:
    data = bytearray()
    while not data.endswith(b"\n"):
        more = control.recv(65536)
        if not more:
            sys.exit(0)
        data += more
    return json.loads(data)


def _fault() -> str:
    """What would make forks of this process slow or unsafe, or ""."""
    if "torch" in sys.modules:
        return "torch must not be imported in trial processes"
    deadline = time.monotonic() + 5
    while kernel.thread_count() > 1:  # worker threads of a warm-up end on their own
        if time.monotonic() > deadline:
            return f"the parent must have one thread, got {kernel.thread_count()}"
        time.sleep(0.01)
    return ""


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
