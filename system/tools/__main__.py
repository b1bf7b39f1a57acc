"""Serves the files of a folder over stdio to any MCP client: `python -m system.tools FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from system.tools.server import build_server

if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(f"usage: python -m system.tools FOLDER, got {' '.join(sys.argv[1:]) or 'nothing'}")
    build_server(Path(sys.argv[1])).run()
