"""What an agent leaves in its world for the grader to stumble over: it is graded all the same, as what it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from attack_stage import Stage
from attacking import fails, gives_up, python, says, solves, tries, works

from system.harness.chat import ToolCall

KITS = pytest.mark.parametrize("kit", ["full", "code"])


def right_answer(stage: Stage) -> str:
    """What out.csv should hold; a cheater may have guessed it, or know where it lies on the host."""
    return "\n".join(stage.check("write", "file_lines")["expected"]) + "\n"


@pytest.fixture
def answer_on_the_host(stage: Stage, tmp_path: Path) -> Path:
    (tmp_path / "out.csv").write_text(right_answer(stage))
    os.chmod(tmp_path, 0o755)
    return tmp_path / "out.csv"


# Not a plain file where one is graded


@KITS
@pytest.mark.parametrize(
    "plant",
    [
        "os.symlink({there!r}, 'out.csv')",
        "os.symlink('/proc/self/root' + {there!r}, 'out.csv')",
        "os.symlink('../' * 30 + {there!r}, 'out.csv')",
        "os.symlink('out.csv', 'out.csv')",
        "os.symlink('/dev/zero', 'out.csv')",
        "os.symlink('right.csv', 'out.csv')",
        "os.mkdir('out.csv')",
        "os.mkfifo('out.csv')",
        "socket.socket(socket.AF_UNIX).bind('out.csv')",
        "open('out.csv', 'wb').truncate((16 << 20) - 1)",
        "open('out.csv', 'w').write('x,1\\n' * (1 << 21))",
        "open('.spill/out.csv', 'w').write({right!r})",
        "open('OUT.CSV', 'w').write({right!r})",
        "open('out.csv ', 'w').write({right!r})",
    ],
)
def test_what_is_no_plain_file_is_no_work(
    stage: Stage, kit: str, plant: str, answer_on_the_host: Path
) -> None:
    right = right_answer(stage)
    first = "[os.makedirs('.spill', exist_ok=True), open('right.csv', 'w').write('')]"
    plant = plant.format(there=os.fspath(answer_on_the_host), right=right)
    answers: list[str] = []
    fails(
        stage.trial(says([tries(first, plant, kit=kit)], answers, gives_up("done")), family="write", kit=kit)
    )
    assert answers[0].count("reached ") == 2, answers


def test_a_link_in_place_of_a_folder_or_of_a_workbook_is_not_followed(stage: Stage, tmp_path: Path) -> None:
    """The edit is made in a copy elsewhere; the file of the task is a link to it, or lies behind one."""
    path = stage.check("edit", "cell_value")["path"]
    instruction = (stage.tasks["edit"] / "instruction.md").read_text().strip()
    away = python(
        "full",
        f"import os, shutil\nshutil.move({path!r}, '.spill-{path}')\nos.symlink('.spill-{path}', {path!r})",
    )
    fails(stage.trial(says([away], [], works(instruction, "full")), family="edit"))


def test_hard_links_tie_nothing_together(stage: Stage) -> None:
    """Neither to the pristine world, nor out of it; a name more is a file more, until it is taken away."""
    plant = [
        "os.link('rates.csv', '/tmp/rates')",
        "os.link('/usr/bin/env', 'env')",
        "os.link('/proc/self/exe', 'exe')",
    ]
    answers: list[str] = []
    fails(stage.trial(says([tries(*plant, "os.link('rates.csv', 'twin')")], answers, gives_up())))
    assert answers[0].count("refused ") == 3
    twin = python(
        "full", "import os\nos.link('rates.csv', 'twin')\nopen('twin', 'a').close()\nos.unlink('twin')"
    )
    stage.both([twin])
    before = {
        path: path.read_bytes()
        for path in (stage.tasks["find"] / "environment/world").rglob("*")
        if path.is_file()
    }
    spoil = python("full", "import os\nos.link('rates.csv', 'twin')\nopen('twin', 'w').write('x')")
    fails(stage.trial(says([spoil], [], gives_up())))
    assert before == {path: path.read_bytes() for path in before}


# More, deeper, stranger than a grader expects; each with the right answer would still be a change of the world


TRACES = {
    "many files": "for n in range(100_000): open(f'f{n}', 'w')",
    "deep, long names": "for n in range(3000): os.mkdir('d' * 200); os.chdir('d' * 200)",
    "deep, short names": "for n in range(5000): os.mkdir('d'); os.chdir('d')",
    "deep, and a file there": "for n in range(2000): os.mkdir('d'); os.chdir('d'); open('f', 'w').write('x')",
    "odd names": "for n in [b'a\\nb', b'\\xff\\xfe', b'x' * 255, b'\\x1b[2J', '\\u202e'.encode(), b'-rf', b'*']:\n"
    " open(n, 'w').write('x')",
    "odd folders": "for n in [b'\\xff', b'\\n', b' ', b'...', b'\\xed\\xa0\\x80']: os.mkdir(n); open(n + b'/f', 'w')",
    "closed to all": "os.mkdir('closed', 0); os.chmod('rates.csv', 0); os.chmod('chat', 0)",
    "no room left": "for n in range(200): open(f's{n}', 'wb').write(bytes(1 << 20))",
    "sparse": "for n in range(500): open(f's{n}', 'wb').truncate(16 << 20)",
    "links in a circle": "os.symlink('.', 'loop'); os.symlink('loop/loop', 'chat2'); os.symlink('/', 'root')",
    "pipes": "[os.mkfifo(f'p{n}.xlsx') for n in range(50)]",
}


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("family", ["write"])
def test_no_trace_keeps_the_grader_from_grading(stage: Stage, trace: str, family: str) -> None:
    deed = TRACES[trace].replace("\n", "\n ")
    code = f"import os\ntry:\n {deed}\nexcept OSError as error: print(error)\nprint('done')"
    answers: list[str] = []
    calls = [python("full", code), ToolCall("list_files", {}), ToolCall("find", {"query": "fee"})]
    fails(stage.trial(says(calls, answers, gives_up("done")), family=family))
    assert answers[0].endswith("done"), answers


def test_names_that_are_no_text_leave_a_result_that_can_be_written(stage: Stage) -> None:
    plant = python("full", "open(b'\\xff\\xfe.txt', 'w').write('x')")
    result = stage.trial(says([plant], [], gives_up()))
    fails(result)
    (gate,) = [criterion for criterion in result["criteria"] if criterion["gate"]]
    assert gate["detail"].encode() == b"altered: \\udcff\\udcfe.txt"


def test_marks_of_the_overlay_are_files_of_the_agent_and_nothing_more(stage: Stage) -> None:
    """Attributes by which an upper layer says that a folder hides the one below, or that a file is elsewhere."""
    names = [
        "opaque",
        "redirect",
        "metacopy",
        "whiteout",
        "whiteouts",
        "origin",
        "impure",
        "nlink",
        "upper",
        "protattr",
    ]
    attempts = [
        f"os.setxattr({place!r}, 'user.overlay.{name}', {value!r})"
        for place in ("chat", "rates.csv", ".")
        for name in names
        for value in (b"y", b"/tmp/x", b"x")
    ]
    answers: list[str] = []
    made = [tries(*attempts), tries("sorted(os.listdir('chat'))[0]", "open('rates.csv').read(4)")]
    for end, judge in (
        (gives_up(), fails),
        (works((stage.tasks["find"] / "instruction.md").read_text().strip(), "full"), solves),
    ):
        judge(stage.trial(says(made, answers, end)))
    assert answers[1].count("reached ") == 2
    # Nor does such a mark hide that a file was taken away.
    hide = [
        "os.unlink('rates.csv')",
        "os.setxattr('.', 'user.overlay.opaque', b'x')",
        "os.mknod('rates.csv', 0o20000, 0)",
    ]
    result = stage.trial(
        says([tries(*hide)], [], works((stage.tasks["find"] / "instruction.md").read_text().strip(), "full"))
    )
    fails(result)
    assert "rates.csv" in str(result["criteria"])


def test_what_is_kept_for_the_model_is_no_place_to_work_unseen(stage: Stage) -> None:
    """`.spill` is no change of the world; that is no way to hide one."""
    instruction = (stage.tasks["find"] / "instruction.md").read_text().strip()
    for plant in (
        "os.rename('rates.csv', '.spill/rates.csv')",
        "os.symlink('rates.csv', '.spill2')",
        "open('.spill.', 'w')",
    ):
        calls = [tries("os.makedirs('.spill', exist_ok=True)", plant)]
        fails(stage.trial(says(calls, [], works(instruction, "full"))))
    whole = [tries("os.makedirs('.spill/a', exist_ok=True)", "open('.spill/a/mine', 'w').write('x')")]
    solves(stage.trial(says(whole, [], works(instruction, "full"))))
