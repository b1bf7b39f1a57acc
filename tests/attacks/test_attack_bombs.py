"""Files that unpack, expand or compute without end: every tool answers, every grader ends, nothing outside is read."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest
from attack_stage import Stage
from attacking import CANARY, SOUND, fails, foreign_task, gives_up, python, says, solves, works
from bombs import decks, documents, others, pdfs, workbooks

from system.harness.chat import ToolCall
from system.sandbox.frozen import FrozenWorld
from system.verify.diff import DiffLimits, changes


def placed(name: str, data: bytes) -> list[ToolCall]:
    """Calls that write a file of any content into the world."""
    text = base64.b85encode(data).decode()
    parts = [text[at : at + 90_000] for at in range(0, len(text), 90_000)]
    calls = [
        python("full", f"open('/tmp/b85', {'w' if not n else 'a'!r}).write({part!r})")
        for n, part in enumerate(parts)
    ]
    return [
        *calls,
        python(
            "full", f"import base64\nopen({name!r}, 'wb').write(base64.b85decode(open('/tmp/b85').read()))"
        ),
    ]


@pytest.fixture(scope="module")
def world(stage: Stage) -> Path:
    return stage.tasks["edit"] / "environment" / "world"


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the host that a grader could read."""
    file = tmp_path_factory.mktemp("host") / "secret.txt"
    file.write_text(CANARY)
    return file


def first(world: Path, suffix: str) -> Path:
    return min(world.glob(f"*{suffix}"))


GRADED = (
    *("a range merged over the whole sheet", "a link over the whole sheet", "formulas over the whole sheet"),
    *("entities within entities", "an entity from outside", "a part of zeros", "styles of zeros"),
    "elements a hundred thousand deep",
)


@pytest.mark.parametrize("name", GRADED)
def test_a_workbook_that_is_a_bomb_is_graded_as_one_that_cannot_be_read(
    stage: Stage, world: Path, secret: Path, name: str
) -> None:
    path = stage.check("edit", "cell_value")["path"]
    bomb = workbooks((world / path).read_bytes(), str(secret))[name]
    result = stage.trial(says(placed(path, bomb), [], gives_up("done")), family="edit")
    fails(result)
    assert CANARY not in str(result)


MADE: dict[str, Callable[[bytes, str], dict[str, bytes]]] = {
    ".xlsx": workbooks,
    ".docx": documents,
    ".pptx": decks,
    ".pdf": lambda _, __: pdfs(),
}
READ: dict[str, list[ToolCall]] = {
    ".xlsx": [ToolCall("read_sheet", {}), ToolCall("edit_cell", {"cell": "B2", "value": "5"})],
    ".docx": [ToolCall("read_document", {}), ToolCall("edit_document", {"old": "a", "new": "b"})],
    ".pptx": [ToolCall("read_slides", {}), ToolCall("edit_slides", {"old": "a", "new": "b"})],
    ".pdf": [ToolCall("read_pdf", {}), ToolCall("read_pdf_tables", {})],
}


@pytest.mark.parametrize("suffix", READ)
def test_every_tool_answers_over_a_bomb_and_the_next_call_is_served(
    stage: Stage, world: Path, suffix: str, tmp_path: Path
) -> None:
    """All bombs of a kind in one world; whatever a tool does with them, the policy is told, and can do its work."""
    data = first(world, suffix).read_bytes() if suffix != ".pdf" else b""
    files = list(MADE[suffix](data, "/tmp/secret").values())
    names = {f"b{number}{suffix}": file for number, file in enumerate(files)}
    calls = [python("full", f"open('/tmp/secret', 'w').write({CANARY[:9]!r} + {CANARY[9:]!r})")]
    calls += [ToolCall(one.name, {"path": name, **one.arguments}) for name in names for one in READ[suffix]]
    calls += [
        ToolCall("find", {"query": "canary"}),
        ToolCall("write_file", {"path": "out.txt", "content": "48\n"}),
    ]
    calls += [ToolCall("list_files", {})]
    answers: list[str] = []
    task = foreign_task(tmp_path / "task", SOUND, world=names)
    limits = {"turns": 100, "result_characters": 2000}
    solves(stage.trial(says(calls, answers, gives_up()), task=task, limits=limits, tool_timeout_s=1.0))
    assert len(answers) == len(calls) and f"b0{suffix}" in answers[-1]
    assert not [answer for answer in answers if CANARY in answer]


def test_further_kinds_are_read_or_refused(stage: Stage, tmp_path: Path) -> None:
    files = others()
    files["mail.mbox"] = files["deep.mbox"]
    files["calendar.ics"] = files["many.ics"]
    files["chat/deep.json"] = files["deep.json"]
    calls = [
        ToolCall("list_channels", {}),
        ToolCall("read_channel", {"channel": "deep"}),
        ToolCall("list_mail", {}),
    ]
    calls += [
        ToolCall("list_events", {}),
        ToolCall("read_mail", {"id": "m1"}),
        ToolCall("find", {"query": "fee"}),
    ]
    calls += [ToolCall("read_file", {"path": name}) for name in ("deep.json", "long.txt", "lines.csv")]
    calls += [ToolCall("write_file", {"path": "out.txt", "content": "48\n"}), ToolCall("list_files", {})]
    answers: list[str] = []
    task = foreign_task(tmp_path / "task", SOUND, world=files)
    limits = {"result_characters": 2000}
    solves(stage.trial(says(calls, answers, gives_up()), task=task, limits=limits, tool_timeout_s=2.0))
    assert len(answers) == len(calls) and "long.txt" in answers[-1]


def test_what_compares_files_for_a_judge_ends_on_every_bomb(
    world: Path, secret: Path, tmp_path: Path
) -> None:
    """The same files before a judge: each is told as a change, in bounds, with no file of the host in it."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    planted: dict[str, bytes] = {}
    for suffix, make in ((".xlsx", workbooks), (".docx", documents), (".pptx", decks)):
        data = first(world, suffix).read_bytes()
        for number, bomb in enumerate(make(data, str(secret)).values()):
            planted[f"b{number}{suffix}"] = bomb
            (before / f"b{number}{suffix}").write_bytes(data)
    planted |= {f"b{number}.pdf": bomb for number, bomb in enumerate(pdfs().values())} | others()
    for name, bomb in planted.items():
        (after / name).write_bytes(bomb)
    limits = DiffLimits(file_s=0.5, seconds=5.0, memory_bytes=256 << 20)
    listed = changes(FrozenWorld(lower=before, root=after), limits)
    assert {change.path for change in listed} == set(planted)
    assert CANARY not in str(listed)
    assert max(len(change.before) + len(change.after) for change in listed) <= 2 * limits.characters + 400


@pytest.mark.parametrize("family", ["find"])
def test_a_bomb_beside_the_work_costs_nobody_else_anything(stage: Stage, world: Path, family: str) -> None:
    """It is made, read, and taken away; then the work is done."""
    bomb = workbooks(first(world, ".xlsx").read_bytes(), "/tmp/x")["a range merged over the whole sheet"]
    calls = [
        *placed("b.xlsx", bomb),
        ToolCall("read_sheet", {"path": "b.xlsx"}),
        ToolCall("delete_file", {"path": "b.xlsx"}),
    ]
    end = works((stage.tasks[family] / "instruction.md").read_text().strip(), "full")
    solves(stage.trial(says(calls, [], end), family=family))
