"""Laws of core.shapes: what a check refuses, it names."""

from __future__ import annotations

import re

import pytest
import torch

from core.shapes import check_float, check_one_axis, check_one_shape, check_record, check_tensor

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


@pytest.mark.parametrize(
    ("other", "got"), [(None, "None"), (0.5, "float"), ([0.5, 0.5], "list"), (TWO.numpy(), "ndarray")]
)
@pytest.mark.parametrize("check", [check_tensor, check_float, check_one_shape])
def test_what_is_no_tensor_is_refused_by_its_type(check, other, got):
    with pytest.raises(ValueError, match=f"^b must be a tensor, got {got}$"):
        check(a=TWO, b=other)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_whole_and_complex_numbers_are_not_floating_point(dtype):
    with pytest.raises(ValueError, match=f"^b must be a floating-point tensor, got {dtype}$"):
        check_float(a=TWO, b=TWO.to(dtype))


@pytest.mark.parametrize(("other", "got"), [(None, "None"), (TWO, "Tensor"), ([], "list")])
def test_what_is_no_record_is_refused_by_its_type(other, got):
    with pytest.raises(ValueError, match=f"^b must be of type tuple, got {got}$"):
        check_record(tuple, a=(), b=other)
