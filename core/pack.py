"""Rows to micro-batches under a token budget, micro-batches to ranks: planned once, for the whole step."""

from __future__ import annotations

from collections.abc import Sequence


def first_fit_decreasing(lengths: Sequence[int], *, token_budget: int) -> tuple[tuple[int, ...], ...]:
    """Row indices in micro-batches of at most `token_budget` tokens; a longer row has one to itself.

    Longest first, each into the first micro-batch with room: at most 11/9 of the fewest possible, plus one.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be positive, got {token_budget}")
    if any(length < 1 for length in lengths):
        raise ValueError(f"every length must be positive, got {min(lengths)}")
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((b for b, free in enumerate(room) if lengths[index] <= free), None)
        if place is None:
            bins.append([index])
            room.append(token_budget - lengths[index])
        else:
            bins[place].append(index)
            room[place] -= lengths[index]
    return tuple(tuple(bin_) for bin_ in bins)


def cost(lengths: Sequence[int], *, per_token: float, per_square: float) -> float:
    """Work of a packed micro-batch: per_token * sum(s) + per_square * sum(s^2), attention within rows."""
    return per_token * sum(lengths) + per_square * sum(length * length for length in lengths)


def dummies(count: int, *, ranks: int) -> int:
    """How many empty micro-batches make `count` a multiple of `ranks`."""
    if ranks < 1:
        raise ValueError(f"ranks must be positive, got {ranks}")
    return -count % ranks


def deal(costs: Sequence[float], *, ranks: int) -> tuple[tuple[int | None, ...], ...]:
    """Micro-batch indices for every rank, equally many each; None is a dummy.

    Dearest first, each to the cheapest rank that still has a free place. A dummy is computed like any other
    micro-batch with every mask False, so that all ranks meet in the same collectives.
    """
    places = (len(costs) + dummies(len(costs), ranks=ranks)) // ranks
    hands: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min((r for r in range(ranks) if len(hands[r]) < places), key=lambda r: (load[r], r))
        hands[rank].append(index)
        load[rank] += costs[index]
    return tuple((*hand, *[None] * (places - len(hand))) for hand in hands)


def plan(
    lengths: Sequence[int], *, token_budget: int, ranks: int, per_token: float, per_square: float
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For every rank its micro-batches, for every micro-batch its row indices; () is a dummy.

    Every row occurs once, every rank has equally many micro-batches, and the same lengths give the same plan.
    """
    packed = first_fit_decreasing(lengths, token_budget=token_budget)
    costs = [cost([lengths[i] for i in rows], per_token=per_token, per_square=per_square) for rows in packed]
    hands = deal(costs, ranks=ranks)
    return tuple(tuple(() if index is None else packed[index] for index in hand) for hand in hands)
