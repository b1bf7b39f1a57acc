"""The files of a run: append-only JSON lines and whole JSON values, readable at any moment."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class JsonLines:
    """Appends one record a line; every line is on disk before `write` returns.

    A line goes out in a single write to a file opened for appending: a reader finds whole lines only, also
    after Ctrl-C. A torn last line, left by a power cut, is removed when the file is opened again.

    Example:
        with JsonLines(run / "metrics.jsonl") as metrics:
            metrics.write({"arm": "prompt_mean", "seed": 0, "step": 1, "reward": 0.41})
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        drop_torn_tail(self.path)
        self._fd: int | None = os.open(
            self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record; a number that is not finite is written as null.

        Raises:
            ValueError: the file is closed.
            OSError: the disk is full; nothing of the record is in the file then.
        """
        if self._fd is None:
            raise ValueError(f"{self.path} must be open to be written to, got a closed file")
        data = _line(record)
        begun = os.fstat(self._fd).st_size
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._fd, begun)  # no half line stays where the disk is full
            raise OSError(
                error.errno, f"a line could not be written: {error.strerror}", str(self.path)
            ) from error

    def rewrite(self, left_out: Callable[[dict[str, Any]], bool]) -> None:
        """Leaves out some of the records: a reader sees the old file or the new one."""
        with _fresh(self.path) as fresh, open(fresh, "wb") as file:
            for record in read_jsonl(self.path):
                if not left_out(record):
                    file.write(_line(record))
        self.close()
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines, in order; a torn last line is left out.

    Raises:
        ValueError: a line other than a torn last one is not a JSON object; the text names file and line.
    """
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise ValueError(f"{path} line {number} must be a JSON object, got {line[:60]!r}")
            yield record


def is_of(line: Mapping[str, Any], tags: Mapping[str, Any]) -> bool:
    """Whether a line of a file that several runs share is of the run with these tags."""
    return all(line.get(name) == value for name, value in tags.items())


def lines_of(path: Path, tags: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of one run, in order."""
    return (line for line in read_jsonl(path) if is_of(line, tags))


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes one JSON value whole: a reader sees the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _fresh(path) as fresh:
        fresh.write_text(json.dumps(_finite(value), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def commit_hash(root: str | os.PathLike[str]) -> str:
    """The short commit hash of a checkout, "+" after it when tracked files differ; "" outside a checkout."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--short=10", "HEAD")
    if not commit:
        return ""
    return commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


@contextmanager
def _fresh(path: Path) -> Iterator[Path]:
    """A file that takes the place of another once it is written; where it cannot be, nothing of it stays."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield fresh
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(_finite(record), ensure_ascii=False, separators=(",", ":")) + "\n").encode()


def is_torn(path: Path) -> bool:
    """Whether the last line of a file was cut off."""
    if not path.exists() or not path.stat().st_size:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def drop_torn_tail(path: Path) -> None:
    """Removes a last line that was not written whole."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value
