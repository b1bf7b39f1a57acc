"""Text documents: paragraphs and table rows, read from the XML inside the docx."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

from system.tools.parts import Element, parse_part
from system.tools.paths import existing_file
from system.tools.registration import tool
from system.tools.results import joined, matches, one_line

_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"


def read_document(root: Path, path: str, find: str = "") -> str:
    """Read the paragraphs and table rows of a docx file; find keeps those that contain a text."""
    lines = document_lines(existing_file(root, path, ".docx"))
    return joined((line for line in lines if matches(find, line)), rest="narrow with find")


def document_lines(file: Path) -> list[str]:
    """Give every paragraph and table row of a document, one a line; cells are joined by ` | `."""
    with ZipFile(file) as archive:
        document = parse_part(archive, "word/document.xml")
    lines = []
    for element in document.iter(f"{_WORD}p", f"{_WORD}tr"):
        if next(element.iterancestors(f"{_WORD}tr"), None) is not None:
            continue
        if element.tag == f"{_WORD}tr":
            cells = [_text(cell) for cell in element.iterchildren(f"{_WORD}tc")]
            lines.append(" | ".join(cell for cell in cells if cell))
        else:
            lines.append(_text(element))
    return [line for line in lines if line]


def _text(element: Element) -> str:
    words = []
    for part in element.iter(f"{_WORD}t", f"{_WORD}tab", f"{_WORD}br", f"{_WORD}p"):
        words.append(part.text or "" if part.tag == f"{_WORD}t" else " ")
    return one_line("".join(words))


TOOLS = (tool(read_document, reads=True),)
