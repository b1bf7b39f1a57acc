"""A folder as one stream of bytes: a line of JSON that lists it, then the contents of its files in that order.

Nothing but the standard library and nothing of this project is imported: the text of this file is also what a
container is given to unpack the first parcel with. What comes back from there may have been made by anybody, so a
parcel can only mean files and folders below the folder that it is placed in, each once, of the sizes that it says.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

MOST_DEPTH = 64
"""Deeper than so many folders, one stands for all that is in it, as a special file does."""

MOST_ENTRIES = 20_000
MOST_LISTING = 16 << 20
"""Longest first line in bytes."""

LEFT_OUT = "left out: not a file"
"""Where the link leads that stands for a link, pipe, socket or device of a parcel: nowhere."""

_CHUNK = 1 << 18

Entry = tuple[str, str, int, str]
"""Path, kind ("file", "folder", "link", "other"), size, and where a link leads."""


def pack(root: str, prefix: str = "") -> tuple[list[Entry], Iterator[bytes]]:
    """What a folder holds, sorted, and the contents of its files; a file that shrinks meanwhile is filled up."""
    listed: list[Entry] = []
    sources: list[tuple[str, int]] = []
    _list(root, prefix, listed, sources)
    return listed, _contents(sources)


def _list(folder: str, prefix: str, listed: list[Entry], sources: list[tuple[str, int]]) -> None:
    for name in sorted(_readable(os.listdir, folder)):
        at, path = os.path.join(folder, name), prefix + name
        status = os.lstat(at)
        if stat.S_ISDIR(status.st_mode) and path.count("/") < MOST_DEPTH:
            listed.append((path, "folder", 0, ""))
            _list(at, path + "/", listed, sources)
        elif stat.S_ISREG(status.st_mode):
            listed.append((path, "file", status.st_size, ""))
            sources.append((at, status.st_size))
        elif stat.S_ISLNK(status.st_mode):
            listed.append((path, "link", 0, os.readlink(at)))
        else:
            listed.append((path, "other", 0, ""))


def _contents(sources: list[tuple[str, int]]) -> Iterator[bytes]:
    for at, size in sources:
        fd = _readable(lambda path: os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), at)
        with os.fdopen(fd, "rb") as file:
            left = size
            while left:
                chunk = file.read(min(left, _CHUNK)) or bytes(min(left, _CHUNK))
                left -= len(chunk)
                yield chunk


def _readable(read: Callable[[str], Any], at: str) -> Any:
    """What `read` gives, even where the owner has taken the permission from himself."""
    try:
        return read(at)
    except PermissionError:
        os.chmod(at, stat.S_IRWXU)
        return read(at)


def listing(entries: list[Entry]) -> bytes:
    """The first line."""
    return json.dumps(entries, separators=(",", ":")).encode() + b"\n"


class TooLarge(ValueError):
    """A parcel holds more than it may: whoever filled it went beyond what it was given."""


def read_listing(stream: BinaryIO, *, most_bytes: int) -> list[Entry]:
    """The entries of a parcel whose files hold at most so much together.

    Raises:
        TooLarge: there are too many, or they hold too much.
        ValueError: the entry that a parcel must not have.
    """
    line = stream.readline(MOST_LISTING + 1)
    if not line.endswith(b"\n"):
        kind = TooLarge if len(line) > MOST_LISTING else ValueError
        raise kind(f"listing must end within {MOST_LISTING} bytes, got {len(line)} without an end")
    try:
        entries = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"listing must be JSON, got {line[:60]!r}") from None
    if not isinstance(entries, list):
        raise ValueError(f"listing must be a list, got {line[:60]!r}")
    if len(entries) > MOST_ENTRIES:
        raise TooLarge(f"listing must have at most {MOST_ENTRIES} entries, got {len(entries)}")
    seen: dict[str, str] = {}
    whole = 0
    for entry in entries:
        path, kind, size, _ = _checked(entry)
        above = path.rpartition("/")[0]
        if path in seen or (above and seen.get(above) != "folder"):
            raise ValueError(f"entry must come once and after its folder, got {path[:100]!r}")
        seen[path] = kind
        whole += size
        if whole > most_bytes:
            raise TooLarge(f"files must hold at most {most_bytes} bytes, got more with {path[:100]!r}")
    return [(path, kind, size, target) for path, kind, size, target in entries]


def _checked(entry: object) -> Entry:
    match entry:
        case [str(path), "file" | "folder" | "link" | "other" as kind, int(size), str(target)]:
            plain = all(part not in ("", ".", "..") for part in path.split("/")) and "\0" not in path
            if plain and "\0" not in target and size is not True and size is not False:
                if size == 0 or (kind == "file" and size > 0):
                    return path, kind, size, target
    raise ValueError(f"entry must be a path inside, a kind, a size and a target, got {str(entry)[:100]}")


def place(stream: BinaryIO, entries: list[Entry], into: str, *, links: bool, mode: int = 0o600) -> None:
    """Write the entries of a parcel below an existing empty folder.

    Args:
        stream: what follows the listing.
        entries: of `read_listing`.
        links: whether links are made as they were, for a parcel of one's own; a link stands for any special file
            otherwise, and leads nowhere. Links are made last: nothing is written through one.
        mode: of the files.

    Raises:
        ValueError: the stream ends early.
        OSError: a name that this file system does not take; the folder was not empty.
    """
    for path, kind, size, _ in entries:
        at = os.path.join(into, path)
        if kind == "folder":
            os.mkdir(at, mode | (mode & 0o444) >> 2)  # entered by whom its files are read by
        elif kind == "file":
            _write(stream, at, size, mode)
    for path, kind, _, target in entries:
        if kind == "link" or (kind == "other" and not links):
            os.symlink(target if links else LEFT_OUT, os.path.join(into, path))


def _write(stream: BinaryIO, at: str, size: int, mode: int) -> None:
    fd = os.open(at, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        left = size
        while left:
            chunk = stream.read(min(left, _CHUNK))
            if not chunk:
                raise ValueError(f"parcel must hold what its listing says, got {left} bytes less at {at}")
            left -= len(chunk)
            file.write(chunk)


def arrive(code: str, world: str, uid: int) -> None:
    """Inside a container, first of all: unpack both parcels from the standard input, and say what was found there.

    Args:
        code: folder for the first parcel, which only its owner can write.
        world: folder for the second; it and all in it is given to `uid` where that can be done.
        uid: whose the tools will be.
    """
    for folder in (code, world):
        os.makedirs(folder)
        place(
            sys.stdin.buffer,
            read_listing(sys.stdin.buffer, most_bytes=1 << 40),
            folder,
            links=True,
            mode=0o644,
        )
    if os.geteuid() == 0:
        for folder, folders, files in os.walk(world):
            for name in (".", *folders, *files):
                os.chown(os.path.join(folder, name), uid, uid, follow_symlinks=False)
    print(json.dumps({"processes": processes(), "mcp": _version("mcp"), "uid": os.geteuid()}))


def processes() -> dict[str, str]:
    """All that runs beside this process: pid to the time of its start, which tells it from a later one of that pid."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:  # gone
            continue
        if fields[0] not in "ZX" and int(name) != os.getpid():
            found[name] = fields[19]
    return found


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
