"""The tools of the code agent over a folder: what they do, what they refuse, what the model is told."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from system.harness.chat import Chat
from system.harness.code import SYSTEM, CodeAgent
from system.harness.serving import expected_tools
from system.tools import code_agent
from system.tools.matching import close_lines, glob_expression, lines_of
from system.tools.registration import tool
from system.tools.spill import LARGEST_SPILL, spilled, spilling
from system.world.company import make_company
from system.world.office import write_world

Use = Callable[..., str]
CLERK = Path(__file__).resolve().parent.parent / "policies" / "clerk"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a few texts, one older than the other."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "fees.csv").write_bytes(b"name,fee\r\nNorvik,4821\r\nHalsul,77\r\n")
    os.utime(tmp_path / "notes" / "a.txt", (1, 1))
    return tmp_path


@pytest.fixture
def use(root: Path) -> Use:
    """Calls a tool that must succeed."""
    tools = code_agent.tools(result_characters=40_000, longest_call_s=20)

    def call(name: str, *, fails: bool = False, **arguments: object) -> str:
        text, error = tools[name].call(root, arguments)
        assert error is fails, text
        assert not fails or (text.startswith("error: ") and "\n" not in text and str(root) not in text)
        return text

    return call


def test_the_tools_are_the_seven_and_three_of_them_change_nothing():
    tools = code_agent.tools(result_characters=1000, longest_call_s=1)
    assert tuple(tools) == ("bash", "glob", "read", "grep", "write", "edit", "todowrite")
    assert tuple(tools) == expected_tools("code", "brief")
    assert [name for name, one in tools.items() if one.reads] == ["glob", "read", "grep"]
    for one in tools.values():
        assert one.description and json.dumps(one.listing.input_schema)


# bash


def test_bash_gives_output_and_errors_together_and_the_status(use):
    assert use("bash", command="echo out; echo err >&2; exit 3") == "out\nerr\n[exit status 3]"
    assert use("bash", command="true") == "no output"
    assert use("bash", command="kill -9 $$") == "[signal 9]"


def test_bash_runs_in_the_folder_with_the_office_libraries_and_nothing_of_the_host(use, root, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "4821")
    assert use("bash", command="ls; cat a.txt | head -1", workdir="notes") == "a.txt\none"
    assert use("bash", command="python -c 'import openpyxl, docx, pptx, pdfplumber; print(1)'") == "1"
    assert "SECRET_KEY" not in use("bash", command="env")


def test_bash_has_nothing_to_read_from(use):
    assert use("bash", command="cat; read x || echo none") == "none"


def test_bash_is_stopped_at_its_timeout_with_all_that_it_started(use, root):
    begun = time.monotonic()
    text = use("bash", command="echo begun; (sleep 2; echo late > late.txt) & sleep 60", timeout=300)
    assert text == "begun\n[stopped after 0.3 s]" and time.monotonic() - begun < 3
    time.sleep(2)
    assert not (root / "late.txt").exists()


def test_bash_kills_what_ignores_the_first_signal(use):
    begun = time.monotonic()
    use("bash", command="trap '' TERM; while :; do sleep 0.05; done", timeout=200)
    assert time.monotonic() - begun < 3


def test_bash_does_not_wait_for_what_was_put_in_the_background(use):
    begun = time.monotonic()
    assert use("bash", command="sleep 60 & echo done") == "done"
    assert use("bash", command="setsid yes & sleep 0.1").startswith("y\ny\n")  # it dies with the pipe
    assert time.monotonic() - begun < 5


def test_bash_cannot_kill_the_server(use):
    assert "not permitted" in use("bash", command=f"kill -9 {os.getpid()}")


def test_a_long_output_is_cut_to_thirty_thousand_characters_and_kept_whole(use, root):
    text = use("bash", command="seq 100000")
    assert len(text) <= 30_000 and text.startswith("1\n2\n") and text.endswith("\n100000")
    assert (root / ".spill" / "1.txt").read_text().split() == [str(n) for n in range(1, 100_001)]
    assert "588894 characters; whole in .spill/1.txt: read shows it from a line offset on" in text
    assert use("read", filePath=".spill/1.txt", offset=50_000, limit=1).startswith("50000: 50000\n")
    use("bash", command="seq 100000")
    assert (root / ".spill" / "2.txt").exists()


def test_bash_refuses_what_cannot_be_run(use):
    assert "command must not be empty" in use("bash", command=" ", fails=True)
    assert "workdir must be a folder" in use("bash", command="ls", workdir="nowhere", fails=True)
    assert "must stay inside" in use("bash", command="ls", workdir="../", fails=True)
    assert "null bytes" in use("bash", command="a\0b", fails=True)
    assert "timeout must be at least 1 ms" in use("bash", command="ls", timeout=0, fails=True)


# read


def test_read_numbers_lines_and_says_where_to_go_on(use, root):
    (root / "long.txt").write_text("\n".join(f"l{n}" for n in range(1, 5001)) + "\n")
    assert use("read", filePath="notes/a.txt") == "1: one\n2: two\n3: three"
    text = use("read", filePath="long.txt")
    assert text.endswith("2000: l2000\n[lines 1 to 2000 of 5000; the next with offset 2001]")
    text = use("read", filePath="long.txt", offset=4999, limit=10)
    assert text == "4999: l4999\n5000: l5000"
    assert "offset must be at most 5000" in use("read", filePath="long.txt", offset=5001, fails=True)


def test_read_shortens_lines_and_stops_at_the_room_of_a_result(use, root):
    (root / "wide.txt").write_text("x" * 5000 + "\nend\n")
    first, second = use("read", filePath="wide.txt").splitlines()
    assert first == "1: " + "x" * 2000 + "... [5000 characters]" and second == "2: end"
    (root / "big.txt").write_text(("y" * 1000 + "\n") * 100)
    text = use("read", filePath="big.txt")
    assert len(text) <= 40_000 and "the next with offset 40]" in text


def test_read_lists_folders_and_takes_absolute_paths_inside(use, root):
    assert use("read", filePath=".") == "fees.csv\nnotes/"
    assert use("read", filePath=f"{root}/notes/a.txt").startswith("1: one")
    (root / "empty.txt").touch()
    assert use("read", filePath="empty.txt") == "the file is empty"


def test_read_counts_lines_as_an_editor_does(use, root):
    (root / "odd.txt").write_bytes("\ufeffa\u2028b\x0cc\r\nd".encode())
    assert use("read", filePath="odd.txt") == "1: a\u2028b\x0cc\n2: d"


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "notes/../../x", "link"])
def test_paths_do_not_leave_the_folder(use, root, name):
    (root / "link").symlink_to("/etc/passwd")
    for call in (
        lambda: use("read", filePath=name, fails=True),
        lambda: use("write", filePath=name, content="x", fails=True),
        lambda: use("edit", filePath=name, oldString="a", newString="b", fails=True),
    ):
        assert "path must" in call()


def test_office_files_are_refused_with_the_way_to_read_them(use, root):
    write_world(make_company(3, split="train"), root / "world")
    hints = {
        "plan.xlsx": "openpyxl",
        "deck.pptx": "pptx",
        "proposal.docx": "docx",
        "report.pdf": "pdfplumber",
    }
    for name, library in hints.items():
        text = use("read", filePath=f"world/{name}", fails=True)
        assert "is an office file; use Python with" in text and library in text
        assert "office file" in use("write", filePath=f"new/{name}", content="x", fails=True)
    (root / "blob").write_bytes(b"a\0b")
    (root / "latin.txt").write_bytes(b"caf\xe9")
    assert "binary" in use("read", filePath="blob", fails=True)
    assert "not UTF-8" in use("read", filePath="latin.txt", fails=True)


def test_a_misspelt_name_is_told_what_is_like_it(use):
    text = use("read", filePath="fee.csv", fails=True)
    assert text == "error: no such file fee.csv; did you mean fees.csv"
    assert use("read", filePath="no/such", fails=True) == "error: no such file no/such"


# write


def test_write_makes_files_and_replaces_only_what_was_read(use, root):
    assert use("write", filePath="new/b.txt", content="é\n") == "wrote new/b.txt: 3 bytes"
    assert use("write", filePath="new/b.txt", content="b") == "replaced new/b.txt: 1 bytes"
    refused = use("write", filePath="notes/a.txt", content="x", fails=True)
    assert refused == "error: notes/a.txt must be read before it is changed"
    use("read", filePath="notes/a.txt")
    (root / "notes" / "a.txt").write_text("other")
    assert "has changed since it was read" in use("write", filePath="notes/a.txt", content="x", fails=True)
    use("read", filePath="notes/a.txt")
    use("write", filePath="notes/a.txt", content="x")
    assert (root / "notes" / "a.txt").read_text() == "x"


def test_what_one_agent_read_another_has_not(use, root):
    use("read", filePath="notes/a.txt")
    others = code_agent.tools(result_characters=1000, longest_call_s=1)
    text, error = others["write"].call(root, {"filePath": "notes/a.txt", "content": "x"})
    assert error and "must be read" in text


# edit


def edited(use: Use, root: Path, before: bytes, old: str, new: str, **more: object) -> bytes:
    (root / "e.txt").write_bytes(before)
    use("read", filePath="e.txt")
    use("edit", filePath="e.txt", oldString=old, newString=new, **more)
    return (root / "e.txt").read_bytes()


def test_edit_replaces_one_place_and_leaves_every_other_byte(use, root):
    assert edited(use, root, b"a\nb\nc", "b", "B\nB") == b"a\nB\nB\nc"
    assert edited(use, root, b"\xef\xbb\xbfa\n", "a", "b") == b"\xef\xbb\xbfb\n"
    assert edited(use, root, b"x x x", "x", "y", replaceAll=True) == b"y y y"


def test_edit_keeps_the_line_ends_of_the_file(use, root):
    assert edited(use, root, b"a\r\nb\r\nc\r\n", "a\nb", "A\nB\nC") == b"A\r\nB\r\nC\r\nc\r\n"
    assert edited(use, root, b"a\r\nb\nc\n", "c", "d") == b"a\r\nb\nd\n"


def test_edit_finds_lines_that_differ_only_in_the_blanks_around_them(use, root):
    before = b"def f():\n    if x:\n        return 1\n    return 2\n"
    after = edited(use, root, before, "if x:\n  return 1", "    return 3")
    assert after == b"def f():\n    return 3\n    return 2\n"


def test_edit_says_what_is_wrong(use, root):
    assert "must be read before" in use(
        "edit", filePath="fees.csv", oldString="77", newString="78", fails=True
    )
    use("read", filePath="fees.csv")
    use("edit", filePath="fees.csv", oldString="77", newString="78")
    assert "must differ" in use("edit", filePath="fees.csv", oldString="78", newString="78", fails=True)
    assert "must not be empty" in use("edit", filePath="fees.csv", oldString="", newString="x", fails=True)
    assert "got none; read it again" in use(
        "edit", filePath="fees.csv", oldString="absent", newString="x", fails=True
    )
    several = use("edit", filePath="fees.csv", oldString=",", newString=";", fails=True)
    assert several.endswith("got 3; give more of it or set replaceAll")
    assert "no such file" in use("edit", filePath="none.txt", oldString="a", newString="b", fails=True)


@given(
    st.lists(st.sampled_from(["a", " a", "b ", "", "c\r"]), max_size=6), st.integers(0, 5), st.integers(1, 3)
)
def test_near_matches_are_whole_lines_in_order_without_overlap(lines, start, count):
    text = "\n".join(lines)
    wanted = "\n".join(line.strip() for line in lines[start : start + count])
    spans = close_lines(text, wanted)
    assert all(a < b <= c for (a, b), (c, _) in zip(spans, [*spans[1:], (len(text), 0)]))
    for begin, end in spans:
        assert begin == 0 or text[begin - 1] == "\n"
        assert [line.strip() for line in lines_of(text[begin:end])] == [
            line.strip() for line in lines_of(wanted)
        ]
    assert bool(spans) == bool(wanted.strip())


# glob and grep


def test_glob_gives_the_newest_first_and_at_most_a_hundred(use, root):
    assert use("glob", pattern="*") == "fees.csv\nnotes/a.txt"
    assert use("glob", pattern="notes/*") == "notes/a.txt"
    assert use("glob", pattern="*.txt", path="notes") == "notes/a.txt"
    assert use("glob", pattern="*.pdf") == "no files"
    for n in range(120):
        (root / f"f{n}.md").touch()
    lines = use("glob", pattern="*.md").splitlines()
    assert len(lines) == 101 and lines[-1] == "[100 of 120 files; use a narrower pattern]"
    assert "path must be a folder" in use("glob", pattern="*", path="nowhere", fails=True)
    assert "pattern must not be empty" in use("glob", pattern=" ", fails=True)


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        ("*.txt", ["a.txt"], ["a.txt.gz", "b/a.txt"]),
        ("**/*.txt", ["a.txt", "b/a.txt", "b/c/a.txt"], ["a.csv"]),
        ("b/**", ["b/a", "b/c/d"], ["a", "bb/a"]),
        ("a?.{csv,txt}", ["ab.csv", "ab.txt"], ["a.csv", "ab.md"]),
        ("[ab][!0-9]", ["ax", "bx"], ["a1", "cx", "a/"]),
        ("a.b", ["a.b"], ["axb"]),
        ("[", ["["], ["a"]),
        ("{a", ["{a"], ["a"]),
        ("[]a]", ["]", "a"], ["b"]),
    ],
)
def test_patterns_of_names(pattern, matches, others):
    expression = glob_expression(pattern)
    assert [name for name in matches if not expression.fullmatch(name)] == []
    assert [name for name in others if expression.fullmatch(name)] == []


@given(
    st.text(alphabet="ab/*?[]{},!^-\\.", max_size=12).filter(str.strip), st.text(alphabet="ab/-.", max_size=8)
)
def test_a_pattern_of_names_is_an_expression_or_one_error(pattern, name):
    try:
        glob_expression(pattern).fullmatch(name)
    except ValueError as error:
        assert "pattern must" in str(error)


@given(
    st.text(max_size=12).filter(
        lambda text: text.strip() and not set(text) & set("*?[]{}") and text[:2] != "./"
    )
)
def test_a_pattern_without_wildcards_matches_itself_alone(name):
    assert glob_expression(name).fullmatch(name)
    assert not glob_expression(name).fullmatch(name + "x")


def test_grep_groups_by_file_with_line_numbers(use, root):
    (root / "notes" / "b.txt").write_text("two\nno\ntwo again\n")
    assert use("grep", pattern="two") == "notes/b.txt:\n  1: two\n  3: two again\nnotes/a.txt:\n  2: two"
    assert use("grep", pattern="^T?wo|o$", path="notes/a.txt") == "notes/a.txt:\n  2: two"
    assert use("grep", pattern="4821", include="*.{csv,md}") == "fees.csv:\n  2: Norvik,4821"
    assert use("grep", pattern="nowhere") == "no match"
    assert "must be a regular expression" in use("grep", pattern="(", fails=True)
    (root / "many.txt").write_text("x\n" * 300)
    lines = use("grep", pattern="x", path="many.txt").splitlines()
    assert len(lines) == 102 and lines[-1] == "[100 of 300 lines; use a narrower pattern]"


def test_kept_results_are_found_only_where_they_are_asked_for(use, root):
    use("bash", command="seq 100000")
    assert use("grep", pattern="^99999$") == "no match" and ".spill" not in use("glob", pattern="*")
    assert use("grep", pattern="^99999$", path=".spill") == ".spill/1.txt:\n  99999: 99999"


# todowrite


def test_todowrite_replaces_the_list_and_says_it(use):
    todos = [{"content": "a", "status": "in_progress", "priority": "high"}]
    assert json.loads(use("todowrite", todos=todos)) == todos
    assert json.loads(use("todowrite", todos=[])) == []
    given = use("todowrite", todos=json.dumps([{"content": "b", "status": "pending"}]))
    assert json.loads(given) == [{"content": "b", "status": "pending", "priority": "medium"}]


@pytest.mark.parametrize(
    "todos", ["x", [1], [{}], [{"content": "a", "status": "done"}], [{"content": "a", "x": 1}]]
)
def test_todowrite_refuses_other_lists(use, todos):
    assert "todos must be a list of objects with content, status (pending" in use(
        "todowrite", todos=todos, fails=True
    )


def test_calls_that_do_not_fit_a_tool_are_told_how_they_would(use):
    assert use("read", fails=True) == "error: read needs argument filePath"
    assert "read has no argument path; arguments: filePath, offset, limit" in use(
        "read", path="a", fails=True
    )
    assert "offset must be an integer" in use("read", filePath="a", offset="x", fails=True)


# Long results of any tool


def speak(root: Path, length: int) -> str:
    """Say so many letters."""
    return "ab" * (length // 2)


@pytest.mark.parametrize("limit", [400, 4000])
def test_no_tool_says_more_than_the_limit_and_the_whole_is_kept(tmp_path, limit):
    (one,) = spilling({"speak": tool(speak)}, limit=limit, how="read_file pages it").values()
    assert one.call(tmp_path, {"length": limit}) == ("ab" * (limit // 2), False)
    assert not (tmp_path / ".spill").exists()
    text, error = one.call(tmp_path, {"length": limit + 2})
    assert not error and len(text) == limit and text.startswith("ab") and text.endswith("ab")
    assert "whole in .spill/1.txt: read_file pages it" in text
    assert (tmp_path / ".spill" / "1.txt").read_text() == "ab" * (limit // 2 + 1)


def test_what_cannot_be_kept_is_cut_and_said_to_be_gone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / ".spill").symlink_to(tmp_path / "out")
    text = spilled("x" * 1000, tmp_path, limit=300, how="")
    assert len(text) == 300 and "nothing is kept of the rest: ask for less" in text
    assert list((tmp_path / "out").iterdir()) == []


def test_a_huge_result_is_kept_up_to_a_bound_and_says_so(tmp_path):
    text = spilled("x" * (LARGEST_SPILL + 1), tmp_path, limit=1000, how="y")
    assert f"its first {LARGEST_SPILL} characters in .spill/1.txt" in text
    assert (tmp_path / ".spill" / "1.txt").stat().st_size == LARGEST_SPILL


# The agent


def test_the_code_agent_speaks_by_the_same_rules_and_says_its_own_prompt_first():
    chat = Chat(CLERK)
    opening = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Go."}]
    text = chat.decode(chat.render(opening, [], add_generation_prompt=True))
    assert text.startswith(f"<|im_start|>system\n{SYSTEM}\n") and text.count("<|im_start|>") == 3
    assert set(CodeAgent.__slots__) == {"trial_id", "seed", "engine", "chat", "limits"}
    assert not re.search(r"\bplease\b", SYSTEM)
