"""Parts of an office file: the XML documents inside the zip and the relations between them."""

from __future__ import annotations

import io
import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

from lxml import etree  # pyright: ignore[reportAttributeAccessIssue]  # a compiled module without stubs

from system.tools.saving import save_bytes

LARGEST_PART = 50_000_000
"""Bytes of a part beyond which it is not parsed."""

Element: TypeAlias = Any
"""An element of lxml, which has no stubs."""

RELATIONSHIPS = "{http://schemas.openxmlformats.org/package/2006/relationships}"
"""The namespace of the parts that list relations."""


_STRICT = b"http://purl.oclc.org/ooxml/"
_USUAL = {
    b"wordprocessingml/main": b"http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    b"spreadsheetml/main": b"http://schemas.openxmlformats.org/spreadsheetml/2006/main",
    b"presentationml/main": b"http://schemas.openxmlformats.org/presentationml/2006/main",
    b"drawingml/": b"http://schemas.openxmlformats.org/drawingml/2006/",
    b"officeDocument/relationships": b"http://schemas.openxmlformats.org/officeDocument/2006/relationships",
}
"""Names in the strict form of Office Open XML, and what they are in the form that programs write."""


def parse_part(archive: ZipFile, name: str) -> Element:
    """Parse one part; entities are not expanded, names of the strict form of a format become the usual ones.

    Raises:
        ValueError: The file lacks the part, or the part is too large.
    """
    if name not in archive.NameToInfo:
        raise ValueError(f"the file lacks {name}")
    if archive.NameToInfo[name].file_size > LARGEST_PART:
        raise ValueError(f"the file holds {name} of more than {LARGEST_PART // 1_000_000} MB")
    data = archive.read(name)
    if _STRICT in data:
        for strict, usual in _USUAL.items():
            data = data.replace(_STRICT + strict, usual)
    return etree.fromstring(data, etree.XMLParser(resolve_entities=False, no_network=True))


def relations_name(part: str) -> str:
    """Name the part that lists the relations of another part."""
    folder, base = posixpath.split(part)
    return f"{folder}/_rels/{base}.rels"


def save_parts(file: Path, changed: Mapping[str, bytes]) -> None:
    """Write an office file anew with some parts changed, every other part as it was."""
    data = io.BytesIO()
    with ZipFile(file) as archive, ZipFile(data, "w", ZIP_DEFLATED) as target:
        for info in archive.infolist():
            kept = changed.get(info.filename)
            target.writestr(info, archive.read(info) if kept is None else kept)
    save_bytes(file, data.getvalue())


def check_package(file: Path) -> None:
    """Refuse an office file that can not be changed.

    Raises:
        ValueError: It is in the strict form, or no office file, or too large to be opened whole.
    """
    try:
        with ZipFile(file) as archive:
            sizes = [info.file_size for info in archive.infolist()]
            if "_rels/.rels" in archive.NameToInfo and _STRICT in archive.read("_rels/.rels"):
                raise ValueError(
                    f"{file.name} is in the strict form of its format, which can only be read here"
                )
    except BadZipFile as error:
        raise ValueError(f"{file.name} is not an office file: {error}") from None
    if max(sizes, default=0) > LARGEST_PART or sum(sizes) > 2 * LARGEST_PART or len(sizes) > 20_000:
        raise ValueError(f"{file.name} holds more than {LARGEST_PART // 1_000_000} MB; use run_code")


def related_parts(archive: ZipFile, part: str) -> dict[str, str]:
    """Map relation ids of a part to the names of the parts they point to."""
    folder = posixpath.dirname(part)
    relations = parse_part(archive, relations_name(part))
    targets = {
        each.get("Id", ""): each.get("Target", "") for each in relations.iter(f"{RELATIONSHIPS}Relationship")
    }
    return {id: posixpath.normpath(posixpath.join(f"/{folder}", name))[1:] for id, name in targets.items()}
