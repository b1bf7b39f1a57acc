"""The gap between two logprobs of one token, averaged in a loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

LARGEST_EXPONENT = math.log(1.7976931348623157e308)


def pairs(
    logprob: Sequence[float], rollout_logprob: Sequence[float], loss_mask: Sequence[bool]
) -> tuple[list[tuple[float, float]], int]:
    """Tokens in the mask with two finite logprobs and a ratio that a float can hold, and how many have not."""
    inside = [(a, b) for a, b, m in zip(logprob, rollout_logprob, loss_mask) if m]
    known = [(a, b) for a, b in inside if math.isfinite(a) and math.isfinite(b) and a - b <= LARGEST_EXPONENT]
    return known, len(inside) - len(known)


def sums(tokens: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Each metric's sum over tokens; d = trainer - sampler."""
    return {
        "token_count": len(tokens),
        "absolute": math.fsum(abs(a - b) for a, b in tokens),
        "k1": math.fsum(b - a for a, b in tokens),
        "k3": math.fsum(math.exp(a - b) - 1 - (a - b) for a, b in tokens),
        "ratio": math.fsum(math.exp(a - b) for a, b in tokens),
        "ratio_square": math.fsum(math.exp(2 * (a - b)) for a, b in tokens),
        "multiplicative": math.fsum(math.exp(abs(a - b)) for a, b in tokens),
        "probability": math.fsum(abs(math.exp(a) - math.exp(b)) for a, b in tokens),
        "logprob": math.fsum(a for a, _ in tokens),
        "rollout_logprob": math.fsum(b for _, b in tokens),
    }


def means(tokens: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Each metric per token; NaN of no token."""
    total, count = sums(tokens), len(tokens)
    names = ("absolute", "k1", "k3", "ratio", "multiplicative", "probability")
    if count == 0:
        return dict.fromkeys((*names, "effective_share", "perplexity", "rollout_perplexity"), math.nan)
    result = {name: total[name] / count for name in names}
    result["effective_share"] = total["ratio"] ** 2 / (count * total["ratio_square"])
    result["perplexity"] = math.exp(-total["logprob"] / count)
    result["rollout_perplexity"] = math.exp(-total["rollout_logprob"] / count)
    return result
