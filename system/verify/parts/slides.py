"""Decks: slides in their order, every shape with its text, place, table and picture, and the notes."""

from __future__ import annotations

import re

import lxml.etree as etree

from . import NotReadable, Parts
from .package import Package

_A = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_P = "{http://schemas.openxmlformats.org/presentationml/2006/main}"
_R = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
_SHAPES = tuple(f"{_P}{name}" for name in ("sp", "pic", "graphicFrame", "cxnSp", "grpSp"))
_COVERED = re.compile(
    r"ppt/(presentation|slides/[^/]*|notesSlides/[^/]*|presProps|viewProps|tableStyles)(\.xml)?$"
)


def read(data: bytes) -> Parts:
    """Facts per shape of each slide; charts, masters and pictures by a hash of their part."""
    package = Package(data)
    if "ppt/presentation.xml" not in package:
        raise NotReadable("no ppt/presentation.xml")
    deck, relations = package.xml("ppt/presentation.xml"), package.relations("ppt/presentation.xml")
    parts: dict[str, str | tuple[str, ...]] = {}
    order = []
    for entry in deck.iter(f"{_P}sldId"):
        name = f"slide {entry.get('id')}"
        target = relations.get(entry.get(f"{_R}id", ""), "")
        if target not in package:
            raise NotReadable(f"{name} leads to no slide")
        told = _slide(package, target)
        order.append(f"{name}: {told.pop('title')}")
        parts |= {f"{name} {key}": value for key, value in told.items() if value}
    size = deck.find(f"{_P}sldSz")
    parts["size"] = "" if size is None else f"{size.get('cx')} × {size.get('cy')}"
    return {"slide": tuple(order), **parts, **package.rest(lambda name: bool(_COVERED.match(name)))}


def _slide(package: Package, name: str) -> dict[str, str | tuple[str, ...]]:
    root, relations = package.xml(name), package.relations(name)
    found: dict[str, str | tuple[str, ...]] = {
        "title": "",
        "hidden": "yes" if root.get("show") == "0" else "",
    }
    for shape in root.iter(*_SHAPES):
        about = next(shape.iter(f"{_P}cNvPr"))
        label = f"shape {about.get('id')} {about.get('name')}"
        if f"{label} line" in found:
            label += " again"
        for key, value in _shape(shape, relations).items():
            found[f"{label} {key}"] = value
        kind = next((ph.get("type") for ph in shape.iter(f"{_P}ph")), None)
        if kind in ("title", "ctrTitle") and not found["title"]:
            found["title"] = " ".join(_lines(shape))
    for target in relations.values():
        if target in package and target.startswith("ppt/notesSlides/"):
            found["notes line"] = _lines(package.xml(target))
        elif target in package and target.startswith("ppt/slideLayouts/"):
            found["layout"] = target
    found["timing"] = _canonical(root, f"{_P}timing") + _canonical(root, f"{_P}transition")
    return found


def _shape(shape: etree._Element, relations: dict[str, str]) -> dict[str, str | tuple[str, ...]]:
    if shape.tag == f"{_P}grpSp":
        return {"place": _place(shape.find(f"{_P}grpSpPr")), "line": (), "kind": "group"}
    links = [
        relations.get(str(value), str(value))
        for node in shape.iter()
        for attribute, value in node.attrib.items()
        if str(attribute).startswith(_R)
    ]
    cells = tuple(
        f"row {row_number} cell {number}: {' / '.join(_lines(cell))}"
        for row_number, row in enumerate(shape.iter(f"{_A}tr"), start=1)
        for number, cell in enumerate(row.iter(f"{_A}tc"), start=1)
    )
    return {
        "kind": etree.QName(shape).localname,
        "place": _place(shape),
        "line": () if cells else _lines(shape),
        "cell": cells,
        "look": _looks(shape),
        "leads to": tuple(links),
        "described as": str(next(shape.iter(f"{_P}cNvPr")).get("descr", "")),
    }


def _lines(node: etree._Element) -> tuple[str, ...]:
    """Text by paragraph, line breaks and fields included."""
    return tuple(
        "".join(
            "\n" if part.tag == f"{_A}br" else str(part.text or "")
            for part in paragraph.iter(f"{_A}t", f"{_A}br")
        )
        for paragraph in node.iter(f"{_A}p")
    )


def _looks(shape: etree._Element) -> tuple[str, ...]:
    """Attributes and colours of runs that have some."""
    found = []
    for run in shape.iter(f"{_A}r"):
        properties = run.find(f"{_A}rPr")
        if properties is None:
            continue
        told = [
            f"{name} {value}"
            for name, value in properties.attrib.items()
            if name not in ("lang", "dirty", "err")
        ]
        told += [str(color.get("val")) for color in properties.iter(f"{_A}srgbClr", f"{_A}schemeClr")]
        if told:
            found.append(f"{', '.join(told)}: {run.findtext(f'{_A}t')}")
    return tuple(found)


def _place(node: etree._Element | None) -> str:
    if node is None:
        return ""
    offset, extent = next(node.iter(f"{_A}off"), None), next(node.iter(f"{_A}ext"), None)
    at = "" if offset is None else f"at {offset.get('x')}, {offset.get('y')}"
    size = (
        "" if extent is None or extent.get("cx") is None else f" size {extent.get('cx')}, {extent.get('cy')}"
    )
    return at + size


def _canonical(root: etree._Element, tag: str) -> str:
    return "".join(etree.tostring(node, method="c14n").decode() for node in root.iter(tag))[:2000]
