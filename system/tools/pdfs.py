"""PDF files: a page with its layout, or the pieces of it that contain a text."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any, NamedTuple

import pdfplumber
from mcp.server import MCPServer

from system.tools.paths import existing_file
from system.tools.registration import add_tool
from system.tools.results import joined, matches, one_line

logging.getLogger("pdfminer").setLevel(logging.ERROR)  # it tells every oddity of a crude file

_NUMBER = re.compile(r"[-+(]?[$€£]?\d[\d.,']*\s?%?\)?")
_GUTTER_WIDTH = 8.0
_CELL_GAP = 2.5


class Span(NamedTuple):
    """A run of words on a line, without a wide gap: `Span("Norvik fee", 72.0, 121.5)`, x in points."""

    text: str
    left: float
    right: float


def read_pdf(root: Path, path: str, page: int = 1, find: str = "") -> str:
    """Read a page of a pdf file."""
    file = existing_file(root, path, ".pdf")
    with pdfplumber.open(file) as pdf:
        if not 1 <= page <= len(pdf.pages):
            raise ValueError(f"page must be from 1 to {len(pdf.pages)}, got {page}")
        chosen = pdf.pages[page - 1]
        if find:
            lines = [piece for piece in _pieces(chosen) if matches(find, piece)]
        else:
            lines = _layout(chosen.extract_text(layout=True))
    return joined(lines, rest="narrow with find")


def piece_lines(file: Path) -> list[str]:
    """Give the pieces of all pages: a line of a column each, label and value together."""
    with pdfplumber.open(file) as pdf:
        return [piece for page in pdf.pages for piece in _pieces(page)]


def _layout(text: str) -> list[str]:
    """Strip the right ends and the common margin, and collapse runs of blank lines to one."""
    lines = [line.rstrip() for line in text.splitlines()]
    margin = min((len(line) - len(line.lstrip()) for line in lines if line), default=0)
    kept = [line for before, line in zip(["", *lines], lines, strict=False) if line or before]
    while kept and not kept[-1]:
        kept.pop()
    return [line[margin:] for line in kept]


def _pieces(page: Any) -> list[str]:
    """Read a page line by line, each line split at the gutters between columns and before each new label."""
    lines = [_spans(line) for line in _word_lines(page)]
    gutters = _gutters(lines)
    return [piece for line in lines for piece in _split(line, gutters)]


def _word_lines(page: Any) -> list[list[dict[str, Any]]]:
    """Group the words of a page into lines, top to bottom, each left to right."""
    lines: list[list[dict[str, Any]]] = []
    for word in sorted(page.extract_words(), key=lambda word: (word["bottom"], word["x0"])):
        height = word["bottom"] - word["top"]
        if lines and abs(word["bottom"] - lines[-1][-1]["bottom"]) < 0.3 * height:
            lines[-1].append(word)
        else:
            lines.append([word])
    return [sorted(line, key=lambda word: word["x0"]) for line in lines]


def _spans(line: list[dict[str, Any]]) -> list[Span]:
    """Join words of a line whose gap is that of a blank."""
    spans: list[Span] = []
    for word in line:
        gap = _CELL_GAP * 0.3 * (word["bottom"] - word["top"])
        if spans and word["x0"] - spans[-1].right < gap:
            last = spans.pop()
            spans.append(Span(f"{last.text} {word['text']}", last.left, word["x1"]))
        else:
            spans.append(Span(word["text"], word["x0"], word["x1"]))
    return spans


def _gutters(lines: list[list[Span]]) -> list[float]:
    """Find the middle of every strip that hardly any line crosses and that has running text on both sides."""
    spans = [span for line in lines for span in line]
    allowed = max(1, len(lines) // 8)
    edges = sorted({span.right for span in spans})
    gutters: list[float] = []
    for left in edges:
        beyond = [span.left for span in spans if span.left > left]
        crossing = sum(span.left <= left + 0.1 and span.right > left + 0.1 for span in spans)
        right = min(beyond, default=left)
        if right - left < _GUTTER_WIDTH or crossing > allowed:
            continue
        middle = (left + right) / 2
        before = [span for span in spans if span.right <= middle]
        after = [span for span in spans if span.left >= middle]
        if _runs(before) and _runs(after):
            gutters.append(middle)
    return gutters


def _runs(spans: list[Span]) -> bool:
    """Say whether spans hold running text: two of four words or more."""
    return sum(len(span.text.split()) >= 4 for span in spans) >= 2


def _split(line: list[Span], gutters: list[float]) -> list[str]:
    """Split a line at gutters, and where a label follows a number."""
    pieces: list[str] = []
    last: Span | None = None
    for span in line:
        between = last is not None and any(last.right <= gutter <= span.left for gutter in gutters)
        label_after_number = (
            last is not None
            and bool(_NUMBER.fullmatch(last.text))
            and not _NUMBER.fullmatch(span.text)
            and len(pieces) > 0
            and pieces[-1] != last.text
        )
        if last is None or between or label_after_number:
            pieces.append(span.text)
        else:
            pieces[-1] += f" {span.text}"
        last = span
    return [one_line(piece) for piece in pieces]


def register(server: MCPServer, root: Path) -> None:
    """Offer the pdf tool."""
    add_tool(server, root, read_pdf)
