"""Trains a policy with one set of rules, and evaluates it on tasks that it has not seen.

python experiments/train.py --save-every 2
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import ablation
from ablation import Arm, command_line

from core.aggregate import prompt_mean_weight, sequence_mean_weight, token_mean_weight
from core.loss import dppo_binary_tv

WEIGHTS = {
    "token_mean": token_mean_weight,
    "sequence_mean": sequence_mean_weight,
    "prompt_mean": prompt_mean_weight,
}


@dataclass(frozen=True, kw_only=True)
class Config(ablation.Config):
    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean"] = "token_mean"
    """How token losses are averaged."""
    start: bool = False
    """Evaluate the policy to start from as well."""


def main(config: Config) -> dict[str, Any]:
    """Trains, evaluates, and returns the summary."""
    loss = partial(
        dppo_binary_tv, delta_low=config.delta, delta_high=config.delta, max_ratio=config.max_ratio
    )
    arm = Arm(weight=WEIGHTS[config.aggregation], loss=loss)
    return ablation.run(config, {"policy": arm}, "experiments/train.py", start=config.start)


if __name__ == "__main__":
    command_line("train", main, Config)
