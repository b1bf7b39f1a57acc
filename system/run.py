"""Brings up what a run needs on this machine, and takes it down whatever happens."""

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from system.engine import EngineError, RestartRule, Router, RunningEngine, start_embedded_engine
from system.engine.vllm import Settings as VllmSettings
from system.engine.vllm import start_vllm_engine
from system.fleet import Fleet
from system.fleet.local import LocalFleet, warm_up
from system.sandbox import choose_sandbox, reap, removal

RESTART = RestartRule()


class RunError(Exception):
    """A run could not come to its end; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """Engines and fleet of a run, up and connected; trainers come and go with the arms."""

    engine: Router
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
    engines: int = 1,
    restart: RestartRule = RESTART,
    kits: Collection[str] = ("brief",),
    modal: dict[str, Any] | None = None,
    vllm: dict[str, Any] | None = None,
    fleet: Callable[..., Fleet] = LocalFleet,
) -> Iterator[Machinery]:
    """`machinery_with` embedded engines, or vLLM's.

    Args:
        policy: folder of the weights that the engines begin with.
        engine_log: the first engine's own record of what it sampled; those of the others lie beside it.
        sandbox, restart, kits, modal, fleet: as there.
        max_context: longest trajectory.
        max_sessions: trajectories that an engine keeps cached.
        threads: of torch, in an engine.
        device: of the engines.
        engines: how many.
        vllm: the fields of `system.engine.vllm.Settings` that are not named here, for that engine. Where it names
            `gpus`, each engine takes as many of them as share a model.
    """

    def start(log: Path, socket_path: Path) -> RunningEngine:
        if vllm is None:
            return start_embedded_engine(policy, socket_path, log, max_context, max_sessions, threads, device)
        width, place = vllm.get("tensor_parallel", 1), logs.index(log)
        told = {
            **vllm,
            "gpus": tuple(vllm.get("gpus", ())[place * width : (place + 1) * width]),
            "policy_dir": str(policy),
            "socket_path": str(socket_path),
            "log_path": str(log),
            "device": device,
            "max_context": max_context,
            "max_sessions": max_sessions,
            "threads": threads,
        }
        return start_vllm_engine(VllmSettings(**told))

    logs = [engine_log, *(engine_log.with_stem(f"{engine_log.stem}-{i}") for i in range(1, engines))]
    around: dict[str, Any] = {
        "policy": policy,
        "sandbox": sandbox,
        "kits": kits,
        "modal": modal,
        "fleet": fleet,
    }
    with machinery_with([partial(start, log) for log in logs], restart=restart, **around) as machine:
        yield machine


@contextmanager
def machinery_with(
    start_engines: Sequence[Callable[[Path], RunningEngine]],
    *,
    policy: Path,
    sandbox: str,
    kits: Collection[str],
    restart: RestartRule = RESTART,
    modal: dict[str, Any] | None = None,
    fleet: Callable[..., Fleet] = LocalFleet,
) -> Iterator[Machinery]:
    """Starts the engines and the fleet side by side; at the end nothing of them is left.

    Args:
        start_engines: each starts one on a socket, or finds one that runs.
        policy: folder whose chat template and tokenizer the trials use.
        sandbox: auto, bubblewrap, process or modal.
        kits: tools that the parent of the trials loads, of `system.fleet.office.KITS`.
        restart: when an engine is given up and started again.
        modal: the fields of `system.sandbox.modal.ModalSettings`, for that sandbox; each trial's spec needs them too.
        fleet: LocalFleet, or another that takes the same; where its trials run, the policy and the engines must be.
    """
    own = run_folder()
    remove_dead_runs(own.parent)
    with ExitStack() as stack:
        own.mkdir(parents=True)
        own.parent.chmod(0o700)
        stack.callback(remove, own)
        # The pool stays open to the end: an engine dies with the thread that started it.
        pool = stack.enter_context(ThreadPoolExecutor(2 + len(start_engines)))
        chosen = pool.submit(choose_sandbox, sandbox, modal)
        trials = pool.submit(fleet, own / "trials", warm=warm_up(kits, policy=policy), temporary=own / "tmp")
        started = [
            pool.submit(start, own / f"engine-{number}.sock") for number, start in enumerate(start_engines)
        ]
        stack.callback(lambda: trials.exception() or trials.result().close())
        for one in started:
            stack.callback(lambda one=one: one.exception() or one.result().close())
        router = Router([one.result() for one in started], hold=own / "held", rule=restart)
        stack.callback(router.close)
        kind, line = chosen.result()
        trials.result().reach([str(policy.resolve()), *(one.result().address for one in started)])
        try:
            yield Machinery(
                engine=router,
                fleet=trials.result(),
                sandbox=kind,
                sandbox_line=line,
                scratch=own,
            )
        except EngineError:
            raise
        except Exception as error:
            if fault := router.fault(0.5):
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
            for place in (folder / "trials", *(folder / "trials").glob("node-*")):
                reap(place)
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
