"""Writes a company as the office files of its world; the same company gives the same bytes.

The libraries are the real ones, so that the files are what an office would have: formulas with cached values,
a pdf of two columns, slides, styles. Times and identifiers inside the files are fixed.
"""

from __future__ import annotations

import io
import json
import random
import struct
import textwrap
from collections.abc import Callable
from datetime import datetime, timedelta
from email.message import EmailMessage
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import docx
import pptx
import xlsxwriter
from icalendar import Calendar, Event
from pptx.util import Pt
from reportlab.pdfgen.canvas import Canvas

from . import names
from .company import Company, Source, row_number, slide_number
from .distractor import draw_distractors

WRITTEN_AT = datetime(2026, 3, 2, 9, 0)
"""The time that every file of every world claims to be from."""

_ZIP_TIME = struct.pack("<HH", 0, 1 << 5 | 1)
_LEFT, _RIGHT, _VALUE_END, _TOP, _LEADING = 60, 320, 530, 700, 15


def write_world(company: Company, folder: Path) -> Path:
    """Writes all files of a company below `folder`, which must be missing or empty; returns the folder.

    Raises:
        ValueError: the folder holds something already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"folder must be empty, got {folder}")
    for source in company.sources:
        if source.kind in _WRITERS:
            (folder / source.name).write_bytes(_WRITERS[source.kind](company, source))
    (folder / "chat").mkdir()
    for channel, messages in company.chats.items():
        (folder / "chat" / f"{channel}.json").write_bytes(_chat(messages))
    (folder / "mail.mbox").write_bytes(_mailbox(company))
    (folder / "calendar.ics").write_bytes(_calendar(company))
    (folder / "handbook.txt").write_text("\n".join(_prose(company, "handbook.txt", 8)) + "\n")
    (folder / "rates.csv").write_text(_rates(company))
    return folder


def write_distractors(company: Company, folder: Path, count: int) -> None:
    """Writes `count` old editions of the company's files into its world.

    Raises:
        ValueError: count is not from 0 to 12.
    """
    for source in draw_distractors(company, count):
        (folder / source.name).parent.mkdir(exist_ok=True)
        (folder / source.name).write_bytes(_WRITERS[source.kind](company, source))


def _prose(company: Company, name: str, count: int) -> list[str]:
    return random.Random(f"prose:{company.id}:{name}").sample(names.PROSE, count)


def _sheet(company: Company, source: Source) -> bytes:
    file = io.BytesIO()
    book = xlsxwriter.Workbook(file, {"in_memory": True})
    book.set_properties({"title": source.name, "author": company.name, "created": WRITTEN_AT})
    bold, number = book.add_format({"bold": True}), book.add_format({"num_format": "#,##0"})
    sheet = book.add_worksheet("Values")
    sheet.set_column("A:A", 24)
    sheet.write_row("A1", ["Item", "Value"], bold)
    for index, fact in enumerate(source.facts):
        sheet.write_string(f"A{row_number(index)}", fact.label)
        sheet.write_number(f"B{row_number(index)}", fact.value, number)
    end = row_number(len(source.facts))
    total = sum(fact.value for fact in source.facts)
    sheet.write_string(f"A{end}", "Total", bold)
    sheet.write_formula(f"B{end}", f"=SUM(B2:B{end - 1})", bold, total)
    about = book.add_worksheet("About")
    about.write_column("A1", [company.name, *_prose(company, source.name, 2)])
    about.write_string("A4", "Sum of all items")
    about.write_formula("B4", f"=Values!B{end}", number, total)
    book.close()
    return file.getvalue()


def _pdf(company: Company, source: Source) -> bytes:
    file = io.BytesIO()
    page = Canvas(file, pagesize=(595, 842), invariant=1)
    page.setTitle(source.name)
    page.setAuthor(company.name)
    page.setFont("Helvetica-Bold", 14)
    page.drawString(_LEFT, 760, company.name)
    page.setFont("Helvetica", 9)
    prose = _prose(company, source.name, 5)
    left = [line for text in prose[:3] for line in [*textwrap.wrap(text, 44), ""]]
    right = [line for text in prose[3:] for line in textwrap.wrap(text, 44)]
    for index, line in enumerate(left):
        page.drawString(_LEFT, _TOP - index * _LEADING, line)
    for index, line in enumerate(right):
        page.drawString(_RIGHT, _TOP - index * _LEADING, line)
    for index, fact in enumerate(source.facts):
        y = _TOP - (len(right) + 1 + index) * _LEADING
        page.drawString(_RIGHT, y, fact.label)
        page.drawRightString(_VALUE_END, y, str(fact.value))
        page.line(_RIGHT, y - 4, _VALUE_END, y - 4)
    page.showPage()
    page.save()
    return file.getvalue()


def _deck(company: Company, source: Source) -> bytes:
    deck: Any = pptx.Presentation()
    _stamp(deck.core_properties, company, source)
    title = deck.slides.add_slide(deck.slide_layouts[0])
    title.shapes.title.text = company.name
    title.placeholders[1].text = _prose(company, source.name, 1)[0]
    for number in sorted({slide_number(index) for index in range(len(source.facts))}):
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.shapes.title.text = "Key figures" if number == 2 else "More figures"
        lines = [f"{f.label}: {f.value}" for i, f in enumerate(source.facts) if slide_number(i) == number]
        slide.placeholders[1].text_frame.text = "\n".join(lines)
        for paragraph in slide.placeholders[1].text_frame.paragraphs:
            paragraph.font.size = Pt(24)
    file = io.BytesIO()
    deck.save(file)
    return _without_times(file.getvalue())


def _document(company: Company, source: Source) -> bytes:
    document = docx.Document()
    _stamp(document.core_properties, company, source)
    document.add_heading(company.name, level=1)
    prose = _prose(company, source.name, 4)
    for text in prose[:2]:
        document.add_paragraph(text)
    for fact in source.facts:
        document.add_paragraph(f"{fact.label}: {fact.value}", style="List Bullet")
    for text in prose[2:]:
        document.add_paragraph(text)
    file = io.BytesIO()
    document.save(file)
    return _without_times(file.getvalue())


def _text(company: Company, source: Source) -> bytes:
    prose = _prose(company, source.name, 3)
    lines = [company.name, prose[0], *(f"{f.label}: {f.value}" for f in source.facts), *prose[1:]]
    return ("\n".join(lines) + "\n").encode()


_WRITERS: dict[str, Callable[[Company, Source], bytes]] = {
    "xlsx": _sheet,
    "pdf": _pdf,
    "pptx": _deck,
    "docx": _document,
    "txt": _text,
}


def _stamp(properties: Any, company: Company, source: Source) -> None:
    properties.title, properties.author, properties.last_modified_by = source.name, company.name, company.name
    properties.created = properties.modified = WRITTEN_AT
    properties.revision = 1


def _without_times(data: bytes) -> bytes:
    """The zip archive with one fixed time on every member, in its own header and in the directory."""
    patched = bytearray(data)
    with ZipFile(io.BytesIO(data)) as archive:
        for member in archive.infolist():
            patched[member.header_offset + 10 : member.header_offset + 14] = _ZIP_TIME
        place = archive.start_dir
        for _ in archive.infolist():
            patched[place + 12 : place + 16] = _ZIP_TIME
            place += 46 + sum(struct.unpack_from("<HHH", data, place + 28))
    return bytes(patched)


def _chat(messages: tuple[tuple[str, str], ...]) -> bytes:
    listed = [
        {"time": (WRITTEN_AT + timedelta(minutes=7 * i)).isoformat(), "user": user, "text": text}
        for i, (user, text) in enumerate(messages)
    ]
    return (json.dumps(listed, indent=1) + "\n").encode()


def _mailbox(company: Company) -> bytes:
    parts = []
    for number, mail in enumerate(company.mails, start=1):
        sent = WRITTEN_AT + timedelta(hours=3 * number)
        message = EmailMessage()
        message["From"] = mail.sender
        message["To"] = "office@" + mail.sender.split("@", 1)[1]
        message["Subject"] = mail.subject
        message["Date"] = sent.strftime("%a, %d %b %Y %H:%M:%S +0000")
        message["Message-ID"] = f"<{number}.{company.id}@" + mail.sender.split("@", 1)[1] + ">"
        message.set_content(mail.body + "\n")
        parts.append(f"From {mail.sender} {sent.strftime('%a %b %d %H:%M:%S %Y')}\n{message.as_string()}\n")
    return "".join(parts).encode()


def _calendar(company: Company) -> bytes:
    calendar = Calendar()
    calendar.add("prodid", "-//Bartleby//world//EN")
    calendar.add("version", "2.0")
    for number, summary in enumerate(company.events):
        event = Event()
        event.add("uid", f"{number}@{company.id}.example")
        event.add("summary", summary)
        event.add("dtstamp", WRITTEN_AT)
        event.add("dtstart", WRITTEN_AT + timedelta(days=number, hours=number % 3))
        event.add("dtend", WRITTEN_AT + timedelta(days=number, hours=number % 3 + 1))
        calendar.add_component(event)
    return calendar.to_ical()


def _rates(company: Company) -> str:
    rng = random.Random(f"rates:{company.id}")
    rows = [f"{year},{1 + rng.randrange(50) / 10:.1f}" for year in range(2019, 2026)]
    return "\n".join(["year,rate", *rows]) + "\n"
