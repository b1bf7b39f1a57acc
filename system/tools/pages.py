"""Pdf files of the set `full`: pages by layout or by columns, search over all pages, tables."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pdfplumber
import pypdfium2.raw as pdfium

from system.tools.paths import existing_file
from system.tools.pdfs import Span, characters_of, in_columns, layout, lines_of, open_pdf, pieces
from system.tools.registration import tool
from system.tools.results import NO_MATCH, matches, one_line

_MOST_OBJECTS = 10_000
"""Drawn objects of a page beyond which its lines are not looked at for tables."""
_MOST_MATCHES = 200
_PROSE_WORDS = 6
"""Words of a run from which on it is more likely a line of text than a cell."""

logging.getLogger("pdfminer").setLevel(logging.ERROR)  # it comments on every crude file


def read_pdf(
    root: Path,
    path: str,
    page: Annotated[int, "number of the page, from 1"] = 1,
    find: Annotated[str, "only pieces that contain this text"] = "",
    order: Annotated[str, "layout: as on the page; columns: column after column"] = "layout",
) -> str:
    """Read a page of a pdf file, its layout kept or its columns one after the other."""
    if order not in ("layout", "columns"):
        raise ValueError(f"order must be layout or columns, got {order}")
    with open_pdf(existing_file(root, path, ".pdf")) as pdf:
        if not 1 <= page <= len(pdf):
            raise ValueError(f"page must be from 1 to {len(pdf)}, got {page}")
        chosen = pdf[page - 1]
        characters = characters_of(chosen)
        if find:
            lines = [piece for piece in pieces(characters) if matches(find, piece)] or [NO_MATCH]
        else:
            lines = layout(characters) if order == "layout" else in_columns(characters)
        if not characters:
            images = sum(1 for _ in chosen.get_objects(filter=[pdfium.FPDF_PAGEOBJ_IMAGE]))
            holds = f"; it holds {images} images, which can not be read as text" if images else ""
            lines = [f"no text on page {page}{holds}"]
        return "\n".join([*lines, f"[page {page} of {len(pdf)}]"])


def search_pdf(root: Path, path: str, query: str) -> str:
    """Find the lines of a pdf file that contain a text, each with its page."""
    if not query.strip():
        raise ValueError("query must not be empty")
    found = []
    with open_pdf(existing_file(root, path, ".pdf")) as pdf:
        for number, page in enumerate(pdf, 1):
            found += [f"page {number}: {p}" for p in pieces(characters_of(page)) if matches(query, p)]
        count = len(pdf)
    more = [f"[{_MOST_MATCHES} of {len(found)} lines shown; use a longer query]"]
    return (
        "\n".join(found[:_MOST_MATCHES] + more * (len(found) > _MOST_MATCHES))
        or f"{NO_MATCH} on {count} pages"
    )


def read_pdf_tables(root: Path, path: str, page: Annotated[int, "number of the page, from 1"] = 1) -> str:
    """Read the tables of a pdf page, a row a line, its cells as a | b | c."""
    file = existing_file(root, path, ".pdf")
    with open_pdf(file) as pdf:
        if not 1 <= page <= len(pdf):
            raise ValueError(f"page must be from 1 to {len(pdf)}, got {page}")
        aligned = list(_aligned(lines_of(characters_of(pdf[page - 1]))))
        objects = pdfium.FPDFPage_CountObjects(pdf[page - 1])
    tables = (_ruled(file, page) if objects <= _MOST_OBJECTS else []) or aligned
    if not tables:
        return f"no table on page {page}"
    shown = []
    for number, rows in enumerate(tables, 1):
        shown += [f"table {number} of {len(tables)}, {len(rows)} rows:", *rows, ""]
    return "\n".join(shown[:-1])


def _ruled(file: Path, page: int) -> list[list[str]]:
    """Tables whose cells are drawn, by pdfplumber."""
    with pdfplumber.open(file, pages=[page]) as pdf:
        found = [table.extract() for table in pdf.pages[0].find_tables()]
    tables = [
        [" | ".join(one_line(cell or "") for cell in row) for row in table if any(row)] for table in found
    ]
    return [rows for rows in tables if len(rows) > 1 and any(" | " in row for row in rows)]


def _aligned(lines: list[list[Span]]) -> Iterator[list[str]]:
    """Tables without lines: rows in succession whose cells stand in the same columns."""
    run: list[list[Span]] = []
    for line in [*lines, []]:
        if run and not _same_columns(run[-1], line):
            words = [len(span.text.split()) for row in run for span in row]
            if len(run) > 1 and sum(count < _PROSE_WORDS for count in words) * 2 > len(words):
                yield _rows(run)
            run = []
        if len(line) > 1:
            run.append(line)


def _same_columns(above: list[Span], line: list[Span]) -> bool:
    """Say whether most cells of a row stand below cells of the row above, flush on one side."""
    flush = sum(any(abs(a.left - b.left) < 3 or abs(a.right - b.right) < 3 for b in above) for a in line)
    return len(line) > 1 and flush * 2 > max(len(line), len(above))


def _rows(run: list[list[Span]]) -> list[str]:
    """Cells by column; a column is where the cells of some row overlap."""
    edges: list[list[float]] = []
    for span in sorted((span for line in run for span in line), key=lambda span: span.left):
        if edges and span.left < edges[-1][1]:
            edges[-1][1] = max(edges[-1][1], span.right)
        else:
            edges.append([span.left, span.right])
    rows = []
    for line in run:
        cells = [" ".join(s.text for s in line if left <= s.left < right) for left, right in edges]
        rows.append(" | ".join(cells))
    return rows


TOOLS = (tool(read_pdf, reads=True), tool(search_pdf, reads=True), tool(read_pdf_tables, reads=True))
