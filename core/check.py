"""What a count may be: a whole number, not a truth value, not a float that happens to be whole."""

from __future__ import annotations

_RULE = {0: "must not be negative", 1: "must be positive"}


def check_whole(name: str, value: object) -> None:
    """Refuses what is no whole number.

    Raises:
        ValueError: such as "ranks must be a whole number, got True".
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {value!r}")


def check_count(name: str, value: int, *, least: int) -> None:
    """Refuses what is no whole number of at least `least`, which is 0 or 1.

    Raises:
        ValueError: such as "token_budget must be positive, got 0".
    """
    check_whole(name, value)
    if value < least:
        raise ValueError(f"{name} {_RULE[least]}, got {value}")
