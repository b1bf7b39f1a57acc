"""One engine and one fleet for all attacks; each is played through a trial in a bubblewrap sandbox."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from attack_stage import CHAT, CLERK, Stage
from attacking import CANARY
from scripted_engine import ScriptedEngine

from system.fleet.local import LocalFleet
from system.world.assignment import draw_assignment
from system.world.company import make_company
from system.world.office import write_world
from system.world.task import write_task


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("bwrap") is None:
        missing = pytest.mark.skip(reason="bwrap is not installed (apt install bubblewrap)")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(missing)


@pytest.fixture(scope="session")
def office_tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A task of each family, with a canary among its tests and in its solution."""
    folder = tmp_path_factory.mktemp("tasks")
    company = make_company(3, split="train")
    world = write_world(company, folder / "world")
    found: dict[str, Path] = {}
    for level, index in [(1, 0), *((2, index) for index in range(12))]:
        assignment = draw_assignment(company, level=level, index=index)
        if assignment.family not in found:
            task = write_task(assignment, company, tasks=folder / "tasks", world=world)
            (task / "tests" / "secret.txt").write_text(CANARY)
            (task / "solution").mkdir()
            (task / "solution" / "solve.sh").write_text(CANARY)
            found[assignment.family] = task
    return found


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(tmp_path_factory.mktemp("engine") / "s", CHAT) as engine:
        yield engine


@pytest.fixture(scope="session")
def stage(
    engine: ScriptedEngine, office_tasks: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    scratch = tmp_path_factory.mktemp("scratch")
    warm = tuple(f"system.fleet.office:load={kit}" for kit in ("full", "code"))
    warm = (*warm, f"system.trial:load_chat={CLERK}")
    with LocalFleet(scratch, target="attack_trials:run", warm=warm) as fleet:
        yield Stage(fleet, engine, office_tasks, scratch)
