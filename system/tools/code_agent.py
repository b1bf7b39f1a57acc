"""The tools of the code agent: `bash glob read grep write edit todowrite`, over one folder.

A server remembers what the agent has read: a file that it has not seen, or that has changed since, is not overwritten.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from system.tools import shell
from system.tools.arguments import Argument, Kind
from system.tools.matching import close_lines, glob_expression, line_expression, lines_of
from system.tools.paths import LARGEST_FILE, entries, inside
from system.tools.registration import Tool, tool
from system.tools.spill import FOLDER as SPILL
from system.tools.spill import kept_among, spilled

LINES_READ = 2000
LINE_LIMIT = 2000
"""Characters of a line that are shown."""
RESULTS_SHOWN = 100
"""Files of a glob, lines of a grep."""
PAGED = "read shows it from a line offset on, grep finds lines in it"

_BY_PYTHON = {
    ".xlsx": "openpyxl",
    ".docx": "python-docx (import docx)",
    ".pptx": "python-pptx (import pptx)",
    ".pdf": "pdfplumber",
}
_STATES = ("pending", "in_progress", "completed", "cancelled")
_PRIORITIES = ("high", "medium", "low")

FilePath = Annotated[str, "path of the file, relative to the folder"]


@dataclass(slots=True)
class Workspace:
    """What one server knows: the folder, its limits, what was read and when, and the list of what is to be done."""

    root: Path
    result_characters: int
    longest_call_s: float
    seen: dict[Path, tuple[int, int]] = field(default_factory=dict)
    todos: list[dict[str, str]] = field(default_factory=list)

    def path(self, path: str) -> Path:
        """Where a path of the model leads; an absolute one may name the folder itself."""
        root = self.root.resolve()
        if Path(path).is_absolute() and Path(os.path.normpath(path)).is_relative_to(root):
            path = os.path.relpath(os.path.normpath(path), root)
        return inside(self.root, path or ".")

    def name(self, file: Path) -> str:
        """A file as the model names it."""
        return file.relative_to(self.root.resolve()).as_posix()

    def saw(self, file: Path) -> None:
        """Note that the model knows what the file now holds."""
        self.seen[file] = _stamp(file)

    def check_seen(self, file: Path) -> None:
        """Refuse a change of a file that the model has not read, or that has changed since."""
        name = self.name(file)
        if file not in self.seen:
            raise ValueError(f"{name} must be read before it is changed")
        if self.seen[file] != _stamp(file):
            raise ValueError(f"{name} has changed since it was read; read it again")


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size


def bash(
    place: Workspace,
    command: Annotated[str, "what bash runs, in the folder unless workdir says otherwise"],
    timeout: Annotated[int, "milliseconds after which the command is stopped"] = 120_000,
    description: Annotated[str, "what the command does, in five to ten words"] = "",
    workdir: Annotated[str, "folder to run in"] = ".",
) -> str:
    """Run a shell command; its output and errors come together, and what it leaves running is ended."""
    if not command.strip():
        raise ValueError("command must not be empty")
    if timeout < 1:
        raise ValueError(f"timeout must be at least 1 ms, got {timeout}")
    folder = place.path(workdir)
    if not folder.is_dir():
        raise ValueError(f"workdir must be a folder, got {workdir}")
    limit_s = min(timeout / 1000, place.longest_call_s)
    run = shell.run(command, folder, limit_s=limit_s)
    said = run.output.decode("utf-8", errors="replace").rstrip("\n")
    limit = min(shell.OUTPUT_LIMIT, place.result_characters)
    text = spilled(said, place.root, limit=max(0, limit - 120), how=PAGED)
    notes = []
    if run.dropped:
        notes.append(f"[{run.dropped} more bytes of output were dropped]")
    if run.status is None:
        notes.append(f"[stopped after {limit_s:g} s]")
    elif run.status != 0:
        notes.append(f"[signal {-run.status}]" if run.status < 0 else f"[exit status {run.status}]")
    return "\n".join([*([text] if text else []), *notes]) or "no output"


def read(
    place: Workspace,
    filePath: FilePath,
    offset: Annotated[int, "line to begin with; the first is 1"] = 1,
    limit: Annotated[int, "lines to read"] = LINES_READ,
) -> str:
    """Read a text file with its line numbers, or list a folder."""
    if offset < 1 or limit < 1:
        raise ValueError(f"offset and limit must be at least 1, got {offset} and {limit}")
    file = place.path(filePath)
    if file.is_dir():
        return "\n".join(entries(place.root, file)) or "no files"
    lines = lines_of(_text(place, file, filePath).removeprefix("\ufeff"))
    place.saw(file)
    if not lines:
        return "the file is empty"
    if offset > len(lines):
        raise ValueError(f"offset must be at most {len(lines)}, the last line of {filePath}, got {offset}")
    room = max(200, place.result_characters - 120)
    shown: list[str] = []
    for number, line in enumerate(lines[offset - 1 : offset - 1 + min(limit, LINES_READ)], start=offset):
        line = f"{number}: {_short(line)}"
        room -= len(line) + 1
        if room < 0 and shown:
            break
        shown.append(line)
    last = offset - 1 + len(shown)
    if last < len(lines):
        shown.append(f"[lines {offset} to {last} of {len(lines)}; the next with offset {last + 1}]")
    return "\n".join(shown)


def write(
    place: Workspace, filePath: FilePath, content: Annotated[str, "all that the file shall hold"]
) -> str:
    """Write a text file, in place of what it holds; an existing one must have been read before."""
    file = place.path(filePath)
    if file.is_dir():
        raise ValueError(f"{filePath} is a folder")
    _refuse_office(filePath, file)
    existed = file.exists()
    if existed:
        if not file.is_file():
            raise ValueError(f"{filePath} is no ordinary file")
        place.check_seen(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode()
    file.write_bytes(data)
    place.saw(file)
    return f"{'replaced' if existed else 'wrote'} {place.name(file)}: {len(data)} bytes"


def edit(
    place: Workspace,
    filePath: FilePath,
    oldString: Annotated[str, "text to replace, enough of it to occur once"],
    newString: Annotated[str, "text to put there"],
    replaceAll: Annotated[bool, "replace every occurrence"] = False,
) -> str:
    """Replace a text in a file that was read before; lines that differ only in their indentation match too."""
    if oldString == newString:
        raise ValueError("oldString and newString must differ, got the same text")
    if not oldString:
        raise ValueError("oldString must not be empty; write makes a new file")
    file = place.path(filePath)
    text = _text(place, file, filePath)
    place.check_seen(file)
    ending = "\r\n" if "\r\n" in text else "\n"
    new = newString.replace("\r\n", "\n").replace("\n", ending)
    spans = _spans(text, oldString, ending)
    if not spans:
        raise ValueError(f"oldString must occur in {filePath}, got none; read it again")
    if len(spans) > 1 and not replaceAll:
        raise ValueError(
            f"oldString must occur once in {filePath}, got {len(spans)}; give more of it or set replaceAll"
        )
    parts, end = [], 0
    for start, stop in spans:
        parts += [text[end:start], new]
        end = stop
    file.write_bytes("".join([*parts, text[end:]]).encode())
    place.saw(file)
    first = text.count("\n", 0, spans[0][0]) + 1
    times = "once" if len(spans) == 1 else f"{len(spans)} times"
    return f"replaced {times} in {place.name(file)}, first in line {first}"


def _spans(text: str, old: str, ending: str) -> list[tuple[int, int]]:
    """Where a text occurs: as it is, with the file's line ends, or by lines without their indentation."""
    for wanted in dict.fromkeys((old, old.replace("\r\n", "\n").replace("\n", ending))):
        spans, at = [], text.find(wanted)
        while at >= 0:
            spans.append((at, at + len(wanted)))
            at = text.find(wanted, at + len(wanted))
        if spans:
            return spans
    return close_lines(text, old)


def glob(
    place: Workspace,
    pattern: Annotated[str, "as in *.csv or reports/**/*.txt"],
    path: Annotated[str, "folder to look in"] = ".",
) -> str:
    """Find files by their names, the newest first."""
    folder = _folder(place, path)
    expression = glob_expression(pattern)
    found = [
        file for file in _files(place, folder) if expression.fullmatch(_seen_from(file, folder, pattern))
    ]
    shown = [place.name(file) for file in found[:RESULTS_SHOWN]]
    if len(found) > RESULTS_SHOWN:
        shown.append(f"[{RESULTS_SHOWN} of {len(found)} files; use a narrower pattern]")
    return "\n".join(shown) or "no files"


def grep(
    place: Workspace,
    pattern: Annotated[str, "a regular expression"],
    path: Annotated[str, "folder or file to look in"] = ".",
    include: Annotated[str, "only files of such names, as in *.{csv,txt}"] = "",
) -> str:
    """Find the lines of text files that match, the newest file first; office files are not searched."""
    expression = line_expression(pattern)
    at = place.path(path)
    files = [at] if at.is_file() else _files(place, _folder(place, path))
    wanted = glob_expression(include) if include else None
    shown: list[str] = []
    found = 0
    for file in files:
        folder = at if at.is_dir() else at.parent
        if wanted is not None and not wanted.fullmatch(_seen_from(file, folder, include)):
            continue
        hits = [(n, line) for n, line in enumerate(_lines(file), start=1) if expression.search(line)]
        room = RESULTS_SHOWN - found
        found += len(hits)
        if hits and room > 0:
            shown += [f"{place.name(file)}:", *(f"  {n}: {_short(line)}" for n, line in hits[:room])]
    if found > RESULTS_SHOWN:
        shown.append(f"[{RESULTS_SHOWN} of {found} lines; use a narrower pattern]")
    return "\n".join(shown) or "no match"


def todowrite(place: Workspace, todos: list[dict[str, str]]) -> str:
    """Replace the list of what is to be done; the new list is the answer."""
    place.todos = todos
    return json.dumps(todos, ensure_ascii=False, indent=1)


def _read_todos(value: Any) -> list[dict[str, str]]:
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, list):
        raise ValueError("no list")
    return [_todo(one) for one in value]


def _todo(one: Any) -> dict[str, str]:
    if not isinstance(one, dict) or not isinstance(one.get("content"), str) or not one["content"].strip():
        raise ValueError("no content")
    todo = {"status": "pending", "priority": "medium"} | one
    if set(todo) - {"id"} != {"content", "status", "priority"}:
        raise ValueError("unknown key")
    if todo["status"] not in _STATES or todo["priority"] not in _PRIORITIES:
        raise ValueError("unknown status or priority")
    return {key: str(todo[key]) for key in ("content", "status", "priority")}


_TODOS = Kind(
    f"a list of objects with content, status ({', '.join(_STATES)}) and priority ({', '.join(_PRIORITIES)})",
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "content": {"type": "string"},
                "status": {"type": "string", "enum": list(_STATES)},
                "priority": {"type": "string", "enum": list(_PRIORITIES)},
            },
            "required": ["content", "status", "priority"],
        },
    },
    _read_todos,
)


def _text(place: Workspace, file: Path, path: str) -> str:
    """The text of a file as it lies there; ValueError with a hint where there is none."""
    if file.is_dir():
        raise ValueError(f"{path} is a folder")
    if not file.exists():
        near = get_close_matches(file.name, os.listdir(file.parent), 3) if file.parent.is_dir() else []
        names = ", ".join(place.name(file.parent / name) for name in near)
        raise ValueError(f"no such file {path}" + (f"; did you mean {names}" if names else ""))
    if not file.is_file():
        raise ValueError(f"{path} is no ordinary file")
    _refuse_office(path, file)
    if file.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path} is larger than {LARGEST_FILE // 1_000_000} MB; use bash")
    data = file.read_bytes()
    if b"\0" in data[:8192]:
        raise ValueError(f"{path} is a binary file; use bash")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; use bash") from None


def _refuse_office(path: str, file: Path) -> None:
    library = _BY_PYTHON.get(file.suffix.lower())
    if library:
        raise ValueError(f"{path} is an office file; use Python with {library} in bash")


def _folder(place: Workspace, path: str) -> Path:
    folder = place.path(path)
    if not folder.is_dir():
        raise ValueError(f"path must be a folder that exists, got {path}")
    return folder


def _files(place: Workspace, folder: Path) -> list[Path]:
    """The regular files below a folder, the newest first; kept results only where they are asked for."""
    root = place.root.resolve()
    found: list[tuple[int, str, Path]] = []
    for at, folders, names in os.walk(folder):
        here = Path(at)
        if here == root and folder == root:
            folders[:] = [name for name in folders if name != SPILL]
        for name in names:
            file = here / name
            if file.is_file() and not file.is_symlink():
                found.append((-file.stat().st_mtime_ns, place.name(file), file))
    return [file for _, _, file in sorted(found)]


def _seen_from(file: Path, folder: Path, pattern: str) -> str:
    """What a pattern is held against: a pattern without a slash is one for names."""
    return file.relative_to(folder).as_posix() if "/" in pattern else file.name


def _lines(file: Path) -> list[str]:
    if file.stat().st_size > LARGEST_FILE:
        return []
    data = file.read_bytes()
    return [] if b"\0" in data[:8192] else lines_of(data.decode("utf-8", errors="replace"))


def _short(line: str) -> str:
    return line if len(line) <= LINE_LIMIT else f"{line[:LINE_LIMIT]}... [{len(line)} characters]"


_DESCRIBED: tuple[Tool, ...] = (
    tool(bash, limit_s=None),
    tool(glob, reads=True),
    tool(read, reads=True),
    tool(grep, reads=True),
    tool(write),
    tool(edit),
    Tool(
        "todowrite",
        (todowrite.__doc__ or "").partition("\n")[0],
        (Argument("todos", _TODOS, "the whole list", True),),
        False,
        None,
        todowrite,
    ),
)

NAMES: tuple[str, ...] = tuple(described.name for described in _DESCRIBED)
"""The tools, in order."""


def tools(*, result_characters: int, longest_call_s: float) -> dict[str, Tool]:
    """The tools of one agent, which share what they remember; they take their folder from the first call.

    Args:
        result_characters: no result is longer; a command's whole output is kept in a file then.
        longest_call_s: no command runs longer, whatever its timeout says.
    """
    share: dict[Path, Workspace] = {}
    return {
        described.name: described._replace(
            run=partial(_in_workspace, described.run, share, result_characters, longest_call_s)
        )
        for described in _DESCRIBED
    }


def _in_workspace(
    run: Callable[..., str],
    share: dict[Path, Workspace],
    result_characters: int,
    longest_call_s: float,
    root: Path,
    /,
    **given: Any,
) -> str:
    place = share.setdefault(root, Workspace(root, result_characters, longest_call_s))
    text = run(place, **given)
    return spilled(text, root, limit=result_characters, how=PAGED, source=kept_among(given))
