"""Context arithmetic of one turn: tokens to ask for, when to warn, how to cut a long tool result."""

from __future__ import annotations

from collections.abc import Sequence

from .check import check_count


def tokens_to_ask(*, window: int, used: int, cap: int) -> int:
    """How many tokens the next turn may sample; 0 means that the trial is truncated by context, not broken.

    Args:
        window: tokens the trajectory may have in all.
        used: tokens it has, the coming turn's prompt included.
        cap: most tokens of one turn.
    """
    check_count("window", window, least=0)
    check_count("used", used, least=0)
    check_count("cap", cap, least=1)
    return max(0, min(cap, window - used))


def should_nudge(*, window: int, used: int, ratio: float, already_nudged: bool) -> bool:
    """Whether to tell the agent, once in a trial, that little context is left.

    Args:
        used: tokens so far, the coming observation included.
        ratio: the share of the window at or below which what is left counts as little.
    """
    check_count("window", window, least=0)
    check_count("used", used, least=0)
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio must lie between 0 and 1, got {ratio}")
    left = max(0, window - used)
    # A quotient of whole numbers is rounded as the written ratio is, so equal ones are equal; a product need not be.
    return not already_nudged and (left == 0 or left / window <= ratio)


def percent_left(*, window: int, used: int) -> int:
    """The share of the window that is left, in whole percent, never below 0; a window has at least one token."""
    check_count("window", window, least=1)
    check_count("used", used, least=0)
    return max(0, (window - used) * 100 // window)


def cut_text(text: str, *, limit: int, marker: str) -> str:
    """A text of at most `limit` characters as it is; of a longer one two thirds its head, one its tail.

    The marker between them comes on top of `limit`, so that what is kept does not depend on its wording.
    """
    check_count("limit", limit, least=0)
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return text[:head] + marker + text[len(text) - tail :]


def fair_shares(sizes: Sequence[int], *, limit: int) -> tuple[int, ...]:
    """How much of each text is kept so that all together have at most `limit`: one bound for all, the largest.

    What is smaller than the bound stays whole; what division leaves over goes one by one to the first of the rest.
    """
    check_count("limit", limit, least=0)
    for size in sizes:
        check_count("every size", size, least=0)
    left, bound = limit, 0
    for rank, size in enumerate(sorted(sizes)):
        bound = left // (len(sizes) - rank)
        if size > bound:
            left -= bound * (len(sizes) - rank)
            break
        left -= size
    else:
        return tuple(sizes)
    longer = [index for index, size in enumerate(sizes) if size > bound]
    return tuple(min(size, bound) + (index in longer[:left]) for index, size in enumerate(sizes))
