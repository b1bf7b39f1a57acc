"""What does one trial cost, sandbox and tools and all, and does it leave anything behind?

One command: `python -m benchmarks.trials`. A light trial lists the files four times; a real one lists them,
reads a sheet, a PDF and slides; an edit changes a cell; code runs Python twice. The times are CPU milliseconds
of the trial's process with everything below it (bwrap, shell, tool server, Python runs), as the kernel adds
them up, and of the parent of all trials, shared out; neighbours on the machine count less than in wall time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import anyio

from system.fleet.local import LocalFleet
from system.sandbox import open_sandbox
from system.sandbox.serve import open_client, serve
from system.world.company import make_company
from system.world.office import write_world

Calls = list[tuple[str, dict[str, str]]]


def programs(world: Path) -> dict[str, Calls]:
    """The calls of each kind of trial."""

    def first(suffix: str) -> str:
        return min(path.name for path in world.glob(f"*.{suffix}"))

    sheet = first("xlsx")
    look: Calls = [("list_files", {}), ("read_sheet", {"path": sheet}), ("read_pdf", {"path": first("pdf")})]
    return {
        "light": [("list_files", {})] * 4,
        "real": [*look, ("read_slides", {"path": first("pptx")})],
        "edit": [*look, ("edit_cell", {"path": sheet, "cell": "B2", "value": "5"})],
        "code": [*look[:2], ("run_code", {"code": "print(1 + 2)"}), ("run_code", {"code": "print(3)"})],
    }


def trial(spec: dict[str, Any]) -> dict[str, Any]:
    """One trial without a policy: open, connect, call, freeze, compare, close."""
    with open_sandbox(spec["kind"], Path(spec["world"]), Path(spec["scratch"]), serve) as sandbox:
        anyio.run(call_all, sandbox.connect(), spec["calls"])
        return {"changed": sandbox.freeze().changed()}


async def call_all(stream: Any, calls: Calls) -> None:
    """The calls, one after the other, none of which may fail."""
    async with open_client(stream, timeout_s=30) as client:
        for name, arguments in calls:
            result = await client.call_tool(name, arguments)
            if result.is_error:
                raise RuntimeError(f"{name} failed: {result.content}")


def processor_seconds(pid: int) -> float:
    """CPU time of a process so far, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(fleet: LocalFleet, spec: dict[str, Any], trials: int, concurrency: int) -> list[float]:
    """CPU seconds of each of so many trials."""
    left, seconds = trials, []
    while left or fleet.running:
        while left and len(fleet.running) < concurrency:
            fleet.start({"trial_id": f"{left}", "deadline_s": 120.0, **spec})
            left -= 1
        for result in fleet.poll(10):
            if "outcome" in result:
                raise RuntimeError(f"a trial failed: {result['outcome']}")
            seconds.append(result["cpu_seconds"]["trial"])
    return seconds


def left_behind(scratch: Path) -> dict[str, int]:
    """Folders, mounts and processes that still have to do with the scratch folder."""
    commands = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            commands.append(Path("/proc", pid, "cmdline").read_text(errors="replace"))
        except OSError:  # gone
            continue
    return {
        "folders": len(set(os.listdir(scratch)) - {"fleet.log"}),
        "mounts": Path("/proc/self/mountinfo").read_text().count(f"{scratch}"),
        "processes": sum(f"{scratch}/" in command for command in commands),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        world, scratch = Path(folder, "world"), Path(folder, "scratch")
        write_world(make_company(3, split="train"), world)
        print(f"{'sandbox':12}{'trial':8}{'CPU ms: median':>16}{'largest':>9}{'parent':>8}   left behind")
        with LocalFleet(scratch, target="benchmarks.trials:trial") as fleet:
            for kind in ("bubblewrap", "process"):
                for name, calls in programs(world).items():
                    spec = {"kind": kind, "world": f"{world}", "scratch": f"{scratch}", "calls": calls}
                    before = processor_seconds(fleet.parent_pid)
                    seconds = measure(fleet, spec, options.trials, options.concurrency)
                    own = (processor_seconds(fleet.parent_pid) - before) / options.trials
                    numbers = [statistics.median(seconds), max(seconds), own]
                    median, largest, parent = (f"{1000 * number:.1f}" for number in numbers)
                    print(f"{kind:12}{name:8}{median:>16}{largest:>9}{parent:>8}   {left_behind(scratch)}")


if __name__ == "__main__":
    main()
