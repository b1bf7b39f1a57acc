"""What an agent changed in a world, part by part; whatever changed is told, in the worst case that it did.

Files are the agent's, so each is read in a child of its own within bounds. What cannot be read is compared as
bytes, and says so.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from core.budget import cut_text

from .bounded import OutOfBounds, bounded
from .parts import Parts, kind_of, reader
from .world import GradedWorld

KINDS = ("added", "removed", "changed")

_CONTEXT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that is no longer as it was.

    Example: `Change(path="fees.xlsx", kind="changed", place="Fees!B4 value", before="40", after="48")`.

    Args:
        place: where in the file, in the words of its kind; "" for the file as a whole.
        before: what stood there; "" where there was nothing.
        after: what stands there now.
    """

    path: str
    kind: str
    place: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffLimits:
    """How much is compared. Example: `DiffLimits(files=20)`."""

    file_bytes: int = 32 << 20
    "Size of a file that is read part by part."
    files: int = 200
    "Files that are; of the others only a hash is told."
    changes: int = 2_000
    "Changes that are told of one file."
    characters: int = 2_000
    "Of the text of one change, on either side."
    memory_bytes: int = 768 << 20
    "Of the child that reads a file."
    file_s: float = 15.0
    "Of the clock, for one file."
    seconds: float = 60.0
    "For all of them; after it only hashes are compared."


def changes(
    world: GradedWorld, limits: DiffLimits | None = None, *, only: Collection[str] | None = None
) -> list[Change]:
    """Everything that differs between a frozen world and the pristine one, by path and place.

    Every path of `world.changed()` has at least one Change.

    Args:
        only: paths that are compared; all of them if left out.
    """
    limits = limits or DiffLimits()
    deadline = time.monotonic() + limits.seconds
    found: list[Change] = []
    wanted = [path for path in world.changed() if only is None or path in only]
    for number, path in enumerate(wanted):
        within = number < limits.files and time.monotonic() < deadline
        found += _file(world, path, limits, within)
    return found


def compare(path: str, before: Parts, after: Parts, *, characters: int) -> list[Change]:
    """The differences between two versions of a file's parts.

    Facts are compared by name, sequences aligned, so that a line more shifts nothing. Where one side is
    empty the kind is "added" or "removed".
    """
    found = []
    for name in (*after, *(name for name in before if name not in after)):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if isinstance(old, tuple) or isinstance(new, tuple):
            pairs: Iterable[tuple[str, str | None, str | None]] = _aligned(_sequence(old), _sequence(new))
            pairs = ((f"{name} {place}", a, b) for place, a, b in pairs)
        else:
            pairs = [(name, old, new)]
        found += [_change(path, place, a, b, characters) for place, a, b in pairs]
    return found


def rendered(listed: list[Change], *, characters: int) -> str:
    """Changes as lines for a reader, a heading for each path; beyond so many characters the middle is left out."""
    lines: list[str] = []
    last = None
    for change in listed:
        if change.path != last:
            lines.append(f"== {change.path!r}")
            last = change.path
        place = f" {change.place}" if change.place else ""
        both = (
            f"{change.before} -> {change.after}" if change.kind == "changed" else change.before + change.after
        )
        lines.append(f"{change.kind}{place}: {both}")
    marker = f"\n[{len(listed)} changes in all; some are left out here]\n"
    return cut_text("\n".join(lines), limit=characters, marker=marker)


def _file(world: GradedWorld, path: str, limits: DiffLimits, within: bool) -> list[Change]:
    old, new = _plain(world.lower / path), world.path(path)
    before, after = _told(old), _told(new)
    there = os.path.lexists(world.lower / path)
    kind = "changed" if there and new is not None else "removed" if there else "added"
    if not there:
        before = ""
    elif new is None:
        after = ""
    head = Change(path=path, kind=kind, place="", before=before, after=after)
    if kind == "removed":
        return [head]
    sizes = [place.lstat().st_size for place in (old, new) if place is not None]
    if not sizes or (there and old is None) or (not there and new is None):
        return [head]
    if not within or max(sizes) > limits.file_bytes:
        return [_noted(head, "only its bytes were compared")]
    try:
        contents = [place.read_bytes() if place is not None else None for place in (old, new)]
    except OSError as error:
        return [_noted(head, f"not readable: {error.strerror}")]
    try:
        rows, note = _structural(path, contents[0], contents[1], limits), ""
    except OutOfBounds as reason:
        rows, note = [], f"not compared by its parts: {reason}"
    found = [Change(path=path, kind=k, place=p, before=b, after=a) for k, p, b, a in rows[: limits.changes]]
    if len(rows) > limits.changes:
        note = f"{len(rows) - limits.changes} changes more"
    if kind == "added" or not found or note:
        return [_noted(head, note or ("" if kind == "added" else "content differs")), *found]
    return found


def _structural(
    path: str, before: bytes | None, after: bytes | None, limits: DiffLimits
) -> list[tuple[str, str, str, str]]:
    """Kind, place, before and after of each change. Raises OutOfBounds: the file cannot be read by its parts."""

    kind = kind_of(path, after if after is not None else before or b"")
    if kind == "bytes":
        return []
    read = reader(kind)  # imported here, so that not every child does it again

    def work() -> list[tuple[str, str, str, str]]:
        parts = [read(data) if data is not None else {} for data in (before, after)]
        listed = compare(path, parts[0], parts[1], characters=limits.characters)
        return [(c.kind, c.place, c.before, c.after) for c in listed]

    return bounded(
        work,
        seconds=limits.file_s,
        memory_bytes=limits.memory_bytes,
        result_bytes=4 * limits.changes * limits.characters,
    )


def _plain(place: Path) -> Path | None:
    try:
        return place if stat.S_ISREG(place.lstat().st_mode) else None
    except OSError:  # not there
        return None


def _told(place: Path | None) -> str:
    """Size and hash of a plain file, in constant memory."""
    if place is None:
        return "no plain file: a link, a pipe, a device or a folder"
    digest = hashlib.sha256()
    try:
        with open(place, "rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
        return f"{place.lstat().st_size} bytes, sha256 {digest.hexdigest()[:16]}"
    except OSError as error:
        return f"{place.lstat().st_size} bytes, not readable: {error.strerror}"


def _noted(change: Change, note: str) -> Change:
    after = f"{change.after} ({note})" if note else change.after
    return Change(path=change.path, kind=change.kind, place=change.place, before=change.before, after=after)


def _sequence(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


_LONGEST_ALIGNED = 4_000


def _aligned(old: tuple[str, ...], new: tuple[str, ...]) -> Iterator[tuple[str, str | None, str | None]]:
    """(place, before, after) of what differs; places are counted from 1 in the sequence that has the member.

    Between common ends of great length members are matched as a bag: alignment is quadratic.
    """
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    left, right = old[start : len(old) - end], new[start : len(new) - end]
    if max(len(left), len(right)) > _LONGEST_ALIGNED:
        yield from _as_bags(left, right, start)
        return
    for tag, a, b, c, d in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        paired = min(b - a, d - c)
        for i in range(paired):
            yield str(start + c + i + 1), left[a + i], right[c + i]
        for i in range(a + paired, b):
            yield f"{start + i + 1} of before", left[i], None
        for i in range(c + paired, d):
            yield str(start + i + 1), None, right[i]


def _as_bags(
    left: tuple[str, ...], right: tuple[str, ...], start: int
) -> Iterator[tuple[str, str | None, str | None]]:
    gone, come = Counter(left) - Counter(right), Counter(right) - Counter(left)
    for index, member in enumerate(left, start=start + 1):
        if gone[member] > 0:
            gone[member] -= 1
            yield f"{index} of before", member, None
    for index, member in enumerate(right, start=start + 1):
        if come[member] > 0:
            come[member] -= 1
            yield str(index), None, member
    if Counter(left) == Counter(right):
        yield f"{start + 1} and on", "an order", "another order"


def _change(path: str, place: str, old: object, new: object, characters: int) -> Change:
    kind = "added" if old is None else "removed" if new is None else "changed"
    before, after = ("" if side is None else str(side) for side in (old, new))
    if max(len(before), len(after)) > characters:
        before, after = _around(before, after, characters)
    return Change(path=path, kind=kind, place=place, before=before, after=after)


def _around(before: str, after: str, characters: int) -> tuple[str, str]:
    """Both texts from shortly before their first difference, cut to size."""
    same = len(os.path.commonprefix([before, after]))
    first = max(0, same - _CONTEXT)
    sides = ["…" + side[first:] if first else side for side in (before, after)]
    marker = " [some of it left out here] "
    return cut_text(sides[0], limit=characters, marker=marker), cut_text(
        sides[1], limit=characters, marker=marker
    )
