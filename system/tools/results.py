"""The text that a tool hands to the model: matching, cutting, one-line errors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

RESULT_LIMIT = 6000
"""Characters of a result; what is longer is cut and says how to get the rest."""

NO_MATCH = "no match"
"""The result of a search that found nothing."""


def matches(find: str, text: str) -> bool:
    """Say whether `text` contains `find`, whatever the case and the runs of blanks."""
    return one_line(find).casefold() in one_line(text).casefold()


def one_line(text: str) -> str:
    """Collapse every run of blanks and line breaks to one blank."""
    return " ".join(text.split())


def joined(lines: Iterable[str], *, rest: str) -> str:
    """Join result lines, `no match` for none, cut at the limit; `rest` says how to get what was cut."""
    text = "\n".join(lines)
    return cut(text, rest=rest) if text else NO_MATCH


def cut(text: str, *, rest: str) -> str:
    """Cut `text` at the last line end before the limit and say how to get the rest."""
    if len(text) <= RESULT_LIMIT:
        return text
    end = text.rfind("\n", RESULT_LIMIT // 2, RESULT_LIMIT)
    end = RESULT_LIMIT if end < 0 else end
    return f"{text[:end]}\n[cut: {end} of {len(text)} characters shown; {rest}]"


def failure_line(error: BaseException, root: Path) -> str:
    """Tell an exception in one line that shows neither a traceback nor where the world lies."""
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    text = one_line(text).replace(f"{root}/", "").replace(str(root), ".")
    return f"error: {text[:400]}"
