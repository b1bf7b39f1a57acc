"""Word documents: every paragraph wherever it stands, with its style, its tracked changes and its runs' looks."""

from __future__ import annotations

import re

import lxml.etree as etree

from . import NotReadable, Parts
from .package import Package

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_R = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
_STORIES = re.compile(r"word/(document|header\d*|footer\d*|footnotes|endnotes|comments)\.xml$")
_NOISE = re.compile(r"word/(settings|webSettings|fontTable|commentsExtended|commentsIds|people)\.xml$")
_LOOKS = ("b", "i", "u", "strike", "color", "highlight", "sz", "vertAlign")


def read(data: bytes) -> Parts:
    """Paragraphs of the body, headers, footers, notes and comments in order; styles and pictures by a hash."""
    package = Package(data)
    if "word/document.xml" not in package:
        raise NotReadable("no word/document.xml")
    parts: dict[str, str | tuple[str, ...]] = {}
    for name in package.names:
        story = _STORIES.match(name)
        if story:
            parts |= {f"{story[1]} {key}": value for key, value in _story(package, name).items()}
    return parts | dict(package.rest(lambda name: bool(_STORIES.match(name) or _NOISE.match(name))))


def _story(package: Package, name: str) -> dict[str, tuple[str, ...]]:
    root, relations = package.xml(name), package.relations(name)
    places = _table_places(root)
    paragraphs = list(root.iter(f"{_W}p"))
    sections = [etree.tostring(s, method="c14n").decode() for s in root.iter(f"{_W}sectPr")]
    authors = [
        f"{comment.get(f'{_W}author')} comment {comment.get(f'{_W}id')}"
        for comment in root.iter(f"{_W}comment")
    ]
    return {
        "paragraph": tuple(places.get(p, "") + _style(p) + _text(p, relations) for p in paragraphs),
        "formatted run": tuple(look for p in paragraphs for look in _looks(p)),
        "section": tuple(_without_revisions(section) for section in sections),
        "author": tuple(authors),
    }


def _table_places(root: etree._Element) -> dict[etree._Element, str]:
    found = {}
    for number, table in enumerate(root.iter(f"{_W}tbl"), start=1):
        for row_number, row in enumerate(table.findall(f"{_W}tr"), start=1):
            for cell_number, cell in enumerate(row.iter(f"{_W}tc"), start=1):
                for paragraph in cell.iter(f"{_W}p"):
                    found[paragraph] = f"[table {number} row {row_number} cell {cell_number}] "
    return found


def _style(paragraph: etree._Element) -> str:
    properties = paragraph.find(f"{_W}pPr")
    if properties is None:
        return ""
    style, numbering = properties.find(f"{_W}pStyle"), properties.find(f"{_W}numPr")
    alignment = properties.find(f"{_W}jc")
    told = [str(style.get(f"{_W}val"))] if style is not None else []
    told += ["numbered"] if numbering is not None else []
    told += [str(alignment.get(f"{_W}val"))] if alignment is not None else []
    return f"[{', '.join(told)}] " if told else ""


def _text(paragraph: etree._Element, relations: dict[str, str]) -> str:
    """All text below a paragraph but that of paragraphs inside it (text boxes), which are listed themselves."""
    out: list[str] = []
    for node in paragraph.iter():
        if (
            next((a for a in node.iterancestors(f"{_W}p")), paragraph) is not paragraph
            and node is not paragraph
        ):
            continue
        match node.tag:
            case tag if tag == f"{_W}t":
                out.append(_tracked(node, node.text or ""))
            case tag if tag in (f"{_W}delText", f"{_W}instrText"):
                out.append(_tracked(node, node.text or ""))
            case tag if tag == f"{_W}tab":
                out.append("\t")
            case tag if tag in (f"{_W}br", f"{_W}cr"):
                out.append("\n")
            case tag if tag == f"{_W}hyperlink":
                out.append(f"[link {relations.get(node.get(f'{_R}id', ''), node.get(f'{_W}anchor', ''))}] ")
            case tag if tag in (f"{_W}footnoteReference", f"{_W}endnoteReference", f"{_W}commentReference"):
                out.append(f"[{etree.QName(node).localname} {node.get(f'{_W}id')}]")
            case tag if isinstance(tag, str) and etree.QName(tag).localname == "blip":
                out.append(f"[picture {relations.get(node.get(f'{_R}embed', ''), '')}]")
            case tag if isinstance(tag, str) and etree.QName(tag).localname == "checked":
                out.append(f"[checked {next(iter(node.attrib.values()), '')}]")
            case _:
                continue
    return "".join(out)


def _tracked(node: etree._Element, text: str) -> str:
    for ancestor in node.iterancestors():
        if ancestor.tag in (f"{_W}ins", f"{_W}moveTo"):
            return f"[inserted: {text}]"
        if ancestor.tag in (f"{_W}del", f"{_W}moveFrom"):
            return f"[deleted: {text}]"
        if ancestor.tag == f"{_W}p":
            break
    return text


def _looks(paragraph: etree._Element) -> list[str]:
    found = []
    for run in paragraph.iter(f"{_W}r"):
        properties = run.find(f"{_W}rPr")
        text = "".join(node.text or "" for node in run.iter(f"{_W}t"))
        if properties is None or not text:
            continue
        told = [
            f"{name} {thing.get(f'{_W}val', 'on')}"
            for name in _LOOKS
            if (thing := properties.find(f"{_W}{name}")) is not None
        ]
        if told:
            found.append(f"{', '.join(told)}: {text}")
    return found


def _without_revisions(xml: str) -> str:
    """Word numbers every editing session; that is no change of the section."""
    return re.sub(r' w:rsid\w*="[^"]*"', "", re.sub(r' xmlns:\w+="[^"]*"', "", xml))
