"""Calls each tool for a kind of file on every file of that kind: `python tests/real_files/probe.py FOLDER`.

Each file is a world of its own. Prints a JSON line a call: text, CPU seconds, most memory so far.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from system.tools.server import tools_of

Calls = Iterator[tuple[str, str, dict[str, Any]]]


def calls(kind: str, name: str) -> Calls:
    """(set, tool, arguments) of every call for a file of a kind."""
    at = {"path": name}
    for toolset in ("brief", "full"):
        yield toolset, "list_files", {}
        yield toolset, "read_file", at
        yield toolset, "search_files", {"query": "the"}
        if kind == "pdf":
            yield toolset, "read_pdf", at
            yield toolset, "read_pdf", {**at, "find": "a"}
        if kind == "pptx":
            yield toolset, "read_slides", at
        if kind == "docx":
            yield toolset, "read_document", at
        if kind == "xlsx":
            yield toolset, "read_sheet", at
            yield toolset, "edit_cell", {**at, "cell": "B2", "value": "=SUM(A1:A9)"}
        if kind == "eml":
            yield toolset, "list_mail", {}
            yield toolset, "search_mail", {"query": "a"}
            yield toolset, "read_mail", {"id": "m1"}
    yield "full", "find", {"query": "the"}
    yield "full", "copy_file", {**at, "to": f"copy/{name}"}
    yield from (("full", tool, arguments) for tool, arguments in _changes(kind, at))


def _changes(kind: str, at: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    new = {**at, "old": "Quokka", "new": "Quagga", "every": True}
    if kind == "pdf":
        yield "read_pdf", {**at, "order": "columns"}
        yield "read_pdf_tables", at
        yield "search_pdf", {**at, "query": "e"}
    if kind == "pptx":
        yield "add_slide", {**at, "title": "Quokka", "text": "a", "rows": [["a", "b"]], "notes": "x"}
        yield "edit_slides", new
        yield "read_slides", {**at, "find": "Quagga"}
        yield "delete_slide", {**at, "slide": 1}
    if kind == "docx":
        yield "append_document", {**at, "text": "# Quokka\n- a\n| a | b |"}
        yield "edit_document", new
        yield "read_document", {**at, "find": "Quagga"}
    if kind == "xlsx":
        yield "list_sheets", at
        yield "filter_rows", {**at, "where": ["A is not empty"]}
        yield "append_rows", {**at, "rows": [["a", "=SUM(A1:A9)"]]}
        yield "add_sheet", {**at, "sheet": "Quokka", "rows": [["a"]]}
        yield "read_sheet", {**at, "sheet": "Quokka"}
    if kind == "eml":
        yield "send_mail", {"to": "a@b.example", "subject": "Quokka", "body": "x"}
        yield "reply_mail", {"id": "m1", "body": "x", "all": True}
        yield "list_mail", {}


def _most_memory() -> int:
    """The most megabytes that this program has held; what its parent had before is not counted."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) // 1024 if found else 0


def probe(folder: Path) -> Iterator[dict[str, Any]]:
    """Call all tools on all files of a folder whose subfolders are named by kind."""
    for file in sorted(folder.glob("*/*")):
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            shutil.copyfile(file, root / file.name)
            if file.parent.name == "eml":
                data = file.read_bytes().replace(b"\r\n", b"\n").rstrip(b"\n")
                (root / "mail.mbox").write_bytes(
                    b"From a@b.example Mon Mar  2 09:00:00 2026\n" + data + b"\n\n"
                )
            for toolset, tool, arguments in calls(file.parent.name, file.name):
                begun = time.process_time()
                text, failed = tools_of(toolset)[tool].call(root, arguments)
                yield {
                    "file": file.name,
                    "set": toolset,
                    "tool": tool,
                    "text": text,
                    "failed": failed,
                    "seconds": round(time.process_time() - begun, 4),
                    "megabytes": _most_memory(),
                }


if __name__ == "__main__":
    for line in probe(Path(sys.argv[1])):
        print(json.dumps(line))
