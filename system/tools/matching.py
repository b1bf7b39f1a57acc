"""Patterns of the code agent: file names with wildcards, regular expressions of lines, texts that nearly match."""

from __future__ import annotations

import re


def glob_expression(pattern: str) -> re.Pattern[str]:
    """A pattern with `*`, `**`, `?`, `[...]` and `{a,b}` as a regular expression; only `**` crosses folders."""
    if not pattern.strip():
        raise ValueError("pattern must not be empty")
    pattern = re.sub(r"\*{3,}", "**", pattern.removeprefix("./"))
    made, depth, at = [], 0, 0
    while at < len(pattern):
        rest = pattern[at:]
        if rest.startswith("**/"):
            made.append("(?:[^/]+/)*")
            at += 3
        elif rest.startswith("**"):
            made.append(".*")
            at += 2
        elif (closed := re.match(r"\[([!^]?)(\]?[^\]/]*)\]", rest)) and closed.group(2):
            made.append(_class(*closed.groups()))
            at += closed.end()
        else:
            piece, depth = _piece(rest[0], depth, closes="}" in rest)
            made.append(piece)
            at += 1
    try:
        return re.compile("".join(made), re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern must be one of file names, got {pattern!r}: {error}") from None


def _piece(char: str, depth: int, *, closes: bool) -> tuple[str, int]:
    """One character of a pattern as an expression, and how many braces are open after it."""
    if char == "{" and closes:
        return "(?:", depth + 1
    if char == "}" and depth:
        return ")", depth - 1
    if char == "," and depth:
        return "|", depth
    return {"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char)), depth


def _class(negated: str, inner: str) -> str:
    """What stands between brackets as an expression of one character that is no slash."""
    escaped = re.sub(r"([\\\[\]^&~|])", r"\\\1", inner)
    return f"(?!/)[{'^' if negated else ''}{escaped}]"


def lines_of(text: str) -> list[str]:
    """The lines of a text without their ends, which are LF or CRLF and nothing else: as an editor counts them."""
    return [line.rstrip("\r\n") for line in _with_ends(text)]


def _with_ends(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def line_expression(pattern: str) -> re.Pattern[str]:
    """A regular expression of the model's. Raises ValueError that says what is wrong with it."""
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"pattern must be a regular expression, got {pattern!r}: {error}") from None


def close_lines(text: str, wanted: str) -> list[tuple[int, int]]:
    """Where lines of a text are those of another but for the blanks around them: (start, end) of each place.

    The line end after the last of them is not a part of it, unless `wanted` ends with one. Blank texts match nothing.
    """
    if not wanted.strip():
        return []
    lines = _with_ends(text)
    bare = [line.strip() for line in lines]
    sought = [line.strip() for line in lines_of(wanted)]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    spans, at = [], 0
    while at + len(sought) <= len(lines):
        if bare[at : at + len(sought)] == sought:
            end = starts[at + len(sought)]
            if not wanted.endswith(("\n", "\r")):
                last = lines[at + len(sought) - 1]
                end -= len(last) - len(last.rstrip("\r\n"))
            spans.append((starts[at], end))
            at += len(sought)
        else:
            at += 1
    return spans
