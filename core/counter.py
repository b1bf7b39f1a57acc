"""A counter-based hash: random numbers as a function of a seed and indices, no generator to carry about."""

from __future__ import annotations

from .check import check_count, check_whole

_MASK = (1 << 64) - 1


def _mix(word: int) -> int:
    """The finaliser of splitmix64: a bijection on 64 bits in which every input bit moves every output bit."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def counter_hash(seed: int, *index: int) -> int:
    """64 well-mixed bits that depend on the seed, on every index and on their order, and on nothing else."""
    check_whole("seed", seed)
    word = _mix(seed & _MASK)
    for part in index:
        check_whole("every index", part)
        word = _mix(word ^ _mix((part & _MASK) ^ 0xD1B54A32D192ED03))
    return word


def counter_uniform(seed: int, *index: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return (counter_hash(seed, *index) >> 11) * 2.0**-53


def permutation(count: int, seed: int, *index: int) -> tuple[int, ...]:
    """The numbers 0 to count - 1 in an order that depends on seed and index only.

    Example: the tasks of epoch 3 are `permutation(task_count, seed, 3)`.
    """
    check_count("count", count, least=0)
    return tuple(sorted(range(count), key=lambda item: (counter_hash(seed, *index, item), item)))
