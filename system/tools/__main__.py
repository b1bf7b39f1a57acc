"""Serves the files of a folder over stdio to any MCP client: `python -m system.tools FOLDER [TOOLSET]`."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
from mcp.server.stdio import stdio_server

from system.tools.server import TOOLSETS, build_server


async def main(folder: Path, toolset: str) -> None:
    """Serve until the client closes its end."""
    server = build_server(folder, toolset)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    given = sys.argv[1:]
    if (
        len(given) not in (1, 2)
        or not Path(given[0]).is_dir()
        or given[1:] not in ([], *[[t] for t in TOOLSETS])
    ):
        sys.exit(f"usage: python -m system.tools FOLDER [brief|full], got {' '.join(given) or 'nothing'}")
    anyio.run(main, Path(given[0]), *(given[1:] or ["brief"]))
