"""Tensors in, lists out, and what "equal" means between a function and its loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

RELATIVE = 1e-9
"""Largest relative difference between two float64 computations of one formula."""

ABSOLUTE = 1e-12
"""The same where the terms of a sum cancel to about zero."""


def numbers(values: Sequence[float]) -> Tensor:
    """A float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def flags(values: Sequence[bool]) -> Tensor:
    """A bool tensor."""
    return torch.tensor(values, dtype=torch.bool)


def places(values: Sequence[int]) -> Tensor:
    """An int64 tensor."""
    return torch.tensor(values, dtype=torch.long)


def is_close(one: float, other: float, *, relative: float = RELATIVE, absolute: float = ABSOLUTE) -> bool:
    """Whether two numbers agree; NaN agrees with NaN, an infinity with itself."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=relative, abs_tol=absolute)


def assert_same(
    found: Any, expected: Any, *, relative: float = RELATIVE, absolute: float = ABSOLUTE, what: str = ""
) -> None:
    """Equal as nested lists: lengths, flags and integers exactly, other numbers closely."""
    if isinstance(found, Tensor):
        found = found.detach().tolist()
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{what}: {found} is not {expected}"
        for index, (one, other) in enumerate(zip(found, expected)):
            assert_same(one, other, relative=relative, absolute=absolute, what=f"{what}[{index}]")
    elif isinstance(expected, float):
        assert is_close(float(found), expected, relative=relative, absolute=absolute), (
            f"{what}: {found!r} is not {expected!r}"
        )
    else:
        assert found == expected, f"{what}: {found!r} is not {expected!r}"


def gradient(function: Callable[..., Tensor], values: Sequence[float]) -> list[float]:
    """d sum(function(x)) / dx, zeros where x is not reached."""
    leaf = numbers(values).requires_grad_(True)
    total = function(leaf).sum()
    if not total.requires_grad:
        return [0.0] * len(values)
    (slope,) = torch.autograd.grad(total, leaf, allow_unused=True)
    return [0.0] * len(values) if slope is None else slope.tolist()


def numeric_gradient(
    function: Callable[[list[float]], float], values: Sequence[float], *, step: float = 1e-6
) -> list[float]:
    """Central differences of a plain function of a list."""
    slopes = []
    for index in range(len(values)):
        up, down = list(values), list(values)
        up[index] += step
        down[index] -= step
        slopes.append((function(up) - function(down)) / (2 * step))
    return slopes


junk = st.sampled_from([math.nan, math.inf, -math.inf, -9999.0, 1e30])
"""What stands where the mask is False."""

no_number = st.sampled_from([math.nan, math.inf, -math.inf])
"""What an anchor may be where the engine had nothing to say."""

logprobs = st.sampled_from([-1e-9, -0.01, -0.2, -0.7, -1.0, -1.5, -3.0, -12.0]) | st.floats(-15, -1e-6)
"""Log-probabilities below 0, often equal to each other."""

advantages = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0]) | st.floats(-4, 4)
"""Of either sign and none."""
