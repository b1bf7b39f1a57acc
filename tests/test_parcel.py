"""A folder as a stream of bytes: it comes out as it went in, and a hostile one comes out nowhere."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from system.sandbox import parcel

names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..")
)
trees = st.recursive(
    st.binary(max_size=40), lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


def write(tree: dict[str, Any], folder: Path) -> None:
    for name, inner in tree.items():
        if isinstance(inner, dict):
            (folder / name).mkdir()
            write(inner, folder / name)
        else:
            (folder / name).write_bytes(inner)


def read(folder: Path) -> dict[str, Any]:
    return {at.name: read(at) if at.is_dir() else at.read_bytes() for at in folder.iterdir()}


def sent(folder: Path) -> io.BytesIO:
    entries, contents = parcel.pack(str(folder))
    return io.BytesIO(parcel.listing(entries) + b"".join(contents))


def placed(stream: io.BytesIO, into: Path, *, links: bool = False, most_bytes: int = 1 << 20) -> None:
    parcel.place(stream, parcel.read_listing(stream, most_bytes=most_bytes), str(into), links=links)


@given(trees)
def test_a_folder_comes_out_as_it_went_in(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    there, here = tmp_path_factory.mktemp("there"), tmp_path_factory.mktemp("here")
    write(tree, there)
    stream = sent(there)
    placed(stream, here)
    assert read(here) == tree and stream.read() == b""


def test_special_files_come_out_as_links_that_lead_nowhere(tmp_path: Path) -> None:
    there, here, mine = (tmp_path / name for name in ("there", "here", "mine"))
    for folder in (there, here, mine):
        folder.mkdir()
    os.symlink("/etc/passwd", there / "link")
    os.mkfifo(there / "pipe")
    os.mkdir(there / "shut", 0)
    placed(sent(there), here)
    assert {at.name: os.readlink(at) for at in here.iterdir() if at.is_symlink()} == {
        "link": parcel.LEFT_OUT,
        "pipe": parcel.LEFT_OUT,
    }
    assert not (here / "link").exists() and (here / "shut").is_dir()
    placed(sent(there), mine, links=True)
    assert os.readlink(mine / "link") == "/etc/passwd" and not (mine / "pipe").is_symlink()


def test_a_nest_deeper_than_the_bound_is_one_entry(tmp_path: Path) -> None:
    (tmp_path / "there" / "/".join("d" * (parcel.MOST_DEPTH + 40))).mkdir(parents=True)
    (tmp_path / "here").mkdir()
    placed(sent(tmp_path / "there"), tmp_path / "here")
    deepest = max(len(at.relative_to(tmp_path / "here").parts) for at in (tmp_path / "here").rglob("*"))
    assert deepest == parcel.MOST_DEPTH + 1


@pytest.mark.parametrize(
    ("entries", "cause"),
    [
        (["../x", "file", 1, ""], "entry must be a path inside"),
        (["/x", "file", 1, ""], "entry must be a path inside"),
        (["a/../x", "file", 1, ""], "entry must be a path inside"),
        (["", "file", 1, ""], "entry must be a path inside"),
        (["a//x", "file", 1, ""], "entry must be a path inside"),
        (["x\0", "file", 1, ""], "entry must be a path inside"),
        (["x", "device", 0, ""], "entry must be a path inside"),
        (["x", "link", 5, "y"], "entry must be a path inside"),
        (["x", "file", -1, ""], "entry must be a path inside"),
        (["x", "file", True, ""], "entry must be a path inside"),
        (["x", "file", 1.0, ""], "entry must be a path inside"),
        (["x", "file", 1], "entry must be a path inside"),
        ({"path": "x"}, "entry must be a path inside"),
        (["a/x", "file", 0, ""], "entry must come once and after its folder"),
        (["x", "file", 1 << 40, ""], "files must hold at most 1048576 bytes"),
        (["x", "file", 9, ""], "parcel must hold what its listing says, got 8 bytes less"),
        (["x\ud800", "file", 0, ""], "surrogates not allowed"),
    ],
)
def test_an_entry_that_could_mean_anything_else_is_refused(tmp_path: Path, entries: Any, cause: str) -> None:
    stream = io.BytesIO(json.dumps([entries]).encode() + b"\n" + b"z")
    with pytest.raises(ValueError, match=cause):
        placed(stream, tmp_path)
    assert sorted(os.listdir(tmp_path)) in ([], ["x"])


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b"", "listing must end within"),
        (b"[" * 100_000 + b"\n", "listing must be JSON"),
        (b"\xff\n", "listing must be JSON"),
        (b'{"a": 1}\n', "listing must be a list, got"),
        (json.dumps([[str(n), "file", 0, ""] for n in range(20_001)]).encode() + b"\n", "at most 20000"),
        (b'[["x","link",0,"/etc"],["x/passwd","file",0,""]]\n', "must come once and after its folder"),
        (b'[["x","file",0,""],["x","folder",0,""]]\n', "must come once and after its folder"),
        (b'[["x","file",700000,""],["y","file",700000,""]]\n', "files must hold at most"),
    ],
)
def test_a_listing_that_is_none_is_refused(line: bytes, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        parcel.read_listing(io.BytesIO(line), most_bytes=1 << 20)


def test_nothing_is_written_where_something_lies(tmp_path: Path) -> None:
    os.symlink("/nowhere", tmp_path / "x")
    stream = io.BytesIO(b'[["x","file",1,""]]\nz')
    with pytest.raises(FileExistsError):
        placed(stream, tmp_path)


def test_both_parcels_arrive_in_a_place_that_has_only_python(tmp_path: Path) -> None:
    for name in ("code", "world"):
        (tmp_path / "from" / name / "deep").mkdir(parents=True)
        (tmp_path / "from" / name / "deep" / "x").write_text(name)
    program = (
        Path(parcel.__file__).read_text() + f"\narrive({f'{tmp_path}/code'!r}, {f'{tmp_path}/world'!r}, 1)\n"
    )
    feed = b"".join(sent(tmp_path / "from" / name).read() for name in ("code", "world"))
    command = [sys.executable, "-I", "-B", "-c", program]
    done = subprocess.run(command, input=feed, capture_output=True, check=True, timeout=60)
    said = json.loads(done.stdout)
    assert str(os.getpid()) in said["processes"] and said["mcp"] and said["uid"] == os.geteuid()
    for name in ("code", "world"):
        assert (tmp_path / name / "deep" / "x").read_text() == name
    assert (tmp_path / "world" / "deep").stat().st_uid == (1 if os.geteuid() == 0 else os.geteuid())
    assert (tmp_path / "code" / "deep").stat().st_uid == os.geteuid()
