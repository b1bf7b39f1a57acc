"""Context arithmetic, one token and one character at a time."""

from __future__ import annotations


def tokens_to_ask(window: int, used: int, cap: int) -> int:
    """Sample while there is room and the turn has not reached its cap."""
    asked = 0
    while asked < cap and used + asked < window:
        asked += 1
    return asked


def cut_text(text: str, limit: int, marker: str) -> str:
    """Of limit characters, two of three from the head, and the rest from the tail."""
    if len(text) <= limit:
        return text
    head, tail = "", ""
    while 3 * (len(head) + 1) <= 2 * limit:
        head += text[len(head)]
    while len(head) + len(tail) < limit:
        tail = text[len(text) - len(tail) - 1] + tail
    return head + marker + tail


def fair_shares(sizes: list[int], limit: int) -> list[int]:
    """One character at a time, always to the text that has the fewest and still lacks some; ties to the first."""
    shares = [0] * len(sizes)
    for _ in range(limit):
        lacking = [i for i, size in enumerate(sizes) if shares[i] < size]
        if not lacking:
            break
        shares[min(lacking, key=lambda i: (shares[i], i))] += 1
    return shares
