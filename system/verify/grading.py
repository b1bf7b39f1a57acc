"""Which verifiers a task brings, and the one verdict that they make together."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any

from ..sandbox import scratch
from .checks import grade, read_checks
from .fault import VerifyError
from .judge import Judge
from .rubric import Rubric, judged, read_rubric
from .script import ScriptLimits, run_script, who_is_to_blame
from .verdict import Verdict
from .world import GradedWorld


def verify(
    task_folder: Path,
    world: GradedWorld,
    answer: str,
    *,
    judge: Judge | None = None,
    scratch_root: Path | None = None,
    timeout_s: float | None = None,
) -> Verdict:
    """Grades a frozen world and a final answer by what the task's folder brings.

    tests/checks.json is ours and graded here; a rubric in bartleby.json or archipelago.json goes to the judge;
    with both, the reward counts the criteria of both, and a gate still makes it zero. Only a task that has neither
    is graded by running its tests/test.sh: the scripts of others ask a judge of their own, with a key that no
    sandbox gets.

    Args:
        judge: for a rubric.
        scratch_root: where a test script's copies lie; see `run_script`.
        timeout_s: of a test script; the task's own [verifier] timeout_sec if None. Grading takes up to 1.25 times that:
            a script that an agent's world keeps from ending is tried on the untouched world.

    Raises:
        VerifyError: grading failed, and there is no reward.
    """
    try:
        rubric = read_rubric(task_folder)
        verdicts = []
        if (task_folder / "tests" / "checks.json").is_file():
            verdicts.append(grade(read_checks(task_folder / "tests" / "checks.json"), world, answer))
        if rubric is not None:
            if judge is None:
                raise VerifyError(
                    "judge_missing", f"a task with a rubric needs a judge, got none for {task_folder}"
                )
            instruction = (task_folder / "instruction.md").read_text()
            verdicts.append(judged(rubric, instruction=instruction, answer=answer, world=world, judge=judge))
        if not verdicts:
            settings = _settings(task_folder)
            tests, verifier = task_folder / "tests", settings.get("verifier", {})
            verdicts.append(_by_script(tests, settings, verifier, world, answer, scratch_root, timeout_s))
        return _together(verdicts, rubric)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise VerifyError("task", " ".join(f"{type(error).__name__}: {error}".split())) from error


def _together(verdicts: list[Verdict], rubric: Rubric | None) -> Verdict:
    if len(verdicts) == 1:
        return verdicts[0]
    criteria = tuple(criterion for verdict in verdicts for criterion in verdict.criteria)
    passed = all(criterion.met for criterion in criteria)
    earned = [criterion.met for criterion in criteria if not criterion.gate]
    gated = any(criterion.gate and not criterion.met for criterion in criteria)
    whole = rubric is not None and rubric.scoring == "all"
    reward = float(passed) if whole else 0.0 if gated else sum(earned) / len(earned)
    return Verdict(reward=reward, passed=passed, criteria=criteria)


def verify_step(
    task_folder: Path, name: str, world: GradedWorld, answer: str, *, scratch_root: Path
) -> Verdict:
    """Grades the world after a step of a task that has several, by the step's own tests over those of the task.

    Where both have a file of one name the step's counts. checks.json is graded here, test.sh is run, as by `verify`.

    Raises:
        VerifyError: grading failed, and there is no reward.
    """
    try:
        settings = _settings(task_folder)
        step = next(table for table in settings["steps"] if table["name"] == name).get("verifier", {})
        common = settings.get("verifier", {})
        verifier = {**common, **step, "env": {**common.get("env", {}), **step.get("env", {})}}
        place = scratch.new_folder(scratch_root)
        try:
            for tests in (task_folder / "tests", task_folder / "steps" / name / "tests"):
                if tests.is_dir():
                    shutil.copytree(tests, place / "tests", symlinks=True, dirs_exist_ok=True)
            if (place / "tests" / "checks.json").is_file():
                return grade(read_checks(place / "tests" / "checks.json"), world, answer)
            return _by_script(place / "tests", settings, verifier, world, answer, scratch_root, None)
        finally:
            scratch.remove_folder(place)
    except (ValueError, KeyError, TypeError, OSError, StopIteration) as error:
        raise VerifyError("task", " ".join(f"{type(error).__name__}: {error}".split())) from error


def _settings(task_folder: Path) -> dict[str, Any]:
    toml = task_folder / "task.toml"
    return tomllib.loads(toml.read_text()) if toml.is_file() else {}


def _by_script(
    tests: Path,
    settings: dict[str, Any],
    verifier: dict[str, Any],
    world: GradedWorld,
    answer: str,
    scratch_root: Path | None,
    timeout_s: float | None,
) -> Verdict:
    environment = settings.get("environment", {})
    variables = {str(name): str(value) for name, value in verifier.get("env", {}).items()}
    hosts = sorted(name for name, value in variables.items() if value.startswith("${"))
    if hosts:
        raise VerifyError(
            "task", f"a test script gets nothing of the host's environment, got {', '.join(hosts)}"
        )

    def grade(world: GradedWorld, answer: str, seconds: float) -> Verdict:
        return run_script(
            tests,
            world,
            answer,
            workdir=environment.get("workdir") or "/world",
            environment=variables,
            scratch_root=scratch_root,
            limits=ScriptLimits(seconds=seconds),
        )

    seconds = timeout_s or float(verifier.get("timeout_sec", 600.0))
    return who_is_to_blame(grade, world, answer, seconds=seconds)
