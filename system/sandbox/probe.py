"""`python -m system.sandbox.probe`: whether bubblewrap works here; prints the cause if not."""

from __future__ import annotations

import socket
import sys
import tempfile
from pathlib import Path

from . import SandboxError, open_sandbox


def answer(fd: int, root: Path) -> None:
    """Send one byte if the world is there and can be written."""
    (root / "probe").write_text("x")
    with socket.socket(fileno=fd) as stream:
        stream.sendall(b"1")


def main() -> int:
    """Exit status 0 if a sandbox came up, served and left the diff it should."""
    with tempfile.TemporaryDirectory() as folder:
        world, scratch = Path(folder, "world"), Path(folder, "scratch")
        world.mkdir()
        try:
            with open_sandbox("bubblewrap", world, scratch, answer) as sandbox:
                stream = sandbox.connect()
                stream.settimeout(10)
                heard = stream.recv(1)
                if heard != b"1" or sandbox.freeze().changed() != ["probe"]:
                    print(f"the sandbox started but does not serve ({sandbox.died()})")
                    return 1
        except SandboxError as error:
            print(error.cause)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
