"""Tasks of others, packed: what is in them comes out whole, and nothing else is touched."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from system.world.archive import Limits, unpack
from system.world.generate import generate
from system.world.parquet import read_parquet
from system.world.task import read_task


def packed(*members: tuple[str, bytes | str, bytes | int], level: int = 9) -> bytes:
    """A gzipped tar of (name, content or link target, type or mode)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content, kind in members:
            info = tarfile.TarInfo(name)
            if isinstance(kind, int):
                info.mode = kind
            else:
                info.type = kind
            if isinstance(content, str):
                info.linkname = content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), level)


def unpacked(data: bytes, place: Path, **limits: int) -> dict[str, bytes]:
    unpack(data, place / "task", row="row 0", limits=Limits(**limits))
    return {
        f.relative_to(place / "task").as_posix(): f.read_bytes()
        for f in (place / "task").rglob("*")
        if f.is_file()
    }


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return generate(tmp_path_factory.mktemp("set"), split="train", worlds=1, tasks=2, seed=0)


def tarred(folder: Path, prefix: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(folder, arcname=prefix)
    return buffer.getvalue()


def test_a_packed_task_comes_out_as_it_was(generated: list[Path], tmp_path: Path):
    unpack(tarred(generated[0], "."), tmp_path / "task", row="row 0", limits=Limits())
    before, after = read_task(generated[0]), read_task(tmp_path / "task")
    assert (after.id, after.steps[0].instruction) == (before.id, before.instruction)
    for file in generated[0].rglob("*"):
        twin = tmp_path / "task" / file.relative_to(generated[0])
        assert twin.is_dir() if file.is_dir() else twin.read_bytes() == file.read_bytes()
    assert os.access(tmp_path / "task" / "tests" / "test.sh", os.X_OK)
    assert not (tmp_path / "task" / "instruction.md").stat().st_mode & 0o111


def test_special_bits_and_owners_are_left_behind(tmp_path: Path):
    unpacked(packed(("a", b"x", 0o6777), ("b", b"y", 0o666)), tmp_path)
    assert (tmp_path / "task" / "a").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "task" / "b").stat().st_mode & 0o7777 == 0o644


def test_links_inside_become_the_files_that_they_mean(tmp_path: Path):
    data = packed(
        ("tests/early", "../late", tarfile.SYMTYPE),
        ("tests/chain", "early", tarfile.SYMTYPE),
        ("late", b"text", 0o644),
        ("hard", "./late", tarfile.LNKTYPE),
    )
    assert unpacked(data, tmp_path) == dict.fromkeys(("tests/early", "tests/chain", "late", "hard"), b"text")
    assert not [file for file in (tmp_path / "task").rglob("*") if file.is_symlink()]


def test_names_lose_dots_and_are_composed(tmp_path: Path):
    assert unpacked(packed(("./a//./u\u0308.txt", b"x", 0o644)), tmp_path) == {"a/\u00fc.txt": b"x"}


@pytest.mark.parametrize(
    ("members", "line"),
    [
        ([("/etc/x", b"x", 0o644)], "row 0 member '/etc/x' must have a relative path, got '/etc/x'"),
        ([("a/../../x", b"x", 0o644)], "row 0 member 'a/../../x' must stay inside its task, got"),
        ([("..", b"", tarfile.DIRTYPE)], "row 0 member '..' must stay inside its task, got '..'"),
        ([("a\\b", b"x", 0o644)], "must have a printable path without backslashes"),
        ([("a\nb", b"x", 0o644)], "must have a printable path without backslashes"),
        ([("a/" * 40 + "x", b"x", 0o644)], "must have 32 names of 255 bytes at most"),
        ([("a" * 300, b"x", 0o644)], "must have 32 names of 255 bytes at most"),
        (
            [("out", "/etc/passwd", tarfile.SYMTYPE)],
            "member 'out' must link inside its task, got '/etc/passwd'",
        ),
        ([("a/out", "../../x", tarfile.SYMTYPE)], "member 'a/out' must link inside its task, got '../../x'"),
        ([("out", "../x", tarfile.LNKTYPE)], "member 'out' must stay inside its task, got '../x'"),
        (
            [("out", "/etc/passwd", tarfile.LNKTYPE)],
            "member 'out' must have a relative path, got '/etc/passwd'",
        ),
        (
            [("a", "b", tarfile.SYMTYPE), ("b", "a", tarfile.SYMTYPE)],
            "member 'a' must link to a file of its task",
        ),
        (
            [("a", b"", tarfile.DIRTYPE), ("b", "a", tarfile.SYMTYPE)],
            "member 'b' must link to a file of its task",
        ),
        ([("l", "a", tarfile.SYMTYPE), ("l/x", b"x", 0o644)], "member 'l/x' must lie in folders, got"),
        ([("f", b"x", 0o644), ("f/x", b"x", 0o644)], "member 'f/x' must lie in folders, got"),
        ([("f", b"x", 0o644), ("./f", b"y", 0o644)], "member './f' must occur once, got it again"),
        ([("f", b"x", 0o644), ("f", "x", tarfile.SYMTYPE)], "member 'f' must occur once, got it again"),
        ([("f", b"x", 0o644), ("f", b"", tarfile.DIRTYPE)], "member 'f' must occur once, got a file"),
        (
            [("pipe", b"", tarfile.FIFOTYPE)],
            "member 'pipe' must be a plain file, a folder or a link, got type",
        ),
        (
            [("null", b"", tarfile.CHRTYPE)],
            "member 'null' must be a plain file, a folder or a link, got type",
        ),
        (
            [("disk", b"", tarfile.BLKTYPE)],
            "member 'disk' must be a plain file, a folder or a link, got type",
        ),
        ([(str(n), b"", 0o644) for n in range(9)], "row 0 must have at most 8 members, got more"),
        ([("big", b"x" * 2000, 0o644)], "row 0 member 'big' must hold at most 1000 bytes, got 2000"),
    ],
)
def test_a_member_that_breaks_a_rule_is_named_with_it(members: list, line: str, tmp_path: Path):
    with pytest.raises(ValueError) as caught:
        unpacked(packed(*members), tmp_path, members=8, member_bytes=1000)
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert [place.name for place in tmp_path.iterdir()] == ["task"]


def test_a_task_may_not_unpack_to_more_than_its_share(tmp_path: Path):
    whole = packed(*[(str(n), os.urandom(9000), 0o644) for n in range(9)])
    with pytest.raises(ValueError, match="row 0 must unpack to at most 50000 bytes, got more"):
        unpacked(whole, tmp_path, total_bytes=50_000)


def test_a_compression_bomb_is_stopped_long_before_its_end(tmp_path: Path):
    bomb = packed(*[(str(n), bytes(8 * 1024**2), 0o644) for n in range(4)])
    assert len(bomb) < 100_000
    with pytest.raises(ValueError, match="row 0 must unpack to at most 16777216 bytes, got more"):
        unpacked(bomb, tmp_path)
    assert sum(file.stat().st_size for file in (tmp_path / "task").iterdir()) <= 16 * 1024**2


def test_headers_may_not_be_a_way_to_fill_the_memory(tmp_path: Path):
    with pytest.raises(ValueError, match="row 0 must have headers of at most 1048576 bytes"):
        unpacked(packed(("a" * 3_000_000, b"x", 0o644)), tmp_path)


def _sparse() -> bytes:
    """The header of a file that claims a gigabyte of holes."""
    info = tarfile.TarInfo("hole")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 0
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[483:495] = b"%011o\0" % 2**30
    block[148:156] = b"%06o\0 " % (256 + sum(block[:148]) + sum(block[156:512]))
    return gzip.compress(bytes(block) + bytes(1024))


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "row 0 must be a gzipped tar, got"),
        (b"PK\x03\x04", "row 0 must be a gzipped tar, got"),
        (gzip.compress(b"no tar" * 200), "row 0 must be a gzipped tar, got"),
        (packed(("a", os.urandom(40_000), 0o644))[:-20_000], "row 0 must be a gzipped tar, got"),
        (packed(("a", b"x", 0o644))[:-8] + bytes(8), "row 0 must be a gzipped tar, got"),
        (_sparse(), "row 0 member 'hole' must be a plain file"),
    ],
)
def test_what_is_no_whole_archive_is_refused(data: bytes, line: str, tmp_path: Path):
    with pytest.raises(ValueError) as caught:
        unpacked(data, tmp_path)
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    reason = "needs pyarrow, the extra `parquet`"
    pyarrow, parquet = (pytest.importorskip(name, reason=reason) for name in ("pyarrow", "pyarrow.parquet"))

    def write(**columns: list) -> Path:
        parquet.write_table(pyarrow.table(columns), tmp_path / "tasks.parquet")
        return tmp_path / "tasks.parquet"

    return write


def test_read_parquet_gives_the_tasks_of_all_rows(
    write_rows: Callable, generated: list[Path], tmp_path: Path
):
    first, second = generated
    file = write_rows(path=["one", "two/"], task_binary=[tarred(first, "."), tarred(second, second.name)])
    found = read_parquet(file, tmp_path / "into")
    assert found == [tmp_path / "into" / "one", tmp_path / "into" / "two"]
    assert [read_task(folder).id for folder in found] == [first.name, second.name]
    assert sorted(os.listdir(tmp_path / "into")) == ["one", "two"]
    with pytest.raises(ValueError, match="row 0 path must be new in .*, got 'one'"):
        read_parquet(file, tmp_path / "into")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("../two", "row 1 path must be the name of one folder, got '../two'"),
        ("/two", "row 1 path must be the name of one folder, got '/two'"),
        (".two", "row 1 path must be the name of one folder, got '.two'"),
        ("", "row 1 path must be the name of one folder, got ''"),
        (None, "row 1 path must be the name of one folder, got None"),
        ("one", "row 1 path must differ from those before, got 'one'"),
    ],
)
def test_a_row_with_a_bad_path_leaves_nothing(
    name: str | None, line: str, write_rows: Callable, tmp_path: Path
):
    good = packed(("task.toml", b"", 0o644))
    with pytest.raises(ValueError) as caught:
        read_parquet(write_rows(path=["one", name], task_binary=[good, good]), tmp_path / "into")
    assert line in str(caught.value)
    assert list((tmp_path / "into").iterdir()) == []


@pytest.mark.parametrize(
    ("binary", "line"),
    [
        (None, "row 1 must have a task_binary, got None"),
        (packed(("x", b"", 0o644)), r"row 1 must hold task.toml, got \['x'\]"),
        (packed(("../x", b"", 0o644)), "row 1 member '../x' must stay inside its task"),
        (packed(("p", b"", tarfile.FIFOTYPE)), "row 1 member 'p' must be a plain file"),
    ],
)
def test_a_bad_row_leaves_nothing(binary: bytes | None, line: str, write_rows: Callable, tmp_path: Path):
    good = packed(("task.toml", b"", 0o644))
    with pytest.raises(ValueError, match=line):
        read_parquet(write_rows(path=["one", "two"], task_binary=[good, binary]), tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []


def test_a_file_of_another_form_is_refused(write_rows: Callable, tmp_path: Path):
    with pytest.raises(
        ValueError, match="must have columns path and task_binary, got none called task_binary"
    ):
        read_parquet(write_rows(path=["one"], binary=[b""]), tmp_path / "into")
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="must be a parquet file, got"):
        read_parquet(tmp_path / "text.parquet", tmp_path / "into")


def test_without_pyarrow_one_line_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"needs pyarrow: pip install 'bartleby\[parquet\]'"):
        read_parquet(tmp_path / "tasks.parquet", tmp_path / "into")
    shutil.rmtree(tmp_path / "into")
