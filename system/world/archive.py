"""Unpacks the gzipped tar of a task directory that somebody else made, and trusts nothing in it."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
import unicodedata
import zlib
from dataclasses import dataclass
from pathlib import Path

_MIB = 1024**2
_HEADER_BYTES = _MIB
_READ_AHEAD = 16 * 1024
_FREE_OF_RATIO = 16 * _MIB
_NAME_BYTES = 255
_DEPTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one task may hold, unpacked: `Limits(members=100)`.

    ratio bounds the unpacked bytes by the packed ones, from 16 MiB on.
    """

    members: int = 20_000
    member_bytes: int = 256 * _MIB
    total_bytes: int = 1024 * _MIB
    ratio: int = 200


def unpack(packed: bytes, into: Path, *, row: str, limits: Limits) -> None:
    """Writes the files of a gzipped tar below the new folder `into`.

    Only plain files and folders come out: a link to a file of the same archive becomes that file under another name.
    Owners, times and special bits are left behind; a file stays executable.

    Args:
        row: which archive this is, for errors.

    Raises:
        ValueError: a member, named together with the rule that it breaks; what was written so far stays.
    """
    try:
        _Unpacking(packed, into, row, limits).run()
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{row} must be a gzipped tar, got {' '.join(str(error).split())}") from None


class _Unpacking:
    def __init__(self, packed: bytes, into: Path, row: str, limits: Limits) -> None:
        self.into, self.row, self.limits = into, row, limits
        most = min(limits.total_bytes, max(_FREE_OF_RATIO, limits.ratio * len(packed)))
        self.source = _Bounded(packed, row, most)
        self.files: set[str] = set()
        self.folders: set[str] = {"."}
        self.links: dict[str, str] = {}

    def run(self) -> None:
        self.into.mkdir()
        count = 0
        header = f"must have headers of at most {_HEADER_BYTES} bytes"
        self.source.allow(_HEADER_BYTES, header)
        with tarfile.open(fileobj=self.source, mode="r|") as tar:  # type: ignore[arg-type]
            while (member := tar.next()) is not None:
                count += 1
                if count > self.limits.members:
                    raise ValueError(f"{self.row} must have at most {self.limits.members} members, got more")
                self._take(tar, member)
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue] - it keeps every header
                self.source.allow(_HEADER_BYTES, f"{header}, after {member.name[:100]!r}")
        self.source.allow(self.limits.total_bytes, "must end")
        while self.source.read(_READ_AHEAD):  # to the checksum
            pass
        self._link()

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = self._name(member.name, member.name)
        if member.isdir():
            if name in self.files or name in self.links:
                self._refuse(member.name, "must occur once", "a file of that name as well")
            self._folder(name, member.name)
            return
        if name in self.files or name in self.folders or name in self.links:
            self._refuse(member.name, "must occur once", "it again")
        self._folder(name.rpartition("/")[0] or ".", member.name)
        if member.islnk() or member.issym():
            self.links[name] = self._target(name, member)
        elif member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse():
            self._write(tar, member, name)
        else:
            self._refuse(member.name, "must be a plain file, a folder or a link", f"type {member.type!r}")

    def _write(self, tar: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> None:
        most = self.limits.member_bytes
        if not 0 <= member.size <= most:
            self._refuse(member.name, f"must hold at most {most} bytes", str(member.size))
        self.source.allow(
            member.size + _HEADER_BYTES, f"member {member.name!r} must hold what its header says"
        )
        content = tar.extractfile(member)
        assert content is not None
        with open(self.into / name, "xb") as file:
            shutil.copyfileobj(content, file)
            os.fchmod(file.fileno(), 0o755 if member.mode & 0o100 else 0o644)
        self.files.add(name)

    def _folder(self, name: str, member: str) -> None:
        parts = name.split("/")
        for depth in range(1, len(parts) + 1):
            folder = "/".join(parts[:depth])
            if folder in self.files or folder in self.links:
                self._refuse(member, "must lie in folders", f"a file or a link {folder!r} on the way")
            if folder not in self.folders:
                (self.into / folder).mkdir()
                self.folders.add(folder)

    def _target(self, name: str, member: tarfile.TarInfo) -> str:
        """The name in the archive that a link means."""
        if member.islnk():
            return self._name(member.linkname, member.name)
        if member.linkname.startswith("/"):
            self._refuse(member.name, "must link inside its task", f"{member.linkname!r}")
        parts = name.split("/")[:-1]
        for part in member.linkname.split("/"):
            if part == ".." and not parts:
                self._refuse(member.name, "must link inside its task", f"{member.linkname!r}")
            if part == "..":
                parts.pop()
            elif part not in ("", "."):
                parts.append(part)
        return self._name("/".join(parts), member.name)

    def _link(self) -> None:
        """Gives every link the file that it means, chains from their end on."""
        left = dict(self.links)
        while left:
            ready = [name for name, target in left.items() if target in self.files]
            if not ready:
                name, target = min(left.items())
                self._refuse(name, "must link to a file of its task", repr(target))
            for name in ready:
                os.link(self.into / left.pop(name), self.into / name)
                self.files.add(name)

    def _name(self, name: str, member: str) -> str:
        """The member's path without `.` and in composed characters."""
        plain = unicodedata.normalize("NFC", name)
        if plain.startswith("/"):
            self._refuse(member, "must have a relative path", repr(name))
        parts = [part for part in plain.split("/") if part not in ("", ".")]
        if ".." in parts:
            self._refuse(member, "must stay inside its task", repr(name))
        if "\\" in plain or any(unicodedata.category(char) in ("Cc", "Cs") for char in plain):
            self._refuse(member, "must have a printable path without backslashes", repr(name))
        if len(parts) > _DEPTH or any(len(part.encode()) > _NAME_BYTES for part in parts):
            self._refuse(
                member, f"must have {_DEPTH} names of {_NAME_BYTES} bytes at most", f"{len(plain)} characters"
            )
        return "/".join(parts) or "."

    def _refuse(self, member: str, rule: str, got: str) -> None:
        raise ValueError(f"{self.row} member {member[:100]!r} {rule}, got {got}")


class _Bounded(io.RawIOBase):
    """The unpacked bytes, up to a bound on all of them and to one that is set anew for every part."""

    def __init__(self, packed: bytes, row: str, most: int) -> None:
        self.source = gzip.GzipFile(fileobj=io.BytesIO(packed))
        self.row, self.most = row, most
        self.count, self.until, self.rule = 0, 0, ""

    def allow(self, count: int, rule: str) -> None:
        """From here on at most `count` bytes, and what is read ahead; the rule is told when there are more."""
        self.until, self.rule = self.count + count + _READ_AHEAD, rule

    def read(self, size: int = -1) -> bytes:
        data = self.source.read(min(size, _READ_AHEAD) if size >= 0 else _READ_AHEAD)
        self.count += len(data)
        if self.count > self.most:
            raise ValueError(f"{self.row} must unpack to at most {self.most} bytes, got more")
        if self.count > self.until:
            raise ValueError(f"{self.row} {self.rule}, got more")
        return data
