"""One rank of the trainer, started by `process.py`: pickled messages in, pickled replies out."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from system.model import Qwen3
from system.parent import die_with_parent
from system.policy import load_policy
from system.trainer.process import HEADER
from system.trainer.torch_trainer import TorchTrainer, write_input

KEPT_WEIGHTS = 2
DEFAULT_TIMEOUT_S = 1800.0
"""How long a collective of the torch trainer may take."""


class Worker:
    """Answers the messages of a TrainerProcess."""

    trainer: Any
    """A torch or Megatron trainer."""

    def __init__(self, values: dict[str, Any]) -> None:
        die_with_parent(values["parent"])
        torch.set_num_threads(values["threads"])
        self.values, self.rank, self.group = values, values["rank"], None
        if values["device"] == "cuda":
            torch.cuda.set_device(self.rank)
        if values["ranks"] > 1 or values["parallel"] is not None:
            self.join(timeout_s=values["parallel"].timeout_s if values["parallel"] else DEFAULT_TIMEOUT_S)
            self.group = dist.group.WORLD
        self.weights_dir, self.input_path = Path(values["weights_dir"]), values["input_path"]
        self.begin(values["weight_function"], values["loss_function"])

    def join(self, *, timeout_s: float) -> None:
        """Meet the other ranks."""
        dist.init_process_group(
            "nccl" if self.values["device"] == "cuda" else "gloo",
            init_method=f"file://{self.values['meeting']}",
            rank=self.rank,
            world_size=self.values["ranks"],
            timeout=timedelta(seconds=timeout_s),
        )

    def begin(self, weight_function: Any, loss_function: Any) -> str:
        """A trainer at the policy's own weights with a fresh optimizer; the path of the weights."""
        rules = {"weight_function": weight_function, "loss_function": loss_function}
        rules |= {name: self.values[name] for name in ("optimizer", "token_budget", "temperature")}
        self.trainer = None  # not two of them at once
        self.trainer = self.torch_trainer(rules) if self.values["parallel"] is None else self.megatron(rules)
        return self.export(self.values["version"])

    def torch_trainer(self, rules: dict[str, Any]) -> TorchTrainer:
        """In plain torch."""
        config, state = load_policy(self.values["policy_dir"])
        model = Qwen3.from_state(config, state, device=self.values["device"])
        return TorchTrainer(model, group=self.group, **rules)

    def megatron(self, rules: dict[str, Any]) -> Any:
        """On Megatron-Core."""
        try:
            import megatron.core  # pyright: ignore[reportMissingImports]  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"megatron-core must be there for the Megatron trainer (pip install 'bartleby[megatron]'), got {error}"
            ) from error
        from system.trainer.megatron.start import start_trainer

        return start_trainer(
            self.values["policy_dir"], self.values["parallel"], device=self.values["device"], rules=rules
        )

    def export(self, version: int) -> str:
        """Write weights for the engine and drop old ones, unless they are kept; the path."""
        path = self.weights_dir / f"weights-{version}.safetensors"
        if self.speaks:
            self.trainer.export(path)
        if self.rank == 0 and not self.values["keep_weights"]:
            (self.weights_dir / f"weights-{version - KEPT_WEIGHTS}.safetensors").unlink(missing_ok=True)
        return str(path)

    @property
    def speaks(self) -> bool:
        """Whether this rank takes part in writing: all that hold a part of the model."""
        return self.rank == 0 or self.values["parallel"] is not None

    def answer(self, name: str, *values: Any) -> Any:
        """Do what one message asks."""
        match name:
            case "step":
                rows, version = values
                if self.rank == 0 and self.input_path:
                    write_input(self.input_path, rows, version=version)
                metrics = self.trainer.step(rows, version=version)
                return replace(metrics, weights_path=self.export(version + 1))
            case "begin":
                return self.begin(*values)
            case "logprob":
                return self.trainer.logprob(values[0])
            case "save":
                return self.trainer.save(values[0]) if self.speaks else None
            case "load":
                self.trainer.load(values[0])
                return self.export(values[1])
            case _:
                raise ValueError(f"message must be step, begin, logprob, save or load, got {name}")


def receive(stream: IO[bytes]) -> Any:
    """The next message. Raises EOFError when the driver is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    return pickle.loads(stream.read(HEADER.unpack(header)[0]))


def main() -> None:
    """Serve until the driver closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not mix with replies

    def send(kind: str, value: Any) -> None:
        body = pickle.dumps((kind, value))
        replies.write(HEADER.pack(len(body)) + body)
        replies.flush()

    try:
        worker = Worker(receive(sys.stdin.buffer))
        send("done", worker.trainer.weights_path)
        while True:
            message = receive(sys.stdin.buffer)
            try:
                send("done", worker.answer(*message))
            except Exception as error:  # noqa: BLE001 (goes to the driver, which decides)
                send("error", " ".join(f"{type(error).__name__}: {error}".split()))
    except EOFError:
        pass
    except Exception as error:
        send("error", " ".join(f"{type(error).__name__}: {error}".split()))
        raise SystemExit(1) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
