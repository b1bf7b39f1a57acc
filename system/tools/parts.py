"""Parts of an office file: the XML documents inside the zip and the relations between them."""

from __future__ import annotations

import posixpath
from typing import Any, TypeAlias
from zipfile import ZipFile

from lxml import etree  # pyright: ignore[reportAttributeAccessIssue]  # a compiled module without stubs

LARGEST_PART = 50_000_000
"""Bytes of a part beyond which it is not parsed."""

Element: TypeAlias = Any
"""An element of lxml, which has no stubs."""

_RELATIONSHIP = "{http://schemas.openxmlformats.org/package/2006/relationships}Relationship"


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


def related_parts(archive: ZipFile, part: str) -> dict[str, str]:
    """Map relation ids of a part to the names of the parts they point to."""
    folder = posixpath.dirname(part)
    relations = parse_part(archive, relations_name(part))
    targets = {each.get("Id", ""): each.get("Target", "") for each in relations.iter(_RELATIONSHIP)}
    return {id: posixpath.normpath(posixpath.join(f"/{folder}", name))[1:] for id, name in targets.items()}
