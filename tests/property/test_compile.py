"""Laws of all tensor functions of core: one graph under torch.compile, which computes what the plain call computes.

`COMPILE_BACKEND=inductor` compiles down to machine code; that takes minutes.
"""

from __future__ import annotations

import os

import pytest
import tensor_functions
import torch
from tensor_functions import all_functions, arguments, function, tensors

BACKEND = os.environ.get("COMPILE_BACKEND", "aot_eager")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TRAINED = ("logprob", "head_logprob", "hidden", "head")
F64 = torch.float64

every_function = pytest.mark.parametrize("name", all_functions())


def value_and_gradient(call, name, device):
    """All results, and the gradients of their sum where the function has any."""
    given = arguments(name, dtype=F64, device=device)
    trained = [given[argument].requires_grad_() for argument in TRAINED if argument in given]
    found = tensors(call(**given))
    differentiable = [x for x in found if x.requires_grad]
    if differentiable:
        total = torch.stack([x.sum() for x in differentiable]).sum()
        found = [x.detach() for x in found] + list(torch.autograd.grad(total, trained))
    return found


@every_function
def test_every_argument_of_every_function_has_an_example(name):
    assert arguments(name, dtype=F64).keys()


def test_an_argument_without_an_example_is_named():
    with pytest.raises(
        LookupError, match=r"^tests/tensor_functions.py must have an example of the argument hue$"
    ):
        tensor_functions.example("hue", dtype=F64)


def test_every_part_is_a_file_of_core_and_every_exception_a_function():
    files = {path.stem for path in tensor_functions.CORE.glob("*.py")}
    assert tensor_functions.PARTS.keys() <= files
    assert all(callable(function(name)) for name in tensor_functions.NO_TENSOR)


# torch itself makes an instance of an autograd function when it traces one.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("device", DEVICES)
@every_function
def test_a_function_compiles_to_one_graph_that_computes_the_same(name, device):
    torch.compiler.reset()
    compiled = torch.compile(function(name), fullgraph=True, backend=BACKEND)
    plain, fused = (value_and_gradient(call, name, device) for call in (function(name), compiled))
    assert len(plain) == len(fused) > 0
    for ours, theirs in zip(fused, plain):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, equal_nan=True)
