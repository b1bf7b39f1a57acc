"""Slide decks of the set `full`: read with tables, charts and notes, made, extended, corrected."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from zipfile import ZipFile

import pptx
from pptx.util import Emu

from system.tools.arguments import NO_ROWS, Rows
from system.tools.parts import Element, check_package, parse_part, related_parts, relations_name
from system.tools.paths import existing_file
from system.tools.registration import tool
from system.tools.replacing import replace_text
from system.tools.results import NO_MATCH, matches
from system.tools.saving import name_of, new_file, save_bytes
from system.tools.slides import slide_parts, texts_of

_DRAWING = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_CHART = "{http://schemas.openxmlformats.org/drawingml/2006/chart}"

SlideNumber = Annotated[int, "number of the slide, from 1"]


def read_slides(
    root: Path,
    path: str,
    find: Annotated[str, "keep lines that contain this text"] = "",
    slide: Annotated[int, "only this slide; all if 0"] = 0,
) -> str:
    """Read the text, tables, charts and notes of a pptx file, each line with its slide."""
    file = existing_file(root, path, ".pptx")
    with ZipFile(file) as archive:
        count = len(slide_parts(archive))
    if slide and not 1 <= slide <= count:
        raise ValueError(f"slide must be from 1 to {count}, got {slide}")
    lines = [line for number, line in deck_lines(file) if slide in (0, number) and matches(find, line)]
    return "\n".join(lines) or (
        NO_MATCH if find else f"no text on {f'slide {slide}' if slide else 'the slides'}"
    )


def create_slides(root: Path, path: str, title: str, subtitle: Annotated[str, "below the title"] = "") -> str:
    """Make a new pptx file with a title slide."""
    file = new_file(root, path, ".pptx")
    deck: Any = pptx.Presentation()
    first = deck.slides.add_slide(deck.slide_layouts[0])
    first.shapes.title.text = title
    first.placeholders[1].text = subtitle
    _save(deck, file)
    return f"created {name_of(root, file)} with 1 slide; add_slide adds more"


def add_slide(
    root: Path,
    path: str,
    title: str,
    text: Annotated[str, "one point a line, indented by two blanks a level"] = "",
    rows: Annotated[Rows, "rows of a table, the header first"] = NO_ROWS,
    notes: Annotated[str, "for the speaker"] = "",
    position: Annotated[int, "number that the slide gets; the last if 0"] = 0,
) -> str:
    """Add a slide with a title, points, a table, notes to a pptx file."""
    file, deck = _open(root, path)
    count = len(deck.slides)
    if not 0 <= position <= count + 1:
        raise ValueError(f"position must be from 0 to {count + 1}, got {position}")
    layout = _layout(deck, body=bool(text))
    slide = deck.slides.add_slide(layout)
    if slide.shapes.title is None:
        box = slide.shapes.add_textbox(*_area(deck, 0.05, 0.12))
        box.text_frame.text = title
    else:
        slide.shapes.title.text = title
    if text:
        _write_points(_body(deck, slide), text)
    if rows:
        _write_table(deck, slide, rows, 0.55 if text else 0.25)
    if notes:
        slide.notes_slide.notes_text_frame.text = notes
    if position:
        listed = deck.slides._sldIdLst  # python-pptx has no public way to move a slide
        listed.insert(position - 1, listed[-1])
    _save(deck, file)
    return f"added slide {position or count + 1} of {count + 1} to {path}: {title}"


def edit_slides(
    root: Path,
    path: str,
    old: Annotated[str, "text within one paragraph"],
    new: str,
    slide: Annotated[int, "only this slide; all if 0"] = 0,
    every: Annotated[bool, "replace all; else old must occur once"] = False,
) -> str:
    """Replace a text on the slides of a pptx file; the formatting stays."""
    file = existing_file(root, path, ".pptx")

    def parts(archive: ZipFile) -> list[str]:
        found = slide_parts(archive)
        if slide and not 1 <= slide <= len(found):
            raise ValueError(f"slide must be from 1 to {len(found)}, got {slide}")
        return found[slide - 1 : slide] if slide else found

    count = replace_text(file, parts, _DRAWING, old, new, every=every)
    return f"replaced {count} time{'s' * (count > 1)} in {path}"


def delete_slide(root: Path, path: str, slide: SlideNumber) -> str:
    """Remove a slide from a pptx file."""
    file, deck = _open(root, path)
    listed = deck.slides._sldIdLst  # python-pptx has no public way to remove a slide
    if not 1 <= slide <= len(listed):
        raise ValueError(f"slide must be from 1 to {len(listed)}, got {slide}")
    entry = listed[slide - 1]
    deck.part.drop_rel(entry.rId)
    listed.remove(entry)
    _save(deck, file)
    return f"removed slide {slide} from {path}; {len(listed)} left"


def deck_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Give every line of a deck with its slide: texts, table rows, series of charts, notes."""
    with ZipFile(file) as archive:
        for number, part in enumerate(slide_parts(archive), 1):
            for text in texts_of(parse_part(archive, part)):
                yield number, f"slide {number}: {text}"
            related = {}
            if relations_name(part) in archive.NameToInfo:
                related = related_parts(archive, part)
            for other in sorted(name for name in related.values() if name in archive.NameToInfo):
                if re.search(r"/charts/chart[^/]*\.xml$", other):
                    for text in _chart_lines(parse_part(archive, other)):
                        yield number, f"slide {number} chart: {text}"
                elif "/notesSlides/" in other:
                    own = [text for text in texts_of(parse_part(archive, other)) if text != str(number)]
                    yield from ((number, f"slide {number} notes: {text}") for text in own)


def _chart_lines(chart: Element) -> Iterator[str]:
    title = chart.find(f"{_CHART}chart/{_CHART}title")
    if title is not None:
        yield from texts_of(title)
    for series in chart.iter(f"{_CHART}ser"):
        name = "".join(value.text or "" for value in series.findall(f"{_CHART}tx//{_CHART}v"))
        labels, values = _points(series, "cat"), _points(series, "val")
        labels, values = labels or _points(series, "xVal"), values or _points(series, "yVal")
        points = [f"{labels.get(index, index)}: {value}" for index, value in values.items()]
        yield " | ".join(part for part in [name, *points] if part)


def _points(series: Element, kind: str) -> dict[str, str]:
    return {
        point.get("idx", ""): point.findtext(f"{_CHART}v") or ""
        for point in series.findall(f"{_CHART}{kind}//{_CHART}pt")
    }


def _open(root: Path, path: str) -> tuple[Path, Any]:
    file = existing_file(root, path, ".pptx")
    check_package(file)
    return file, pptx.Presentation(str(file))


def _layout(deck: Any, *, body: bool) -> Any:
    """A layout with a title, and with or without a body."""
    for layout in deck.slide_layouts:
        kinds = [p.placeholder_format.type for p in layout.placeholders if p.placeholder_format.idx < 10]
        if len(kinds) == 1 + body and layout.placeholders[0].placeholder_format.idx == 0:
            return layout
    return deck.slide_layouts[0]


def _body(deck: Any, slide: Any) -> Any:
    for placeholder in slide.placeholders:
        if placeholder.placeholder_format.idx > 0 and placeholder.has_text_frame:
            return placeholder.text_frame
    return slide.shapes.add_textbox(*_area(deck, 0.25, 0.6)).text_frame


def _write_points(frame: Any, text: str) -> None:
    lines = [line for line in text.split("\n") if line.strip()]
    for index, line in enumerate(lines):
        paragraph = frame.paragraphs[0] if index == 0 else frame.add_paragraph()
        paragraph.text = re.sub(r"^[-*•]\s+", "", line.strip())
        paragraph.level = min(4, (len(line) - len(line.lstrip())) // 2)


def _write_table(deck: Any, slide: Any, rows: Rows, top: float) -> None:
    width = max(len(row) for row in rows)
    if width == 0 or len(rows) * width > 2000:
        raise ValueError(f"rows must have 1 to 2000 cells, got {len(rows) * width}")
    table = slide.shapes.add_table(len(rows), width, *_area(deck, top, 0.05 * len(rows))).table
    for index, row in enumerate(rows):
        for column, text in enumerate(row):
            table.cell(index, column).text = text


def _area(deck: Any, top: float, height: float) -> tuple[Emu, Emu, Emu, Emu]:
    """A box over most of the width, from a share of the height on."""
    wide, high = deck.slide_width, deck.slide_height
    return Emu(int(wide * 0.07)), Emu(int(high * top)), Emu(int(wide * 0.86)), Emu(int(high * height))


def _save(deck: Any, file: Path) -> None:
    data = io.BytesIO()
    deck.save(data)
    save_bytes(file, data.getvalue())


TOOLS = (
    tool(read_slides, reads=True),
    tool(create_slides),
    tool(add_slide),
    tool(edit_slides),
    tool(delete_slide),
)
