"""Does it matter how token losses are averaged? Token, sequence and prompt mean, trained from the same start.

python experiments/ablate_aggregation.py
"""

from functools import partial
from typing import Any

from ablation import Arm, Config, command_line, run

from core.aggregate import prompt_mean_weight, sequence_mean_weight, token_mean_weight
from core.loss import dppo_binary_tv

WEIGHTS = {
    "token_mean": token_mean_weight,
    "sequence_mean": sequence_mean_weight,
    "prompt_mean": prompt_mean_weight,
}


def main(config: Config) -> dict[str, Any]:
    """Trains the three arms and returns the summary."""
    loss = partial(
        dppo_binary_tv, delta_low=config.delta, delta_high=config.delta, max_ratio=config.max_ratio
    )
    return run(
        config,
        {name: Arm(weight=weight, loss=loss) for name, weight in WEIGHTS.items()},
        "experiments/ablate_aggregation.py",
    )


if __name__ == "__main__":
    command_line("ablate_aggregation", main, Config)
