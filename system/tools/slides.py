"""Slide decks: the text of every slide, read from the XML inside the pptx."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

from system.tools.parts import Element, parse_part, related_parts
from system.tools.paths import existing_file
from system.tools.registration import tool
from system.tools.results import joined, matches, one_line

_DRAWING = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_DECK = "{http://schemas.openxmlformats.org/presentationml/2006/main}"
_RELATION = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"


def read_slides(root: Path, path: str, find: str = "") -> str:
    """Read the text of a pptx file; find keeps lines that contain a text."""
    lines = slide_lines(existing_file(root, path, ".pptx"))
    return joined((line for line in lines if matches(find, line)), rest="narrow with find")


def slide_lines(file: Path) -> list[str]:
    """Give every paragraph and table row of a deck as `slide 1: text`, in order."""
    with ZipFile(file) as archive:
        slides = [parse_part(archive, part) for part in slide_parts(archive)]
    return [f"slide {number}: {text}" for number, slide in enumerate(slides, 1) for text in texts_of(slide)]


def slide_parts(archive: ZipFile) -> list[str]:
    """Name the parts of the slides, in their order."""
    deck = parse_part(archive, "ppt/presentation.xml")
    targets = related_parts(archive, "ppt/presentation.xml")
    return [targets[entry.get(f"{_RELATION}id", "")] for entry in deck.iter(f"{_DECK}sldId")]


def texts_of(slide: Element) -> list[str]:
    """Give the paragraphs and table rows below an element, without the empty ones."""
    texts = []
    for element in slide.iter(f"{_DRAWING}p", f"{_DRAWING}tr"):
        if element.tag == f"{_DRAWING}tr":
            cells = [_text(cell) for cell in element.iter(f"{_DRAWING}tc")]
            texts.append(" | ".join(cell for cell in cells if cell))
        elif next(element.iterancestors(f"{_DRAWING}tr"), None) is None:
            texts.append(_text(element))
    return [text for text in texts if text]


def _text(element: Element) -> str:
    words = []
    for part in element.iter(f"{_DRAWING}t", f"{_DRAWING}br", f"{_DRAWING}p"):
        words.append(part.text or "" if part.tag == f"{_DRAWING}t" else " ")
    return one_line("".join(words))


TOOLS = (tool(read_slides, reads=True),)
