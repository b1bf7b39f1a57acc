"""PDF: the text of every page, in the file's order, and the pages' sizes."""

from __future__ import annotations

from typing import Any

import pypdfium2

from . import NotReadable, Parts

MOST_PAGES = 500


def read(data: bytes) -> Parts:
    """Lines by page; how many pages, how large, and what the file says of itself."""
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        raise NotReadable(f"no PDF: {error}") from None
    try:
        count = len(document)
        if count > MOST_PAGES:
            raise NotReadable(f"a PDF of {count} pages, {MOST_PAGES} are read at most")
        parts: dict[str, str | tuple[str, ...]] = {"pages": str(count)}
        told = document.get_metadata_dict(skip_empty=True)
        parts |= {
            f"about {name}": told[name] for name in ("Title", "Author", "Subject", "Keywords") if name in told
        }
        for number in range(count):
            parts |= {f"page {number + 1} {name}": text for name, text in _page(document[number]).items()}
        return parts
    finally:
        document.close()


def _page(page: Any) -> dict[str, str | tuple[str, ...]]:
    text = page.get_textpage()
    try:
        lines = text.get_text_bounded().splitlines()
    finally:
        text.close()
    width, height = page.get_size()
    drawn = sum(1 for thing in page.get_objects(max_depth=3) if thing.type != 1)
    page.close()
    return {"line": tuple(lines), "size": f"{width:g} × {height:g}", "drawings and pictures": str(drawn)}
