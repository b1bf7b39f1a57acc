"""`system.harbor.environment:BartlebyEnvironment`: our bubblewrap sandbox as a Harbor environment.

No image is built. What a command sees is this machine's system folders, the interpreter of this process with its office
libraries, and the task's world (environment/world) in its workdir; nobody is another user than anybody else, whatever a
task says, and there is no network. Each command, transfer and agent has a place of its own over the same files, and
what it leaves running ends with it: nothing of an agent is alive when its work is graded.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, override

from harbor.environments.base import BaseEnvironment, EnvironmentPath, ExecResult, HealthcheckError
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import should_upload_environment_dir
from harbor.models.task.config import NetworkMode
from harbor.models.trial.paths import EnvironmentPaths

from system.sandbox import Limits, SandboxError, clean_environment, reap
from system.sandbox.server_process import last_line

LONGEST_REPLY = 512 << 20
"""Most bytes of one line of the keeper's."""


class BartlebyEnvironment(BaseEnvironment):
    """One world of ours. It needs a task with a world; a Dockerfile is read by nobody.

    Args:
        limits: fields of `system.sandbox.Limits` other than those of this class's `LIMITS`.
    """

    LIMITS = Limits(memory_bytes=2 << 30, processes=128, file_bytes=64 << 20, world_bytes=256 << 20)
    """What applies where neither the task ([environment] memory_mb, storage_mb) nor `limits` says otherwise.

    Memory is that of each process; storage counts all that is written, /logs and /tests included.
    """

    def __init__(self, *args: Any, limits: dict[str, float] | None = None, **kwargs: Any) -> None:
        self._given: dict[str, Any] = dict(limits or {})
        super().__init__(*args, **kwargs)
        self._keeper: subprocess.Popen[bytes] | None = None
        self._turn = asyncio.Lock()
        self._log = self.trial_paths.trial_dir / "sandbox.log"
        self._scratch = Path(tempfile.gettempdir()) / f"bartleby-harbor-{os.getuid()}"

    @staticmethod
    @override
    def type() -> str:
        return "bartleby"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities()

    @override
    def _validate_definition(self) -> None:
        if not self._world().is_dir():
            raise FileNotFoundError(
                f"environment must hold world, for no image is built here, got none in {self.environment_dir}"
            )
        self._limits()

    def _world(self) -> Path:
        """environment/world; for a task that names an image and builds none, Harbor's rule: all of environment."""
        image, world = self.task_env_config.docker_image, self.environment_dir / "world"
        if not world.is_dir() and should_upload_environment_dir(self.environment_dir, docker_image=image):
            return self.environment_dir
        return world

    def _limits(self) -> Limits:
        wanted: dict[str, Any] = asdict(self.LIMITS)
        if memory_mb := self._effective_memory_mb:
            wanted["memory_bytes"] = memory_mb << 20
        if storage_mb := self._effective_storage_mb:
            wanted["world_bytes"] = storage_mb << 20
        if unknown := sorted(set(self._given) - set(wanted)):
            raise ValueError(f"limits must be among {', '.join(wanted)}, got {unknown[0]!r}")
        return Limits(**(wanted | self._given))

    @property
    def workdir(self) -> str:
        """Where the world is seen."""
        return self.task_env_config.workdir or "/world"

    @override
    async def start(self, force_build: bool) -> None:
        if self.network_policy.network_mode != NetworkMode.NO_NETWORK:
            self.logger.warning("the task asks for a network and gets none: %s", self.environment_dir)
        reap(self._scratch)
        ours, theirs = socket.socketpair()
        with theirs, open(self._log, "ab") as said:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "system.harbor.keeper", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=clean_environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=LONGEST_REPLY)
        order = {"world": str(self._world()), "scratch": str(self._scratch), "root": self.workdir}
        await self._ask({**order, "limits": asdict(self._limits())})

    @override
    async def stop(self, delete: bool) -> None:
        """Ends everything inside and confirms it, in bounded time; `delete` is always so."""
        if self._keeper is None:
            return
        keeper, self._keeper = self._keeper, None
        patience_s = 3 * self._limits().stop_s
        cause = ""
        try:
            if self._turn.locked():
                self._send({"op": "abort"})
            async with asyncio.timeout(patience_s), self._turn:
                self._send({"op": "close"})
                closed = json.loads(await self._line() or b"{}").get("closed")
                cause = "" if closed else "it broke off"
        except TimeoutError:
            cause = f"it did not end within {patience_s:g} s"
        finally:
            self._writer.close()
            await asyncio.to_thread(_end, keeper)
            left = [name for name in reap(self._scratch) if name.startswith(f"trial-{keeper.pid}-")]
        if cause:
            removed = f"; removed {', '.join(left)}" if left else ""
            raise SandboxError("close", f"the keeper of {self.session_id} was killed: {cause}{removed}")

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Runs a command to its end; late, it is killed and its code is 124."""
        order = {"op": "exec", "command": command, "cwd": cwd, "env": self._merge_env(env) or {}}
        reply = await self._ask({**order, "timeout_s": timeout_sec})
        if reply["dropped"]:
            self.logger.warning("%d bytes that a command printed were dropped", reply["dropped"])
        return ExecResult(stdout=reply["out"], stderr=reply["err"], return_code=reply["code"])

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._put(Path(source_path), target_path)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._put(Path(source_dir), target_dir)

    async def _put(self, source: Path, target: str) -> None:
        if not source.exists():
            raise FileNotFoundError(f"what is uploaded must exist, got {source}")
        at = PurePosixPath(self.workdir, target)
        await self._ask({"op": "put", "source": str(source.absolute()), "target": str(at)})

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._get(source_path, Path(target_path), folder=False)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Files and folders; a link, pipe or device is left where it is."""
        Path(target_dir).mkdir(parents=True, exist_ok=True)
        await self._get(source_dir, Path(target_dir), folder=True)

    async def _get(self, source: str, target: Path, *, folder: bool) -> None:
        order = {"op": "get", "source": source, "target": str(target.absolute()), "folder": folder}
        await self._ask(order)

    @override
    async def empty_dirs(self, dirs: Sequence[EnvironmentPath], *, chmod: bool = True) -> ExecResult | None:
        """Emptying /tests, Harbor begins a step or a grading: what follows is the agent's until tests come in."""
        done = await super().empty_dirs(dirs, chmod=chmod)
        if str(EnvironmentPaths.tests_dir) in map(str, dirs):
            await self._ask({"op": "agent"})
        return done

    async def play(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Lets an agent of ours work on the world with our tools; see `system.harbor.player`.

        Raises:
            HealthcheckError: engine, tools or sandbox failed. Harbor does not grade after that, and counts no reward.
        """
        return await self._ask({"op": "play", **spec})

    def _send(self, order: dict[str, Any]) -> None:
        self._writer.write(json.dumps(order).encode() + b"\n")

    async def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """The keeper's reply to an order; cancelled, it sees the order taken back before it goes on.

        Raises:
            HealthcheckError: the sandbox is at fault.
            RuntimeError: the order cannot be carried out, or not to its end.
        """
        async with self._turn:
            if self._keeper is None:
                raise RuntimeError("the environment must be started, and not be stopped, to be used")
            self._send(order)
            line = asyncio.ensure_future(self._line())
            try:
                said = await asyncio.shield(line)
            except asyncio.CancelledError:
                self._send({"op": "abort"})
                await asyncio.wait([line], timeout=3 * self._limits().stop_s)
                if not line.done():
                    line.cancel()
                    _end(self._keeper)
                raise
        reply = json.loads(said) if said else {"phase": order.get("op", "start"), "fault": self._gone()}
        if "fault" in reply:
            raise HealthcheckError(f"{reply['phase']}: {reply['fault']}")
        if "refused" in reply or "aborted" in reply:
            raise RuntimeError(reply.get("refused", "the environment was stopped meanwhile"))
        return reply

    def _gone(self) -> str:
        return f"the keeper is gone; {last_line(self._log)}".rstrip("; ")

    async def _line(self) -> bytes:
        """The keeper's next line; b"" if it is gone."""
        try:
            return await self._reader.readline()
        except ConnectionError:
            return b""


def _end(keeper: subprocess.Popen[bytes]) -> None:
    """The keeper has ended, or is killed; the kernel ends the places with it."""
    try:
        keeper.wait(2)
    except subprocess.TimeoutExpired:
        os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()
