"""What every ablation shares: the settings of a run, and the arms trained one after the other from the same start.

An arm is a value: its rules for weights, loss and advantage. Seeds, tasks, their order and the start are the
same for all arms. `ablate_aggregation.py` declares three arms and calls `run` here.
"""

import hashlib
import json
import math
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple

import command
import torch

from core.advantage import group_mean_advantage
from core.aggregate import token_mean_weight
from core.counter import counter_hash
from core.loss import importance_weighted_policy_gradient
from core.schedule import Settings, StartTrial
from system.checkpoint import remove_partial, write_checkpoint
from system.engine import RestartRule
from system.fleet import Fleet
from system.fleet.local import LocalFleet
from system.fleet.ray_fleet import RayFleet
from system.journal import Journal, read_tags
from system.lock import LockedError, held, holder
from system.loop import AdvantageFunction, Crew, Loop, trial_ended
from system.model import config_from_huggingface
from system.policy import POLICY_FILES, token_count
from system.record.metrics import JsonLines, commit_hash, is_torn, lines_of, write_json
from system.record.progress import Progress
from system.record.recorder import Recorder
from system.record.report import token_pieces, write_report
from system.record.summary import arm_summary, comparisons
from system.record.table import print_summary
from system.resume import Found, differences, find_run, intervals, later_than
from system.run import Machinery, RunError, machinery
from system.sandbox import choose_sandbox
from system.trainer import OptimizerSettings, TrainerError, TrainerProcess
from system.trainer.parallel import Parallel
from system.verify.checks import read_checks
from system.world.apex import refuse_to_train
from system.world.generate import draw, generate
from system.world.names import Split
from system.world.task import Task, read_task

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Config:
    policy: Path = ROOT / "policies" / "clerk"
    """Folder of the policy to start from, an ordinary Hugging Face folder."""
    out: Path | None = None
    """Folder of this run; by default out/<script>/<time>."""
    seed: int = 0
    """First seed: of training worlds, task order and sampling."""
    seed_held_out: int = 0
    """Of the held-out worlds, which are the same for every seed."""
    seeds: int = 1
    """Runs of each arm, with seeds counted up from the first."""
    steps: int = 16
    """Optimizer steps of each arm and seed."""
    groups: int = 4
    """Groups in one step, each the trials of one task."""
    group_size: int = 8
    """Trials of one task; the advantage compares them with each other."""
    max_staleness: int = 2
    """Versions that the oldest token of a trained trajectory may lag behind the trainer."""
    max_running: int = 24
    """Trials side by side."""
    engine: Literal["embedded", "vllm"] = "embedded"
    """What samples."""
    vllm: Path | None = None
    """File with the settings of the engine "vllm", as docs/vllm.md says."""
    fleet: Literal["local", "ray"] = "local"
    """Where the trials run: on this machine, or on the nodes of a Ray cluster."""
    ray_address: str | None = None
    """Of a cluster that runs, for the fleet "ray"; by default one is started on this machine, and ended."""
    max_starting: int = 16
    """Trials of a machine whose sandboxes are starting at a time."""
    starts_per_s: float | None = None
    """Most trials that are started in a second, by all machines together; by default as many as there is room for."""
    engines: int = 1
    """Engines that sample; a trial stays with the one that had the fewest when it began."""
    engine_restarts: int = 8
    """How often an engine that ended is started again within ten minutes; its next end is the end of the run."""
    reset_kv_on_sync: bool = False
    """At new weights, compute again what older ones had cached of the trajectories under way; else it is kept, and only
    a trajectory that begins later has nothing of older weights."""
    order: Literal["oldest", "completion", "admission"] = "oldest"
    """Which of the groups that are ready are trained first."""
    late_group: Literal["wait", "drop", "mask", "train"] = "wait"
    """What to do about a slow group: wait for it before it gets too old; train on, and drop it when it is; train of it
    what is young enough; or train it however old."""
    in_order_steps: int = 0
    """So many first steps in the order of admission: in the others the first batches are of short tasks alone."""
    max_late: int | None = None
    """With late_group mask: groups that a step may leave too old; rather than leave more it waits. 0 masks nothing."""
    save_every: int = 0
    """Steps after which weights and optimizer are saved, so that a run that is killed can go on; 0 for never."""
    resume: bool = False
    """Go on with the run in the folder `out`, which must have been begun with the same settings."""
    max_retries: int = 2
    """Further attempts at a trial that met a system error."""
    max_error_share: float = 0.5
    """Share of the last 64 trials that may have met a system error; beyond it the run ends."""
    train: Path | None = None
    """Folder of Harbor task directories to train on; by default tasks are generated. Tasks that are for evaluation
    only, as those of APEX-Agents are by their licence, are refused."""
    held_out: Path | None = None
    """Folder of Harbor task directories to evaluate on; by default tasks are generated."""
    tasks: int = 48
    """Training tasks; each is drawn once an epoch."""
    tasks_held_out: int = 48
    """Held-out tasks, of other companies with other values; at most 6 for each step, so that a trial run is short."""
    attempts: int = 2
    """Trials of each held-out task."""
    worlds: int = 12
    """Companies to train in; a third as many are held out."""
    learning_rate: float = 1.5e-4
    """Of AdamW; 0 leaves the weights as they are."""
    max_grad_norm: float = 1.0
    """Bound on the norm of a step's gradient."""
    delta: float = 0.15
    """DPPO (arXiv:2602.04879): how far a token's probability may move from its rollout's before the gradient stops."""
    max_ratio: float = 5.0
    """DPPO: cap of the importance ratio (the paper's C)."""
    token_budget: int = 4096
    """Tokens of one micro-batch."""
    context: int = 800
    """Tokens of a training trajectory."""
    context_held_out: int = 1280
    """Tokens of a held-out trajectory: longer, as in the recipe that README names (160K and 256K)."""
    turn_tokens: int = 160
    """Most tokens of one turn."""
    turns: int = 24
    """Most turns of a trial."""
    nudge_ratio: float = 0.2
    """Share of the context left at which a training trial is reminded once to come to an end."""
    temperature: float = 1.0
    """Of sampling; the trainer applies the same."""
    judge_endpoint: str = ""
    """OpenAI-compatible address of a judge, for tasks with a rubric; what comes before /chat/completions."""
    judge_model: str = ""
    """Its model."""
    judge_keys: tuple[str, ...] = ()
    """Environment variables that hold its keys."""
    judge_s: float = 45.0
    """Deadline of a question to the judge; beyond it the trial met a system error."""
    sandbox: Literal["auto", "bubblewrap", "process", "modal"] = "auto"
    """Where the tools run."""
    modal: Path | None = None
    """File with the settings of the sandbox "modal", as docs/modal.md says."""
    deadline_s: float = 120.0
    """Wall clock of a trial; beyond it the trial has no reward, since the clock also measures the machine."""
    trainer_s: float = 1800.0
    """What the trainer may take for a step or a save; beyond it the run ends."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Of engine and trainer."""
    trainer: Literal["torch", "megatron"] = "torch"
    """What takes the steps: plain torch, or Megatron-Core (the extra "megatron")."""
    trainer_ranks: int = 1
    """Processes that share each step."""
    parallel: Parallel = Parallel()
    """How the ranks of the Megatron trainer share model and step."""
    threads: int = 1
    """Torch threads of the engine and of the trainer each; on two cores more than one makes both slower."""
    confidence: float = 0.95
    """Of the intervals, over all comparisons of the run together."""
    assumed_seed_spread: float = 0.03
    """Spread of pass@1 between seeds, for the number of runs a tie would need; used where a single seed cannot tell."""

    def __post_init__(self) -> None:
        least = {
            **dict.fromkeys(
                ("seed", "seed_held_out", "max_staleness", "in_order_steps", "max_retries", "save_every"), 0
            ),
            **dict.fromkeys(("seeds", "steps", "groups", "max_running", "tasks", "tasks_held_out"), 1),
            **dict.fromkeys(("engines", "max_starting"), 1),
            "engine_restarts": 0,
            **dict.fromkeys(("attempts", "worlds", "token_budget", "turn_tokens", "turns", "threads"), 1),
            **dict.fromkeys(("group_size", "context", "context_held_out"), 2),
        }
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise ValueError(f"{name} must be at least {bound}, got {getattr(self, name)}")
        for name in ("max_grad_norm", "delta", "max_ratio", "temperature", "deadline_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if self.starts_per_s is not None and not self.starts_per_s > 0:
            raise ValueError(f"starts_per_s must be positive, got {self.starts_per_s}")
        if self.ray_address is not None and self.fleet != "ray":
            raise ValueError(f"ray_address goes with the fleet ray, got it with {self.fleet}")
        if not 0 <= self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be finite and not negative, got {self.learning_rate}")
        if self.max_late is not None and not (self.max_late >= 0 and self.late_group == "mask"):
            told = f"{self.max_late} with late_group {self.late_group}"
            raise ValueError(f"max_late must be at least 0 and go with late_group mask, got {told}")
        if not 0 <= self.max_error_share <= 1:
            raise ValueError(f"max_error_share must lie between 0 and 1, got {self.max_error_share}")
        if not 0 <= self.nudge_ratio <= 1:
            raise ValueError(f"nudge_ratio must lie between 0 and 1, got {self.nudge_ratio}")
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence must lie between 0 and 1, got {self.confidence}")
        if not 0 <= self.assumed_seed_spread < math.inf:
            raise ValueError(
                f"assumed_seed_spread must be finite and not negative, got {self.assumed_seed_spread}"
            )

    @property
    def evaluation_tasks(self) -> int:
        """Held-out tasks that are used."""
        return min(self.tasks_held_out, 6 * self.steps)

    @property
    def worlds_held_out(self) -> int:
        """Companies of the held-out tasks."""
        return max(1, self.worlds // 3)


class Arm(NamedTuple):
    """The rules of one arm: functions of core with their settings bound."""

    weight: Callable[..., Any]
    loss: Callable[..., Any]
    advantage: AdvantageFunction = partial(group_mean_advantage, tolerance=1e-6)


command_line = partial(
    command.command_line,
    broken=(TrainerError,),
    stopped="stopped; `python -m system.record.report RUN` shows what there is",
)
"""Runs a script that trains."""


def run(
    config: Config,
    arms: Mapping[str, Arm],
    script: str,
    *,
    start: bool = True,
    keep_weights: bool = False,
) -> dict[str, Any]:
    """Trains every arm with every seed, evaluates each on the held-out tasks, writes the files and the report.

    Args:
        script: its path in the repository.
        start: evaluate the start as well, at the end; without arms that is all.
        keep_weights: of every version, in the folder `versions` of the run; of one arm and seed.
    """
    if keep_weights and (len(arms), config.seeds) != (1, 1):
        raise ValueError(f"seeds must be 1 where weights of one arm are kept, got {config.seeds}")
    begun = time.monotonic()
    folder = config.out or Path("out") / Path(script).stem / time.strftime("%Y%m%d-%H%M%S")
    check_policy(config.policy, context=max(config.context, config.context_held_out))
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu where torch finds no GPU, got cuda")
    if config.trainer == "torch" and config.parallel != Parallel():
        raise ValueError(f"parallel must go with trainer megatron, got {config.parallel} for trainer torch")
    if config.sandbox == "bubblewrap":
        choose_sandbox("bubblewrap")
    modal = command.modal_settings(config.sandbox, config.modal)
    vllm = command.vllm_settings(config.engine, config.vllm)
    judge = command.judge_client(
        config.judge_endpoint, config.judge_model, config.judge_keys, timeout_s=config.judge_s
    )
    given = {"train": read_tasks(config.train, training=True), "eval": read_tasks(config.held_out)}
    check_worlds(config)
    settings = {
        key: str(value) if isinstance(value, Path) else value for key, value in asdict(config).items()
    }
    commit = commit_hash(ROOT)
    typed = shlex.join(["python", script, *sys.argv[1:]])
    own = what_matters(config, arms, given)
    written = {**settings, **own, "arms": list(arms), "commit": commit, "command": typed}
    if config.resume:
        check_same(folder, own)
    else:
        command.claim(folder)
    names = [*arms, *(["warm_start"] if start else [])]
    planned = {name: config.steps * config.seeds if name in arms else 0 for name in names}
    with held(folder), Progress(planned) as progress:
        if config.resume:
            for note in told_of(folder, commit):
                progress.note(note)
        else:
            write_json(folder / "config.json", written)
        progress.note(f"run folder {folder}")
        with (
            machinery(
                policy=config.policy,
                engine_log=folder / "engine.jsonl",
                sandbox=config.sandbox,
                max_context=max(config.context, config.context_held_out),
                max_sessions=2 * config.max_running,
                threads=config.threads,
                device=config.device,
                fleet=fleet_of(config),
                engines=config.engines,
                restart=RestartRule(most=config.engine_restarts),
                kits=sorted({task.toolset for tasks in given.values() for task in tasks} or {"brief"}),
                modal=modal,
                vllm=vllm,
            ) as machine,
            ExitStack() as stack,
        ):
            progress.note(machine.sandbox_line)
            socket = command.serve_judge(judge, machine, config.max_running, stack)
            runs = Runs(config, folder, given, machine, progress, begun, modal, socket, own, keep_weights)
            with closing(runs):
                for seed in range(config.seed, config.seed + config.seeds):
                    for name in names:
                        runs.one(name, seed, arms.get(name))
            spent = {
                **runs.cpu_seconds,
                "engine": machine.engine.stats().get("cpu_s", 0.0),
                "driver": time.process_time(),
            }
    compared = partial(
        comparisons,
        runs.recorders,
        confidence=config.confidence,
        assumed_seed_spread=config.assumed_seed_spread,
    )
    summary = {
        "config": settings | {"tasks_held_out": runs.tasks_held_out},
        "commit": commit,
        "command": typed,
        "finished": True,
        "seconds": time.monotonic() - runs.begun,
        "arms": {name: arm_summary(runs.recorders[name], runs.trained[name]) for name in arms},
        "warm_start": arm_summary(runs.recorders["warm_start"], []) if start else None,
        "gains": compared([("warm_start", arm) for arm in arms] if start else []),
        "comparisons": compared(list(combinations(arms, 2))),
        "throughput": {
            "trials_per_minute": 60 * runs.trials / runs.seconds if runs.seconds else None,
            "cpu_seconds_per_trial": {
                name: value / runs.trials_since for name, value in spent.items() if runs.trials_since
            },
            "first_step_seconds": runs.first_step_seconds,
        },
    }
    write_json(folder / "summary.json", summary)
    write_report(folder, decode=token_pieces(config.policy / "tokenizer.json"))
    print_summary(summary)
    print(f"report {folder / 'report.html'}")
    return summary


class Runs:
    """The arms of a run, one at a time on the same engine and fleet; what they leave for the summary."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        given: Mapping[str, list[Task]],
        machine: Machinery,
        progress: Progress,
        begun: float,
        modal: dict[str, Any] | None,
        judge_socket: str,
        own: dict[str, Any],
        keep_weights: bool,
    ) -> None:
        self.config, self.folder, self.given, self.machine, self.modal = config, folder, given, machine, modal
        self.judge_socket, self.own = judge_socket, own
        self.keep_weights = keep_weights
        self.progress, self.begun = progress, begun
        self.trainer: TrainerProcess | None = None
        self.metrics = JsonLines(folder / "metrics.jsonl")
        self.trajectories = JsonLines(folder / "trajectories.jsonl")
        self.recorders: dict[str, list[Recorder]] = {}
        self.trained: dict[str, list[float]] = {}
        self.cpu_seconds = {"tools": 0.0, "agent": 0.0, "trainer": 0.0}
        self.trials, self.seconds, self.tasks_held_out = 0, 0.0, 0
        self.trials_since = 0
        """Those that ended since the run went on; what the processes spent is known of them alone."""
        self.first_step_seconds: float | None = None

    def one(self, name: str, seed: int, arm: Arm | None) -> None:
        """One arm with one seed; without an arm only the evaluation of the start."""
        config = self.config
        begun = time.monotonic()
        tasks = self._tasks(seed)
        folders = {str(task.folder.parent.resolve()) for some in tasks.values() for task in some}
        self.machine.fleet.reach(sorted(folders))
        self.tasks_held_out = len(tasks["eval"])
        recorder = Recorder(
            arm=name,
            seed=seed,
            tasks={purpose: [described(task) for task in some] for purpose, some in tasks.items()},
            metrics=self.metrics,
            trajectories=self.trajectories,
            progress=self.progress,
        )
        self.recorders.setdefault(name, []).append(recorder)
        self.progress.phase(name, "starting")
        # Without an arm the trainer takes no step: it brings the engine back to the weights of the start.
        rules = arm or Arm(weight=token_mean_weight, loss=importance_weighted_policy_gradient)
        trainer = self._trainer_with(rules)
        settings = self._schedule(seed, steps=config.steps if arm else 0, tasks=tasks)
        tags, checkpoints = recorder.tags, self.folder / "checkpoints" / f"{name}-{seed}"
        about = {**tags, **self.own}
        found = self._found(about, f"{name}/{seed}", checkpoints, settings, recorder)
        weights = self.folder / "weights" / f"{name}-{seed}"
        before = found.seconds if found else 0.0
        self.begun -= before
        if found and found.checkpoint:
            trainer.load(found.checkpoint.folder, version=found.version)
        if found and _is_done(found, recorder):
            if arm and found.checkpoint:  # it may have been killed before these were written whole
                trainer.save(weights)
            self._count(name, recorder, before)
            return
        entries = 1 + len(found.entries) if found else 0
        journal = Journal(
            self.folder / "events.jsonl", tags=tags, settings=settings, written=entries, seconds=before
        )
        for event, actions in found.unheard if found else ():
            journal.write(event, actions)
        loop = Loop(
            settings,
            crew=Crew(fleet=self.machine.fleet, engine=self.machine.engine, trainer=trainer),
            name=f"{name}/{seed}",
            spec=partial(self._spec, tasks, seed),
            advantage=rules.advantage,
            journal=journal,
            observer=recorder,
            reset_kv=config.reset_kv_on_sync,
            save=lambda version: write_checkpoint(checkpoints, version, save=trainer.save, about=about),
            resumed=found.resumed if found else None,
        )
        try:
            reason = loop.run()
            if arm:
                trainer.save(weights)
        finally:
            journal.close()
        if reason != "all steps trained":
            raise RunError(f"{name} seed {seed} ended early: {reason}; see {self.folder / 'events.jsonl'}")
        self._count(name, recorder, before + time.monotonic() - begun)

    def _count(self, name: str, recorder: Recorder, seconds: float) -> None:
        """Takes in what an arm came to, for the summary."""
        self.trained.setdefault(name, []).append(seconds)
        if self.first_step_seconds is None and recorder.first_step_at is not None:
            self.first_step_seconds = recorder.first_step_at - self.begun
        for part in ("tools", "agent"):
            self.cpu_seconds[part] += recorder.cpu_seconds[part]
        spent = max(self.cpu_seconds["trainer"], recorder.trainer_cpu_s)  # of its process
        self.cpu_seconds["trainer"] = spent
        self.trials += recorder.trials
        self.trials_since += recorder.trials - recorder.recalled
        self.seconds += seconds

    def _found(
        self, about: dict[str, Any], name: str, checkpoints: Path, settings: Settings, recorder: Recorder
    ) -> Found | None:
        """What a killed run left of this arm and seed; the recorder has then seen it."""
        tags = recorder.tags
        events = self.folder / "events.jsonl"
        if not self.config.resume or not events.exists() or tags not in read_tags(events):
            return None
        wanted = {"tags": tags, "name": name, "settings": settings, "about": about, "defaults": DEFAULTS}
        found = find_run(self.folder, checkpoints, **wanted)
        remove_partial(checkpoints)
        for note in found.notes:
            self.progress.note(note)
        if not found.resumed.state.finished:
            recorder.metrics.rewrite(later_than(tags, found.version))
        trials = lines_of(self.folder / "trajectories.jsonl", tags)
        step, zero_variance = intervals(found.happened)
        recorder.recall(
            (
                (t, trial_ended("", t).valid, step.get(t["trial_id"].removeprefix(f"{name}/"), 0))
                for t in trials
            ),
            lines_of(self.folder / "metrics.jsonl", tags),
            version=found.resumed.state.trained if found.resumed.state.finished else found.version,
            zero_variance=zero_variance,
            seconds=found.seconds,
        )
        if not _is_done(found, recorder):
            self.progress.note(f"{name} goes on from version {found.version}")
        return found

    def _tasks(self, seed: int) -> dict[str, list[Task]]:
        """Training tasks of this seed; the held-out tasks are the same for every seed."""
        c = self.config
        train = self.given["train"] or self._made(f"train-{seed}", "train", c.worlds, c.tasks, seed)
        held_out = self.given["eval"] or self._made(
            "heldout", "heldout", c.worlds_held_out, c.evaluation_tasks, c.seed_held_out
        )
        return {"train": train, "eval": held_out[: c.evaluation_tasks]}

    def _made(self, name: str, split: Split, worlds: int, tasks: int, seed: int) -> list[Task]:
        folder = self.folder / "tasks" / name
        if not folder.exists():
            partial_folder = folder.with_name(f".{name}.partial")
            shutil.rmtree(partial_folder, ignore_errors=True)
            generate(partial_folder, split=split, worlds=worlds, tasks=tasks, seed=seed)
            partial_folder.rename(folder)
        return read_tasks(folder / "tasks")

    def _trainer_with(self, arm: Arm) -> TrainerProcess:
        """The one trainer of all arms, at the start's weights with this arm's rules."""
        if self.trainer is not None:
            self.trainer.begin(weight_function=arm.weight, loss_function=arm.loss)
            return self.trainer
        config = self.config
        self.trainer = TrainerProcess(
            config.policy,
            weight_function=arm.weight,
            loss_function=arm.loss,
            optimizer=OptimizerSettings(
                learning_rate=config.learning_rate,
                beta1=0.9,
                beta2=0.98,
                epsilon=1e-8,
                weight_decay=0.01,
                max_grad_norm=config.max_grad_norm,
            ),
            token_budget=config.token_budget,
            temperature=config.temperature,
            weights_dir=self.folder / "versions" if self.keep_weights else self.machine.scratch / "weights",
            keep_weights=self.keep_weights,
            input_path=self.folder / "trainer_input.jsonl",
            answer_s=config.trainer_s,
            threads=config.threads,
            device=config.device,
            ranks=config.trainer_ranks,
            parallel=config.parallel if config.trainer == "megatron" else None,
        )
        return self.trainer

    def close(self) -> None:
        """Ends the trainer; engine and fleet are the machinery's."""
        if self.trainer is not None:
            self.trainer.close()
        self.metrics.close()
        self.trajectories.close()

    def _schedule(self, seed: int, *, steps: int, tasks: Mapping[str, Sequence[Task]]) -> Settings:
        config = self.config
        return Settings(
            steps=steps,
            batch_groups=config.groups,
            group_size=config.group_size,
            max_staleness=config.max_staleness,
            max_running=config.max_running,
            max_retries=config.max_retries,
            min_valid=2,
            tolerance=1e-6,
            max_zero_variance=4 * config.groups,
            max_lost=config.groups,
            order=config.order,
            in_order_steps=config.in_order_steps,
            late_group=config.late_group,
            max_late=config.max_late,
            max_error_share=config.max_error_share,
            error_window=64,
            requeue_stale=True,
            task_count=len(tasks["train"]),
            seed=seed,
            save_every=config.save_every,
            evaluate_at=(steps,),
            evaluation_tasks=len(tasks["eval"]),
            evaluation_samples=config.attempts,
        )

    def _spec(
        self, tasks: Mapping[str, Sequence[Task]], seed: int, action: StartTrial, trial_id: str
    ) -> dict[str, Any]:
        """What a trial needs; its sampling seed depends on the place in the schedule, not on the arm."""
        config, training = self.config, action.purpose == "train"
        place = (
            (action.group_id, action.sample, action.attempt) if training else (-1, action.task, action.sample)
        )
        return {
            "trial_id": trial_id,
            "task": str(tasks[action.purpose][action.task].folder.resolve()),
            "policy": str(config.policy.resolve()),
            "sandbox": self.machine.sandbox,
            **({"modal": self.modal} if self.modal else {}),
            **({"judge_socket": self.judge_socket} if self.judge_socket else {}),
            "scratch": str(self.machine.scratch / "trials"),
            "seed": counter_hash(seed, *place),
            "purpose": action.purpose,
            "start_s": 30.0,
            "deadline_s": config.deadline_s,
            "tool_timeout_s": 30.0,
            "engine_s": 60.0,
            "verify_s": 60.0,
            "stop_s": 15.0,
            "limits": {
                "context": config.context if training else config.context_held_out,
                "turn_tokens": config.turn_tokens,
                "turns": config.turns,
                "repairs": 2,
                "result_characters": 1200,
                "nudge_ratio": config.nudge_ratio if training else 0.0,
                "temperature": config.temperature,
            },
        }


def fleet_of(config: Config) -> Callable[..., Fleet]:
    """What makes the fleet of a run."""
    pace = {"max_starting": config.max_starting, "starts_per_s": config.starts_per_s or math.inf}
    if config.fleet == "local":
        return partial(LocalFleet, **pace)
    # A cluster's nodes say how many trials they take; the Ray of this machine's own takes all.
    slots = None if config.ray_address else config.max_running
    return partial(RayFleet, address=config.ray_address, slots=slots, **pace)


def _is_done(found: Found, recorder: Recorder) -> bool:
    """Whether a run came to its end and its last evaluation, which is told after that, was written."""
    return found.resumed.state.finished and recorder.evaluated is not None


def read_tasks(folder: Path | None, *, training: bool = False) -> list[Task]:
    """The task directories of a folder, in the order of their names; none without a folder.

    Those that are for evaluation only are refused for training.
    """
    if folder is None:
        return []
    if not folder.is_dir():
        raise ValueError(f"tasks must lie in a folder, got {folder}")
    if training:
        refuse_to_train(folder)
    tasks = [read_task(path) for path in sorted(folder.iterdir()) if path.is_dir()]
    if training:
        refuse_to_train(folder, tasks)
    if not tasks:
        raise ValueError(f"a folder of tasks must hold task directories, got {folder} without one")
    for task in tasks:
        if task.world is None:
            raise ValueError(f"a task must bring a world in environment/world, got {task.folder}")
        if len(task.steps) != 1:
            raise ValueError(
                f"a task must have a single step to be run, got {len(task.steps)} in {task.folder}"
            )
        read_checks(task.folder / "tests" / "checks.json")
    ids = [task.id for task in tasks]
    if repeated := [task.folder for task in tasks if ids.count(task.id) > 1]:
        raise ValueError(f"tasks must differ in more than their worlds, got {repeated[0]} and {repeated[1]}")
    return tasks


NOT_ITS_OWN = (
    *(
        "resume",
        "out",
        "judge_endpoint",
        "judge_keys",
        "fleet",
        "ray_address",
        "max_starting",
        "starts_per_s",
    ),
    *("engine_restarts", "trainer_s", "trainer_ranks", "parallel"),
)
"""Settings that may be others when a run goes on: where it lies, where trials and judge are, and patience."""


def what_matters(
    config: Config, arms: Mapping[str, Arm], given: Mapping[str, Sequence[Task]]
) -> dict[str, Any]:
    """All that must be the same when a run goes on: settings, rules of the arms, policy and tasks; as JSON."""
    settings = {name: value for name, value in asdict(config).items() if name not in NOT_ITS_OWN}
    rules = {
        name: ", ".join(described_rule(rule) for rule in (arm.weight, arm.loss, arm.advantage))
        for name, arm in arms.items()
    }
    read = {"policy_files": digest_of(config.policy)} | {
        f"{name}_tasks": digest_of_tasks(tasks) for name, tasks in given.items() if tasks
    }
    return as_json({**settings, "rules": rules, **read})


def as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As a file of a run tells them; infinity is null there."""
    return json.loads(json.dumps(settings, default=str), parse_constant=lambda _: None)


def described_rule(rule: Callable[..., Any]) -> str:
    """A function with its bound settings: "dppo_binary_tv(max_ratio=5.0)"."""
    if isinstance(rule, partial):
        bound = ", ".join([*map(str, rule.args), *(f"{k}={v}" for k, v in sorted(rule.keywords.items()))])
        return f"{described_rule(rule.func)}({bound})"
    return getattr(rule, "__qualname__", type(rule).__qualname__)


def digest_of(policy: Path) -> str:
    """Of what a policy's folder holds."""
    found = hashlib.sha256()
    for path in sorted(policy.iterdir()):
        if path.is_file() and path.suffix in (".json", ".jinja", ".safetensors", ".txt"):
            found.update(f"{path.name} {path.stat().st_size} ".encode())
            with path.open("rb") as file:
                found.update(file.read(DIGESTED_BYTES))
    return found.hexdigest()[:16]


DIGESTED_BYTES = 64 << 20
"""Of each file: the whole of a small policy, the beginning of a large one."""


def digest_of_tasks(tasks: Sequence[Task]) -> str:
    """Of what some task directories ask for and how it is checked."""
    found = hashlib.sha256()
    for task in tasks:
        found.update(json.dumps(described(task), sort_keys=True).encode())
        for path in sorted(task.folder.glob("*.json")) + sorted(task.folder.glob("tests/*")):
            if path.is_file():
                found.update(path.read_bytes())
    return found.hexdigest()[:16]


DEFAULTS = as_json({f.name: f.default for f in fields(Config)})
"""What a run had in a setting that there was not when it was begun."""


def check_same(folder: Path, own: Mapping[str, Any]) -> None:
    """Refuses to go on with a run that lives, or with other settings, rules, policy or tasks than it was begun with."""
    if pid := holder(folder):
        raise LockedError(folder, pid)
    try:
        before = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"out must be the folder of a run to be resumed, got {folder}: {error}") from None
    if changed := differences({**DEFAULTS, **before}, own):
        raise ValueError(f"a run must go on with its own settings, got others: {changed}")


def told_of(folder: Path, commit: str) -> list[str]:
    """What to say of a run that goes on: lines that are lost, and whether its code is another now."""
    names = ("events.jsonl", "trajectories.jsonl", "metrics.jsonl", "engine.jsonl", "trainer_input.jsonl")
    torn = [name for name in names if is_torn(folder / name)]
    told = [f"the last line of {name} was cut off: what it told of comes again" for name in torn]
    before = json.loads((folder / "config.json").read_text()).get("commit")
    if before != commit:
        told.append(f"the run was begun at commit {before or '(none)'}, and goes on at {commit or '(none)'}")
    return told


def check_worlds(config: Config) -> None:
    """Refuses worlds that are too few for so many different tasks, before anything is started."""
    if config.train is None:
        for seed in range(config.seed, config.seed + config.seeds):
            draw(split="train", worlds=config.worlds, tasks=config.tasks, seed=seed)
    if config.held_out is None:
        tasks, seed = config.evaluation_tasks, config.seed_held_out
        draw(split="heldout", worlds=config.worlds_held_out, tasks=tasks, seed=seed)


def check_policy(folder: Path, *, context: int) -> None:
    """Refuses a policy folder that lacks a file or whose window is too short, before anything is started."""
    for name in (*POLICY_FILES, "generation_config.json"):
        if not (folder / name).is_file():
            raise ValueError(f"policy must be a folder with {name}, got {folder}")
    try:
        described = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"config.json of the policy must be JSON, got {folder}: {error}") from None
    longest = config_from_huggingface(described, token_count=token_count(folder)).max_position_embeddings
    if context > longest:
        raise ValueError(
            f"context must be at most max_position_embeddings {longest} of the policy, got {context}"
        )


def described(task: Task) -> dict[str, Any]:
    """What the files of a run say about a task."""
    return {
        "task": task.id,
        "level": task.level,
        "family": task.family,
        "domain": task.domain,
        "instruction": task.instruction,
    }
