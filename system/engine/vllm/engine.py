"""A vLLM engine as the driver has it. No torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from system.engine.client import EngineClient
from system.engine.request import EngineError
from system.engine.running import EngineHandle
from system.engine.vllm.settings import Settings


class VllmEngine(EngineHandle):
    """A front process and the server behind it: one process group, which dies with the thread that started it.

    Args:
        settings: what both are told.
        silence_s: bound on the wait for its counters.
    """

    def __init__(self, settings: Settings, *, silence_s: float = 60.0) -> None:
        # An update is seven calls at most, each with a bound of its own.
        super().__init__(
            asdict(settings),
            timeout_s=settings.start_s + settings.call_s,
            update_s=8 * settings.call_s,
            silence_s=silence_s,
            module="system.engine.vllm.process",
        )

    def restart(self) -> None:
        """Kill the whole group and start another at the same address."""
        self._kill_group()
        super().restart()

    def close(self) -> None:
        """Stop the server and its front; running requests end."""
        super().close()
        self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def start_vllm_engine(settings: Settings, *, silence_s: float = 60.0) -> VllmEngine:
    """Start a server and wait until it listens.

    Raises:
        EngineError: it did not start; the message has the last lines of its log.
    """
    return VllmEngine(settings, silence_s=silence_s)


def probe(
    address: str | os.PathLike[str],
    token_ids: Sequence[int],
    expected: Sequence[float],
    *,
    version: int,
    tolerance: float,
    patience_s: float = 120.0,
) -> float:
    """Compare an engine's log-probabilities of some tokens with the trainer's, after an update; the mean gap.

    Args:
        address: of the engine.
        token_ids: a row of tokens.
        expected: log-probability of every token of it but the first, at temperature 1, by the trainer.
        version: of the weights that both should have.
        tolerance: of the mean gap.

    Raises:
        EngineError: the engine has another version, or differs by more.
    """
    client = EngineClient(Path(address), patience_s=patience_s)
    try:
        found, has = client.score(token_ids)
    finally:
        client.close()
    if has != version:
        raise EngineError(f"engine must have policy_version {version}, got {has}")
    gaps = [abs(ours - theirs) for ours, theirs in zip(expected, found, strict=True)]
    mean = sum(gaps) / len(gaps)
    if not mean <= tolerance:
        raise EngineError(
            f"logprobs of engine and trainer must differ by {tolerance:g} at most after an update, got {mean:.3g}"
        )
    return mean
