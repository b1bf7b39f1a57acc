"""The softmax at a label, one logit at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Matrix = Sequence[Sequence[float]]


class OracleLogprob(NamedTuple):
    """Per token."""

    logprob: list[float]
    entropy: list[float]
    share: list[list[float]]
    """the softmax"""


def logits(hidden: Matrix, head: Matrix) -> list[list[float]]:
    """hidden @ head^T."""
    return [[math.fsum(a * b for a, b in zip(state, row)) for row in head] for state in hidden]


def token_logprob(hidden: Matrix, head: Matrix, label: Sequence[int], temperature: float) -> OracleLogprob:
    """log softmax(z / temperature) at the label, and -sum p log p."""
    result = OracleLogprob([], [], [])
    for row, y in zip(logits(hidden, head), label):
        z = [x / temperature for x in row]
        top = max(z)
        whole = top + math.log(math.fsum(math.exp(x - top) for x in z))
        share = [math.exp(x - whole) for x in z]
        result.logprob.append(z[y] - whole)
        result.entropy.append(-math.fsum(p * (x - whole) for p, x in zip(share, z)))
        result.share.append(share)
    return result


def logit_gradient(
    share: Matrix, label: Sequence[int], slope: Sequence[float], temperature: float
) -> list[list[float]]:
    """slope (onehot(label) - softmax) / temperature."""
    return [
        [s / temperature * ((1.0 if v == y else 0.0) - p) for v, p in enumerate(row)]
        for row, y, s in zip(share, label, slope)
    ]


def hidden_gradient(of_logits: Matrix, head: Matrix) -> list[list[float]]:
    """sum over the vocabulary of d loss / d logit times the head's row."""
    width = len(head[0])
    return [
        [math.fsum(g * row[k] for g, row in zip(token, head)) for k in range(width)] for token in of_logits
    ]


def head_gradient(of_logits: Matrix, hidden: Matrix, vocabulary: int) -> list[list[float]]:
    """sum over tokens of d loss / d logit times the hidden state."""
    width = len(hidden[0])
    return [
        [math.fsum(token[v] * state[k] for token, state in zip(of_logits, hidden)) for k in range(width)]
        for v in range(vocabulary)
    ]


def chunk_within(memory: float, vocabulary: int, logit_bytes: int, gradient_bytes: int) -> int:
    """Tokens one by one until the next does not fit; whole tiles of 128 if there is one."""
    each, count = vocabulary * (logit_bytes + gradient_bytes), 0
    while (count + 1) * each <= memory:
        count += 1
    return count - count % 128 if count >= 128 else max(1, count)
