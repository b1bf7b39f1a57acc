"""Is the environment sound enough to train in? Plays tasks by the real harness, counts what breaks and what is left.

python experiments/audit_environment.py --agent expert --tasks 500 --concurrency 64

Every trial is one of training: token ids, parser, MCP, sandbox, freeze, verifier. The scripted expert must earn 1.0
everywhere; a policy may fail, the system may not. Exit code 1 if the gate is not passed.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from command import claim, command_line, judge_client, modal_settings, serve_judge, withdraw
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from core.counter import counter_hash
from system.engine import EngineError, OtherEngine
from system.engine.scripted import ScriptedEngine
from system.fleet import FleetError, kit_of
from system.harness.chat import Chat
from system.record.audit import Tally, faults, machine_name, page, print_audit
from system.record.metrics import JsonLines, commit_hash, write_json
from system.run import Machinery, machinery, machinery_with, run_folder
from system.sandbox import choose_sandbox, kernel
from system.sandbox.remains import Remains, remains
from system.world.expert import read_instruction
from system.world.expert_script import expert_script
from system.world.generate import generate
from system.world.names import Split
from system.world.task import Task, read_task

ROOT = Path(__file__).resolve().parent.parent
INTERRUPTED = "Ctrl-C"


@dataclass(frozen=True, kw_only=True)
class Config:
    agent: str = "expert"
    """Who plays: expert, which knows our own kinds of tasks, or the folder of a policy."""
    policy: Path = ROOT / "policies" / "clerk"
    """Folder whose tokenizer and chat template the expert speaks; a policy brings its own."""
    engine_address: Path | None = None
    """Socket of an engine that runs already with the policy's weights; by default the embedded one is started."""
    data: Path | None = None
    """Folder of Harbor task directories; by default tasks are generated, mixed in domain, length and kind."""
    tasks: int = 64
    """Tasks to generate, or the first so many of those given."""
    attempts: int = 1
    """Trials of each task."""
    concurrency: int = 16
    """Trials side by side: as many as training runs."""
    harness: Literal["office", "code"] = "office"
    """The office agent with its tools, or the code agent with a shell."""
    toolset: Literal["brief", "full"] | None = None
    """The office's tools; by default what each task asks for."""
    sandbox: Literal["auto", "bubblewrap", "process", "modal"] = "auto"
    """Where the tools run."""
    modal: Path | None = None
    """File with the settings of the sandbox "modal", as docs/modal.md says."""
    max_system_error: float = 0.005
    """Largest share of system errors that passes."""
    out: Path | None = None
    """Folder of this audit; by default out/audit_environment/<time>."""
    task: str = ""
    """Play this task alone, by its id, as it was played among the others."""
    seed: int = 0
    """Of the generated companies and of sampling."""
    split: Split = "train"
    """Of the generated companies."""
    distractors: int = 0
    """Old editions of files that each generated world holds as well."""
    context: int | None = None
    """Tokens of a trajectory; by default 2048, and 65536 for the expert."""
    turn_tokens: int = 2048
    """Most tokens of one turn."""
    turns: int = 48
    """Most turns of a trial."""
    result_characters: int = 4000
    """A longer tool result is cut."""
    temperature: float = 1.0
    """Of sampling."""
    start_s: float = 60.0
    """Deadline of a sandbox's start; with many at once on few cores each takes long."""
    deadline_s: float | None = None
    """Deadline of the agent; by default what each task says."""
    tool_timeout_s: float = 30.0
    """Deadline of a tool call."""
    engine_s: float = 300.0
    """An engine that needs longer for a turn is a system error."""
    verify_s: float | None = None
    """Deadline of grading; by default what each task says."""
    stop_s: float = 30.0
    """Deadline of a sandbox's end."""
    judge_endpoint: str = ""
    """OpenAI-compatible address of a judge, for tasks with a rubric; what comes before /chat/completions."""
    judge_model: str = ""
    """Its model."""
    judge_keys: tuple[str, ...] = ()
    """Environment variables that hold its keys."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Of the embedded engine."""
    threads: int = 1
    """Torch threads of the embedded engine."""

    def __post_init__(self) -> None:
        for name in ("tasks", "attempts", "concurrency", "turn_tokens", "turns", "threads"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("context", "result_characters"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in (
            "start_s",
            "deadline_s",
            "tool_timeout_s",
            "engine_s",
            "verify_s",
            "stop_s",
            "temperature",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if not 0 <= self.max_system_error <= 1:
            raise ValueError(f"max_system_error must lie between 0 and 1, got {self.max_system_error}")
        if self.by_expert and self.engine_address is not None:
            raise ValueError(f"engine_address must be left out for the expert, got {self.engine_address}")

    @property
    def by_expert(self) -> bool:
        """Whether the scripted expert plays."""
        return self.agent == "expert"

    @property
    def policy_folder(self) -> Path:
        """Whose tokenizer and template the trials use."""
        return self.policy if self.by_expert else Path(self.agent)

    @property
    def window(self) -> int:
        """Tokens of a trajectory."""
        return self.context or (65_536 if self.by_expert else 2_048)


class Given(NamedTuple):
    """A trial to play: `Given("audit/17", 17, Path("tasks/3fa9c01b2d4e"), task)`; task is None where unreadable."""

    trial_id: str
    index: int
    folder: Path
    task: Task | None


def main(config: Config) -> dict[str, Any]:
    """Plays all trials and writes the report; `passed` and `faults` in it are the verdict."""
    folder = config.out or Path("out") / "audit_environment" / time.strftime("%Y%m%d-%H%M%S")
    Chat(config.policy_folder)  # refuses a folder that is no policy
    if config.sandbox == "bubblewrap":
        choose_sandbox("bubblewrap")
    modal = modal_settings(config.sandbox, config.modal)
    judge = judge_client(config.judge_endpoint, config.judge_model, config.judge_keys)
    claim(folder)
    typed = shlex.join(["python", "experiments/audit_environment.py", *sys.argv[1:]])
    settings = {name: shown_path(v) if isinstance(v, Path) else v for name, v in asdict(config).items()}
    about = {"command": typed, "commit": commit_hash(ROOT), "config": settings, "machine": machine_name()}
    write_json(folder / "config.json", about)
    try:
        given = trials_of(config, folder)
    except ValueError:
        withdraw(folder)
        raise
    tally = Tally(len(given))
    kernel.adopt_orphans()
    before = remains(run_folder())
    with ExitStack() as stack:
        shown = stack.enter_context(Shown(len(given)))
        shown.note(f"audit folder {folder}")
        trajectories = stack.enter_context(JsonLines(folder / "trajectories.jsonl"))
        machine = stack.enter_context(started(config, given, folder, modal))
        shown.note(machine.sandbox_line)
        socket = serve_judge(judge, machine, config.concurrency, stack)
        spec = partial(spec_of, config, machine, socket, modal)
        begun = time.monotonic()
        stopped = play(machine, given, config.concurrency, spec, tally, trajectories, shown)
        seconds = time.monotonic() - begun
        machine.fleet.close()
        during = remains(machine.scratch, known=("trials/fleet.log",))
    after = left_after(before, during, remains(run_folder()))
    kernel.leave_orphans()
    told = {"left": {"before": before._asdict(), "after": after._asdict()}, "stopped": stopped}
    report = {**about, "concurrency": config.concurrency, **tally.report(seconds=seconds), **told}
    return finished(report, config, folder)


def shown_path(path: Path) -> str:
    """A path as a reader elsewhere finds it: from the repository on, where it lies there."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def finished(report: dict[str, Any], config: Config, folder: Path) -> dict[str, Any]:
    """The report with its verdict, written and shown."""
    found = faults(report, max_system_error=config.max_system_error, all_solved=config.by_expert)
    report |= {"finished": not report["stopped"], "faults": found, "passed": not found}
    for one in report["unsolved"]:
        one["replay"] = replay(config, one["task"])
    write_json(folder / "report.json", report)
    (folder / "report.md").write_text(page(report), encoding="utf-8")
    print_audit(report)
    print(f"report {folder / 'report.md'}")
    return report


def trials_of(config: Config, folder: Path) -> list[Given]:
    """The trials to play: those of the first attempt at every task, then those of the second, and so on."""
    if config.data is None:
        worlds = max(min(6, config.tasks), config.tasks // 12)
        made = {"split": config.split, "worlds": worlds, "tasks": config.tasks, "seed": config.seed}
        folders = generate(folder / "tasks", **made, distractors=config.distractors)
    else:
        folders = task_folders(config.data)[: config.tasks]
    tasks = [readable(path) for path in folders]
    if config.by_expert:
        for task in tasks:
            if task is not None:
                read_instruction(task.instruction)  # refuses a task of another kind
    given = [
        Given(f"audit/{index}", index, path, task)
        for index, (path, task) in enumerate(list(zip(folders, tasks)) * config.attempts)
    ]
    if config.task:
        given = [one for one in given if name_of(one) == config.task]
        if not given:
            raise ValueError(f"task must be the id of one of the {len(folders)} tasks, got {config.task!r}")
    return given


def task_folders(data: Path) -> list[Path]:
    """The task directories of a folder, or of its folder `tasks`, in the order of their names."""
    for place in (data, data / "tasks"):
        found = sorted(path.parent for path in place.glob("*/task.toml"))
        if found:
            return found
    raise ValueError(f"data must be a folder of Harbor task directories, got {data} without a */task.toml")


def readable(folder: Path) -> Task | None:
    """A task, or None where it cannot be read: its trial says why."""
    try:
        return read_task(folder)
    except ValueError:
        return None


def name_of(given: Given) -> str:
    """The task's id, or its folder's name where it cannot be read."""
    return given.task.id if given.task else given.folder.name


@contextmanager
def started(
    config: Config, given: Sequence[Given], folder: Path, modal: dict[str, Any] | None
) -> Iterator[Machinery]:
    """The fleet, warm for the tools of these tasks, and the engine of the agent."""
    toolsets = {config.toolset or one.task.toolset for one in given if one.task}
    around: dict[str, Any] = {
        "policy": config.policy_folder,
        "sandbox": config.sandbox,
        "kits": sorted({kit_of(config.harness, toolset) for toolset in toolsets} or {"brief"}),
        "modal": modal,
    }
    if config.by_expert:
        chat = Chat(config.policy_folder)
        start = partial(ScriptedEngine, chat=chat, write=lambda _, opening: expert_script(opening))
        opened = machinery_with([start], **around)
    elif config.engine_address is not None:
        engine = OtherEngine(config.engine_address)
        opened = machinery_with([lambda _: engine], **around)
    else:
        opened = machinery(
            **around,
            engine_log=folder / "engine.jsonl",
            max_context=config.window,
            max_sessions=2 * config.concurrency,
            threads=config.threads,
            device=config.device,
        )
    with opened as machine:
        yield machine


def spec_of(
    config: Config, machine: Machinery, judge_socket: str, modal: dict[str, Any] | None, given: Given
) -> dict[str, Any]:
    """What the fleet needs for a trial; its sampling depends on its place among all trials alone."""
    steps = given.task.steps if given.task else ()
    agent_s = config.deadline_s or sum(step.agent_timeout_s for step in steps) or 60.0
    verify_s = config.verify_s or sum(step.verifier_timeout_s for step in steps) or 60.0
    return {
        "trial_id": given.trial_id,
        "task": str(given.folder.resolve()),
        "policy": str(config.policy_folder.resolve()),
        "engine_address": machine.engine.place(given.trial_id),
        "sandbox": machine.sandbox,
        **({"modal": modal} if modal else {}),
        "sandbox_limits": {"start_s": config.start_s, "stop_s": config.stop_s},
        "scratch": str(machine.scratch / "trials"),
        "seed": counter_hash(config.seed, given.index),
        "purpose": "eval",
        "harness": config.harness,
        **({"toolset": config.toolset} if config.toolset else {}),
        **({"judge_socket": judge_socket} if judge_socket else {}),
        "start_s": config.start_s,
        "deadline_s": agent_s,
        "tool_timeout_s": config.tool_timeout_s,
        "engine_s": config.engine_s,
        "verify_s": verify_s,
        "stop_s": config.stop_s,
        "limits": {
            "context": config.window,
            "turn_tokens": min(config.turn_tokens, config.window),
            "turns": config.turns,
            "repairs": 2,
            "result_characters": config.result_characters,
            "nudge_ratio": 0.0,
            "temperature": config.temperature,
        },
    }


def play(
    machine: Machinery,
    given: Sequence[Given],
    concurrency: int,
    spec: Callable[[Given], dict[str, Any]],
    tally: Tally,
    trajectories: JsonLines,
    shown: Shown,
) -> str:
    """Plays the trials, so many side by side; why it stopped before the end, or ""."""
    waiting, running = deque(given), dict[str, tuple[Given, float]]()
    try:
        while waiting or running:
            while waiting and len(running) < concurrency:
                one = waiting.popleft()
                running[one.trial_id] = one, time.monotonic()
                machine.fleet.start(spec(one))
            for result in machine.fleet.poll(0.2):
                one, begun = running.pop(result["trial_id"])
                machine.engine.release(one.trial_id, failed=False)
                tally.add(result, task=name_of(one), seconds=time.monotonic() - begun)
                trajectories.write({**described(one), **result})
            shown.show(tally)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (EngineError, FleetError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def described(given: Given) -> dict[str, Any]:
    """What a line of trajectories.jsonl says about the task."""
    about: dict[str, Any] = {"purpose": "audit", "task": name_of(given), "folder": str(given.folder)}
    if (task := given.task) is None:
        return about
    more = {"level": task.level, "family": task.family, "domain": task.domain, "toolset": task.toolset}
    return about | more | {"instruction": "\n\n".join(step.instruction for step in task.steps)}


def left_after(before: Remains, during: Remains, after: Remains) -> Remains:
    """What is there now and was not before, and what the trials had left before the run's folder was removed."""
    trials = tuple(name for name in during.files if name.startswith(("trials/", "tmp/")))
    return Remains(
        tuple(line for line in after.processes if line not in before.processes),
        tuple(dict.fromkeys((*during.mounts, *after.mounts))),
        (*trials, *after.files),
    )


def replay(config: Config, task: str) -> str:
    """The command that plays one task again, sampled as it was."""
    words = ["python", "experiments/audit_environment.py"]
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in ("out", "task", "concurrency") and value != field.default:
            many = value if isinstance(value, tuple) else (value,)
            words += [f"--{field.name.replace('_', '-')}", *(str(one) for one in many)]
    return shlex.join([*words, "--task", task])


class Shown:
    """One line while the trials run: redrawn in place, or printed at every tenth where there is no terminal."""

    def __init__(self, planned: int) -> None:
        self._console, self._planned, self._said = Console(), planned, 0
        about = TextColumn("{task.fields[about]}")
        columns = (BarColumn(24), MofNCompleteColumn(), about, TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=self._console, disable=not self._console.is_terminal)
        self._row = self._bar.add_task("trials", total=planned, about="starting")

    def __enter__(self) -> Shown:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        self._bar.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def show(self, tally: Tally) -> None:
        """How far it is."""
        reward = fmean(tally.rewards) if tally.rewards else 0.0
        about = f"reward {reward:.3f}  {tally.system_errors} system errors"
        self._bar.update(self._row, completed=tally.trials, about=about)
        tenth = 10 * tally.trials // self._planned
        if not self._console.is_terminal and tenth > self._said:
            self._said = tenth
            self.note(f"{tally.trials} of {self._planned} trials  {about}")


if __name__ == "__main__":
    told = command_line("audit_environment", main, Config)
    if told["stopped"] == INTERRUPTED:
        raise SystemExit(130)
    raise SystemExit(0 if told["passed"] else 1)
