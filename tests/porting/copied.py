"""Copies core under another name, with its laws, and runs them there: `python tests/porting/copied.py NAME`.

In the laws `core` becomes the other name where it is imported; nothing else is touched, and in the copy of core
nothing at all. `import core` fails there, so that no law can reach the original.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = re.compile(r'(\b(?:from|import) |\bf?"|/ ")core(?=[. "])')
ALONE = """

import sys  # noqa: E402


class Original:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "core":
            raise ImportError("a copy of core must not import the original")


sys.meta_path.insert(0, Original())
settings.register_profile("copy", settings.get_profile("mutants"), max_examples={examples})
settings.load_profile("copy")
"""


def copied(name: str, folder: Path, *, examples: int) -> None:
    """core as `name` in an empty folder, and its laws beside it, with so many examples each."""
    caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "core", folder / name, ignore=caches)
    for laws in ("property", "oracle"):
        shutil.copytree(ROOT / "tests" / laws, folder / "tests" / laws, ignore=caches)
    for path in (ROOT / "tests").glob("*.py"):
        if not path.name.startswith("test_"):
            shutil.copy(path, folder / "tests")
    for path in (folder / "tests").rglob("*.py"):
        path.write_text(IMPORTED.sub(rf"\g<1>{name}", path.read_text(encoding="utf-8")), encoding="utf-8")
    with (folder / "tests" / "conftest.py").open("a", encoding="utf-8") as conftest:
        conftest.write(ALONE.format(examples=examples))
    shutil.copy(ROOT / "setup.cfg", folder)


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """pytest in a copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="what core is called in the copy")
    parser.add_argument("--examples", type=int, default=25, help="of every law")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        copied(options.name, Path(scratch), examples=options.examples)
        done = run(Path(scratch), "tests/property")
    print(done.stdout[-20_000:], done.stderr)
    sys.exit(done.returncode)
