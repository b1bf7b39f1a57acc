"""A place where the tools of one trial run: a Protocol, its kinds, and the frozen world afterwards."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .frozen import FrozenWorld
from .scratch import reap

if TYPE_CHECKING:
    from .modal import ModalSandbox, ModalSettings

__all__ = [
    "FrozenWorld",
    "KINDS",
    "Limits",
    "Sandbox",
    "SandboxError",
    "Serve",
    "Thawable",
    "View",
    "choose_sandbox",
    "open_sandbox",
    "reap",
]

KINDS = ("auto", "bubblewrap", "process", "modal")

Serve = Callable[[int, Path], None]
"""Runs inside: serves the tools over a world (a path) on a connected socket (a descriptor) to its end."""


class SandboxError(Exception):
    """A sandbox could not be started, frozen or removed: a fault of the system, never of the agent.

    Example: `SandboxError("start", "bwrap: No permissions to create new namespace")`.
    """

    def __init__(self, phase: str, cause: str) -> None:
        super().__init__(f"{phase}: {cause}")
        self.phase = phase
        self.cause = cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the tools of one trial may use. Example: `Limits(memory_bytes=2 << 30)`."""

    memory_bytes: int = 1 << 30
    "Address space of each process, above what the server has when it starts."
    processes: int = 64
    "Processes and threads at once (bubblewrap; for root 301 at least, and only from Linux 6.14)."
    file_bytes: int = 16 << 20
    "Size of one file."
    world_bytes: int = 64 << 20
    "All that is written into the world (bubblewrap)."
    tmp_bytes: int = 64 << 20
    "All that is written into /tmp, and into /dev/shm (bubblewrap)."
    start_s: float = 20.0
    "Deadline of the start."
    stop_s: float = 10.0
    "Deadline of the confirmed end."

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is seen inside beside the system. Example: `View(root=Path("/app"), rooms={"/tests": "tests"})`."""

    root: Path = Path("/world")
    "Where the world lies."
    rooms: Mapping[str, str] = field(default_factory=dict)
    "More folders to write in, and a name for each: one is empty at first, and lasts as long as the sandbox does."
    shown: tuple[Path, ...] = ()
    "Folders of the host, read-only, at their own paths."


class Sandbox(Protocol):
    """One world with a tool server running over it, shut off from the host as far as its kind promises."""

    kind: str
    root: Path

    def connect(self) -> socket.socket:
        """The stream to the tool server; can be taken once. Raises SandboxError("connect")."""
        ...

    def died(self) -> str | None:
        """Why the tool server is no longer alive, in one line, or None while it is."""
        ...

    def freeze(self) -> FrozenWorld:
        """Kill everything inside, confirm it, give the world as it then is. Raises SandboxError("freeze")."""
        ...

    def close(self) -> None:
        """Freeze, then remove everything. Raises SandboxError("close") if something stays."""
        ...

    def __enter__(self) -> Sandbox: ...

    def __exit__(self, *exception: object) -> None: ...


@runtime_checkable
class Thawable(Protocol):
    """A sandbox that can go on after a freeze."""

    def thaw(self, serve: Serve | None = None) -> None:
        """Start a server over the world as it was frozen; nothing else of what ran before comes back.

        The frozen world that `freeze` gave must not be read any more. The server is forked from this process, which
        must not have read meanwhile what the agent must not learn.

        Args:
            serve: what to run; left out, the same as before.

        Raises:
            SandboxError: "start"; the sandbox is still frozen.
        """
        ...


def open_sandbox(
    kind: str,
    world: Path,
    scratch: Path,
    serve: Serve,
    limits: Limits | None = None,
    *,
    trial: str = "",
    agent_s: float = math.inf,
    modal: dict[str, Any] | None = None,
) -> Sandbox:
    """Start a tool server over a world in a sandbox.

    Call it in a process made for one trial, while that has a single thread and before it reads anything that
    the agent must not learn: the server is forked from it. The process enters a mount namespace of its own.

    Args:
        kind: "bubblewrap", "process" or "modal".
        world: the folder of the company; it is never written.
        scratch: folder below which the sandbox makes its own; `reap` cleans it after a killed run.
        serve: what to run inside, with a connected socket and the path of the world there.
        limits: what the tools may use.
        trial: whose it is, for the journal.
        agent_s: how long the agent may work; a container of Modal's does not live much longer.
        modal: the fields of `system.sandbox.modal.ModalSettings`, for that kind.

    Raises:
        SandboxError: the sandbox did not come up; nothing is left of it.
    """
    if kind not in KINDS[1:]:
        raise ValueError(f'kind must be "bubblewrap", "process" or "modal", got {kind!r}')
    if not world.is_dir():
        raise ValueError(f"world must be a folder, got {world}")
    places = world.resolve(), scratch.resolve(), serve, limits or Limits()
    if kind == "modal":
        return _container()(*places, _modal_settings(modal), trial=trial, agent_s=agent_s)
    if kind == "bubblewrap":
        from .bubblewrap import BubblewrapSandbox as chosen
    else:
        from .process import ProcessSandbox as chosen
    return chosen(*places, trial=trial)


def _container() -> type[ModalSandbox]:
    from .modal import ModalSandbox

    return ModalSandbox


def _modal_settings(given: dict[str, Any] | None) -> ModalSettings:
    from .modal import ModalSettings

    if given is None:
        raise ValueError("modal must be settings with an image, got none")
    return ModalSettings(**given)


_ISOLATED = (
    "sandbox bubblewrap: no network; the tools see the system libraries, the interpreter and their own "
    "view of the world; whatever a trial starts is killed with it"
)
_OPEN = (
    "sandbox process{reason}: the tools run as this user, with network, and can read this user's files; "
    "memory and file size are limited, and processes are killed with the trial; {remedy}"
)


_CONTAINER = (
    "sandbox modal: a container of Modal's for each trial, {network} network, of the image {image}; "
    "it is ended with the trial, and by Modal when its lifetime is over"
)


def choose_sandbox(kind: str, modal: dict[str, Any] | None = None) -> tuple[str, str]:
    """The kind to use and one line about it: what it is, what it promises, how to get more.

    Args:
        kind: "auto" takes bubblewrap where it works; the others take what they say or fail.
        modal: the fields of `system.sandbox.modal.ModalSettings`; its image is fetched here, once for all trials.
    """
    if kind not in KINDS:
        raise ValueError(f'sandbox must be "auto", "bubblewrap", "process" or "modal", got {kind!r}')
    if kind == "modal":
        settings = _modal_settings(modal)
        if fault := modal_fault(settings):
            raise SandboxError("start", fault)
        return kind, _CONTAINER.format(network="with" if settings.network else "no", image=settings.image)
    if kind == "process":
        return "process", _OPEN.format(reason="", remedy="--sandbox bubblewrap isolates them")
    fault = bubblewrap_fault()
    if not fault:
        return "bubblewrap", _ISOLATED
    if kind == "bubblewrap":
        cause = f"bubblewrap does not work here: {fault}; {_remedy(fault)}, or use --sandbox process"
        raise SandboxError("start", cause)
    return "process", _OPEN.format(reason=f" (bubblewrap does not work here: {fault})", remedy=_remedy(fault))


def _remedy(fault: str) -> str:
    if "not found" in fault:
        return "install it with: apt install bubblewrap"
    return "allow user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0, or run as root)"


def bubblewrap_fault() -> str:
    """Why a bubblewrap sandbox, tried over an empty world, did not work; "" if it did."""
    if not sys.platform.startswith("linux"):
        return f"bubblewrap not found on {sys.platform}"
    return _probed([sys.executable, "-m", "system.sandbox.probe"], 60)


IMAGE_S = 900
"""How long Modal may take to fetch an image that it has not seen before."""


def modal_fault(settings: ModalSettings) -> str:
    """Why Modal does not give the image: the extra or the token is missing, say; "" if it does."""
    given = json.dumps(asdict(settings))
    return _probed([sys.executable, "-m", "system.sandbox.modal", given, str(IMAGE_S)], IMAGE_S + 30)


def _probed(command: list[str], seconds: float) -> str:
    """What a command said last before it failed, or ""."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            env=clean_environment(),
        )
    except subprocess.TimeoutExpired:
        return f"the probe did not end within {seconds:g} s"
    if done.returncode == 0:
        return ""
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[-1] if lines else f"the probe ended with {done.returncode}"


def clean_environment() -> dict[str, str]:
    """Environment of this project's processes: the modules, one thread each, nothing of the user's."""
    modules = [os.path.abspath(entry) for entry in sys.path]
    libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return libraries | {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": os.pathsep.join(modules),
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": "0",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
