"""Search over a whole world: every kind of file, by text or by words, out of an index that follows the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

from system.tools import drafts
from system.tools.calendar import event_lines
from system.tools.chat import message_lines
from system.tools.decks import deck_lines
from system.tools.files import files_below
from system.tools.letters import mail_lines
from system.tools.paths import LARGEST_FILE
from system.tools.pdfs import characters_of, in_columns, open_pdf
from system.tools.ranking import Ranking
from system.tools.registration import tool
from system.tools.results import NO_MATCH, matches, one_line
from system.tools.sheets import workbook_lines
from system.tools.texts import SPILL, text_of_file

_PASSAGE_LINES, _PASSAGE_CHARACTERS = 8, 600
_MOST_LINES = 20_000
"""Lines of one file that are searched."""
_SHOWN_LINES = 60


class Passage(NamedTuple):
    """A few lines of a file: `Passage("memo.docx", 3, ("Halpas fee: 6839",))`, counted from 1."""

    name: str
    line: int
    lines: tuple[str, ...]


class Index:
    """The passages of a world, read again where a file has changed."""

    def __init__(self) -> None:
        self._ranking = Ranking()
        self._seen: dict[str, tuple[int, int]] = {}
        self._lines: dict[str, list[str]] = {}
        self._keys: dict[str, list[Passage]] = {}
        self.unread: set[str] = set()

    def refresh(self, root: Path) -> None:
        """Take in what changed since the last time."""
        present = {}
        for file, name in files_below(root):
            if name.split("/")[0] != SPILL:
                status = file.stat()
                present[name] = (file, (status.st_mtime_ns, status.st_size))
        for name in [name for name in self._seen if present.get(name, (None, None))[1] != self._seen[name]]:
            self._ranking.remove(self._keys.pop(name))
            del self._seen[name], self._lines[name]
            self.unread.discard(name)
        for name, (file, stamp) in present.items():
            if name not in self._seen:
                self._read(file, name, stamp)

    def _read(self, file: Path, name: str, stamp: tuple[int, int]) -> None:
        try:
            if stamp[1] > LARGEST_FILE:
                raise ValueError(f"{name} is too large")
            lines = [one_line(line) for line in lines_of_file(file, name)[:_MOST_LINES]]
        except Exception:  # noqa: BLE001  # one damaged file must not hide the others; it is named in the result
            lines = []
            self.unread.add(name)
        self._seen[name], self._lines[name] = stamp, lines
        self._keys[name] = list(_passages(name, lines))
        for passage in self._keys[name]:
            # The words of the path are found too: "fees.xlsx", "contracts".
            self._ranking.add(passage, "\n".join([name.replace("_", " "), *passage.lines]))

    def ranked(self, query: str, count: int) -> list[Passage]:
        """The passages that fit a query best."""
        return [hit.key for hit in self._ranking.search(query, count) if isinstance(hit.key, Passage)]

    def containing(self, text: str) -> Iterator[str]:
        """Every line that contains a text, after the name of its file."""
        for name in sorted(self._lines):
            yield from (f"{name}: {line}" for line in self._lines[name] if matches(text, line))


def find(
    root: Path,
    query: Annotated[str, "words, in any order"],
    count: Annotated[int, "how many passages, at most 20"] = 5,
) -> str:
    """Find the passages of all files, mail and chats that fit some words best."""
    if not query.strip():
        raise ValueError("query must not be empty")
    if not 1 <= count <= 20:
        raise ValueError(f"count must be from 1 to 20, got {count}")
    index = _current(root)
    passages = index.ranked(query, count)
    shown = [
        "\n".join([f"{p.name}, line {p.line}:", *(f"  {line[:400]}" for line in p.lines)]) for p in passages
    ]
    return "\n".join([*(shown or [NO_MATCH]), *_unread(index)])


def search_files(root: Path, query: Annotated[str, "a text that a line contains"]) -> str:
    """Find the lines that contain a text, in every file of any type."""
    if not query.strip():
        raise ValueError("query must not be empty")
    index = _current(root)
    found = list(index.containing(query))
    more = [f"[{_SHOWN_LINES} of {len(found)} lines shown; use a longer query]"] * (len(found) > _SHOWN_LINES)
    return "\n".join([*(found[:_SHOWN_LINES] or [NO_MATCH]), *more, *_unread(index)])


def lines_of_file(file: Path, name: str) -> list[str]:
    """What a file says, one line a paragraph, row, message or event.

    Raises:
        Exception: Whatever a damaged file brings about.
    """
    suffix = file.suffix.lower()
    if suffix == ".json" and not name.startswith("chat/"):
        return text_of_file(file).splitlines()
    reader = _READERS.get(suffix)
    if reader is not None:
        return reader(file)
    with file.open("rb") as opened:
        if b"\0" in opened.read(4096):  # an image, a font: nothing to read
            return []
    return text_of_file(file).splitlines()


def _deck(file: Path) -> list[str]:
    return [line for _, line in deck_lines(file)]


def _pdf(file: Path) -> list[str]:
    with open_pdf(file) as pdf:
        return [line for page in pdf for line in in_columns(characters_of(page))]


_READERS: dict[str, Callable[[Path], list[str]]] = {
    ".xlsx": workbook_lines,
    ".pdf": _pdf,
    ".pptx": _deck,
    ".docx": drafts.document_lines,
    ".mbox": mail_lines,
    ".json": message_lines,
    ".ics": event_lines,
}


def _passages(name: str, lines: list[str]) -> Iterator[Passage]:
    held: list[str] = []
    first = 1
    for number, line in enumerate([*lines, ""], 1):
        size = sum(map(len, held))
        full = len(held) == _PASSAGE_LINES or size + len(line) > _PASSAGE_CHARACTERS
        if held and (full or number > len(lines)):
            yield Passage(name, first, tuple(held))
            held = []
        if line:
            first = first if held else number
            held.append(line)


@lru_cache(maxsize=4)
def _index(root: Path) -> Index:
    """The index of a world; a server has one world, tests have several."""
    return Index()


def _current(root: Path) -> Index:
    index = _index(root.resolve())
    index.refresh(root)
    return index


def _unread(index: Index) -> list[str]:
    return [f"[not readable: {', '.join(sorted(index.unread))}]"] if index.unread else []


TOOLS = (tool(find, reads=True, limit_s=60.0), tool(search_files, reads=True, limit_s=60.0))
