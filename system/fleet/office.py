"""What the parent of the trials loads once: the office libraries and every tool, used on a tiny world."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from typing import Any

import anyio
import jinja2  # noqa: F401 - loaded here for the trials
import tokenizers  # noqa: F401 - loaded here for the trials

from system.child import ChildDied, in_a_child
from system.sandbox import bubblewrap, process  # noqa: F401 - loaded here for the trials
from system.sandbox.serve import open_client, serve_server
from system.tools import code_agent
from system.tools.registration import Tool
from system.tools.server import serve_tools, tools_of

KITS = ("brief", "full", "code")
"""The office's two sets of tools, and those of the code agent."""


def load(kit: str = "brief") -> None:
    """Call every tool once, so that whatever it loads late or remembers is there when a trial is forked."""
    if kit not in KITS:
        raise ValueError(f"kit must be one of {', '.join(KITS)}, got {kit!r}")
    tools = (
        code_agent.tools(result_characters=10_000, longest_call_s=20.0) if kit == "code" else tools_of(kit)
    )
    with tempfile.TemporaryDirectory() as folder:
        world = Path(folder, "world")
        _write_world(world)
        anyio.run(_use, world, tools, calls_of(kit, world))


def calls_of(kit: str, world: Path) -> list[tuple[str, dict[str, Any]]]:
    """At least one call of every tool of a kit, in an order in which all succeed in a world of ours."""
    if kit == "code":
        return _code_calls()
    return _calls(world) + (_full_calls(world) if kit == "full" else [])


def _write_world(world: Path) -> None:
    """In a child: the libraries that make office files are not needed later."""

    def write() -> None:
        from system.world.company import make_company
        from system.world.office import write_world

        write_world(make_company(0, split="train"), world)

    try:
        in_a_child(write)
    except ChildDied as error:
        raise RuntimeError(f"the world for the warm-up could not be written: {error}") from None


async def _use(world: Path, tools: dict[str, Tool], calls: list[tuple[str, dict[str, Any]]]) -> None:
    ours, theirs = socket.socketpair()
    async with anyio.create_task_group() as group:
        group.start_soon(serve_server, serve_tools(world, tools), theirs)
        async with open_client(ours, timeout_s=60) as client:
            offered = {tool.name for tool in (await client.list_tools()).tools}
            used = set()
            for name, arguments in calls:
                result = await client.call_tool(name, arguments)
                if result.is_error:
                    raise RuntimeError(f"tool {name} fails on the warm-up world: {result.content}")
                used.add(name)
            if missing := sorted(offered - used):
                raise RuntimeError(f"tools without a warm-up call: {', '.join(missing)}")


def _code_calls() -> list[tuple[str, dict[str, Any]]]:
    return [
        ("bash", {"command": "echo 1"}),
        ("glob", {"pattern": "**/*.{txt,csv}"}),
        ("grep", {"pattern": "fee"}),
        ("write", {"filePath": "out.csv", "content": "a,1\n"}),
        ("read", {"filePath": "out.csv"}),
        ("edit", {"filePath": "out.csv", "oldString": "1", "newString": "2"}),
        ("todowrite", {"todos": []}),
    ]


def _full_calls(world: Path) -> list[tuple[str, dict[str, Any]]]:
    """What the set `full` has beyond the other, on files that it makes itself."""
    pdf = min(path.relative_to(world).as_posix() for path in world.rglob("*.pdf"))
    channel = min(path.stem for path in world.glob("chat/*.json"))
    received = sum(line.startswith("From ") for line in (world / "mail.mbox").read_text().splitlines())
    sent = f"m{received + 1}"
    rows = [["Client", "Fee"], ["Norvik", "4821"], ["Total", "=SUM(B2:B2)"]]
    return [
        ("edit_file", {"path": "out.csv", "old": "1", "new": "2"}),
        ("copy_file", {"path": "out.csv", "to": "copy.csv"}),
        ("move_file", {"path": "copy.csv", "to": "moved.csv"}),
        ("delete_file", {"path": "moved.csv"}),
        ("find", {"query": "fee of the client"}),
        ("create_sheet", {"path": "new.xlsx", "rows": rows}),
        ("list_sheets", {"path": "new.xlsx"}),
        ("filter_rows", {"path": "new.xlsx", "where": ["Fee > 1"]}),
        ("add_sheet", {"path": "new.xlsx", "sheet": "More", "rows": rows}),
        ("edit_range", {"path": "new.xlsx", "cell": "A1", "rows": rows, "sheet": "More"}),
        ("append_rows", {"path": "new.xlsx", "rows": rows, "sheet": "More"}),
        ("search_pdf", {"path": pdf, "query": "fee"}),
        ("read_pdf_tables", {"path": pdf}),
        ("create_slides", {"path": "new.pptx", "title": "Fees"}),
        ("add_slide", {"path": "new.pptx", "title": "More", "text": "one", "rows": rows, "notes": "two"}),
        ("edit_slides", {"path": "new.pptx", "old": "Fees", "new": "Costs"}),
        ("delete_slide", {"path": "new.pptx", "slide": 2}),
        ("create_document", {"path": "new.docx", "text": "# Fees\n\nNone yet."}),
        ("append_document", {"path": "new.docx", "text": "- one"}),
        ("edit_document", {"path": "new.docx", "old": "None yet.", "new": "Some."}),
        (
            "send_mail",
            {"to": ["ann@else.example"], "subject": "Fee", "body": "See.", "attachments": ["out.csv"]},
        ),
        ("save_attachment", {"id": sent, "name": "out.csv", "path": "saved.csv"}),
        ("reply_mail", {"id": "m1", "body": "Yes."}),
        ("list_channels", {}),
        ("post_message", {"channel": channel, "text": "Seen."}),
        ("create_event", {"summary": "Talk", "start": "2026-03-03 10:00", "end": "2026-03-03 11:00"}),
    ]


def _calls(world: Path) -> list[tuple[str, dict[str, Any]]]:
    """At least one call of every tool, with files that are there."""

    def first(pattern: str) -> str:
        return min(path.relative_to(world).as_posix() for path in world.rglob(pattern))

    sheet = first("*.xlsx")
    return [
        ("list_files", {}),
        ("read_file", {"path": first("*.ics")}),
        ("search_files", {"query": "fee"}),
        ("read_sheet", {"path": sheet}),
        ("read_sheet", {"path": sheet, "find": "Total"}),
        ("edit_cell", {"path": sheet, "cell": "B2", "value": "5"}),
        ("read_pdf", {"path": first("*.pdf")}),
        ("read_pdf", {"path": first("*.pdf"), "find": "fee"}),
        ("read_slides", {"path": first("*.pptx")}),
        ("read_document", {"path": first("*.docx")}),
        ("list_mail", {}),
        ("search_mail", {"query": "fee"}),
        ("read_mail", {"id": "m1"}),
        ("read_channel", {"channel": Path(first("chat/*.json")).stem}),
        ("list_events", {}),
        ("write_file", {"path": "out.csv", "content": "a,1\n"}),
        ("run_code", {"code": "print(1)"}),
    ]
