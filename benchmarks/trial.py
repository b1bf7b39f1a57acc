"""What does a trial cost beside its policy, and how long does a tool call take? Beside an SDK server for every trial.

One command: `python -m benchmarks.trial --raw benchmarks/recorded/trial.jsonl`. A fixed trial starts its sandbox and
tools, gets one answer from a scripted engine, is frozen, graded and removed; a trial of calls makes one call of every
tool at least. Both run as the fleet runs them, and once more with a fresh `python -m system.tools` behind the MCP
SDK's stdio client, without a sandbox. The two take turns, one trial at a time, so that neighbours on the machine
disturb both. CPU is that of the trial's process with everything below it, as the kernel adds it up.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import anyio
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.server.stdio import stdio_server

from system.engine.scripted import Script, ScriptedEngine
from system.fleet.local import LocalFleet, warm_up
from system.fleet.office import KITS, calls_of
from system.harness.chat import Chat, ToolCall, call_text
from system.record.audit import machine_name, markdown_table, spread
from system.record.metrics import commit_hash
from system.sandbox import FrozenWorld, clean_environment
from system.tools import code_agent
from system.tools.server import serve_tools
from system.trial import run_trial
from system.verify import verify
from system.world.assignment import draw_assignment
from system.world.company import make_company
from system.world.office import write_world
from system.world.task import write_task

ROOT = Path(__file__).resolve().parent.parent
POLICY = ROOT / "policies" / "clerk"
FAMILIES = {
    "sheets": ("sheet", "cell", "row", "tab", "workbook"),
    "pdfs": ("pdf",),
    "slides": ("slide",),
    "documents": ("document",),
    "mail": ("mail", "attachment"),
    "chat": ("channel", "message"),
    "calendar": ("event",),
    "processes": ("run_code", "bash"),
    "search": ("search_files", "find", "grep", "glob"),
}
"""Family → parts of the names of its tools; what is in none is of the files."""

Record = dict[str, Any]


def family(tool: str) -> str:
    """The family of a tool."""
    found = [name for name, parts in FAMILIES.items() if any(part in tool for part in parts)]
    return found[0] if found else "files"


def trial(spec: Record) -> Record:
    """What the fleet runs: a trial of ours, or one around an SDK server."""
    return run_trial(spec) if spec["arrangement"] == "ours" else sdk_trial(spec)


def sdk_trial(spec: Record) -> Record:
    """The same work with a fresh server process over stdio, on a copy of the world and without a sandbox."""
    task, folder = Path(spec["task"]), Path(tempfile.mkdtemp(dir=spec["scratch"]))
    seconds: dict[str, float] = {}
    begun = time.monotonic()
    try:
        world = shutil.copytree(task / "environment" / "world", folder / "world")
        seconds["start"] = time.monotonic() - begun
        turns = anyio.run(sdk_calls, spec, world, seconds)
        begun = time.monotonic()
        verify(task, FrozenWorld(lower=task / "environment" / "world", root=world), "done")
        seconds["verify"] = time.monotonic() - begun
    finally:
        shutil.rmtree(folder)
    return {"turns": turns, "seconds": seconds}


async def sdk_calls(spec: Record, world: Path, seconds: dict[str, float]) -> list[Record]:
    """Starts the server, lists its tools, makes the calls, ends it."""
    module = ["benchmarks.trial", "--serve-code"] if spec["kit"] == "code" else ["system.tools"]
    more = [] if spec["kit"] == "code" else [spec["kit"]]
    server = StdioServerParameters(
        command=sys.executable, args=["-m", *module, str(world), *more], env=clean_environment()
    )
    turns, begun = [], time.monotonic()
    with open(os.devnull, "w") as nothing:
        async with Client(stdio_client(server, errlog=nothing)) as client:
            await client.list_tools()
            seconds["ready"] = time.monotonic() - begun
            for name, arguments in spec["calls"]:
                asked = time.monotonic()
                reply = await client.call_tool(name, arguments)
                turns.append({"tool": name, "error": reply.is_error, "seconds": time.monotonic() - asked})
            begun = time.monotonic()
    seconds["teardown"] = time.monotonic() - begun
    return turns


async def serve_code(folder: Path) -> None:
    """The code agent's tools over stdio, for the comparison only: no sandbox is around them."""
    tools = code_agent.tools(result_characters=4000, longest_call_s=20.0)
    server = serve_tools(folder, tools)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def measured(trials: int, rounds_of_calls: int) -> Iterator[Record]:
    """A record of each trial."""
    with tempfile.TemporaryDirectory() as folder:
        company = make_company(3, split="train")
        world = write_world(company, Path(folder, "world"))
        task = write_task(
            draw_assignment(company, level=1, index=0), company, tasks=Path(folder, "tasks"), world=world
        )
        calls = {kit: calls_of(kit, world) for kit in KITS}
        waiting: dict[str, Script] = {}
        with (
            ScriptedEngine(Path(folder, "s"), Chat(POLICY), lambda name, _: waiting.pop(name)) as engine,
            LocalFleet(
                Path(folder, "scratch"), target="benchmarks.trial:trial", warm=warm_up(KITS, policy=POLICY)
            ) as fleet,
        ):
            for number in range(trials + rounds_of_calls):
                for kit in KITS:
                    made = calls[kit] if number >= trials else []
                    for arrangement in ("ours", "sdk"):
                        name = f"{number} {kit} {arrangement}"
                        waiting[name] = script(made)
                        spec = spec_of(name, kit, task, engine.socket_path, Path(folder, "scratch"))
                        yield {
                            "kit": kit,
                            "arrangement": arrangement,
                            "kind": "calls" if made else "fixed",
                            **one(fleet, {**spec, "arrangement": arrangement, "calls": made}),
                        }


def script(calls: Sequence[tuple[str, Record]]) -> Script:
    """Makes the calls, whatever the tools answer, then answers."""
    for name, arguments in calls:
        yield call_text(ToolCall(name, arguments))
    yield "done"


def one(fleet: LocalFleet, spec: Record) -> Record:
    """One trial, alone: its CPU, the wall clock around it, its phases, its calls."""
    parent, begun = processor_seconds(fleet.parent_pid), time.monotonic()
    fleet.start(spec)
    (result,) = fleet.poll(120)
    wall_s = time.monotonic() - begun
    if "seconds" not in result:
        raise RuntimeError(f"a trial failed: {result['outcome']}")
    turns = [turn for turn in result["turns"] if turn["tool"]]
    if failed := [turn for turn in turns if turn["error"]]:
        raise RuntimeError(f"a call failed: {failed[0]}")
    return {
        "cpu_s": round(result["cpu_seconds"]["trial"], 5),
        "parent_s": round(processor_seconds(fleet.parent_pid) - parent, 5),
        "wall_s": round(wall_s, 5),
        "seconds": {name: round(value, 5) for name, value in result["seconds"].items()},
        "calls": [[turn["tool"], round(turn["seconds"], 5)] for turn in turns],
    }


def spec_of(name: str, kit: str, task: Path, socket_path: str, scratch: Path) -> Record:
    """What the fleet needs for a trial of ours."""
    return {
        "trial_id": name,
        "kit": kit,
        "task": str(task),
        "policy": str(POLICY),
        "engine_address": socket_path,
        "sandbox": "bubblewrap",
        "scratch": str(scratch),
        "seed": 1,
        "harness": "code" if kit == "code" else "office",
        **({} if kit == "code" else {"toolset": kit}),
        "deadline_s": 120.0,
        "tool_timeout_s": 30.0,
        "limits": {
            "context": 200_000,
            "turn_tokens": 4_000,
            "turns": 200,
            "repairs": 0,
            "result_characters": 4_000,
            "nudge_ratio": 0.0,
            "temperature": 1.0,
        },
    }


def processor_seconds(pid: int) -> float:
    """CPU time of a process so far, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fixed_cost(records: Sequence[Record]) -> str:
    """CPU and wall clock of trials without a call."""
    rows = []
    for kit in KITS:
        ours, sdk = (chosen(records, kit, name, "fixed") for name in ("ours", "sdk"))
        ready = [
            median(in_ms(r["seconds"]["start"] + r["seconds"]["ready"] for r in some)) for some in (ours, sdk)
        ]
        cpu, other = (spread(in_ms(r["cpu_s"] for r in some)) for some in (ours, sdk))
        wall, slow = (spread(in_ms(r["wall_s"] for r in some)) for some in (ours, sdk))
        parent = sum(in_ms(r["parent_s"] for r in ours)) / len(ours)
        rows.append(
            (
                kit,
                f"{cpu['p50']:.0f} / {cpu['p95']:.0f}",
                f"{parent:.0f}",
                f"{wall['p50']:.0f} / {wall['p95']:.0f}",
                f"{ready[0]:.0f}",
                f"{other['p50']:.0f} / {other['p95']:.0f}",
                f"{slow['p50']:.0f} / {slow['p95']:.0f}",
                f"{ready[1]:.0f}",
                f"{other['p50'] / cpu['p50']:.1f}",
                f"{ready[1] / ready[0]:.1f}",
            )
        )
    headings = (
        *("tools", "CPU", "parent", "wall", "ready", "SDK: CPU", "wall", "ready", "CPU, times ours", "ready"),
    )
    return markdown_table(headings, rows)


def call_latency(records: Sequence[Record]) -> str:
    """Milliseconds of a call by family, and of all.

    The least of a call's rounds is what it takes when no neighbour disturbs it.
    """
    rows = []
    for kit in KITS:
        found: dict[str, dict[str, list[list[float]]]] = {}
        for arrangement in ("ours", "sdk"):
            rounds = [record["calls"] for record in chosen(records, kit, arrangement, "calls")]
            for place, (tool, _) in enumerate(rounds[0]):
                times = [1000 * calls[place][1] for calls in rounds]
                for name in (family(tool), "all"):
                    found.setdefault(name, {"ours": [], "sdk": []})[arrangement].append(times)
        for name in sorted(found, key=lambda one: (one == "all", one)):
            ours, sdk = found[name]["ours"], found[name]["sdk"]
            every = [spread([value for times in some for value in times]) for some in (ours, sdk)]
            least = [median(min(times) for times in some) for some in (ours, sdk)]
            cells = [f"{some['p50']:.1f} / {some['p95']:.1f}" for some in every]
            calls = f"{len(ours)} x {len(ours[0])}"
            share = f"{every[1]['p50'] / every[0]['p50']:.2f}"
            rows.append((kit, name, calls, cells[0], f"{least[0]:.1f}", cells[1], f"{least[1]:.1f}", share))
    headings = ("tools", "family", "calls", "ours", "least", "SDK", "least", "SDK, times ours")
    return markdown_table(headings, rows)


def chosen(records: Sequence[Record], kit: str, arrangement: str, kind: str) -> list[Record]:
    """Records of one kind, the first left out: it pays for what nobody used before."""
    wanted = {"kit": kit, "arrangement": arrangement, "kind": kind}
    return [record for record in records if record.items() >= wanted.items()][1:]


def in_ms(values: Iterator[float]) -> list[float]:
    """Seconds as milliseconds."""
    return [1000 * value for value in values]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=25, help="fixed trials of each kind")
    parser.add_argument("--rounds", type=int, default=6, help="trials of calls of each kind")
    parser.add_argument("--raw", type=Path, help="file for one line a trial")
    parser.add_argument("--serve-code", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_code:
        anyio.run(serve_code, options.serve_code)
        return
    records = list(measured(options.trials + 1, options.rounds + 1))
    if options.raw:
        options.raw.parent.mkdir(parents=True, exist_ok=True)
        options.raw.write_text(
            "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        )
    print(f"{machine_name()}, commit {commit_hash(ROOT)}; milliseconds, median / 95 %\n")
    print(fixed_cost(records), call_latency(records), sep="\n\n")


if __name__ == "__main__":
    main()
