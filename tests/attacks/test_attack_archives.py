"""Task sets that somebody else packed: what unpacks them writes nothing elsewhere, and never more than it may."""

from __future__ import annotations

import gzip
import io
import os
import resource
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from attack_stage import Stage
from attacking import SOUND, fails, foreign_task, gives_up, says, solves

from system.harness.chat import ToolCall
from system.world.archive import Limits, unpack
from system.world.parquet import read_parquet

DIR, SYM, LNK, FIFO, CHR, BLK = (
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.FIFOTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
)
Member = tuple[str, bytes, bytes, str]


def packed(*members: Member, base: Path | None = None) -> bytes:
    """A gzipped tar of a folder and of (name, content, type, link)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        if base is not None:
            tar.add(base, arcname=".")
        for name, content, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size, info.mode = kind, link, len(content), 0o6777
            tar.addfile(info, io.BytesIO(content))
    return gzip.compress(buffer.getvalue())


def file(name: str, content: bytes = b"x") -> Member:
    return name, content, tarfile.REGTYPE, ""


ARCHIVES: dict[str, list[Member]] = {
    "an absolute path": [file("/tmp/out")],
    "dots": [file("../out")],
    "dots on the way": [file("a/b/../../../out")],
    "dots by a link": [("a", b"", SYM, ".."), file("a/out")],
    "a link out, and a file through it": [("l", b"", SYM, "/tmp"), file("l/out")],
    "a link to a link out": [("a", b"", SYM, "b"), ("b", b"", SYM, "/etc/passwd")],
    "a link to the tests of another": [("l", b"", SYM, "../../other/tests/secret.txt")],
    "a hard link out": [("l", b"", LNK, "/etc/passwd")],
    "a hard link by dots": [("l", b"", LNK, "../../etc/passwd")],
    "a file over a link": [("instruction.md", b"", SYM, "/tmp/out"), file("instruction.md")],
    "a link over a file": [file("x"), ("x", b"", SYM, "/tmp/out")],
    "a folder over a link": [("d", b"", SYM, "/tmp"), ("d", b"", DIR, ""), file("d/out")],
    "a pipe": [("p", b"", FIFO, "")],
    "a device": [("d", b"", CHR, "")],
    "a disk": [("d", b"", BLK, "")],
    "a name of many lines": [file("a\nb")],
    "a name with a null": [file("a\0b")],
    "a name with a backslash": [file("..\\out")],
    "a long way down": [file("d/" * 3000 + "f")],
    "a letter composed twice": [file("\u00fc"), file("u\u0308")],
    "one file in two cases of dots": [file("a"), file("./a")],
    "a path in a header of its own": [file("ok" * 70 + "/../" * 20 + "out")],
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_writes_nothing_outside_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "other" / "tests").mkdir(parents=True)
    (tmp_path / "other" / "tests" / "secret.txt").write_text("secret")
    before = sorted(os.listdir(tmp_path)), sorted(os.listdir("/tmp"))
    try:
        unpack(packed(*ARCHIVES[name]), tmp_path / "task", row="row 0", limits=Limits())
    except ValueError as error:
        assert str(error).startswith("row 0 ") and "\n" not in str(error)
    else:  # a null ends a name in a tar: what came out is plain
        assert name == "a name with a null"
    assert "out" not in os.listdir("/tmp") or "out" in before[1]
    assert sorted(os.listdir(tmp_path)) == sorted([*before[0], "task"])
    for place in (tmp_path / "task").rglob("*"):
        assert place.resolve().is_relative_to(tmp_path / "task") and (place.is_file() or place.is_dir())
        assert not place.is_symlink() and b"secret" not in (place.read_bytes() if place.is_file() else b"")
        assert place.stat().st_mode & 0o6022 == 0


BOMBS: dict[str, list[Member]] = {
    "a file of zeros": [file("z", bytes(40 << 20))],
    "many files of zeros": [file(f"z{n}", bytes(4 << 20)) for n in range(8)],
    "thousands of files": [file(str(n), b"") for n in range(2_500)],
    "a header without an end": [file("a" * 3_000_000)],
}


@pytest.mark.parametrize("name", BOMBS)
def test_an_archive_that_is_a_bomb_is_stopped_in_bounds(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^row 0 "):
        unpack(packed(*BOMBS[name]), tmp_path / "task", row="row 0", limits=Limits(members=2_000))
    assert sum(place.stat().st_size for place in (tmp_path / "task").rglob("*")) <= 17 << 20


def test_a_gzip_in_a_gzip_is_not_gone_into(tmp_path: Path) -> None:
    bomb = gzip.compress(gzip.compress(bytes(50 << 20)))
    with pytest.raises(ValueError, match="row 0 must be a gzipped tar, got"):
        unpack(bomb, tmp_path / "task", row="row 0", limits=Limits())


@pytest.fixture
def parquet(tmp_path: Path) -> Any:
    reason = "needs pyarrow, the extra `parquet`"
    arrow, tables = (pytest.importorskip(name, reason=reason) for name in ("pyarrow", "pyarrow.parquet"))

    def write(**columns: list[Any]) -> Path:
        tables.write_table(
            arrow.table(columns), tmp_path / "tasks.parquet", compression="zstd", row_group_size=8
        )
        return tmp_path / "tasks.parquet"

    return write


PATHS = [
    "../two",
    "/tmp/two",
    "..",
    ".",
    "",
    "a/b",
    "a\\b",
    "a\nb",
    "a\0b",
    ".hidden",
    " ",
    "x" * 300,
    "one",
    "one/",
    "\u202etwo",
    None,
]


@pytest.mark.parametrize("name", PATHS)
def test_a_path_in_a_parquet_file_names_one_new_folder(
    name: str | None, parquet: Any, tmp_path: Path
) -> None:
    good = packed(file("task.toml", b""))
    into = tmp_path / "into"
    with pytest.raises(ValueError, match="^row 1 path must"):
        read_parquet(parquet(path=["one", name], task_binary=[good, good]), into)
    assert list(into.iterdir()) == [] and sorted(os.listdir(tmp_path)) == ["into", "tasks.parquet"]


@pytest.mark.parametrize("name", ["dots", "a link out, and a file through it", "a pipe"])
def test_a_row_that_breaks_a_rule_leaves_no_row(name: str, parquet: Any, tmp_path: Path) -> None:
    good, bad = packed(file("task.toml", b"")), packed(file("task.toml", b""), *ARCHIVES[name])
    with pytest.raises(ValueError, match="^row 1 member"):
        read_parquet(parquet(path=["one", "two"], task_binary=[good, bad]), tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []


def test_a_parquet_file_of_zeros_is_refused_in_bounded_memory(parquet: Any, tmp_path: Path) -> None:
    """400 MB of zeros in a file of some kilobytes; one row is held at a time."""
    bomb = parquet(path=[f"t{n}" for n in range(50)], task_binary=[bytes(8 << 20)] * 50)
    assert bomb.stat().st_size < 200_000
    code = (
        "import resource, sys\nfrom pathlib import Path\n"
        "from system.world.parquet import read_parquet\nimport pyarrow.parquet\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (700 << 20),) * 2)\n"
        "try: read_parquet(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(bomb), str(tmp_path / "into")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.startswith("row 0 must be a gzipped tar, got"), done
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY or done.returncode == 0


def test_a_task_out_of_a_parquet_file_is_played_like_any_other(
    stage: Stage, parquet: Any, tmp_path: Path
) -> None:
    """With every special bit set and a hard link to its own tests: the agent sees its world and nothing else."""
    made = foreign_task(tmp_path / "made", SOUND)
    row = packed(("environment/world/answer.txt", b"", LNK, "./environment/world/notes.txt"), base=made)
    (task,) = read_parquet(parquet(path=["one"], task_binary=[row]), tmp_path / "into")
    look = ToolCall("bash", {"command": "cat answer.txt; ls / | tr '\\n' ' '"})
    work = ToolCall("bash", {"command": "echo 48 > out.txt"})
    answers: list[str] = []
    fails(stage.trial(says([look], answers, gives_up()), task=task, kit="code"))
    solves(stage.trial(says([look, work], answers, gives_up()), task=task, kit="code"))
    assert answers[0].startswith("alpha 40") and " tests " not in answers[0]
