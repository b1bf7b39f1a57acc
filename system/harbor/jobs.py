"""What a place does for Harbor, one job a life: run a command, take files in, give files out. Runs inside the sandbox.

Each is a `Serve` of `system.sandbox` once its keywords are bound: it talks on its stream and ends.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import subprocess
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

HEADER = struct.Struct("!cI")
"""Of a frame: what it is, and how many bytes follow."""

OUT, ERR, END, FAULT = b"o", b"e", b"x", b"f"
"""What the command printed, its errors, its exit code, and why there is none."""

LINGER_S = 0.2
"""How long after its end what a command left in its pipes is waited for."""

_CHUNK = 1 << 16


def idle(fd: int, root: Path) -> None:
    """Nothing: only the place is made."""


def run_command(
    fd: int, root: Path, *, command: str, cwd: str | None, environment: Mapping[str, str]
) -> None:
    """Run a command by bash; what it prints goes out as it comes, then its exit code."""
    with socket.socket(fileno=fd) as stream:
        try:
            process = subprocess.Popen(
                ["bash" if os.path.exists("/bin/bash") else "sh", "-c", command],
                cwd=cwd or root,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **environment},
            )
        except (OSError, ValueError) as error:
            _send(stream, FAULT, str(error).encode())
            return
        assert process.stdout is not None and process.stderr is not None
        _forward(stream, process, {process.stdout.fileno(): OUT, process.stderr.fileno(): ERR})
        code = process.wait()
        _send(stream, END, str(code if code >= 0 else 128 - code).encode())


def _forward(stream: socket.socket, process: subprocess.Popen[bytes], kinds: dict[int, bytes]) -> None:
    """Until the command ends, and what it left in its pipes: something that it started may hold them open."""
    with selectors.DefaultSelector() as selector, open(os.pidfd_open(process.pid), "rb") as end:
        for fd in (*kinds, end.fileno()):
            selector.register(fd, selectors.EVENT_READ)
        deadline: float | None = None
        while any(fd in selector.get_map() for fd in kinds):
            ready = selector.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if deadline is not None and (not ready or time.monotonic() > deadline):
                return
            for key, _ in ready:
                if key.fd == end.fileno():
                    selector.unregister(key.fd)
                    deadline = time.monotonic() + LINGER_S
                elif data := os.read(key.fd, _CHUNK):
                    _send(stream, kinds[key.fd], data)
                else:
                    selector.unregister(key.fd)


def _send(stream: socket.socket, kind: bytes, data: bytes) -> None:
    stream.sendall(HEADER.pack(kind, len(data)) + data)


def take_in(fd: int, root: Path, *, target: str) -> None:
    """Unpack the archive that comes in below a folder, or as a file of a name if it holds one called ''."""
    with socket.socket(fileno=fd) as stream:
        try:
            with stream.makefile("rb") as incoming:
                _unpack(incoming, Path(root, target))
                while incoming.read(_CHUNK):  # what pads the archive
                    continue
        except (OSError, tarfile.TarError) as error:
            _send(stream, FAULT, _line(error))
            return
        _send(stream, END, b"0")


def _unpack(incoming: BinaryIO, target: Path) -> None:
    with tarfile.open(fileobj=incoming, mode="r|") as archive:
        for member in archive:
            if member.name == FILE:
                target.parent.mkdir(parents=True, exist_ok=True)
                source = archive.extractfile(member)
                assert source is not None
                target.unlink(missing_ok=True)
                with open(target, "wb") as file:
                    while data := source.read(_CHUNK):
                        file.write(data)
                target.chmod(member.mode & 0o777)
            else:
                target.mkdir(parents=True, exist_ok=True)
                archive.extract(member, target, filter="data")


FILE = ".file"
"""The name, in an archive, of a file that goes under another one."""


def give_out(fd: int, root: Path, *, source: str, folder: bool) -> None:
    """An archive of a folder's files and folders, or of one file, after a frame that says whether there is one."""
    with socket.socket(fileno=fd) as stream:
        at = Path(root, source)
        if not (at.is_dir() if folder else at.is_file()):
            _send(stream, FAULT, f"no such {'folder' if folder else 'file'}: {source}".encode())
            return
        _send(stream, END, b"0")
        with stream.makefile("wb") as outgoing, tarfile.open(fileobj=outgoing, mode="w|") as archive:
            if folder:
                archive.add(at, arcname=".", filter=plain)
            else:
                archive.add(at.resolve(), arcname=FILE, filter=plain)


def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Files and folders only: a link, pipe or device is not carried."""
    if not (member.isreg() or member.isdir()):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _line(error: Exception) -> bytes:
    return " ".join(str(error).split()).encode()
