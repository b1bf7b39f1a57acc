"""Grading: the expert earns everything, idleness and near misses nothing, damage elsewhere gates to zero."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import openpyxl
import pytest
from playing import copied, play

from system.sandbox.frozen import FrozenWorld
from system.tools.files import write_file
from system.tools.sheets import edit_cell
from system.verify import VerifyError, verify
from system.verify.__main__ import main
from system.verify.checks import grade, numbers_in, read_checks
from system.world.assignment import draw_assignment
from system.world.company import make_company
from system.world.office import write_world
from system.world.task import Task, read_task, write_task


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Task]:
    """One task of every family and level that there is, over three companies."""
    folder = tmp_path_factory.mktemp("tasks")
    companies = [make_company(seed, split="train") for seed in range(3)]
    worlds = [write_world(company, folder / "worlds" / company.id) for company in companies]
    found: dict[tuple[str, int], Task] = {}
    for index in range(60):
        for level in (1, 2, 3, 4):
            company, world = companies[index % 3], worlds[index % 3]
            assignment = draw_assignment(company, level=level, index=index)
            if (assignment.family, level) not in found:
                place = write_task(assignment, company, tasks=folder / "tasks", world=world)
                found[assignment.family, level] = read_task(place)
    assert len(found) == 11
    return found


EVERY = [
    ("find", 1),
    ("find", 2),
    *((family, level) for family in ("sum", "edit", "write") for level in (2, 3, 4)),
]
FAMILIES = [("find", 1), ("sum", 3), ("edit", 3), ("write", 3)]


def world_of(task: Task) -> Path:
    assert task.world is not None
    return task.world


@pytest.mark.parametrize("kind", EVERY)
def test_expert_earns_the_whole_reward(kind: tuple[str, int], tasks: dict, tmp_path: Path):
    task = tasks[kind]
    place = tmp_path / "world"
    world = copied(world_of(task), place)
    answer, _ = play(task.instruction, place)
    verdict = verify(task.folder, world, answer)
    assert verdict.reward == 1.0 and verdict.passed, verdict
    assert all(criterion.met for criterion in verdict.criteria)


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("answer", ["", "done"])
def test_doing_nothing_earns_nothing(kind: tuple[str, int], answer: str, tasks: dict):
    task = tasks[kind]
    verdict = verify(task.folder, FrozenWorld(lower=world_of(task), root=world_of(task)), answer)
    assert verdict.reward == 0.0 and not verdict.passed


@pytest.mark.parametrize("kind", FAMILIES)
def test_touching_another_file_gates_to_zero(kind: tuple[str, int], tasks: dict, tmp_path: Path):
    task = tasks[kind]
    for number, damage in enumerate(_DAMAGES):
        place = tmp_path / f"world{number}"
        world = copied(world_of(task), place)
        answer, _ = play(task.instruction, place)
        damage(place)
        verdict = verify(task.folder, world, answer)
        assert verdict.reward == 0.0 and not verdict.passed, damage
        assert [c.met for c in verdict.criteria if c.name == "rest of the world"] == [False]


def _append(root: Path) -> None:
    (root / "handbook.txt").write_text((root / "handbook.txt").read_text() + "x")


_DAMAGES: list[Callable[[Path], object]] = [
    _append,
    lambda root: (root / "rates.csv").unlink(),
    lambda root: (root / "chat" / "new.json").write_text("[]"),
    lambda root: (root / "link").symlink_to("/etc/passwd"),
    lambda root: shutil.rmtree(root / "chat"),
    lambda root: os.mkfifo(root / "pipe"),
]


@pytest.mark.parametrize("kind", [("find", 1), ("sum", 3)])
def test_a_near_answer_earns_nothing(kind: tuple[str, int], tasks: dict):
    task = tasks[kind]
    world = FrozenWorld(lower=world_of(task), root=world_of(task))
    right = read_checks(task.folder / "tests" / "checks.json")[0]["expected"]
    for wrong in (
        right + 1,
        right - 1,
        f"{right}0",
        -right,
        f"{right}.5",
        f"{right} {right}",
        f"{right} or {right + 1}",
    ):
        assert verify(task.folder, world, str(wrong)).reward == 0.0, wrong
    for fine in (f"{right:,}", f"The total is {right}.", f"{right}.0", f" {right}\n"):
        assert verify(task.folder, world, fine).reward == 1.0, fine


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", []),
        ("none", []),
        ("4,821", [4821]),
        ("1,23", [1, 23]),
        ("12,345,67", [12345, 67]),
        ("-3.5", [-3.5]),
        ("Q4 is 12", [4, 12]),
        ("٤٨", [48]),
        ("2026-03-02", [2026, -3, -2]),
    ],
)
def test_numbers_in_finds_every_number(text: str, numbers: list[float]):
    assert numbers_in(text) == numbers


def test_half_an_edit_earns_half(tasks: dict, tmp_path: Path):
    task = tasks["edit", 3]
    place = tmp_path / "world"
    world = copied(world_of(task), place)
    check = next(c for c in read_checks(task.folder / "tests" / "checks.json") if c["kind"] == "cell_value")
    edit_cell(place, check["path"], check["cell"], str(check["expected"]))
    verdict = verify(task.folder, world, "done")
    assert verdict.reward == 0.5 and not verdict.passed


def test_an_edit_that_changes_another_cell_earns_nothing(tasks: dict, tmp_path: Path):
    task = tasks["edit", 2]
    check = read_checks(task.folder / "tests" / "checks.json")[0]
    other = "B2" if check["cell"] != "B2" else "B3"
    for number, (cell, value) in enumerate(
        [(other, "1"), ("A1", "Thing"), ("XFD1048576", "x"), (_total(task, check), "5")]
    ):
        place = tmp_path / f"world{number}"
        world = copied(world_of(task), place)
        answer, _ = play(task.instruction, place)
        edit_cell(place, check["path"], cell, value)
        verdict = verify(task.folder, world, answer)
        assert verdict.reward == 0.0, cell
        assert [c.met for c in verdict.criteria if c.name.startswith("other cells")] == [False]


def _total(task: Task, check: dict) -> str:
    return f"B{openpyxl.load_workbook(world_of(task) / check['path']).worksheets[0].max_row}"


def test_an_edit_saved_by_openpyxl_counts_as_well(tasks: dict, tmp_path: Path):
    task = tasks["edit", 2]
    check = read_checks(task.folder / "tests" / "checks.json")[0]
    place = tmp_path / "world"
    world = copied(world_of(task), place)
    book = openpyxl.load_workbook(place / check["path"])
    book.worksheets[0][check["cell"]] = check["expected"]
    book.save(place / check["path"])
    assert verify(task.folder, world, "done").reward == 1.0


@pytest.mark.parametrize(
    "damage",
    [
        lambda book: book.create_sheet("More"),
        lambda book: book.remove(book.worksheets[1]),
        lambda book: setattr(book.worksheets[1], "title", "Other"),
        lambda book: book.move_sheet(book.worksheets[1], -1),
    ],
)
def test_an_edit_that_changes_the_sheets_earns_nothing(damage: Callable, tasks: dict, tmp_path: Path):
    task = tasks["edit", 2]
    check = read_checks(task.folder / "tests" / "checks.json")[0]
    place = tmp_path / "world"
    world = copied(world_of(task), place)
    book = openpyxl.load_workbook(place / check["path"])
    book.worksheets[0][check["cell"]] = check["expected"]
    damage(book)
    book.save(place / check["path"])
    verdict = verify(task.folder, world, "done")
    assert verdict.reward == 0.0
    assert [c.met for c in verdict.criteria if c.name.startswith("other cells")] == [False]


def test_an_edit_as_text_earns_nothing(tasks: dict, tmp_path: Path):
    task = tasks["edit", 2]
    check = read_checks(task.folder / "tests" / "checks.json")[0]
    place = tmp_path / "world"
    world = copied(world_of(task), place)
    book = openpyxl.load_workbook(place / check["path"])
    book.worksheets[0][check["cell"]] = str(check["expected"])
    book.save(place / check["path"])
    assert verify(task.folder, world, "done").reward == 0.0


def xlsx_without_sheets(path: Path) -> None:
    book = openpyxl.Workbook()
    book.create_chartsheet("only")
    book.remove(book.worksheets[0])
    book.save(path)


def _bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/workbook.xml", b"0" * 9_000_000)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("no workbook"),
        lambda path: path.write_bytes(path.read_bytes()[:2000]),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), xlsx_without_sheets(path)),
        lambda path: path.write_bytes(b"0" * 9_000_000),
        _bomb,
    ],
)
def test_a_damaged_workbook_earns_nothing_and_raises_nothing(damage: Callable, tasks: dict, tmp_path: Path):
    task = tasks["edit", 2]
    place = tmp_path / "world"
    world = copied(world_of(task), place)
    damage(place / read_checks(task.folder / "tests" / "checks.json")[0]["path"])
    assert verify(task.folder, world, "done").reward == 0.0


def test_written_lines_count_one_by_one_in_any_order(tasks: dict, tmp_path: Path):
    task = tasks["write", 3]
    lines = read_checks(task.folder / "tests" / "checks.json")[0]["expected"]
    place = tmp_path / "world"
    world = copied(world_of(task), place)
    count = len(lines)
    for content, reward in [
        ("\r\n".join(lines[::-1]) + "  \n\n", 1.0),
        ("\n".join(lines[:-1]), (count - 1) / (count + 1)),
        ("\n".join([*lines[:-1], f"{lines[-1]}0"]), count / (count + 1)),
        ("\n".join([*lines, "more,1"]), count / (count + 1)),
        ("\n".join([lines[0], *lines]), (count - 1) / (count + 1)),
        ("name,value\n" * count, 0.0),
        ("", 0.0),
    ]:
        write_file(place, "out.csv", content)
        assert verify(task.folder, world, "done").reward == pytest.approx(reward), content


def test_a_defect_of_the_task_raises(tasks: dict, tmp_path: Path):
    world = FrozenWorld(lower=tmp_path, root=tmp_path)
    with pytest.raises(ValueError, match="tests must hold checks.json, got none"):
        read_checks(tmp_path / "checks.json")
    with pytest.raises(VerifyError, match="^task: tests must hold test.sh, got none"):
        verify(tmp_path, world, "")
    (tmp_path / "checks.json").write_text('[{"kind": "vibes"}]')
    with pytest.raises(ValueError, match="kind of a check must be one of"):
        read_checks(tmp_path / "checks.json")
    with pytest.raises(ValueError, match="checks must hold a criterion beside the gates"):
        grade([{"kind": "unchanged", "except": []}], world, "")
    with pytest.raises(FileNotFoundError):
        grade([{"kind": "other_cells_unchanged", "path": "gone.xlsx", "except": []}], world, "")


def test_command_line_writes_the_reward(tasks: dict, tmp_path: Path):
    task = tasks["write", 2]
    place = tmp_path / "world"
    copied(world_of(task), place)
    play(task.instruction, place)
    reward = tmp_path / "logs" / "reward.json"
    given = {
        "tests": task.folder / "tests",
        "world": place,
        "answer": tmp_path / "none",
        "reward": reward,
    }
    main([word for name, path in given.items() for word in (f"--{name}", str(path))])
    assert json.loads(reward.read_text()) == {"reward": 1.0, "passed": 1.0}


def test_a_defect_of_the_checks_is_a_system_error_and_no_zero(tasks: dict, tmp_path: Path):
    world = FrozenWorld(lower=tmp_path, root=tmp_path)
    (tmp_path / "tests").mkdir()
    for checks in (
        "not json",
        '[{"kind": "vibes"}]',
        '[{"kind": "answer_number"}]',
        '[{"kind": "cell_value", "path": 3}]',
        '[{"kind": "unchanged", "except": []}]',
        '[{"kind": "other_cells_unchanged", "path": "gone.xlsx", "except": []}]',
    ):
        (tmp_path / "tests" / "checks.json").write_text(checks)
        with pytest.raises(VerifyError, match="^task: "):
            verify(tmp_path, world, "")


def test_a_diff_checks_what_changed_and_that_nothing_else_did(tasks: dict, tmp_path: Path):
    task = tasks["edit", 2]
    check = read_checks(task.folder / "tests" / "checks.json")[0]
    title = openpyxl.load_workbook(world_of(task) / check["path"]).sheetnames[0]
    cell, others = check["cell"], ("A2", 3)
    diff = {"kind": "diff", "path": check["path"]}
    diff["expected"] = [{"place": f"{title}!{cell} value", "after": str(check["expected"])}]
    for number, (edit, loose, reward) in enumerate(
        [((), False, 0.0), ((cell,), False, 1.0), ((cell, "B9"), False, 0.0), ((cell, "B9"), True, 1.0)]
    ):
        place = tmp_path / f"world{number}"
        world = copied(world_of(task), place)
        book = openpyxl.load_workbook(place / check["path"])
        for name in edit:
            book[title][name] = check["expected"] if name == cell else others[1]
        book.save(place / check["path"])
        verdict = grade([diff | {"others": loose}], world, "done")
        assert verdict.reward == reward, (edit, loose, verdict)
