"""Laws of core.shapes: what a check refuses, it names."""

from __future__ import annotations

import re

import pytest
import torch

from core.shapes import check_one_axis, check_one_shape

ONE, TWO, FLAT = torch.zeros(1), torch.zeros(2), torch.zeros(2, 1)


@pytest.mark.parametrize(
    ("axis", "tensors", "text"),
    [
        ("T", {"a": FLAT}, "a must have one shape [T], got (2, 1)"),
        ("N", {"a": ONE, "b": TWO}, "a and b must have one shape [N], got [(1,), (2,)]"),
        ("B", {"a": ONE, "b": ONE, "c": TWO}, "a, b and c must have one shape [B], got [(1,), (1,), (2,)]"),
    ],
)
def test_tensors_of_more_than_one_axis_or_length_are_refused_by_name(axis, tensors, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        check_one_axis(axis, **tensors)


def test_tensors_of_different_shapes_are_refused_by_name():
    text = "a, b and c must have one shape, got [(2,), (2,), (2, 1)]"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        check_one_shape(a=TWO, b=TWO, c=FLAT)


def test_tensors_of_one_shape_pass():
    check_one_axis("T", a=TWO, b=TWO)
    check_one_shape(a=FLAT, b=FLAT)
    check_one_shape(a=FLAT)
