"""Brings up what a run needs on this machine, and takes it down whatever happens."""

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from system.engine import EngineClient, EngineError, RunningEngine, start_embedded_engine
from system.fleet import Fleet
from system.fleet.local import LocalFleet, warm_up
from system.sandbox import choose_sandbox, reap, removal


class RunError(Exception):
    """A run could not come to its end; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """Engine and fleet of a run, up and connected; trainers come and go with the arms."""

    engine: EngineClient
    engine_socket: Path
    fleet: Fleet
    sandbox: str
    sandbox_line: str
    scratch: Path


@contextmanager
def machinery(
    *,
    policy: Path,
    engine_log: Path,
    sandbox: str,
    max_context: int,
    max_sessions: int,
    threads: int,
    device: str,
    kits: Collection[str] = ("brief",),
    modal: dict[str, Any] | None = None,
) -> Iterator[Machinery]:
    """`machinery_with` the embedded engine.

    Args:
        policy: folder of the weights that the engine begins with.
        engine_log: the engine's own record of what it sampled.
        sandbox, kits, modal: as there.
        max_context: longest trajectory.
        max_sessions: trajectories that the engine keeps cached.
        threads: of torch, in the engine.
        device: of the engine.
    """

    def start(socket_path: Path) -> RunningEngine:
        return start_embedded_engine(
            policy, socket_path, engine_log, max_context, max_sessions, threads, device
        )

    with machinery_with(start, policy=policy, sandbox=sandbox, kits=kits, modal=modal) as machine:
        yield machine


@contextmanager
def machinery_with(
    start_engine: Callable[[Path], RunningEngine],
    *,
    policy: Path,
    sandbox: str,
    kits: Collection[str],
    modal: dict[str, Any] | None = None,
) -> Iterator[Machinery]:
    """Starts an engine and the fleet side by side; at the end nothing of them is left.

    Args:
        start_engine: starts it on a socket, or finds one that runs.
        policy: folder whose chat template and tokenizer the trials use.
        sandbox: auto, bubblewrap, process or modal.
        kits: tools that the parent of the trials loads, of `system.fleet.office.KITS`.
        modal: the fields of `system.sandbox.modal.ModalSettings`, for that sandbox; each trial's spec needs them too.
    """
    own = run_folder()
    remove_dead_runs(own.parent)
    with ExitStack() as stack:
        own.mkdir(parents=True)
        own.parent.chmod(0o700)
        stack.callback(remove, own)
        # The pool stays open to the end: the engine dies with the thread that started it.
        pool = stack.enter_context(ThreadPoolExecutor())
        chosen = pool.submit(choose_sandbox, sandbox, modal)
        fleet = pool.submit(
            LocalFleet, own / "trials", warm=warm_up(kits, policy=policy), temporary=own / "tmp"
        )
        engine = pool.submit(start_engine, own / "engine.sock")
        stack.callback(lambda: fleet.exception() or fleet.result().close())
        stack.callback(lambda: engine.exception() or engine.result().close())
        client = engine.result().client()
        stack.callback(client.close)
        kind, line = chosen.result()
        try:
            yield Machinery(
                engine=client,
                engine_socket=Path(engine.result().socket_path),
                fleet=fleet.result(),
                sandbox=kind,
                sandbox_line=line,
                scratch=own,
            )
        except Exception as error:
            if fault := engine.result().fault(0.5):
                raise EngineError(fault) from error
            raise


def run_folder() -> Path:
    """Where a run of this process keeps what goes with it."""
    return Path(tempfile.gettempdir()) / f"bartleby-{os.getuid()}" / f"run-{os.getpid()}"


def remove_dead_runs(root: Path) -> None:
    """Ends and removes what runs left that were killed before they could, an earlier one with this pid included."""
    for folder in root.glob("run-*"):
        pid = folder.name.removeprefix("run-")
        if pid == str(os.getpid()) or not Path("/proc", pid).exists():
            reap(folder / "trials")
            if not removal.reap_remote(folder / "trials"):
                shutil.rmtree(folder, ignore_errors=True)
            elif pid == str(os.getpid()):  # the name is needed
                folder.rename(folder.with_name(f"{folder.name}.kept"))


def remove(own: Path) -> None:
    """Removes the folder of this run, and the one above it when no other run is there.

    It stays while its journals say that something may be left on another machine: the next run asks for that again.
    """
    if not removal.outstanding(own / "trials"):
        shutil.rmtree(own, ignore_errors=True)
    with suppress(OSError):
        own.parent.rmdir()
