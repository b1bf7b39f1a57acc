"""Laws of all tensor functions of core: at least float32 inside, float64 kept, results where the arguments are."""

from __future__ import annotations

import pytest
import torch
from tensor_functions import all_functions, arguments, function, tensors

F64 = torch.float64
MOVES_VALUES = {"mask.next_in_row"}
"""Results that are arguments in another place keep their dtype."""

HIDDEN_GRADIENT = {"logprob.head_gradient"}
"""A gradient of the hidden states has their dtype, and its rounding."""

every_function = pytest.mark.parametrize("name", all_functions())


def results(name, *, dtype, device="cpu"):
    return tensors(function(name)(**arguments(name, dtype=dtype, device=device)))


@every_function
def test_float64_is_kept(name):
    assert all(x.dtype == F64 for x in results(name, dtype=F64) if x.is_floating_point())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_function
def test_narrow_arguments_give_what_float64_gives_to_seven_digits_or_so(name, dtype):
    """The examples are numbers of bfloat16, so that all that can differ is the arithmetic."""
    rounding = 1e-2 if name in HIDDEN_GRADIENT and dtype.itemsize == 2 else 2e-5
    for ours, exact in zip(results(name, dtype=dtype), results(name, dtype=F64), strict=True):
        if ours.is_floating_point() and name not in MOVES_VALUES | HIDDEN_GRADIENT:
            assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.to(exact.dtype), exact, rtol=rounding, atol=rounding, equal_nan=True)


@every_function
def test_no_argument_is_changed(name):
    given = arguments(name, dtype=F64)
    before = [x.clone() for x in tensors(list(given.values()))]
    function(name)(**given)
    for now, then in zip(tensors(list(given.values())), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


@every_function
def test_results_are_where_the_arguments_are(name, monkeypatch):
    """Meta tensors have a place and no values: nothing new may be made elsewhere, and nothing may look at a value."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    here = results(name, dtype=torch.float32)
    for ours, theirs in zip(results(name, dtype=torch.float32, device="meta"), here, strict=True):
        assert (ours.device.type, ours.shape, ours.dtype) == ("meta", theirs.shape, theirs.dtype)


@every_function
def test_nothing_is_made_on_the_default_device(name):
    there = results(name, dtype=F64)
    given = arguments(name, dtype=F64)
    with torch.device("meta"):
        here = tensors(function(name)(**given))
    for ours, theirs in zip(here, there, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16], ids=str)
@every_function
def test_cpu_and_gpu_agree(name, dtype):
    rounding = (
        1e-10 if dtype == F64 else 1e-2 if name in HIDDEN_GRADIENT and dtype == torch.bfloat16 else 2e-5
    )
    for ours, theirs in zip(
        results(name, dtype=dtype, device="cuda"), results(name, dtype=dtype), strict=True
    ):
        assert ours.is_cuda
        torch.testing.assert_close(ours.cpu(), theirs, rtol=rounding, atol=rounding, equal_nan=True)
