"""Office files that are small and stand for much: for the tools that read them, and for who grades them."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from zipfile import ZIP_DEFLATED, ZipFile

_ENTITIES = (
    b'<!DOCTYPE x [<!ENTITY a "'
    + b"a" * 100
    + b'">'
    + b"".join(b'<!ENTITY %c "%s">' % (98 + n, b"&%c;" % (97 + n) * 20) for n in range(10))
    + b"]>"
)
_OUTSIDE = b'<!DOCTYPE x [<!ENTITY k SYSTEM "file://%s">]>'


def rewritten(
    data: bytes, change: Callable[[str, bytes], bytes], more: dict[str, bytes] | None = None
) -> bytes:
    """A zip whose members are changed, and more of them."""
    out = io.BytesIO()
    with ZipFile(io.BytesIO(data)) as source, ZipFile(out, "w", ZIP_DEFLATED) as target:
        for member in source.infolist():
            target.writestr(member.filename, change(member.filename, source.read(member)))
        for name, content in (more or {}).items():
            target.writestr(name, content)
    return out.getvalue()


def _in(part: str, old: bytes, new: bytes) -> Callable[[str, bytes], bytes]:
    def change(name: str, content: bytes) -> bytes:
        if name != part:
            return content
        assert old in content, (part, old)
        return content.replace(old, new, 1)

    return change


def _typed(part: str, tag: bytes, head: bytes, text: bytes) -> Callable[[str, bytes], bytes]:
    """A document type before a part's first element, and a text after the first of a tag."""

    def change(name: str, content: bytes) -> bytes:
        if name != part:
            return content
        assert tag in content, (part, tag)
        start = content.index(b"<", content.index(b"?>") + 2) if b"?>" in content else 0
        return content[:start] + head + content[start:].replace(tag, tag + text, 1)

    return change


def workbooks(data: bytes, secret: str) -> dict[str, bytes]:
    """What an xlsx file can be made into; secret is the path of a file that must not be read."""
    sheet, end = "xl/worksheets/sheet1.xml", b"</sheetData>"
    whole = b"A1:XFD1048576"
    formulas = b"".join(
        b'<row r="%d"><c r="C%d"><f>%s</f></c></row>' % (n, n, b"SUM(A:XFD)*" * 20 + b"1")
        for n in range(100, 400)
    )
    ring = b"".join(
        b'<row r="%d"><c r="C%d"><f>C%d+C%d</f></c></row>' % (n, n, n + 1, n + 1) for n in range(100, 300)
    )
    rept = b'<row r="100"><c r="C100"><f>REPT("x",1E9)</f></c><c r="D100"><f>9^9^9^9</f></c></row>'
    cells = b"".join(b'<row r="%d">' % n + b"<c/>" * 10_000 + b"</row>" for n in range(100, 140))
    zeros = bytes(60_000_000)
    return {
        "a range merged over the whole sheet": rewritten(
            data, _in(sheet, end, end + b'<mergeCells><mergeCell ref="%s"/></mergeCells>' % whole)
        ),
        "a link over the whole sheet": rewritten(
            data,
            _in(sheet, end, end + b'<hyperlinks><hyperlink ref="%s" location="x"/></hyperlinks>' % whole),
        ),
        "formulas over the whole sheet": rewritten(data, _in(sheet, end, formulas + end)),
        "formulas that double": rewritten(data, _in(sheet, end, ring + end)),
        "formulas of huge values": rewritten(data, _in(sheet, end, rept + end)),
        "many cells": rewritten(data, _in(sheet, end, cells + end)),
        "a cell at the far corner": rewritten(
            data, _in(sheet, end, b'<row r="1048576"><c r="XFD1048576"><v>1</v></c></row>' + end)
        ),
        "entities within entities": rewritten(
            data, _typed(sheet, b"<sheetData>", _ENTITIES, b'<row r="1"><c t="str"><v>&k;</v></c></row>')
        ),
        "an entity from outside": rewritten(
            data,
            _typed(
                sheet,
                b"<sheetData>",
                _OUTSIDE % secret.encode(),
                b'<row r="999"><c r="A999" t="str"><v>&k;</v></c></row>',
            ),
        ),
        "a part of zeros": rewritten(data, lambda name, content: zeros if name == sheet else content),
        "styles of zeros": rewritten(
            data, lambda name, content: zeros if name == "xl/styles.xml" else content
        ),
        "many parts": rewritten(
            data, lambda _, content: content, {f"xl/media/{n}": b"" for n in range(15_000)}
        ),
        "a part twice": data[:-22] + data[-22:-12] + b"\xff" * 2 + data[-10:],
        "elements a hundred thousand deep": rewritten(
            data, _in(sheet, end, b"<row>" * 100_000 + b"</row>" * 100_000 + end)
        ),
    }


def documents(data: bytes, secret: str) -> dict[str, bytes]:
    """What a docx file can be made into."""
    part, body = "word/document.xml", b"<w:body>"
    return {
        "a part of zeros": rewritten(
            data, lambda name, content: bytes(60_000_000) if name == part else content
        ),
        "entities within entities": rewritten(
            data, _typed(part, body, _ENTITIES, b"<w:p><w:r><w:t>&k;</w:t></w:r></w:p>")
        ),
        "an entity from outside": rewritten(
            data, _typed(part, body, _OUTSIDE % secret.encode(), b"<w:p><w:r><w:t>&k;</w:t></w:r></w:p>")
        ),
        "tables within tables": rewritten(
            data, _in(part, body, body + b"<w:tbl><w:tr><w:tc>" * 5000 + b"</w:tc></w:tr></w:tbl>" * 5000)
        ),
        "many paragraphs": rewritten(data, _in(part, body, body + b"<w:p/>" * 300_000)),
    }


def decks(data: bytes, secret: str) -> dict[str, bytes]:
    """What a pptx file can be made into."""
    part = "ppt/slides/slide1.xml"
    tag = b"<a:p>"
    return {
        "a part of zeros": rewritten(
            data, lambda name, content: bytes(60_000_000) if name == part else content
        ),
        "entities within entities": rewritten(
            data, _typed(part, tag, _ENTITIES, b"<a:r><a:t>&k;</a:t></a:r>")
        ),
        "an entity from outside": rewritten(
            data, _typed(part, tag, _OUTSIDE % secret.encode(), b"<a:r><a:t>&k;</a:t></a:r>")
        ),
        "one slide ten thousand times": rewritten(data, _many_slides),
    }


def _many_slides(name: str, content: bytes) -> bytes:
    if name != "ppt/presentation.xml":
        return content
    start = content.index(b"<p:sldId ")
    end = content.index(b"/>", start) + 2
    return content[:start] + content[start:end] * 10_000 + content[end:]


def pdfs() -> dict[str, bytes]:
    """Files that claim to be pages."""
    flood = zlib.compress(bytes(60_000_000), 9)
    text = zlib.compress(b"BT /F 9 Tf " + b"(aaaaaaaaaa) Tj " * 300_000 + b"ET", 9)
    return {
        "a page of zeros": _pdf(flood, b"/FlateDecode"),
        "a page of much text": _pdf(text, b"/FlateDecode"),
        "pages in a circle": _pdf(b"", b"/FlateDecode", kids=b"[2 0 R 2 0 R]"),
        "a page named often": _pdf(b"", b"/FlateDecode", kids=b"[" + b"3 0 R " * 200_000 + b"]"),
    }


def _pdf(stream: bytes, filters: bytes, *, kids: bytes = b"[3 0 R]") -> bytes:
    bodies = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Count 1/Kids %s>>" % kids,
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 595 842]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>",
        b"<</Length %d/Filter %s>>stream\n%s\nendstream" % (len(stream), filters, stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    out, places = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(bodies, 1):
        places.append(len(out))
        out += b"%d 0 obj%s\nendobj\n" % (number, body)
    table = len(out)
    out += b"xref\n0 6\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % place for place in places)
    return bytes(out + b"trailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % table)


def others() -> dict[str, bytes]:
    """Further kinds: an archive in archives, a mailbox, a calendar, JSON, text."""
    inner = b"x" * 1_000_000
    for _ in range(5):
        out = io.BytesIO()
        with ZipFile(out, "w", ZIP_DEFLATED) as archive:
            for number in range(10):
                archive.writestr(f"{number}.zip", inner)
        inner = out.getvalue()
    part = b"Content-Type: multipart/mixed; boundary=%d\n\n--%d\n"
    return {
        "nested.zip": inner,
        "deep.json": b"[" * 1_000_000,
        "wide.json": b"[" + b"{}," * 1_000_000 + b"{}]",
        "deep.mbox": b"From x Mon Mar  2 09:00:00 2026\nMIME-Version: 1.0\n"
        + b"".join(part % (n, n) for n in range(2000)),
        "many.mbox": b"From x Mon Mar  2 09:00:00 2026\n\n\n" * 100_000,
        "many.ics": b"BEGIN:VCALENDAR\n"
        + b"BEGIN:VEVENT\nRRULE:FREQ=SECONDLY\nEND:VEVENT\n" * 20_000
        + b"END:VCALENDAR\n",
        "long.txt": b"a" * 10_000_000,
        "lines.csv": b"\n" * 10_000_000,
    }
