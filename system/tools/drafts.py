"""Text documents of the set `full`: read with their structure, made, continued, corrected."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from zipfile import ZipFile

import docx

from system.tools.parts import Element, check_package, parse_part
from system.tools.paths import existing_file
from system.tools.registration import tool
from system.tools.replacing import replace_text
from system.tools.results import NO_MATCH, matches, one_line
from system.tools.saving import name_of, new_file, save_bytes

_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
_HEADING = re.compile(r"heading ?(\d)", re.IGNORECASE)
_EXTRAS = {
    "footnotes": "footnote",
    "endnotes": "endnote",
    "comments": "comment",
    "header": "header",
    "footer": "footer",
}
"""Parts beside the body, by the beginning of their name, and what a line of theirs is called."""
_EDITED = re.compile(r"word/(document|header\d*|footer\d*|footnotes|endnotes)\.xml")

Markup = Annotated[
    str, "one paragraph a line; # to #### begin headings, - and 1. list items, lines like | a | b | a table"
]


def read_document(
    root: Path, path: str, find: Annotated[str, "keep lines that contain this text"] = ""
) -> str:
    """Read a docx file: headings with #, list items with -, table rows as a | b, then footnotes and comments."""
    lines = document_lines(existing_file(root, path, ".docx"))
    shown = [line for line in lines if matches(find, line)]
    return "\n".join(shown) or (NO_MATCH if lines else "no text")


def create_document(root: Path, path: str, text: Markup) -> str:
    """Make a new docx file from text with simple marks."""
    file = new_file(root, path, ".docx")
    document = docx.Document()
    done = _add(document, text)
    _save(document, file)
    return f"created {name_of(root, file)}: {done}"


def append_document(root: Path, path: str, text: Markup) -> str:
    """Add text with simple marks, tables too, to the end of a docx file."""
    file = existing_file(root, path, ".docx")
    check_package(file)
    document = docx.Document(str(file))
    done = _add(document, text)
    _save(document, file)
    return f"added to {path}: {done}"


def edit_document(
    root: Path,
    path: str,
    old: Annotated[str, "text within one paragraph or cell"],
    new: str,
    every: Annotated[bool, "replace all; else old must occur once"] = False,
) -> str:
    """Replace a text in a docx file, in its body, tables, headers and notes; the formatting stays."""
    file = existing_file(root, path, ".docx")
    count = replace_text(file, _edited_parts, _WORD, old, new, every=every)
    return f"replaced {count} time{'s' * (count > 1)} in {path}"


def document_lines(file: Path) -> list[str]:
    """Give the paragraphs and table rows of a document with their marks, then those of its other parts."""
    with ZipFile(file) as archive:
        styles = _style_names(archive)
        lines = list(_lines(parse_part(archive, "word/document.xml"), styles))
        for name in sorted(archive.namelist()):
            kind = re.fullmatch(r"word/([a-z]+)\d*\.xml", name)
            if kind and kind[1] in _EXTRAS:
                texts = _lines(parse_part(archive, name), styles)
                lines += dict.fromkeys(f"{_EXTRAS[kind[1]]}: {text}" for text in texts)
    return lines


def _lines(tree: Element, styles: dict[str, str]) -> Iterator[str]:
    for fallback in list(tree.iter(_FALLBACK)):  # says again what stands before it
        fallback.getparent().remove(fallback)
    for element in tree.iter(f"{_WORD}p", f"{_WORD}tr"):
        if next(element.iterancestors(f"{_WORD}tr"), None) is not None:
            continue
        if element.tag == f"{_WORD}tr":
            cells = [_text(cell) for cell in element.iter(f"{_WORD}tc") if _row_of(cell) is element]
            line = " | ".join(cells) if any(cells) else ""
        else:
            text = _text(element)
            line = _mark(element, styles) + text if text else ""
        if line:
            yield line


def _row_of(cell: Element) -> Element:
    return next(cell.iterancestors(f"{_WORD}tr"))


def _text(element: Element) -> str:
    """The text of a paragraph or cell; that of a paragraph inside a paragraph has a line of its own."""
    words = []
    for part in element.iter(f"{_WORD}t", f"{_WORD}tab", f"{_WORD}br", f"{_WORD}p"):
        if element.tag == f"{_WORD}p" and next(part.iterancestors(f"{_WORD}p"), element) is not element:
            continue
        words.append(part.text or "" if part.tag == f"{_WORD}t" else " ")
    return one_line("".join(words))


def _mark(paragraph: Element, styles: dict[str, str]) -> str:
    style = paragraph.find(f"{_WORD}pPr/{_WORD}pStyle")
    name = styles.get(style.get(f"{_WORD}val", ""), "") if style is not None else ""
    heading = _HEADING.match(name)
    if heading or name.lower() == "title":
        return "#" * int(heading[1] if heading else 1) + " "
    if name.lower().startswith("list ") or paragraph.find(f"{_WORD}pPr/{_WORD}numPr") is not None:
        return "- "
    return ""


def _style_names(archive: ZipFile) -> dict[str, str]:
    if "word/styles.xml" not in archive.NameToInfo:
        return {}
    found = {}
    for style in parse_part(archive, "word/styles.xml").iter(f"{_WORD}style"):
        name = style.find(f"{_WORD}name")
        found[style.get(f"{_WORD}styleId", "")] = name.get(f"{_WORD}val", "") if name is not None else ""
    return found


def _edited_parts(archive: ZipFile) -> list[str]:
    return [name for name in archive.namelist() if _EDITED.fullmatch(name)]


def _add(document: Any, text: str) -> str:
    """Add marked text to a document of python-docx; says how much."""
    paragraphs, tables, rows = 0, 0, list[list[str]]()
    for line in [*text.split("\n"), ""]:
        stripped = line.strip()
        if stripped.startswith("|"):
            rows.append([cell.strip() for cell in stripped.strip("|").split("|")])
            continue
        if rows:
            _add_table(document, rows)
            tables, rows = tables + 1, []
        if stripped:
            _add_paragraph(document, stripped)
            paragraphs += 1
    return f"{paragraphs} paragraphs, {tables} tables"


def _add_paragraph(document: Any, line: str) -> None:
    match = re.match(r"(#{1,4}|[-*•]|\d+[.)])\s+(.*)", line)
    mark, text = match.groups() if match else ("", line)
    if mark.startswith("#"):
        style = f"Heading {len(mark)}"
    else:
        style = "" if not mark else "List Bullet" if mark in "-*•" else "List Number"
    known = {each.name for each in document.styles}
    paragraph = document.add_paragraph(text if not mark or style in known else line)
    if style in known:
        paragraph.style = style


def _add_table(document: Any, rows: list[list[str]]) -> None:
    shown = [row for row in rows if not all(re.fullmatch(r":?-{2,}:?", cell) for cell in row)]
    width = max((len(row) for row in shown), default=0)
    if not width:
        return
    table = document.add_table(rows=len(shown), cols=width)
    if "Table Grid" in {each.name for each in document.styles}:
        table.style = "Table Grid"
    for cells, row in zip(table.rows, shown):
        for cell, text in zip(cells.cells, row):
            cell.text = text


def _save(document: Any, file: Path) -> None:
    data = io.BytesIO()
    document.save(data)
    save_bytes(file, data.getvalue())


TOOLS = (
    tool(read_document, reads=True),
    tool(create_document),
    tool(append_document),
    tool(edit_document),
)
