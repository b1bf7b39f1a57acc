"""Code of the set `full`: the model is told which packages it can import, and which it need not look for."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Annotated

from system.tools import code
from system.tools.registration import Tool, tool

PACKAGES = (
    *("numpy", "pandas", "openpyxl", "xlsxwriter", "docx", "pptx", "pdfplumber", "pypdf", "pypdfium2"),
    *("reportlab", "icalendar", "lxml", "PIL", "matplotlib", "scipy"),
)
"""What office work asks for, by the names that are imported; `pip install 'bartleby[office-python]'` brings all."""

LONGEST_S = 60
_OUTPUT_LIMIT = 100_000


def run_code(
    root: Path,
    code: str,  # the argument keeps the name that it has in `brief`
    seconds: Annotated[int, "time limit, at most 60"] = 10,
) -> str:
    """Run Python code in the folder of the files and give what it prints."""
    if not 1 <= seconds <= LONGEST_S:
        raise ValueError(f"seconds must be from 1 to {LONGEST_S}, got {seconds}")
    return _run(root, code, seconds=float(seconds), output_limit=_OUTPUT_LIMIT)


_run = code.run_for


@cache
def packages() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of `PACKAGES`, those that can be imported here and those that can not."""
    there = tuple(name for name in PACKAGES if importlib.util.find_spec(name) is not None)
    return there, tuple(name for name in PACKAGES if name not in there)


def _tool() -> Tool:
    there, missing = packages()
    absent = f"; not installed: {', '.join(missing)}" if missing else ""
    description = (
        f"Run Python code in the folder of the files and give what it prints. It can import the standard library and "
        f"{', '.join(there)}{absent}; there is no network and nothing can be installed."
    )
    return tool(run_code, limit_s=None, description=description)


TOOLS = (_tool(),)
