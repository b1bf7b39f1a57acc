"""Names of shapes, one letter per axis: T tokens, B rows, N rollouts, G groups, V vocabulary, H hidden.

A packed step is flat: every row of every rollout lies end to end in one `[T]`, and ids say what belongs
together.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

PerToken = Annotated[Tensor, "T"]
"""One entry per token of the packed step."""

PerRow = Annotated[Tensor, "B"]
"""One entry per training row; a rollout whose history was rewritten has several."""

PerRollout = Annotated[Tensor, "N"]
"""One entry per rollout: what reward and baseline are about."""

Hidden = Annotated[Tensor, "T H"]
"""The last hidden state of every token."""

Head = Annotated[Tensor, "V H"]
"""The weight of the output layer."""


def check_tensor(**tensors: object) -> None:
    """Refuse what is no tensor: None, a number, a list, an array of another library."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            got = None if tensor is None else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor, got {got}")


def check_record(kind: type[object], **records: object) -> None:
    """Refuse what is no record of that kind, such as a bare tensor or None."""
    for name, record in records.items():
        if not isinstance(record, kind):
            got = None if record is None else type(record).__name__
            raise ValueError(f"{name} must be of type {kind.__name__}, got {got}")


def check_one_axis(axis: str, **tensors: Tensor) -> None:
    """Refuse tensors that do not share one shape of one axis, of which `axis` is the letter."""
    check_tensor(**tensors)
    shapes = [tuple(tensor.shape) for tensor in tensors.values()]
    if len(shapes[0]) != 1 or any(shape != shapes[0] for shape in shapes):
        *names, last = tensors
        listed = f"{', '.join(names)} and {last}" if names else last
        got = shapes if names else shapes[0]
        raise ValueError(f"{listed} must have one shape [{axis}], got {got}")


def check_one_shape(**tensors: Tensor) -> None:
    """Refuse tensors that do not share one shape, whatever it is."""
    check_tensor(**tensors)
    shapes = [tuple(tensor.shape) for tensor in tensors.values()]
    if any(shape != shapes[0] for shape in shapes):
        *names, last = tensors
        raise ValueError(f"{', '.join(names)} and {last} must have one shape, got {shapes}")


def check_bool(**tensors: Tensor) -> None:
    """Refuse a mask that is not bool: ones and zeros would be indices where True and False select."""
    check_tensor(**tensors)
    for name, tensor in tensors.items():
        if tensor.dtype != torch.bool:
            raise ValueError(f"{name} must be bool, got {tensor.dtype}")


def check_float(**tensors: Tensor) -> None:
    """Refuse numbers that are not floating point: whole ones cannot say what is missing, and have no gradient."""
    check_tensor(**tensors)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor, got {tensor.dtype}")


def check_integer(**tensors: Tensor) -> None:
    """Refuse ids that are not integers: rounding could make two of them one."""
    check_tensor(**tensors)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise ValueError(f"{name} must be an integer tensor, got {tensor.dtype}")
