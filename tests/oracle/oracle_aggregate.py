"""Weights of tokens by counting them in loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def weights(
    loss_mask: Sequence[bool],
    row_id: Sequence[int],
    group_id: Sequence[int],
    share: Callable[[int, int, int, int, int, int], float],
) -> list[float]:
    """share(N, S, P, n_i, N_p, G_p) of every trained token; rows and prompts without one do not exist."""
    live = [(row, group) for m, row, group in zip(loss_mask, row_id, group_id) if m]
    rows = {row for row, _ in live}
    groups = {group for _, group in live}
    result = []
    for m, row, group in zip(loss_mask, row_id, group_id):
        if not m:
            result.append(0.0)
            continue
        tokens_of_row = sum(1 for other, _ in live if other == row)
        tokens_of_group = sum(1 for _, other in live if other == group)
        rows_of_group = len({one for one, other in live if other == group})
        result.append(share(len(live), len(rows), len(groups), tokens_of_row, tokens_of_group, rows_of_group))
    return result


def token_mean(loss_mask: Sequence[bool], row_id: Sequence[int], group_id: Sequence[int]) -> list[float]:
    """1 / N."""
    return weights(loss_mask, row_id, group_id, lambda N, S, P, n, Np, Gp: 1 / N)


def sequence_mean(loss_mask: Sequence[bool], row_id: Sequence[int], group_id: Sequence[int]) -> list[float]:
    """1 / (S n_i)."""
    return weights(loss_mask, row_id, group_id, lambda N, S, P, n, Np, Gp: 1 / (S * n))


def prompt_mean(loss_mask: Sequence[bool], row_id: Sequence[int], group_id: Sequence[int]) -> list[float]:
    """1 / (P N_p)."""
    return weights(loss_mask, row_id, group_id, lambda N, S, P, n, Np, Gp: 1 / (P * Np))


def prompt_mean_of_sequence_means(
    loss_mask: Sequence[bool], row_id: Sequence[int], group_id: Sequence[int]
) -> list[float]:
    """1 / (P G_p n_i)."""
    return weights(loss_mask, row_id, group_id, lambda N, S, P, n, Np, Gp: 1 / (P * Gp * n))


def sequence_sum(
    loss_mask: Sequence[bool], row_id: Sequence[int], group_id: Sequence[int], length: float
) -> list[float]:
    """1 / (S L)."""
    return weights(loss_mask, row_id, group_id, lambda N, S, P, n, Np, Gp: 1 / (S * length))


def weighted_sum(weight: Sequence[float], value: Sequence[float]) -> float:
    """Sum of weight times value over tokens with a weight; the others are not read."""
    total = 0.0
    for w, x in zip(weight, value):
        if w != 0:
            total += w * x
    return total
