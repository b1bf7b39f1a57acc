"""Zip archives, and the office files that are some: bounded, without entities, every member accounted for."""

from __future__ import annotations

import hashlib
import io
import posixpath
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from zipfile import ZipFile

import lxml.etree as etree

from . import NotReadable, Parts

MOST_MEMBERS = 5_000
LARGEST_UNPACKED = 64 << 20

_RELATIONS = "{http://schemas.openxmlformats.org/package/2006/relationships}Relationship"
_NOISE = ("[Content_Types].xml", "docProps/app.xml", "docProps/core.xml", "docProps/thumbnail.jpeg")


class Package:
    """The members of an archive, unpacked on demand within bounds.

    Raises:
        NotReadable: no archive, or one that would fill the memory.
    """

    def __init__(self, data: bytes) -> None:
        try:
            self._archive = ZipFile(io.BytesIO(data))
        except Exception as error:  # noqa: BLE001 - a damaged directory takes any form; it becomes a NotReadable
            raise NotReadable(f"no archive: {type(error).__name__}") from None
        infos = self._archive.infolist()
        unpacked = sum(info.file_size for info in infos)
        if len(infos) > MOST_MEMBERS or unpacked > LARGEST_UNPACKED:
            raise NotReadable(
                f"an archive of {len(infos)} members and {unpacked} bytes; "
                f"{MOST_MEMBERS} and {LARGEST_UNPACKED} are read at most"
            )
        self.names = [info.filename for info in infos if not info.is_dir()]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def bytes(self, name: str) -> bytes:
        """The content of a member."""
        return self._archive.read(name)

    def xml(self, name: str) -> etree._Element:
        """The root of a member that is XML; no entity is expanded, nothing is fetched."""
        return _root(self.bytes(name))

    def relations(self, name: str) -> dict[str, str]:
        """Identifier → target of a member's relationships: a member's name, or an address outside as it stands."""
        folder, base = posixpath.split(name)
        place = posixpath.join(folder, "_rels", f"{base}.rels")
        if place not in self.names:
            return {}
        found = {}
        for relation in self.xml(place).iter(_RELATIONS):
            target = str(relation.get("Target", ""))
            if relation.get("TargetMode") != "External":
                target = posixpath.normpath(posixpath.join("/", folder, target)).lstrip("/")
            found[str(relation.get("Id", ""))] = target
        return found

    def rest(self, is_covered: Callable[[str], bool]) -> Parts:
        """A hash for every member that is not covered otherwise; of XML in canonical form, so that only content counts.

        What a program notes about itself when it saves is left out.
        """
        twice = sorted(name for name, count in Counter(self.names).items() if count > 1)
        found = {"members that come twice": ", ".join(twice)} if twice else {}
        for name in sorted(set(self.names)):
            if name in _NOISE or name.endswith(".rels") or is_covered(name):
                continue
            found[f"part {name}"] = f"sha256 {self.hash(name)}"
        return found

    def hash(self, name: str) -> str:
        """A hash of a member's content."""
        return _hash(self.bytes(name), name.endswith(".xml"))


@lru_cache(maxsize=256)  # most members of two versions of a file are the same bytes
def _hash(content: bytes, is_xml: bool) -> str:
    if is_xml:
        try:
            content = etree.tostring(_root(content), method="c14n")
        except etree.XMLSyntaxError:
            pass  # hashed as the bytes that it is
    return hashlib.sha256(content).hexdigest()[:16]


def _root(content: bytes) -> etree._Element:
    return etree.fromstring(content, etree.XMLParser(resolve_entities=False, no_network=True))


def read(data: bytes) -> Parts:
    """Members of an archive by name: size and hash."""
    package = Package(data)
    sizes = {name: len(package.bytes(name)) for name in package.names}
    return {f"member {name}": f"{sizes[name]} bytes, {package.hash(name)}" for name in package.names}
