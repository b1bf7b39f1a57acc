"""What the parent of the trials loads once: the office libraries and every tool, used on a tiny world."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import anyio
import jinja2  # noqa: F401 - loaded here for the trials
import tokenizers  # noqa: F401 - loaded here for the trials

from system.sandbox import bubblewrap, process  # noqa: F401 - loaded here for the trials
from system.sandbox.serve import open_client, serve_server
from system.tools.server import build_server


def load() -> None:
    """Call every tool once, so that whatever it loads late or remembers is there when a trial is forked."""
    with tempfile.TemporaryDirectory() as folder:
        world = Path(folder, "world")
        _write_world(world)
        anyio.run(_use, world)


def _write_world(world: Path) -> None:
    """In a child: the libraries that make office files are not needed later."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            from system.world.company import make_company
            from system.world.office import write_world

            write_world(make_company(0, split="train"), world)
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(pid, 0)[1] != 0:
        raise RuntimeError("the world for the warm-up could not be written")


async def _use(world: Path) -> None:
    ours, theirs = socket.socketpair()
    async with anyio.create_task_group() as group:
        group.start_soon(serve_server, build_server(world), theirs)
        async with open_client(ours, timeout_s=60) as client:
            offered = {tool.name for tool in (await client.list_tools()).tools}
            used = set()
            for name, arguments in _calls(world):
                result = await client.call_tool(name, arguments)
                if result.is_error:
                    raise RuntimeError(f"tool {name} fails on the warm-up world: {result.content}")
                used.add(name)
            if missing := sorted(offered - used):
                raise RuntimeError(f"tools without a warm-up call: {', '.join(missing)}")


def _calls(world: Path) -> list[tuple[str, dict[str, str]]]:
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
