"""Fetches some seventy chat templates and runs the laws of deltas on them: `python tests/templates/fetch.py`.

They come from the source package of llama-cpp-python (77 MB, MIT; each template is its model owner's), into a folder
that is deleted again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "llama-cpp-python==0.3.36"


def main() -> int:
    """The exit status of the tests."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        download = ["pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", name, PACKAGE]
        subprocess.run([sys.executable, "-m", *download], check=True)
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as files:
            for member in files:
                path = Path(member.name)
                if path.suffix == ".jinja" and path.parts[-3:-1] == ("models", "templates"):
                    opened = files.extractfile(member)
                    assert opened is not None
                    (folder / path.name).write_bytes(opened.read())
        tests = [sys.executable, "-m", "pytest", "-q", "tests/templates/test_fetched_templates.py"]
        return subprocess.run(tests, cwd=ROOT, env={**os.environ, "FETCHED_TEMPLATES": name}).returncode


if __name__ == "__main__":
    sys.exit(main())
