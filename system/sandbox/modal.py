"""The Modal sandbox: a container of Modal's that is given the tools' code and the world, and is gone afterwards."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import socket
import sys
import time
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from core.retry import KeyState, Progress, Reply, RetryRule, after_reply, next_step

from . import Limits, SandboxError, Serve, inside, parcel, scratch, server_process, service
from .frozen import FrozenWorld

REPOSITORY = Path(__file__).parents[2]
BROUGHT = ("core/*.py", "system/__init__.py", "system/sandbox/*.py", "system/tools/**/*.py")
BROUGHT_TOO = ("system/harness/__init__.py", "system/harness/serving.py")
"""What of this project goes into a container: what serves the tools, nothing that solves or grades a task."""

_HOLDER = ("sleep", "infinity")
_PYTHON = ("python3", "-I", "-B", "-X", "utf8", "-c")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalSettings:
    """Where and how the containers are made. Example: `ModalSettings(image="python:3.11", region="eu")`."""

    image: str
    "Of any registry; it brings Python 3.11 or later, and the packages that docs/modal.md lists."
    secret: str = ""
    "Name of the Modal secret that opens the registry; for AWS ECR it holds the keys of an account."
    app: str = "bartleby"
    "Modal's app, made if it is missing."
    environment: str = ""
    "Modal's environment; left out, the token's own."
    config: str = field(default_factory=lambda: own_config())
    "Modal's configuration file, with the token; left out, $MODAL_CONFIG_PATH or ~/.modal.toml, as the maker sees it."
    run: str = ""
    "What the containers of this run are called by; left out, the folder that holds the scratch folder."
    cpu: float = 1.0
    "Cores, asked for and never exceeded."
    memory_mib: int = 0
    "Memory of a container, asked for and never exceeded; 0 takes what `Limits` adds up to, and 512 more."
    region: str = ""
    "Of the machines; left out, any."
    idle_s: int = 0
    "Modal ends a container that has had nothing to do for so long; 0 leaves that to its lifetime."
    grace_s: float = 60.0
    "How much longer than the trial may need a container lives, if nobody ends it."
    network: bool = False
    "Whether the tools reach the network."
    attempts: int = 4
    "To create a container that Modal has no room for, or does not answer to."

    def __post_init__(self) -> None:
        if not self.image:
            raise ValueError("image must name an image of a registry, got nothing")
        for name in ("cpu", "grace_s", "attempts"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("memory_mib", "idle_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def connected(self) -> service.Service:
        """The service that these settings name; a trial sees no environment, so the token must be in a file."""
        if fault := token_fault(self.config):
            raise SandboxError("start", fault)
        return service.Service(app=self.app, environment=self.environment, config=self.config)


def own_config() -> str:
    """Where Modal's client would look for its configuration file."""
    return os.path.abspath(os.environ.get("MODAL_CONFIG_PATH") or os.path.expanduser("~/.modal.toml"))


def token_fault(config: str) -> str:
    """Why a configuration file cannot be used, or ""."""
    try:
        with open(config, "rb") as file:
            profiles = tomllib.load(file).values()
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        return (
            f"sandbox modal needs a token in {config} ({cause}): run `modal token new` or `modal token set`"
        )
    secrets = ("token_secret", "oauth_refresh_token")
    if not any(isinstance(one, dict) and any(one.get(name) for name in secrets) for one in profiles):
        return (
            f"sandbox modal needs a token, got none in {config}: run `modal token new` or `modal token set`"
        )
    return ""


class ModalSandbox:
    """A container without network that lives as long as its trial; the stream is that of a program started in it.

    The tool server runs there as an ordinary user, if the image starts as root. The world goes there and comes back
    as a parcel, and is graded here. What Modal promises of the container itself is not checked.

    Args:
        world: the folder of the company; it is read only.
        scratch_root: where the journal is, and the world that comes back.
        serve: by name (`inside.order_of`).
        limits: start_s holds for the whole start, from the client's import to the tools' answer.
        settings: of the service.
        trial: whose it is.
        agent_s: how long it must be there for the agent.
    """

    kind = "modal"
    root = Path(inside.WORLD)

    def __init__(
        self,
        world: Path,
        scratch_root: Path,
        serve: Serve,
        limits: Limits,
        settings: ModalSettings,
        *,
        trial: str = "",
        agent_s: float,
    ) -> None:
        if not 0 < agent_s < math.inf:
            raise ValueError(f"agent_s must be positive and finite, got {agent_s}")
        self._world, self._limits, self._settings, self._trial = world, limits, settings, trial
        self._order = inside.order_of(serve)
        self._lifetime_s = math.ceil(limits.start_s + agent_s + 2 * limits.stop_s + settings.grace_s)
        self._run = settings.run or scratch_root.parent.name
        self._name, self._attempts, self._doubtful = "", 0, False
        self._container: Any = None
        self._service: service.Service | None = None
        self._stream: service.Stream | None = None
        self._taken = self._closed = False
        self._frozen: FrozenWorld | None = None
        where = {name: getattr(settings, name) for name in ("app", "environment", "config")}
        self._folder = scratch.new_folder(scratch_root, what=self.kind, trial=trial, modal=where)
        try:
            self._start(time.monotonic() + limits.start_s)
        except BaseException:
            with suppress(SandboxError):  # what stays is in the journal
                self.close()
            raise

    def _start(self, deadline: float) -> None:
        self._service = self._settings.connected()
        self._container = self._create(self._service, deadline)
        report = self._bring(deadline)
        self._spared = report["processes"]
        if _minor(report["mcp"]) != _minor(metadata.version("mcp")):
            wanted, found = metadata.version("mcp"), report["mcp"] or "none"
            raise SandboxError("start", f"image must have mcp {'.'.join(_minor(wanted))}, got {found}")
        self._start_server(deadline)

    def _create(self, modal: service.Service, deadline: float) -> Any:
        """A container; whatever is not Modal's last word is tried again, under a name that the journal knows."""
        rule = RetryRule(attempts=self._settings.attempts, base_s=0.5, ceiling_s=8.0, forms=1)
        seed = int(self._folder.name[-8:], 16)
        progress, keys, said = Progress(), (KeyState(),), ""
        image = modal.image(self._settings.image, self._settings.secret)
        while True:
            now = time.monotonic()
            step = next_step(progress, keys, rule=rule, now_s=now, deadline_s=deadline, seed=seed)
            if step.kind == "stop" and not progress.attempts:
                raise SandboxError("start", self._late("image"))
            if step.kind == "stop":
                tries = f"{progress.attempts} attempt{'s' * (progress.attempts != 1)}"
                raise SandboxError("start", f"{service.FAULTS[step.cause]} after {tries}: {said}")
            if step.kind == "wait":
                time.sleep(step.until_s - now)
                continue
            what, doubtful = "image", self._doubtful
            try:
                modal.ask(modal.build(image), deadline)
                what = "create"
                return self._create_once(modal, image, deadline)
            except service.Late:
                raise SandboxError("start", self._late(what)) from None
            except service.Refused as error:
                self._doubtful = doubtful or (what == "create" and error.fault in ("busy", "connection"))
                said, reply = error.said, Reply(None, error.fault, "", None)
                progress, keys = after_reply(
                    progress, keys, reply, key=0, rule=rule, now_s=time.monotonic(), seed=seed
                )

    def _late(self, what: str) -> str:
        return f"{what}: no answer from Modal within the {self._limits.start_s:g} s of the start"

    def _create_once(self, modal: service.Service, image: Any, deadline: float) -> Any:
        settings, folder = self._settings, self._folder.name
        self._name, self._attempts = _name(self._run, self._trial, folder[-8:]), self._attempts + 1
        tags = {
            "bartleby": folder,
            "run": _plain(self._run),
            "trial": _plain(self._trial),
            "attempt": str(self._attempts),
        }
        scratch.note(self._folder, "intent", sync=True, name=self._name, attempt=self._attempts)
        self._doubtful = True
        limits = self._limits
        summed = (limits.memory_bytes + limits.world_bytes + limits.tmp_bytes) // _MIB + 512
        memory = settings.memory_mib or summed
        wanted = {
            "name": self._name,
            "tags": {key: value for key, value in tags.items() if value},
            "image": image,
            "timeout": self._lifetime_s,
            "idle_timeout": settings.idle_s or None,
            "cpu": (settings.cpu, settings.cpu),
            "memory": (memory, memory),
            "region": settings.region or None,
            "block_network": not settings.network,
        }
        container = modal.ask(modal.create(_HOLDER, wanted), deadline)
        scratch.note(self._folder, "confirmed", sync=True, name=self._name, id=container.object_id)
        return container

    def _bring(self, deadline: float) -> dict[str, Any]:
        """Take code and world there; what was found."""
        program = Path(parcel.__file__).read_text()
        program += f"\narrive({inside.CODE!r}, {inside.WORLD!r}, {inside.UID})\n"
        entries, contents = parcel.pack(str(self._world))
        self._lower_bytes = sum(size for _, _, size, _ in entries)
        out = io.BytesIO()
        feed = (*_code(), parcel.listing(entries))
        self._run_there("start", "unpacking", (program,), deadline, out.write, feed=_chain(feed, contents))
        return json.loads(out.getvalue())

    def _start_server(self, deadline: float) -> None:
        ours, theirs = socket.socketpair()
        self._stream, self._taken = service.Stream(ours=ours, theirs=theirs), False
        order = {**self._order, "limits": asdict(self._limits)}
        command = (*_PYTHON, _MAIN, "serve", json.dumps(order))
        modal = self._connected("start")
        modal.do("start", "tool server", modal.carry(self._container, command, self._stream), deadline)
        if not server_process.is_up(ours, deadline):
            raise SandboxError("start", self.died() or "the tool server was not ready in time")

    def connect(self) -> socket.socket:
        """The stream to the tool server; can be taken once."""
        if self._stream is None or self._taken:
            raise SandboxError("connect", "the stream was taken before")
        self._taken = True
        return self._stream.ours

    def died(self) -> str | None:
        """Why the tool server is no longer alive, in one line, or None while it is."""
        return self._stream.end if self._stream is not None else None

    def restart(self) -> None:
        """Kill the server and everything that it left behind; start another over the world as it now is."""
        if self._frozen is not None or self._closed:
            raise SandboxError("start", "the sandbox is frozen")
        deadline = time.monotonic() + self._limits.start_s
        self._kill("start", deadline, io.BytesIO(), world=False)
        if self._stream is not None and not self._taken:
            self._stream.ours.close()
        self._start_server(deadline)

    def freeze(self) -> FrozenWorld:
        """Kill everything that came after the world, confirm it, fetch the world."""
        if self._frozen is None:
            if self._closed:
                raise SandboxError("freeze", "the sandbox is closed")
            root = self._folder / "world"
            try:
                shutil.rmtree(root, ignore_errors=True)
                root.mkdir()
                with open(self._folder / "parcel", "w+b") as file:
                    self._kill("freeze", time.monotonic() + self._limits.stop_s, file, world=True)
                    most = self._lower_bytes + self._limits.world_bytes
                    entries = parcel.read_listing(file, most_bytes=most)
                    parcel.place(file, entries, str(root), links=False)
            except parcel.TooLarge:
                # There is no quota inside. Who writes more than is given loses what was written, and is graded.
                shutil.rmtree(root)
                root = self._world
            except (OSError, ValueError) as error:
                raise SandboxError("freeze", f"world: {error}") from error
            self._frozen = FrozenWorld(lower=self._world, root=root)
        return self._frozen

    def _kill(self, phase: str, deadline: float, file: Any, *, world: bool) -> None:
        """Kill all but what was there before the world, which is then what the file holds from its place on."""
        most = self._lower_bytes + self._limits.world_bytes + parcel.MOST_LISTING

        beyond = parcel.TooLarge(f"world must hold at most {most} bytes, got more")
        met: list[parcel.TooLarge] = []

        def take(chunk: bytes) -> None:
            if file.tell() + len(chunk) > most:
                met.append(beyond)
                raise beyond
            file.write(chunk)

        seconds = max(0.5, (deadline - time.monotonic()) / 2)
        order = {"spared": self._spared, "seconds": seconds, "world": world}
        try:
            self._run_there(phase, "killing", (_MAIN, "freeze", json.dumps(order)), deadline, take)
        except SandboxError:
            if not met:
                raise
        file.seek(0)
        left = json.loads(file.readline(1 << 16)).get("left")
        if left != []:
            raise SandboxError(phase, f"processes in the container do not die: {left}")
        if met:
            raise beyond

    def _run_there(
        self,
        phase: str,
        what: str,
        program: tuple[str, ...],
        deadline: float,
        take: Any,
        *,
        feed: Iterable[bytes] = (),
    ) -> None:
        modal = self._connected(phase)
        seconds = deadline - time.monotonic()
        command = (*_PYTHON, *program)
        work = modal.run(self._container, command, seconds=seconds, feed=feed, take=take)
        code, said = modal.do(phase, what, work, deadline)
        if code == -1:
            raise SandboxError(phase, f"{what}: Modal ended it after {seconds:.1f} s")
        if code:
            killed = " (killed, as when memory is short)" if code == 137 else ""
            raise SandboxError(phase, f"{what}: exit {code}{killed} {said}".strip())

    def _connected(self, phase: str) -> service.Service:
        if self._service is None or self._container is None:
            raise SandboxError(phase, "there is no container")
        return self._service

    def close(self) -> None:
        """End the container, confirm it, remove what lies here."""
        if self._closed:
            return
        if self._service is not None:
            self._end(self._service, time.monotonic() + self._limits.stop_s)
            self._service.close()
        with suppress(FileNotFoundError):  # a reaper was at it
            scratch.note(self._folder, "removed", sync=True)
        if self._stream is not None and not self._taken:
            self._stream.ours.close()
        try:
            scratch.remove_folder(self._folder)
        except OSError as error:
            raise SandboxError("close", str(error)) from error
        self._closed = True

    def _end(self, modal: service.Service, deadline: float) -> None:
        try:
            if self._container is not None:
                modal.remove(self._container, deadline)
            elif self._doubtful and not remove_named(modal, self._name, self._folder.name, deadline):
                raise SandboxError("close", f"whether Modal made {self._name} cannot be known yet")
        except service.Refused as error:
            raise SandboxError("close", str(error)) from error
        except service.Late:
            cause = f"Modal did not confirm the end within {self._limits.stop_s:g} s"
            raise SandboxError("close", cause) from None

    def __enter__(self) -> ModalSandbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def remove_named(modal: service.Service, name: str, folder: str, deadline: float) -> int:
    """End every running container of this name, or with the tag of a sandbox's folder; how many there were."""
    found = modal.ask(modal.find(name, {"bartleby": folder}), deadline)
    for container in found:
        modal.remove(container, deadline)
    return len(found)


_MAIN = (
    f"import sys; sys.path.insert(0, {inside.CODE!r}); from system.sandbox import inside; "
    "sys.exit(inside.main(*sys.argv[1:]))"
)


def _code() -> tuple[bytes, ...]:
    """The parcel of what is brought, with the folders that hold it."""
    files = sorted({path for each in (*BROUGHT, *BROUGHT_TOO) for path in REPOSITORY.glob(each)})
    folders: dict[str, None] = {}
    entries: list[parcel.Entry] = []
    contents: list[bytes] = []
    for path in files:
        rel = path.relative_to(REPOSITORY)
        for parent in reversed(rel.parents[:-1]):
            if str(parent) not in folders:
                folders[str(parent)] = None
                entries.append((str(parent), "folder", 0, ""))
        contents.append(path.read_bytes())
        entries.append((str(rel), "file", len(contents[-1]), ""))
    return parcel.listing(entries), b"".join(contents)


def _chain(first: Iterable[bytes], then: Iterable[bytes]) -> Iterable[bytes]:
    yield from first
    yield from then


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)[-50:]


def _name(run: str, trial: str, unique: str) -> str:
    """What Modal calls a container, of fewer than 64 characters: run, trial, and what makes it the only one."""
    parts = (_plain(run)[:20], _plain(trial)[-30:], unique)
    return ".".join(part for part in parts if part).lstrip(".-")


def main(settings: str, seconds: str) -> int:
    """Fetch the image once, for all sandboxes of a run; one line says why that cannot be done."""
    given = ModalSettings(**json.loads(settings))
    try:
        modal = given.connected()
        image = modal.image(given.image, given.secret)
        modal.do("start", "image", modal.build(image), time.monotonic() + float(seconds))
    except SandboxError as error:
        print(error.cause)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
