"""The fleet of many machines: trials as tasks of a Ray cluster, each in a process of its own."""

from __future__ import annotations

import logging
import math
import os
import queue
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.placement import next_start, roomiest, start_wait
from core.routing import may_restart
from system.fleet import FleetError, check_spec, lost
from system.fleet.local import TARGET, WARM
from system.fleet.node import NodeFleet
from system.sandbox import reap, removal

RESOURCE = "trials"
"""Of a Ray node: how many trials it takes at a time, as in `ray start --resources '{"trials": 64}'`."""

FOLDER = "bartleby-ray-"
"""Begins the name of the folder of a Ray that a process started for itself; its pid follows."""

LONGEST_FOLDER = 14
"""Characters of the folder above it: sockets are below, and no path of one may have more than 107."""

SPARE_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""A worker that ends must not take the parent of its trials with it, which then could not clear up after them."""

LOOK_S = 1.0
"""How often the fleet looks which nodes there are."""

OPEN_S = 120.0
CLOSE_S = 30.0

MOST_RESTARTS, RESTART_WINDOW_S = 3, 60.0
"""A node whose worker dies more often than this is given up."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Node:
    """What the fleet knows of a node."""

    node_id: str
    name: str
    slots: int
    reserved: dict[str, Any]
    "What its worker asks of Ray, so that Ray gives that to nobody else."
    keeper: Any = None
    ready: bool = False
    trials: set[str] = field(default_factory=set)
    ended_s: list[float] = field(default_factory=list)


class RayFleet:
    """Trials over the nodes of a Ray cluster. Example: `RayFleet(Path("out/run/scratch"), slots=24)`.

    Each node has one Ray worker, which has reserved what its trials need, with a `LocalFleet` below it: a trial is a
    Ray task that waits for a process of its own, forked from a warm parent. A worker or a node that dies is a system
    error of its trials, and blameless; the worker is started again, and nodes may come and go.

    Args:
        scratch: folder for what the trials make, on each node; a folder in it for each node.
        target, warm, grace_s, temporary: as in LocalFleet, on each node.
        address: of a Ray cluster that runs; None for one that this process has, or starts for itself and ends.
        slots: trials at a time on a node that does not say so itself by the resource "trials"; one per CPU if None.
        max_starting: trials of a node that are starting at a time.
        starts_per_s: trials that are started in a second, by all nodes together, each its share.
        patience_s: after so long without any node that takes trials the fleet cannot go on.

    Raises:
        FleetError: Ray is not there, or no node can run trials.
    """

    def __init__(
        self,
        scratch: Path,
        *,
        target: str = TARGET,
        warm: Sequence[str] = WARM,
        grace_s: float = 5.0,
        temporary: Path | None = None,
        address: str | None = None,
        slots: int | None = None,
        max_starting: float = math.inf,
        starts_per_s: float = math.inf,
        patience_s: float = 60.0,
    ) -> None:
        if not grace_s >= 0:
            raise ValueError(f"grace_s must not be negative, got {grace_s}")
        if slots is not None and not slots >= 1:
            raise ValueError(f"slots must be positive, got {slots}")
        start_wait(
            0, max_starting=max_starting, next_s=0.0, now_s=0.0
        )  # refuses what could never start a trial
        next_start(0.0, starts_per_s=starts_per_s)
        self._scratch, self._slots = scratch.resolve(), slots
        self._starts_per_s, self._patience_s = starts_per_s, patience_s
        self._order = {
            "target": target,
            "warm": list(warm),
            "grace_s": grace_s,
            "temporary": None if temporary is None else os.fspath(temporary.resolve()),
            "max_starting": max_starting,
        }
        self._needed: list[str] = []
        self._nodes: dict[str, _Node] = {}
        self._given_up: set[str] = set()
        self._running: set[str] = set()
        self._waiting: dict[str, dict[str, Any]] = {}
        self._results: list[dict[str, Any]] = []
        self._heard: queue.SimpleQueue[
            tuple[Callable[[_Node, Any, Future[Any]], None], _Node, Any, Future[Any]]
        ]
        self._heard = queue.SimpleQueue()
        self._looked_s, self._alone_since_s = -math.inf, time.monotonic()
        self._closed, self._own, self._spared = False, "", False
        self._ray = _vendor()
        self._connect(address)
        try:
            self._wait_for_a_node()
        except BaseException:
            self.close()
            raise

    @property
    def running(self) -> frozenset[str]:
        """Ids of the trials that were started and not yet returned."""
        return frozenset(self._running)

    @property
    def nodes(self) -> dict[str, int]:
        """How many trials each node that is ready takes, by name."""
        return {node.name: node.slots for node in self._nodes.values() if node.ready}

    def reach(self, needed: Sequence[str]) -> None:
        """Have every node look whether it sees these: absolute paths of files and sockets, and URLs.

        Raises:
            FleetError: the first node that does not, and what.
        """
        self._needed += needed
        asked = [
            (node, node.keeper.lacks.remote(list(needed))) for node in self._nodes.values() if node.ready
        ]
        for node, answer in asked:
            try:
                lacking = self._ray.get(answer, timeout=OPEN_S)
            except self._ray.exceptions.RayError:  # it is gone, which is told where its trials are
                continue
            if lacking:
                raise FleetError(f"{node.name}: {lacking}")

    def start(self, spec: dict[str, Any]) -> None:
        """Start a trial, as soon as a node has room for it.

        Raises:
            ValueError: the spec has no proper trial_id or deadline_s, or a trial of that id is running.
            FleetError: the fleet is closed.
        """
        check_spec(spec, self._running)
        if self._closed:
            raise FleetError("the fleet is closed")
        self._running.add(spec["trial_id"])
        self._waiting[spec["trial_id"]] = spec
        self._place()

    def poll(self, timeout_s: float) -> list[dict[str, Any]]:
        """Results that have come in; waits up to timeout_s for the first.

        Raises:
            FleetError: for a long time no node has taken trials.
        """
        deadline = time.monotonic() + timeout_s
        while not self._closed:
            self._look()
            self._place()
            left = deadline - time.monotonic()
            if self._results or not self._listen(min(left, LOOK_S)) and left <= LOOK_S:
                break
        while not self._closed and self._listen(0.0):
            continue
        self._place()
        results, self._results = self._results, []
        self._running -= {result["trial_id"] for result in results}
        return results

    def cancel(self, trial_id: str) -> None:
        """Kill a trial; its result comes with the outcome "cancelled"."""
        if self._waiting.pop(trial_id, None) is not None:
            cancelled = {"trial_id": trial_id, "outcome": {"kind": "cancelled"}}
            self._results.append({**cancelled, "cpu_seconds": {"trial": 0.0}})
        for node in self._nodes.values():
            if trial_id in node.trials:
                node.keeper.cancel.remote(trial_id)

    def close(self) -> None:
        """Kill what still runs on every node, end the workers, and Ray if this fleet started it."""
        if self._closed:
            return
        self._closed = True
        keepers = [node.keeper for node in self._nodes.values() if node.keeper is not None]
        if keepers:
            self._ray.wait([k.close.remote() for k in keepers], num_returns=len(keepers), timeout=CLOSE_S)
        for keeper in keepers:
            self._ray.kill(keeper)
        for known in (self._nodes, self._running, self._waiting, self._results):
            known.clear()
        if self._own:
            self._ray.shutdown()
            shutil.rmtree(self._own, ignore_errors=True)
        for folder in self._scratch.glob(
            "node-*"
        ):  # what is here of them; a node elsewhere has cleared up itself
            reap(folder)
            removal.reap_remote(folder)

    def __enter__(self) -> RayFleet:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _connect(self, address: str | None) -> None:
        if self._ray.is_initialized():
            return
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        _remove_dead()
        self._own = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-", dir=_short_folder())
        try:
            if address is not None:
                self._ray.init(address=address, **quiet)
            else:
                os.environ.update(SPARE_CHILDREN)
                self._spared = True
                room = {RESOURCE: self._slots or os.cpu_count() or 1}
                ours = {"num_cpus": 0, "resources": room, "include_dashboard": False, "_temp_dir": self._own}
                self._ray.init(address="local", object_store_memory=256 << 20, **ours, **quiet)
        except Exception as error:  # whatever Ray raises here ends the fleet, in one line
            shutil.rmtree(self._own, ignore_errors=True)
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise FleetError(f"Ray must be reached at {address or 'this machine'}, got {cause}") from error

    def _wait_for_a_node(self) -> None:
        deadline = time.monotonic() + OPEN_S
        while not self.nodes:
            self._look()
            self._listen(0.2)
            if time.monotonic() > deadline:
                raise FleetError(f"a node must be ready for trials within {OPEN_S:g} s, got none")

    def _look(self) -> None:
        """Learn which nodes there are, now and then."""
        now = time.monotonic()
        if now < self._looked_s + LOOK_S:
            return
        self._looked_s = now
        try:
            alive = {one["NodeID"]: one for one in self._ray.nodes() if one["Alive"]}
        except (
            Exception
        ) as error:  # of whatever kind: without its head Ray is gone, which ends the fleet in one line
            raise FleetError(
                " ".join(f"Ray's head must answer, got {type(error).__name__}: {error}".split())
            ) from error
        for node in [node for node in self._nodes.values() if node.node_id not in alive]:
            self._lose(node, f"node was lost: {node.name}", phase="node")
            del self._nodes[node.node_id]
            self._keep_pace()
        for node_id, described in alive.items():
            if node_id not in self._nodes and node_id not in self._given_up:
                self._meet(node_id, described)
        if self._nodes:
            self._alone_since_s = now
        elif now - self._alone_since_s > self._patience_s:
            raise FleetError(f"a node must take trials, got none for {self._patience_s:g} s")

    def _meet(self, node_id: str, described: dict[str, Any]) -> None:
        has = described["Resources"]
        cpus = int(has.get("CPU", 0))
        own = int(has.get(RESOURCE, 0))
        slots = own or (self._slots or cpus if cpus else 0)
        if slots < 1:
            self._given_up.add(node_id)
            return
        reserved = {"resources": {RESOURCE: own}, "num_cpus": 0} if own else {"num_cpus": cpus}
        name = f"node {node_id[:8]} at {described['NodeManagerAddress']}"
        node = self._nodes[node_id] = _Node(node_id=node_id, name=name, slots=slots, reserved=reserved)
        self._employ(node)

    def _employ(self, node: _Node) -> None:
        """Give a node its worker."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        worker = self._ray.remote(NodeFleet).options(
            scheduling_strategy=there,
            max_concurrency=node.slots + 100,
            max_restarts=0,
            runtime_env=None if self._spared else {"env_vars": SPARE_CHILDREN},
            **node.reserved,
        )
        node.keeper = worker.remote()
        folder = self._scratch / f"node-{node.node_id[:12]}"
        order = {**self._order, "scratch": os.fspath(folder), "starts_per_s": self._share(len(self._nodes))}
        modules = [os.path.abspath(path) for path in sys.path]
        self._hear(self._opened, node, node.keeper, node.keeper.open.remote(order, modules, self._needed))

    def _opened(self, node: _Node, keeper: Any, answer: Future[str]) -> None:
        if node.keeper is not keeper:
            return
        try:
            fault = answer.result()
        except self._ray.exceptions.RayError as error:
            self._lose(node, _line(error))
            return
        if fault:
            self._give_up(node, fault)
            return
        node.ready = True
        self._keep_pace()

    def _give_up(self, node: _Node, fault: str) -> None:
        """A node that cannot run trials: alone it is the end; beside others it is one line."""
        self._given_up.add(node.node_id)
        self._ray.kill(node.keeper)
        del self._nodes[node.node_id]
        self._keep_pace()
        if not self._nodes:
            raise FleetError(f"{node.name}: {fault}")
        print(f"{node.name} takes no trials: {fault}", file=sys.stderr, flush=True)

    def _keep_pace(self) -> None:
        """Every node starts its share of the trials of a second."""
        ready = [node for node in self._nodes.values() if node.ready]
        if self._starts_per_s < math.inf:
            for node in ready:
                node.keeper.pace.remote(self._share(len(ready)))

    def _share(self, nodes: int) -> float:
        return self._starts_per_s / max(1, nodes)

    def _place(self) -> None:
        """Hand the trials that wait to nodes that have room."""
        nodes = [node for node in self._nodes.values() if node.ready]
        while self._waiting:
            place = roomiest([len(node.trials) for node in nodes], [node.slots for node in nodes])
            if place is None:
                return
            node, trial_id = nodes[place], next(iter(self._waiting))
            node.trials.add(trial_id)
            answer = node.keeper.trial.remote(self._waiting.pop(trial_id))
            self._hear(self._ended, node, (node.keeper, trial_id), answer)

    def _ended(self, node: _Node, what: tuple[Any, str], answer: Future[dict[str, Any]]) -> None:
        keeper, trial_id = what
        if node.keeper is not keeper or trial_id not in node.trials:  # it was lost, and that told
            return
        try:
            result = answer.result()
        except self._ray.exceptions.RayError as error:
            self._lose(node, _line(error))
            return
        node.trials.remove(trial_id)
        self._results.append(result)

    def _lose(self, node: _Node, cause: str, *, phase: str = "process") -> None:
        """A node's worker is gone, and its trials with it: a system error of each; another worker takes its place."""
        self._results += [lost(trial_id, cause, phase=phase) for trial_id in sorted(node.trials)]
        node.trials.clear()
        node.ready = False
        now = time.monotonic()
        node.ended_s.append(now)
        if phase == "node":
            return
        self._ray.kill(node.keeper)
        if not may_restart(node.ended_s, now_s=now, most=MOST_RESTARTS, window_s=RESTART_WINDOW_S):
            self._give_up(node, f"its worker died {len(node.ended_s)} times, at last: {cause}")
            return
        self._employ(node)

    def _hear(
        self, told: Callable[[_Node, Any, Future[Any]], None], node: _Node, what: Any, answer: Any
    ) -> None:
        """Have `told` called by whoever listens once there is an answer. Ray's thread only leaves word."""
        heard = self._heard
        answer.future().add_done_callback(lambda future: heard.put((told, node, what, future)))

    def _listen(self, timeout_s: float) -> bool:
        """Act on one answer, waiting up to timeout_s for it; whether there was one."""
        try:
            told, node, what, answer = self._heard.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return False
        told(node, what, answer)
        return True


def _short_folder() -> str:
    """The folder of temporary files, where its path is short enough."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= LONGEST_FOLDER else "/tmp"


def _remove_dead() -> None:
    """Remove what the Ray of a process left that was killed before it could."""
    for folder in Path(_short_folder()).glob(f"{FOLDER}*-*"):
        pid = folder.name.removeprefix(FOLDER).partition("-")[0]
        if folder.stat().st_uid == os.getuid() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _vendor() -> Any:
    """Ray, where it is installed."""
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise FleetError('the ray fleet must have ray: pip install "bartleby[ray]"') from error
    return ray


def _line(error: Exception) -> str:
    """Why a worker is given up, in one line: what was raised in it, or what Ray calls its end."""
    raised = getattr(error, "cause", None)
    if isinstance(raised, Exception):
        return " ".join(f"Ray worker failed: {type(raised).__name__}: {raised}".split())
    return f"Ray worker died: {type(error).__name__}"
