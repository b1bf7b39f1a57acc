"""Fetches office files that nobody here wrote: `python tests/real_files/fetch.py FOLDER`, some twenty seconds.

They lie in FOLDER, which is made, by kind; nothing is fetched where they lie there already. Their sources: the source
packages of python-pptx and python-docx (MIT), pypdf (BSD), npm's mammoth (BSD), the test messages of CPython (PSF).
`--test` then runs the tests over them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SDISTS = ("python-pptx==1.0.2", "python-docx==1.2.0", "pypdf==7.1.0")
NPM = "mammoth@1.13.0"
SUFFIXES = (".pptx", ".docx", ".pdf", ".xlsx")
LARGEST = 20_000_000
DONE = "complete.txt"


def fetch(folder: Path) -> dict[str, int]:
    """Fill the folder, unless it is full; gives the number of files of each kind."""
    if not (folder / DONE).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as name:
            for archive in _archives(Path(name)):
                _take_files(archive, folder)
        _take_messages(folder)
        (folder / DONE).write_text("Made by tests/real_files/fetch.py\n")
    kinds = sorted(kind for kind in folder.iterdir() if kind.is_dir())
    return {kind.name: len(list(kind.iterdir())) for kind in kinds}


def _archives(folder: Path) -> list[Path]:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        str(folder),
    ]
    subprocess.run([*pip, *SDISTS], check=True)
    if shutil.which("npm"):
        npm = ["npm", "pack", "--silent", "--pack-destination", str(folder), NPM]
        subprocess.run(npm, check=True, stdout=subprocess.DEVNULL)
    else:
        print("npm is not installed: the documents of mammoth are left out", file=sys.stderr)
    return sorted([*folder.glob("*.tar.gz"), *folder.glob("*.tgz")])


def _take_files(archive: Path, folder: Path) -> None:
    """Copy the office files of an archive under flat names; links and large ones are left."""
    with tarfile.open(archive) as files:
        for member in files:
            path = Path(member.name)
            suffix = path.suffix.lower()
            if not member.isfile() or suffix not in SUFFIXES or member.size > LARGEST:
                continue
            opened = files.extractfile(member)
            assert opened is not None
            kind = folder / suffix[1:]
            kind.mkdir(exist_ok=True)
            flat = "-".join([archive.name.split("-")[0], *path.parts[1:]]).replace(" ", "_")
            (kind / flat).write_bytes(opened.read())


def _take_messages(folder: Path) -> None:
    found = importlib.util.find_spec("test.test_email.data")
    if found is None or not found.submodule_search_locations:
        print("this Python has no test package: the messages of CPython are left out", file=sys.stderr)
        return
    kind = folder / "eml"
    kind.mkdir(exist_ok=True)
    for place in found.submodule_search_locations:
        for file in sorted(Path(place).glob("msg_*.txt")):
            shutil.copyfile(file, kind / f"{file.stem}.eml")


def main() -> int:
    """Fetch, count, and with --test run the tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--test", action="store_true", help="run tests/test_real_files.py over them")
    given = parser.parse_args()
    folder = given.folder.resolve()
    print(", ".join(f"{count} {kind}" for kind, count in fetch(folder).items()))
    if not given.test:
        return 0
    tests = [sys.executable, "-m", "pytest", "-q", "tests/test_real_files.py"]
    return subprocess.run(tests, cwd=ROOT, env={**os.environ, "REAL_FILES": str(folder)}).returncode


if __name__ == "__main__":
    sys.exit(main())
