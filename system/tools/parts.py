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


def parse_part(archive: ZipFile, name: str) -> Element:
    """Parse one part; entities are not expanded.

    Raises:
        ValueError: The file lacks the part, or the part is too large.
    """
    if name not in archive.NameToInfo:
        raise ValueError(f"the file lacks {name}")
    if archive.NameToInfo[name].file_size > LARGEST_PART:
        raise ValueError(f"the file holds {name} of more than {LARGEST_PART // 1_000_000} MB")
    return etree.fromstring(archive.read(name), etree.XMLParser(resolve_entities=False, no_network=True))


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
    """Refuse an office file that would not fit into memory when a library opens it whole.

    Raises:
        ValueError: Its parts are too large, one of them or all together, or too many.
    """
    try:
        with ZipFile(file) as archive:
            sizes = [info.file_size for info in archive.infolist()]
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
