"""The trainer in processes of its own, one a rank; the driver never waits for a step. No torch."""

from __future__ import annotations

import math
import os
import pickle
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from system.trainer.parallel import Parallel
from system.trainer.step import OptimizerSettings, StepMetrics, StepRow

HEADER = struct.Struct("!Q")

AFTER_ERROR_S = 10.0
"""How long the other ranks may take once one has refused."""


class TrainerError(RuntimeError):
    """The trainer refused or ended; the message is its one line."""


class TrainerProcess:
    """A trainer behind pipes, one process a rank. It dies with this process.

    Args:
        policy_dir: where the weights start from.
        weight_function: one of core.aggregate.
        loss_function: one of core.loss, its thresholds bound by functools.partial (it is pickled by name).
        optimizer: settings of AdamW.
        token_budget: tokens of one forward.
        temperature: at which the rollouts were sampled.
        weights_dir: where the weights for the engine are written (/dev/shm is best).
        keep_weights: all versions of them stay there; otherwise the newest two.
        input_path: trainer_input.jsonl, or "" for none.
        version: policy version of the weights in policy_dir.
        threads: torch threads of each rank; one when an engine runs beside it.
        device: "cpu" or "cuda" (rank i takes device i).
        ranks: processes that share each step.
        parallel: how the ranks of the Megatron trainer share the model; None is the torch trainer.
        timeout_s: bound on the start.
        answer_s: bound on every answer; a trainer that needs longer is a TrainerError.
    """

    def __init__(
        self,
        policy_dir: str | os.PathLike[str],
        *,
        weight_function: Callable[..., Any],
        loss_function: Callable[..., Any],
        optimizer: OptimizerSettings,
        token_budget: int,
        temperature: float,
        weights_dir: str | os.PathLike[str],
        input_path: str | os.PathLike[str],
        keep_weights: bool = False,
        version: int = 0,
        threads: int = 1,
        device: str = "cpu",
        ranks: int = 1,
        parallel: Parallel | None = None,
        timeout_s: float = 120.0,
        answer_s: float = 1800.0,
    ) -> None:
        if parallel is not None:
            parallel.data(ranks)  # refuses sizes that do not fit
        self.answer_s, self._due, self._asked = answer_s, math.inf, "start"
        self.weights_dir = Path(weights_dir)
        self.weights_dir.mkdir(parents=True, exist_ok=True)
        self._meeting = tempfile.TemporaryDirectory(prefix="meeting-", dir=self.weights_dir)
        self._workers: list[subprocess.Popen[bytes]] = []
        self._buffers: list[bytearray] = []
        self._replies: list[list[Any]] = []
        self._busy = False
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TORCHINDUCTOR_CACHE_DIR": self._meeting.name,  # torch makes this folder, used or not
        }
        for rank in range(ranks):
            values = {
                "policy_dir": str(policy_dir),
                "weight_function": weight_function,
                "loss_function": loss_function,
                "optimizer": optimizer,
                "token_budget": token_budget,
                "temperature": temperature,
                "weights_dir": str(self.weights_dir),
                "keep_weights": keep_weights,
                "input_path": str(input_path),
                "version": version,
                "threads": threads,
                "device": device,
                "rank": rank,
                "ranks": ranks,
                "parallel": parallel,
                "meeting": str(Path(self._meeting.name) / "store"),
                "parent": os.getpid(),
            }
            worker = subprocess.Popen(
                [sys.executable, "-m", "system.trainer.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=Path(__file__).resolve().parent.parent.parent,
                process_group=0,  # Ctrl-C is for the driver, which ends this process
                env=environment,
            )
            self._workers.append(worker)
            self._buffers.append(bytearray())
            self._replies.append([])
            self._send(rank, values)
        self._busy, self._due = True, time.monotonic() + timeout_s
        try:
            self.weights_path: str = self._wait()
        except BaseException:
            self.close()
            raise

    def begin(self, *, weight_function: Callable[..., Any], loss_function: Callable[..., Any]) -> None:
        """Go back to the weights of policy_dir with a fresh optimizer and these rules."""
        self._ask("begin", weight_function, loss_function)
        self.weights_path = self._wait()

    def start_step(self, rows: Sequence[StepRow], *, version: int) -> None:
        """Begin a step from weights `version`; `poll` tells when it is done."""
        self._ask("step", list(rows), version)

    def poll(self, timeout_s: float = 0.0) -> StepMetrics | None:
        """The metrics of the step begun, or None while it runs."""
        if not self._busy:
            raise TrainerError("poll must follow start_step, got no step begun")
        done = self._gather(timeout_s)
        if done is None:
            return None
        metrics: StepMetrics = done[0]
        self.weights_path = metrics.weights_path
        return metrics

    def fileno(self, rank: int = 0) -> int:
        """Readable when the step of a rank is done, for the driver's own select."""
        stream = self._workers[rank].stdout
        assert stream is not None
        return stream.fileno()

    def step(self, rows: Sequence[StepRow], *, version: int) -> StepMetrics:
        """One whole step."""
        self.start_step(rows, version=version)
        while (metrics := self.poll(60.0)) is None:
            pass
        return metrics

    def logprob(self, rows: Sequence[StepRow]) -> list[list[float]]:
        """Log-probability of every trained token under the present weights; 0.0 elsewhere."""
        self._ask("logprob", list(rows))
        return self._wait()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write weights and optimizer state."""
        self._ask("save", str(folder))
        self._wait()

    def load(self, folder: str | os.PathLike[str], *, version: int) -> None:
        """Take weights and optimizer state that `save` wrote, and write them for the engine."""
        self._ask("load", str(folder), version)
        self.weights_path = self._wait()

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            if worker.stdin is not None and not worker.stdin.closed:
                try:
                    worker.stdin.close()
                except BrokenPipeError:
                    pass  # it ended by itself
        for worker in self._workers:
            try:
                worker.wait(5)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()
        self._meeting.cleanup()

    def _ask(self, *message: Any) -> None:
        if self._busy:
            raise TrainerError(f"{message[0]} must wait for the step begun, got it before poll was done")
        self._due, self._asked = time.monotonic() + self.answer_s, message[0]
        for rank in range(len(self._workers)):
            self._send(rank, message)
        self._busy = True

    def _send(self, rank: int, message: Any) -> None:
        """Write a message into the pipe of a rank, which may take no more of it than the pipe holds."""
        stream = self._workers[rank].stdin
        assert stream is not None
        body = pickle.dumps(message)
        data = memoryview(HEADER.pack(len(body)) + body)
        os.set_blocking(stream.fileno(), False)
        while data:
            left = max(0.0, min(self._due - time.monotonic(), 3600.0))
            if not select.select([], [stream], [], left)[1] and time.monotonic() > self._due:
                raise TrainerError(f"trainer must be done in time, got one that does not read {self._asked}")
            try:
                data = data[os.write(stream.fileno(), data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise self._ended(rank) from error

    def _ended(self, rank: int) -> TrainerError:
        which = "trainer" if len(self._workers) == 1 else f"rank {rank} of the trainer"
        return TrainerError(f"{which} must be running, got exit code {self._workers[rank].wait()}")

    def _wait(self) -> Any:
        while (done := self._gather(1.0)) is None:
            pass
        return done[0]

    def _gather(self, timeout_s: float) -> list[Any] | None:
        """One reply of every rank, or None if one is still missing at the end of the time.

        Raises:
            TrainerError: a rank ended, refused, or has taken too long.
        """
        deadline = time.monotonic() + timeout_s
        while missing := [i for i, replies in enumerate(self._replies) if not replies]:
            descriptors = {self.fileno(i): i for i in missing}
            ready, _, _ = select.select(list(descriptors), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._check_missing(missing)
                return None
            for descriptor in ready:
                self._receive(descriptors[descriptor], os.read(descriptor, 1 << 20))
        self._busy = False
        replies = [replies.pop(0) for replies in self._replies]
        for kind, value in replies:
            if kind == "error":
                raise TrainerError(value)
        return [value for _, value in replies]

    def _check_missing(self, missing: list[int]) -> None:
        """Refuse to wait any longer for ranks that have not answered."""
        late = "" if len(self._workers) == 1 else f" from rank {', '.join(map(str, missing))}"
        refused = [value for replies in self._replies for kind, value in replies if kind == "error"]
        if refused:  # the others may wait for this one, or it for them
            self._due = min(self._due, time.monotonic() + AFTER_ERROR_S)
        if time.monotonic() > self._due:
            why = f" ({refused[0]})" if refused else ""
            raise TrainerError(f"trainer must be done in time, got no end of {self._asked}{late}{why}")

    def _receive(self, rank: int, part: bytes) -> None:
        if not part:
            raise self._ended(rank)
        buffer = self._buffers[rank]
        buffer += part
        while len(buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(buffer)
            if len(buffer) < HEADER.size + length:
                return
            self._replies[rank].append(pickle.loads(bytes(buffer[HEADER.size : HEADER.size + length])))
            del buffer[: HEADER.size + length]
