"""A disk that can be filled: a small tmpfs where one may be mounted, else a limit on the size of a run's files."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Sequence
from pathlib import Path

SIZE = 1 << 29
"""Bytes of the tmpfs."""


class Disk:
    """Where a run's folder lies. Example: `with Disk(Path("out/disk")) as disk: disk.fill(pids); disk.free(pids)`."""

    def __init__(self, place: Path) -> None:
        self.place, self.mounted = place, False
        self._ballast = place / "ballast"

    def __enter__(self) -> Disk:
        self.place.mkdir(parents=True, exist_ok=True)
        options = ["-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(self.place)]
        done = (
            subprocess.run(["mount", *options], capture_output=True, check=False)
            if os.geteuid() == 0
            else None
        )
        self.mounted = done is not None and done.returncode == 0
        return self

    def __exit__(self, *exception: object) -> None:
        if self.mounted:
            busy = subprocess.run(["umount", str(self.place)], capture_output=True, check=False).returncode
            if busy:
                subprocess.run(["umount", "--lazy", str(self.place)], capture_output=True, check=True)
            self.place.rmdir()

    @property
    def how(self) -> str:
        """What being full means here."""
        if self.mounted:
            return f"a tmpfs of {SIZE >> 20} MiB that is filled"
        return "RLIMIT_FSIZE of the run's processes: no file grows"

    def fill(self, pids: Sequence[int]) -> None:
        """From now on nothing more can be written."""
        if not self.mounted:
            _limit(pids, 0)
            return
        with open(self._ballast, "wb", buffering=0) as file:
            for piece in (1 << 20, 1 << 12, 1):
                _write_until_full(file.fileno(), b"\0" * piece)

    def free(self, pids: Sequence[int]) -> None:
        """There is room again."""
        if self.mounted:
            self._ballast.unlink(missing_ok=True)
        else:
            _limit(pids, None)


def _write_until_full(descriptor: int, piece: bytes) -> None:
    try:
        while os.write(descriptor, piece) > 0:
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def _limit(pids: Sequence[int], size: int | None) -> None:
    for pid in pids:
        try:
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            soft = hard if size is None else size
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
        except ProcessLookupError:
            continue
