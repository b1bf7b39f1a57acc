"""What the scripts share at the command line: options, a folder of their own, one line for what went wrong."""

import io
import json
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import tyro

from system.checkpoint import SaveError
from system.engine import EngineError
from system.engine.vllm import Settings
from system.fleet import FleetError
from system.lock import holder
from system.run import Machinery, RunError
from system.sandbox import SandboxError
from system.sandbox.modal import ModalSettings
from system.verify.judge import JudgeClient, JudgeSettings
from system.verify.judge_service import JudgeService


def command_line(
    script: str,
    main: Callable[[Any], Any],
    config: type,
    *,
    broken: tuple[type[Exception], ...] = (),
    stopped: str = "stopped",
) -> Any:
    """Runs a script: one line and exit code 2 for what the user can put right, 1 if the run broke, 130 after Ctrl-C.

    Args:
        script: its name.
        main: what it does with its settings; returned is what that returns.
        config: the settings, a dataclass.
        broken: what it raises, beside the rooms' own errors, when a run breaks.
        stopped: what to say after Ctrl-C.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the end of a job is as clean as Ctrl-C
    try:
        return main(options(script, config, about=sys.modules[main.__module__].__doc__ or ""))
    except (ValueError, FileNotFoundError, SandboxError) as error:
        print(f"{script}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (RunError, SaveError, EngineError, FleetError, *broken, OSError) as error:
        print(f"{script}: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print(f"{script}: {stopped}", file=sys.stderr)
        raise SystemExit(130) from None


def options(script: str, config: type, *, about: str) -> Any:
    """The settings from the command line; a mistake there is told in one line instead of tyro's box of lines."""
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            return tyro.cli(config, prog=script, description=about, config=(tyro.conf.FlagConversionOff,))
    except SystemExit as stop:
        if stop.code:
            boxed = [line.strip("│ ") for line in told.getvalue().splitlines() if line.startswith("│")]
            sentence = " ".join(takewhile(lambda line: not line.startswith("─"), boxed))
            print(f"{script}: {sentence or told.getvalue().strip()} (see --help)", file=sys.stderr)
        raise


def claim(folder: Path) -> None:
    """Makes the folder of a run; of two runs that want the same one the second is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").touch(exist_ok=False)
    except FileExistsError:
        pid = holder(folder)
        found = f"a run in it{f' of process {pid}' if pid else ''}" if folder.is_dir() else "a file there"
        raise ValueError(f"out must be a new folder, got {folder} with {found}") from None
    except OSError as error:
        raise ValueError(f"out must be a folder that can be made, got {folder}: {error.strerror}") from None


def withdraw(folder: Path) -> None:
    """Gives a claimed folder back, for a run that was refused before it began; what else lay there stays."""
    (folder / "config.json").unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def judge_client(
    endpoint: str, model: str, keys: tuple[str, ...], *, timeout_s: float = 180.0
) -> JudgeClient | None:
    """The judge at an address; None without one.

    Args:
        endpoint: what comes before /chat/completions.
        model: its name there.
        keys: environment variables that hold a key each.
        timeout_s: deadline of a question.
    """
    if not endpoint:
        return None
    if not model:
        raise ValueError(f"judge_model must be given for a judge, got none for {endpoint}")
    settings = JudgeSettings(endpoint=endpoint, model=model, key_variables=keys, timeout_s=timeout_s)
    return JudgeClient(settings)


def serve_judge(judge: JudgeClient | None, machine: Machinery, side_by_side: int, stack: ExitStack) -> str:
    """The socket of the judge of all trials; "" without one."""
    if judge is None:
        return ""
    path = machine.scratch / "judge.sock"
    stack.enter_context(JudgeService(judge, path, side_by_side=side_by_side))
    return str(path)


def modal_settings(sandbox: str, file: Path | None) -> dict[str, Any] | None:
    """What a trial's specification says of Modal, from a JSON file; None for another sandbox.

    Args:
        sandbox: as it was asked for.
        file: fields of `system.sandbox.modal.ModalSettings`, as docs/modal.md shows them.
    """
    if sandbox != "modal":
        if file is not None:
            raise ValueError(f"modal must go with sandbox modal, got {file} for sandbox {sandbox}")
        return None
    if file is None:
        raise ValueError(
            "sandbox modal must have its settings in a file, got none: --modal FILE (docs/modal.md)"
        )
    try:
        fields = json.loads(file.read_text())
        ModalSettings(**fields)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"modal must be a file of settings as JSON, got {file}: {error}") from None
    return fields


def vllm_settings(engine: str, file: Path | None) -> dict[str, Any] | None:
    """What a vLLM engine is told beside the run's own settings, from a JSON file; None for another engine.

    Args:
        engine: as it was asked for.
        file: fields of `system.engine.vllm.Settings`, as docs/vllm.md shows them.
    """
    if engine != "vllm":
        if file is not None:
            raise ValueError(f"vllm must go with engine vllm, got {file} for engine {engine}")
        return None
    if file is None:
        raise ValueError("engine vllm must have its settings in a file, got none: --vllm FILE (docs/vllm.md)")
    run = dict.fromkeys(("policy_dir", "socket_path", "log_path"), "")
    of_run: dict[str, Any] = {**run, "device": "cpu", "max_context": 2, "max_sessions": 1, "threads": 1}
    try:
        fields: dict[str, Any] = json.loads(file.read_text())
        if twice := sorted(fields.keys() & of_run.keys()):
            raise ValueError(f"{', '.join(twice)} must be the run's own")
        Settings(**{**of_run, "kv_gib": 1.0, **fields, "gpus": ()})
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"vllm must be a file of settings as JSON, got {file}: {error}") from None
    return fields
