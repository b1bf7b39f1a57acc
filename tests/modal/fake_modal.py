"""Modal's own service classes on loopback: the unmodified client talks to them, its commands run in bubblewrap.

Only what the client asks of a sandbox is there. A container is one bubblewrap with a process namespace that all its
commands share, as there: what one leaves behind is alive for the next. Nothing of this is Modal's own code; that it
answers as Modal does is what nobody here could check.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from grpclib import GRPCError, Status
from grpclib.server import Server
from modal._utils.grpc_testing import patch_mock_servicer
from modal_proto import api_pb2 as api
from modal_proto import task_command_router_pb2 as router
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from system.sandbox.bubblewrap import _interpreter

TOKEN = ("ak-test", "as-test")
Action = Status | str | Callable[["FakeModal", Any], Awaitable[None]]
"""What becomes of a call instead: a status, "hang", or a function called with the request before it is answered."""

_SAY = """
import base64, sys
sys.stdout.buffer.write(base64.b64decode(sys.argv[1]))
for _ in range(int(sys.argv[2]) >> 20): sys.stdout.buffer.write(bytes(1 << 20))
"""

_DIED = api.GenericResult.GENERIC_STATUS_TERMINATED
_LATE = api.GenericResult.GENERIC_STATUS_TIMEOUT
_DONE = api.GenericResult.GENERIC_STATUS_SUCCESS


@dataclass(slots=True)
class Container:
    """One sandbox of the service."""

    id: str
    request: Any
    process: asyncio.subprocess.Process
    first: int
    "Pid of its first process."
    result: Any = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.request.definition.name

    @property
    def tags(self) -> dict[str, str]:
        return {tag.tag_name: tag.tag_value for tag in self.request.tags}


@dataclass(slots=True)
class Program:
    """One command in a container."""

    process: asyncio.subprocess.Process
    said: dict[int, bytearray]
    grown: asyncio.Condition
    written: int = 0
    open: set[int] = field(default_factory=lambda: {1, 2})


class FakeModal:
    """The service. Example: `with FakeModal(folder) as modal: ModalSettings(image="x", config=str(modal.config))`."""

    def __init__(self, folder: Path, *, secrets: tuple[str, ...] = ("registry",)) -> None:
        self.config, self.secrets = folder / "modal.toml", secrets
        self.containers: dict[str, Container] = {}
        self.programs: dict[str, Program] = {}
        self.calls: list[tuple[str, Any]] = []
        self.faults: dict[str, list[Action]] = {}
        self.exits: list[tuple[str, int]] = []
        self.answers: list[tuple[str, bytes, int]] = []
        self.images: list[Any] = []
        self._ids = itertools.count(1)
        self._made: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> FakeModal:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self._start())
        return self

    def __exit__(self, *exception: object) -> None:
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def run(self, work: Any) -> Any:
        """The result of work on the service's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def inject(self, call: str, *actions: Action) -> None:
        """What becomes of the next calls of this name, in order."""
        self.faults.setdefault(call, []).extend(actions)

    def answer_next(self, word: str, said: bytes, *, then_zeros: int = 0) -> None:
        """The next command that has this word in it is not run; it says this instead, and so many zeros after it."""
        self.answers.append((word, said, then_zeros))

    def exit_next(self, word: str, code: int) -> None:
        """The next command that has this word in it is killed at once, and ends with this code."""
        self.exits.append((word, code))

    def asked(self, call: str) -> list[Any]:
        """The requests of this name so far."""
        return [request for name, request in self.calls if name == call]

    def running(self) -> list[str]:
        """Names of the containers that have not ended."""
        return [one.name for one in self.containers.values() if one.result is None]

    def vanish(self) -> None:
        """Every container is gone, as when its machine is lost."""
        for one in list(self.containers.values()):
            if one.result is None:
                self.run(self.end(one, _DIED))

    async def _start(self) -> None:
        self._server = Server([served(self) for served in cast("list[Any]", [Api, Router])])
        await self._server.start("127.0.0.1", 0)
        port = self._server._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.url = f"http://127.0.0.1:{port}"
        lines = [f'server_url = "{self.url}"', f'token_id = "{TOKEN[0]}"', f'token_secret = "{TOKEN[1]}"']
        self.config.write_text("\n".join(["[default]", *lines, ""]))

    async def _stop(self) -> None:
        for one in self.containers.values():
            if one.result is None:
                await self.end(one, _DIED)
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait([asyncio.create_task(self._server.wait_closed())], timeout=2)

    def spawn(self, work: Any) -> None:
        """Go on with something beside what is answered."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def fault(self, call: str, request: Any) -> None:
        """Note a call, and do what was injected for it."""
        self.calls.append((call, request))
        queue = self.faults.get(call)
        if not queue:
            return
        action = queue.pop(0)
        if isinstance(action, Status):
            raise GRPCError(action, f"injected {action.name}")
        if action == "hang":
            await asyncio.Event().wait()
        elif not isinstance(action, str):
            await action(self, request)

    async def create(self, request: Any, key: str) -> Container:
        """Start a container, once for each key."""
        if key in self._made:
            return self.containers[self._made[key]]
        if request.definition.name in self.running():
            raise GRPCError(Status.ALREADY_EXISTS, f"{request.definition.name} runs already")
        process, first = await _started(list(request.definition.entrypoint_args), _cut_off(request))
        one = Container(f"sb-{next(self._ids)}V", request, process, first)
        self.containers[one.id] = one
        self._made[key] = one.id
        self.spawn(self._watch(one))
        return one

    async def _watch(self, one: Container) -> None:
        try:
            await asyncio.wait_for(one.process.wait(), one.request.definition.timeout_secs)
            await self.end(one, _DONE)
        except TimeoutError:
            await self.end(one, _LATE)

    async def end(self, one: Container, status: Any) -> None:
        """Kill a container with all that is in it."""
        if one.result is None:
            one.result = api.GenericResult(status=status, exitcode=137)
            for pid in (one.first, one.process.pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            await one.process.wait()
            one.ended.set()

    def container(self, task: str) -> Container:
        """The running container of a task, as the machine it runs on knows it."""
        one = self.containers.get(task.removeprefix("ta-"))
        if one is None or one.result is not None:
            raise GRPCError(Status.NOT_FOUND, "task not found")
        return one

    async def execute(self, request: Any) -> None:
        """Start a command."""
        one = self.container(request.task_id)
        if request.exec_id in self.programs:
            return
        words = " ".join(request.command_args)
        command = list(request.command_args)
        for word, answer, zeros in list(self.answers):
            if word in words:
                self.answers.remove((word, answer, zeros))
                command = ["python3", "-c", _SAY, base64.b64encode(answer).decode(), str(zeros)]
        process = await asyncio.create_subprocess_exec(
            *_entering(one.first),
            *command,
            stdin=-1,
            stdout=-1,
            stderr=-1,
            env=_environment(),
            start_new_session=True,
            limit=1 << 24,
        )
        program = Program(process, {1: bytearray(), 2: bytearray()}, asyncio.Condition())
        self.programs[request.exec_id] = program
        for fd, stream in ((1, process.stdout), (2, process.stderr)):
            assert stream is not None
            self.spawn(_collect(program, fd, stream))
        for word, code in list(self.exits):
            if word in words:
                self.exits.remove((word, code))
                self.spawn(self._kill_as(program, code))
        if request.HasField("timeout_secs"):
            self.spawn(_kill_late(process, request.timeout_secs))

    async def _kill_as(self, program: Program, code: int) -> None:
        assert code == 137
        _kill(program.process)


@patch_mock_servicer
class Api(ModalClientBase):
    """The calls to the service."""

    def __init__(self, modal: FakeModal) -> None:
        self.modal = modal

    async def _got(self, call: str, stream: Any) -> Any:
        request = await stream.recv_message()
        given = (stream.metadata.get("x-modal-token-id"), stream.metadata.get("x-modal-token-secret"))
        if given != TOKEN:
            raise GRPCError(Status.UNAUTHENTICATED, "no such token")
        await self.modal.fault(call, request)
        return request

    async def ClientHello(self, stream: Any) -> None:
        await self._got("ClientHello", stream)
        await stream.send_message(api.ClientHelloResponse())

    async def AuthTokenGet(self, stream: Any) -> None:
        await self._got("AuthTokenGet", stream)
        await stream.send_message(api.AuthTokenGetResponse(token=_token()))

    async def AppGetOrCreate(self, stream: Any) -> None:
        request = await self._got("AppGetOrCreate", stream)
        await stream.send_message(api.AppGetOrCreateResponse(app_id=f"ap-{request.app_name}"))

    async def EnvironmentGetOrCreate(self, stream: Any) -> None:
        await self._got("EnvironmentGetOrCreate", stream)
        settings = api.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api.EnvironmentMetadata(name="main", settings=settings)
        await stream.send_message(
            api.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)
        )

    async def SecretGetOrCreate(self, stream: Any) -> None:
        request = await self._got("SecretGetOrCreate", stream)
        if request.deployment_name not in self.modal.secrets:
            raise GRPCError(Status.NOT_FOUND, f"no secret {request.deployment_name}")
        await stream.send_message(api.SecretGetOrCreateResponse(secret_id="st-1"))

    async def ImageGetOrCreate(self, stream: Any) -> None:
        request = await self._got("ImageGetOrCreate", stream)
        self.modal.images.append(request.image)
        await stream.send_message(api.ImageGetOrCreateResponse(image_id="im-1"))

    async def ImageJoinStreaming(self, stream: Any) -> None:
        await self._got("ImageJoinStreaming", stream)
        result = api.GenericResult(status=_DONE)
        await stream.send_message(api.ImageJoinStreamingResponse(result=result, eof=True))

    async def SandboxCreateV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        key = str(stream.metadata["x-idempotency-key"])
        await self.modal.fault("SandboxCreateV2", request)
        one = await self.modal.create(request, key)
        await self.modal.fault("SandboxCreateV2 made", request)
        await stream.send_message(api.SandboxCreateV2Response(sandbox_id=one.id))

    async def SandboxGetTaskIdV2(self, stream: Any) -> None:
        request = await self._got("SandboxGetTaskIdV2", stream)
        await stream.send_message(api.SandboxGetTaskIdResponse(task_id=f"ta-{request.sandbox_id}"))

    async def SandboxGetCommandRouterAccess(self, stream: Any) -> None:
        await self._got("SandboxGetCommandRouterAccess", stream)
        answer = api.SandboxGetCommandRouterAccessResponse(jwt=_token(), url=self.modal.url)
        await stream.send_message(answer)

    async def SandboxWaitV2(self, stream: Any) -> None:
        request = await self._got("SandboxWaitV2", stream)
        one = self._known(request.sandbox_id)
        if one.result is None and request.timeout:
            try:
                await asyncio.wait_for(one.ended.wait(), request.timeout)
            except TimeoutError:
                pass
        await stream.send_message(api.SandboxWaitResponse(result=one.result))

    async def SandboxTerminateV2(self, stream: Any) -> None:
        request = await self._got("SandboxTerminateV2", stream)
        await self.modal.end(self._known(request.sandbox_id), _DIED)
        await stream.send_message(api.SandboxTerminateResponse())

    async def SandboxGetFromNameV2(self, stream: Any) -> None:
        request = await self._got("SandboxGetFromNameV2", stream)
        for one in self.modal.containers.values():
            if one.result is None and one.name == request.sandbox_name:
                await stream.send_message(api.SandboxGetFromNameResponse(sandbox_id=one.id))
                return
        raise GRPCError(Status.NOT_FOUND, "no sandbox of this name")

    async def SandboxGetFromName(self, stream: Any) -> None:
        await self._got("SandboxGetFromName", stream)
        raise GRPCError(Status.NOT_FOUND, "no sandbox of this name")

    async def SandboxListV2(self, stream: Any) -> None:
        request = await self._got("SandboxListV2", stream)
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        found = [
            api.SandboxInfo(id=one.id, created_at=index, name=one.name)
            for index, one in enumerate(self.modal.containers.values(), 1)
            if one.result is None and wanted.items() <= one.tags.items()
        ]
        shown = [] if request.before_timestamp else found
        await stream.send_message(api.SandboxListResponse(sandboxes=shown))

    def _known(self, sandbox_id: str) -> Container:
        one = self.modal.containers.get(sandbox_id)
        if one is None:
            raise GRPCError(Status.NOT_FOUND, f"no sandbox {sandbox_id}")
        return one


@patch_mock_servicer
class Router(TaskCommandRouterBase):
    """The calls to the machine that a container runs on."""

    def __init__(self, modal: FakeModal) -> None:
        self.modal = modal

    async def _got(self, call: str, stream: Any) -> Any:
        request = await stream.recv_message()
        await self.modal.fault(call, request)
        self.modal.container(request.task_id)
        return request

    async def TaskExecStart(self, stream: Any) -> None:
        await self.modal.execute(await self._got("TaskExecStart", stream))
        await stream.send_message(router.TaskExecStartResponse())

    async def TaskExecStdinWrite(self, stream: Any) -> None:
        request = await self._got("TaskExecStdinWrite", stream)
        program = self.modal.programs[request.exec_id]
        stdin = program.process.stdin
        assert stdin is not None
        if request.offset + len(request.data) > program.written:  # else it is sent again
            stdin.write(request.data[program.written - request.offset :])
            program.written = request.offset + len(request.data)
        try:
            await stdin.drain()
        except ConnectionError:
            raise GRPCError(Status.FAILED_PRECONDITION, "the program does not read") from None
        if request.eof:
            stdin.close()
        await stream.send_message(router.TaskExecStdinWriteResponse())

    async def TaskExecStdioRead(self, stream: Any) -> None:
        request = await self._got("TaskExecStdioRead", stream)
        program = self.modal.programs[request.exec_id]
        fd = 1 if request.file_descriptor == router.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT else 2
        said, at = program.said[fd], request.offset
        while True:
            async with program.grown:
                while len(said) == at and fd in program.open:
                    await program.grown.wait()
            if len(said) == at:
                return
            chunk = bytes(said[at : at + (1 << 18)])
            at += len(chunk)
            await stream.send_message(router.TaskExecStdioReadResponse(data=chunk))

    async def TaskExecWait(self, stream: Any) -> None:
        request = await self._got("TaskExecWait", stream)
        code = await self.modal.programs[request.exec_id].process.wait()
        self.modal.container(request.task_id)
        await stream.send_message(router.TaskExecWaitResponse(**_exit(code)))

    async def TaskExecPoll(self, stream: Any) -> None:
        request = await self._got("TaskExecPoll", stream)
        code = self.modal.programs[request.exec_id].process.returncode
        await stream.send_message(router.TaskExecPollResponse(**({} if code is None else _exit(code))))


def _exit(code: int) -> dict[str, int]:
    return {"code": code} if code >= 0 else {"signal": -code}


def _token() -> str:
    parts = ({"alg": "none"}, {"exp": int(time.time()) + 3600})
    coded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    return ".".join([*coded, "none"])


def _cut_off(request: Any) -> bool:
    return request.definition.network_access.network_access_type == api.NetworkAccess.BLOCKED


def _environment() -> dict[str, str]:
    return {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "IMAGE": "the image's own"}


async def _started(command: list[str], cut_off: bool) -> tuple[asyncio.subprocess.Process, int]:
    """A container, with nothing in it but the system and the interpreter; also the pid of its first process."""
    info, info_there = os.pipe()
    root = os.geteuid() == 0
    # An ordinary user's container has the host's own devices: for others bwrap would make a second user namespace.
    devices = ["--dev", "/dev"] if root else ["--dev-bind", "/dev", "/dev"]
    view = ["--ro-bind", "/usr", "/usr", "--proc", "/proc", *devices, "--tmpfs", "/tmp"]
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            view += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            view += ["--ro-bind", f"/{name}", f"/{name}"]
    for file in ("ld.so.cache", "alternatives"):
        if os.path.exists(f"/etc/{file}"):
            view += ["--ro-bind", f"/etc/{file}", f"/etc/{file}"]
    for path in _interpreter():
        for parent in reversed(Path(path).parents[:-1]):
            view += ["--perms", "0755", "--dir", os.fspath(parent)]
        view += ["--ro-bind", path, path]
    spaces = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", *(["--unshare-net"] if cut_off else [])]
    spaces += [] if root else ["--unshare-user"]
    process = await asyncio.create_subprocess_exec(
        *["bwrap", *spaces, *view, "--die-with-parent", "--info-fd", str(info_there), "--", *command],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        pass_fds=[info_there],
        env=_environment(),
        start_new_session=True,
    )
    os.close(info_there)
    with os.fdopen(info) as said:
        first = json.loads(await asyncio.to_thread(said.read))["child-pid"]
    while not Path(f"/proc/{first}/task/{first}/children").read_text():  # the command itself
        await asyncio.sleep(0.01)
    return process, first


def _entering(first: int) -> list[str]:
    """Run a command in a container: as root there, with the powers that a container's root has, or as its one user."""
    spaces = ["nsenter", "--target", str(first), "--mount", "--pid", "--net", "--ipc", "--uts"]
    if os.geteuid() != 0:
        return [*spaces, "--user", "--preserve-credentials"]
    powers = "-all,+setuid,+setgid,+chown,+fowner,+dac_override,+kill"
    return [*spaces, "--", "setpriv", f"--bounding-set={powers}", "--inh-caps=-all", "--"]


async def _collect(program: Program, fd: int, stream: asyncio.StreamReader) -> None:
    while chunk := await stream.read(1 << 16):
        program.said[fd] += chunk
        async with program.grown:
            program.grown.notify_all()
    program.open.discard(fd)
    async with program.grown:
        program.grown.notify_all()


def _kill(process: asyncio.subprocess.Process) -> None:
    """The command and what runs it; its own children live on, as in a container."""
    for pid in (*_children(process.pid), process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


async def _kill_late(process: asyncio.subprocess.Process, seconds: float) -> None:
    try:
        await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        _kill(process)
