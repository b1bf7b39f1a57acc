"""PDF files: a page with its layout, or the pieces of it that contain a text.

pdfium gives the characters and their boxes; pdfplumber, which the tests compare with, takes ten times longer.
"""

from __future__ import annotations

import ctypes
import re
from bisect import bisect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pypdfium2
import pypdfium2.raw as pdfium

from system.tools.paths import existing_file
from system.tools.registration import tool
from system.tools.results import joined, matches, one_line

_NUMBER = re.compile(r"[-+(]?[$€£]?\d[\d.,']*\s?%?\)?")
_HYPHENS = (0x2, 0xAD, 0xFFFE)
"""What pdfium gives for a hyphen at the end of a line, besides the usual one."""
_BLANK_SHARE = 0.15
"""Space between characters, as a share of their height, that is a blank."""
_CELL_SHARE = 0.75
"""Space between words, as a share of their height, that parts cells."""
_PARAGRAPH_SHARE = 1.9
"""Step from one line to the next, as a share of the height, beyond which a blank line is shown."""
_GUTTER_WIDTH = 8.0
"""Least width of the strip between two columns, in points."""


class Character(NamedTuple):
    """A character and its box in points from the top left: `Character("N", 72.0, 100.0, 78.5, 112.0)`."""

    text: str
    left: float
    top: float
    right: float
    bottom: float


class Span(NamedTuple):
    """A run of words on a line without a wide gap: `Span("Norvik fee", 72.0, 121.5)`."""

    text: str
    left: float
    right: float


def read_pdf(root: Path, path: str, page: int = 1, find: str = "") -> str:
    """Read a page of a pdf file with its layout, or only the pieces that contain the text find."""
    file = existing_file(root, path, ".pdf")
    with open_pdf(file) as pdf:
        if not 1 <= page <= len(pdf):
            raise ValueError(f"page must be from 1 to {len(pdf)}, got {page}")
        chosen = pdf[page - 1]
        if find:
            lines = [piece for piece in pieces(characters_of(chosen)) if matches(find, piece)]
        else:
            lines = layout(characters_of(chosen)) or [f"no text on page {page}"]
    return joined(lines, rest="narrow with find")


def piece_lines(file: Path) -> list[str]:
    """Give the pieces of all pages: a line of a column each, label and value together."""
    with open_pdf(file) as pdf:
        return [piece for page in pdf for piece in pieces(characters_of(page))]


def open_pdf(file: Path) -> pypdfium2.PdfDocument:
    try:
        return pypdfium2.PdfDocument(file)
    except pypdfium2.PdfiumError as error:
        raise ValueError(f"{file.name} is not a readable pdf: {error}") from error


def characters_of(page: pypdfium2.PdfPage) -> list[Character]:
    """Read the characters of a page that can be seen."""
    height = page.get_height()
    text = page.get_textpage()
    box = pdfium.FS_RECTF()
    pointer = ctypes.byref(box)
    found = []
    for index in range(pdfium.FPDFText_CountChars(text)):
        code = pdfium.FPDFText_GetUnicode(text, index)
        letter = "-" if code in _HYPHENS else chr(code)
        if letter.isprintable() and letter != " " and pdfium.FPDFText_GetLooseCharBox(text, index, pointer):
            found.append(Character(letter, box.left, height - box.top, box.right, height - box.bottom))
    return found


def layout(characters: list[Character]) -> list[str]:
    """Place spans in columns of a mean character's width; a blank line stands for a larger gap."""
    if not characters:
        return []
    advance = sum(character.right - character.left for character in characters) / len(characters)
    margin = min(character.left for character in characters)
    placed: list[str] = []
    last_bottom = 0.0
    for line in _lines(characters):
        bottom, height = line[0].bottom, line[0].bottom - line[0].top
        if placed and bottom - last_bottom > _PARAGRAPH_SHARE * height:
            placed.append("")
        text = ""
        for span in spans_of(line):
            column = round((span.left - margin) / max(advance, 1.0))
            text = text.ljust(max(column, len(text) + 2 if text else 0)) + span.text
        placed.append(text)
        last_bottom = bottom
    return placed


def pieces(characters: list[Character]) -> list[str]:
    """Read line by line, each line split at the gutters between columns and before each new label."""
    lines = lines_of(characters)
    gutters = _gutters(lines)
    return [piece for line in lines for piece in _split(line, gutters)]


def in_columns(characters: list[Character]) -> list[str]:
    """Read column by column, down to the next line that runs across the gutter between them."""
    lines = lines_of(characters)
    gutters = _gutters(lines)
    columns: list[list[str]] = [[] for _ in range(len(gutters) + 1)]
    read: list[str] = []
    for line in [*lines, None]:
        if line is None or any(span.left < gutter < span.right for span in line for gutter in gutters):
            read += [text for column in columns for text in column]
            columns = [[] for _ in columns]
            read += ["  ".join(span.text for span in line)] if line else []
            continue
        for number, column in enumerate(columns):
            own = [span.text for span in line if bisect(gutters, span.left) == number]
            column += ["  ".join(own)] if own else []
    return read


def lines_of(characters: list[Character]) -> list[list[Span]]:
    """Give the lines of a page from the top, each as its runs of words from the left."""
    return [spans_of(line) for line in _lines(characters)]


def _lines(characters: list[Character]) -> Iterator[list[Character]]:
    """Group characters that stand on one line, top to bottom, each line left to right."""
    line: list[Character] = []
    for character in sorted(characters, key=lambda character: character.bottom):
        if line and character.bottom - line[0].bottom > 0.3 * (line[0].bottom - line[0].top):
            yield sorted(line, key=lambda character: character.left)
            line = []
        line.append(character)
    if line:
        yield sorted(line, key=lambda character: character.left)


def spans_of(line: list[Character]) -> list[Span]:
    """Join the characters of a line to words, and words that are a blank apart to spans."""
    spans: list[Span] = []
    text, left, right = "", 0.0, 0.0
    for character in line:
        gap = (character.left - right) / max(character.bottom - character.top, 1.0)
        if text and gap > _CELL_SHARE:
            spans.append(Span(text, left, right))
            text = ""
        if not text:
            text, left = character.text, character.left
        else:
            text += f" {character.text}" if gap > _BLANK_SHARE else character.text
        right = max(right, character.right) if text != character.text else character.right
    return [*spans, Span(text, left, right)] if text else spans


def _gutters(lines: list[list[Span]]) -> list[float]:
    """Find the middle of every strip that hardly any line crosses and that has running text on both sides."""
    spans = [span for line in lines for span in line]
    allowed = max(1, len(lines) // 8)
    gutters: list[float] = []
    for edge in sorted({span.right for span in spans}):
        crossing = sum(span.left < edge + _GUTTER_WIDTH and span.right > edge for span in spans)
        if crossing > allowed:
            continue
        before = [span for span in spans if span.right <= edge]
        after = [span for span in spans if span.left >= edge + _GUTTER_WIDTH]
        if _is_text(before) and _is_text(after):
            gutters.append(edge + _GUTTER_WIDTH / 2)
    return gutters


def _is_text(spans: list[Span]) -> bool:
    """Say whether spans hold running text: two of four words or more."""
    return sum(len(span.text.split()) >= 4 for span in spans) >= 2


def _split(line: list[Span], gutters: list[float]) -> list[str]:
    """Split a line at gutters, and where a label follows the number of another label."""
    pieces: list[list[Span]] = []
    for span in line:
        piece = pieces[-1] if pieces else []
        parted = piece and any(piece[-1].right <= gutter <= span.left for gutter in gutters)
        next_label = len(piece) > 1 and _is_number(piece[-1]) and not _is_number(span)
        if not piece or parted or next_label:
            pieces.append([span])
        else:
            piece.append(span)
    return [one_line(" ".join(span.text for span in piece)) for piece in pieces]


def _is_number(span: Span) -> bool:
    return _NUMBER.fullmatch(span.text) is not None


TOOLS = (tool(read_pdf, reads=True),)
