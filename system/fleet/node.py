"""The fleet of one node of many: a `LocalFleet`, asked from elsewhere. Knows nothing of what carries the questions."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from system.fleet import FleetError, lost
from system.fleet.local import LocalFleet

CONNECT_S = 10.0
"""A service that takes no connection within so long is not reached."""


class NodeFleet:
    """Answers for the trials of a node, all in the thread of one event loop.

    Example: `await node.open({"scratch": "/tmp/x", "target": .., "warm": [..]}, sys.path, [])`, then
    `result = await node.trial(spec)` as often and as many at a time as there is room.
    """

    def __init__(self) -> None:
        self._fleet: LocalFleet | None = None
        self._due: dict[str, asyncio.Future[dict[str, Any]]] = {}

    async def open(self, order: dict[str, Any], modules: Sequence[str], needed: Sequence[str]) -> str:
        """Start the fleet; why that cannot be, in one line, or "".

        Args:
            order: keyword arguments of LocalFleet, its paths as text.
            modules: folders that Python looks for modules in, where the trials come from.
            needed: what `lacks` asks for.
        """
        if lacking := await self.lacks(needed):
            return lacking
        sys.path += [path for path in modules if path not in sys.path and os.path.isdir(path)]
        folders = {name: Path(order[name]) for name in ("scratch", "temporary") if order.get(name)}
        try:
            self._fleet = LocalFleet(**{**order, **folders})
        except (FleetError, OSError) as error:
            return " ".join(f"{error}".split())
        self._scratch = os.fspath(folders["scratch"])
        return ""

    async def lacks(self, needed: Sequence[str]) -> str:
        """The first of these that this node does not have, and why, in one line; "" if all are there.

        Args:
            needed: absolute paths of files and folders to be read and of sockets to connect to, or URLs of services.
        """
        for what in needed:
            try:
                await asyncio.wait_for(_reached(what), CONNECT_S)
            except (OSError, ValueError, TimeoutError) as error:
                cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
                return f"{what} must be there for its trials, got {cause}"
        return ""

    async def trial(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Run a trial in a process of its own; its result. Its scratch folder is this node's."""
        assert self._fleet is not None
        trial_id = spec["trial_id"]
        due = self._due[trial_id] = asyncio.get_running_loop().create_future()
        with self._watched(self._fleet) as fleet:
            try:
                fleet.start({**spec, "scratch": self._scratch} if "scratch" in spec else spec)
            except FleetError as error:
                self._due.pop(trial_id)
                return lost(trial_id, f"{error}")
        return await due

    async def cancel(self, trial_id: str) -> None:
        """Kill a trial, if it runs here."""
        if self._fleet is not None:
            with self._watched(self._fleet) as fleet:
                fleet.cancel(trial_id)

    async def pace(self, starts_per_s: float) -> None:
        """From now on start so many trials in a second."""
        if self._fleet is not None:
            with self._watched(self._fleet) as fleet:
                fleet.pace(starts_per_s)

    async def close(self) -> None:
        """Kill what runs, remove what it made; trials that somebody still waits for are cancelled."""
        if self._fleet is None:
            return
        fleet, self._fleet = self._fleet, None
        if fleet.descriptor is not None:
            asyncio.get_running_loop().remove_reader(fleet.descriptor)
        fleet.close()
        for trial_id, due in self._due.items():
            due.set_result({"trial_id": trial_id, "outcome": {"kind": "cancelled"}})
        self._due.clear()

    @contextmanager
    def _watched(self, fleet: LocalFleet) -> Iterator[LocalFleet]:
        """Use the fleet, then hand out what came in and wait for more; its stream may be another one afterwards."""
        loop = asyncio.get_running_loop()
        if fleet.descriptor is not None:
            loop.remove_reader(fleet.descriptor)
        try:
            yield fleet
        finally:
            for result in fleet.poll(0.0):
                due = self._due.pop(result["trial_id"])
                if not due.done():
                    due.set_result(result)
            if fleet.descriptor is not None:
                loop.add_reader(fleet.descriptor, self._take, fleet)

    def _take(self, fleet: LocalFleet) -> None:
        with self._watched(fleet):
            pass


async def _reached(what: str) -> None:
    """Raises OSError or ValueError unless the file can be read, or the service takes a connection."""
    if "://" in what:
        place = urlsplit(what)
        if place.hostname is None:
            raise ValueError("a URL without a host")
        port = place.port or (443 if place.scheme == "https" else 80)
        _, stream = await asyncio.open_connection(place.hostname, port)
        stream.close()
    elif Path(what).is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.setblocking(False)
            await asyncio.get_running_loop().sock_connect(stream, what)
    elif not os.access(what, os.R_OK):
        raise FileNotFoundError(2, "no such file that can be read")
