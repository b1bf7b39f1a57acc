"""The server's process: started, awaited until it answers, watched, ended. No torch."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from system.engine.request import EngineError
from system.engine.vllm.settings import Settings, command, environment, name_plugin
from system.engine.vllm.wire import Refused, Wire

LOOK_S = 0.2
TAIL_LINES = 3
"""So many lines of a server's log are told when it ends."""

TELLING = re.compile(r"\b\w*(Error|Exception|Killed|Signal)\b")


class Server:
    """A server of vLLM in this process's group.

    Args:
        settings: what it is told.
        scratch: folder for what goes with it.
    """

    def __init__(self, settings: Settings, scratch: Path) -> None:
        self.settings, self.scratch = settings, scratch
        self.wire = Wire(settings.server_socket)
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            EngineError: it ended, or does not answer in time; the line has the last ones of its log.
        """
        settings = self.settings
        Path(settings.server_socket).unlink(missing_ok=True)
        env = environment(settings, name_plugin(self.scratch / "plugin"), os.environ)
        deadline = time.monotonic() + settings.start_s
        with open(settings.server_log, "ab") as log:
            self._log_from = log.tell()
            self.process = await asyncio.create_subprocess_exec(
                *command(settings), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=env
            )
        ended = asyncio.create_task(self.process.wait())
        while not await self._answers():
            await asyncio.wait([ended], timeout=LOOK_S)
            if ended.done():
                raise EngineError(f"vllm must start, got exit code {ended.result()}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise EngineError(f"vllm must start within {settings.start_s:g} s, got: {self.last_words()}")

    async def ended(self) -> str:
        """Waits for its end; why it ended, in one line."""
        assert self.process is not None
        code = await self.process.wait()
        return f"vllm must be running, got exit code {code}: {self.last_words()}"

    async def end(self, grace_s: float) -> None:
        """Ask it to end, and wait so long."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), grace_s)
            except TimeoutError:
                self.process.kill()

    async def post(self, target: str, body: Any = None, *, timeout_s: float | None) -> Any:
        """What it answers to a POST; see `Wire.call`."""
        return await self.wire.call("POST", target, body, timeout_s=timeout_s)

    async def get(self, target: str, *, timeout_s: float) -> Any:
        """What it answers to a GET; see `Wire.call`."""
        return await self.wire.call("GET", target, timeout_s=timeout_s)

    async def _answers(self) -> bool:
        try:
            await self.get("/health", timeout_s=5.0)
        except (OSError, Refused):
            return False
        return True

    def last_words(self) -> str:
        """The last lines of its log that tell of an error, or its last line."""
        with open(self.settings.server_log, "rb") as log:
            log.seek(max(self._log_from, os.fstat(log.fileno()).st_size - (1 << 16)))
            lines = [
                line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()
            ]
        telling = [line for line in lines if TELLING.search(line) and "raise " not in line] or lines
        told = [re.sub(r"^\(\w+ pid=\d+\)\s*|\x1b\[[\d;]*m", "", line) for line in telling[-TAIL_LINES:]]
        return " | ".join(dict.fromkeys(told))[:1500] or "nothing in its log"


GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "sampled_tokens": "vllm:generation_tokens_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "prefix_asked_tokens": "vllm:prefix_cache_queries_total",
    "prefix_hit_tokens": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}
"""Our names of what the server's metrics tell."""


def read_metrics(text: str) -> dict[str, float]:
    """The numbers of GAUGES in a page of metrics, added up over their labels."""
    ours = {theirs: name for name, theirs in GAUGES.items()}
    found = dict.fromkeys(GAUGES, 0.0)
    for line in text.splitlines():
        name, _, value = (
            line.partition(" ") if "{" not in line else (line.split("{")[0], "", line.rsplit(" ", 1)[1])
        )
        if name in ours:
            found[ours[name]] += float(value)
    return found


def kv_tokens_of(text: str) -> int:
    """Tokens that the cache of keys and values holds, by the server's metrics; 0 where they do not tell."""
    for line in text.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            labels: Mapping[str, str] = dict(re.findall(r'(\w+)="([^"]*)"', line))
            blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
            if blocks.isdigit() and size.isdigit():
                return int(blocks) * int(size)
    return 0
