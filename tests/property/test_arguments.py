"""Laws of all tensor functions of core: what is no tensor, or one of another kind, is refused by name in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensor_functions import all_functions, arguments, function
from torch import Tensor

F64 = torch.float64

ANY_KIND = {("mask.next_in_row", "value"), ("segment.segment_sum", "value"), ("segment.per_segment", "value")}
"""Arguments that may be floating point, whole or bool."""

KINDS = {
    "a floating-point tensor": [torch.float16, torch.bfloat16, torch.float32, torch.float64],
    "an integer tensor": [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64],
    "bool": [torch.bool],
}
"""What a message says that an argument must be, and the dtypes that are it."""

ONE_OF_EACH = [torch.bool, torch.int64, torch.float32, torch.complex64]


def kind_of(tensor: Tensor) -> str:
    return next(kind for kind, dtypes in KINDS.items() if tensor.dtype in dtypes)


def is_record(value: Any) -> bool:
    """Whether a value is a tuple of tensors with names; what else has a name in it is a setting."""
    return isinstance(value, tuple) and hasattr(value, "_fields") and isinstance(value[0], Tensor)


def places(given: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """Every tensor of the arguments: what a message calls it, and the way to it."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for name, value in given.items():
        if isinstance(value, Tensor):
            found.append((name, (name,)))
        elif isinstance(value, list):
            found += [(f"{name} {index}", (name, str(index))) for index in range(len(value))]
        elif hasattr(value, "_fields"):
            inner = value._asdict()
            found += [(field, (name, field)) for field in inner if isinstance(inner[field], Tensor)]
    return found


def at(given: Any, way: tuple[str, ...]) -> Tensor:
    """The tensor at the end of the way."""
    for step in way:
        given = (
            given[int(step)]
            if isinstance(given, list)
            else (given if isinstance(given, dict) else given._asdict())[step]
        )
    return given


def swapped(given: dict[str, Any], way: tuple[str, ...], new: Any) -> dict[str, Any]:
    """The arguments with one tensor replaced."""
    value = given[way[0]]
    if len(way) == 2:
        new = [new] if isinstance(value, list) else value._replace(**{way[1]: new})
    return {**given, way[0]: new}


LEFT_ALONE = {
    "mismatch.is_healthy": ["k1", "k3", "ratio", "multiplicative", "probability"]
    + ["effective_share", "perplexity", "rollout_perplexity"],
    "importance.reweighted": ["importance_ratio", "unusable"],
}
"""Fields of a record that the function passes on as they are, or does not need."""


def examples(name: str) -> dict[str, Any]:
    """The arguments of a function; none where one has no example, which a law below says by name."""
    try:
        return arguments(name, dtype=F64)
    except LookupError:
        return {}


CASES = [
    pytest.param(name, said, way, id=f"{name}-{'.'.join(way)}")
    for name in all_functions()
    for said, way in places(examples(name))
    if way[-1] not in LEFT_ALONE.get(name, [])
]

every_tensor = pytest.mark.parametrize(("name", "said", "way"), CASES)


def refusal(name: str, given: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as raised:
        function(name)(**given)
    return str(raised.value)


@pytest.mark.parametrize("name", all_functions())
def test_every_function_takes_a_tensor_that_can_be_replaced(name):
    assert arguments(name, dtype=F64)
    assert any(case.values[0] == name for case in CASES), f"core.{name} must have an example that is a tensor"


@every_tensor
def test_what_is_no_tensor_is_refused_by_name_in_one_line(name, said, way):
    given = arguments(name, dtype=F64)
    values = at(given, way)
    others = {"None": None, "list": values.tolist() if values.ndim else [0.5], "ndarray": values.numpy()}
    for got, other in (others | {"float": 0.5, "int": 1, "bool": True, "str": "0.5"}).items():
        if other is None and way[0] == "alternative":
            continue  # None is what was not rescored.
        assert refusal(name, swapped(given, way, other)).startswith(f"{said} must be a tensor")
        assert refusal(name, swapped(given, way, other)).endswith(f", got {got}")


@every_tensor
def test_a_tensor_of_another_kind_is_refused_by_name_in_one_line(name, said, way):
    given = arguments(name, dtype=F64)
    values = at(given, way)
    kind = kind_of(values)
    wrong = [] if (name, said) in ANY_KIND or way[0] == "field" else ONE_OF_EACH
    for dtype in wrong:
        if dtype not in KINDS[kind]:
            text = refusal(name, swapped(given, way, torch.ones_like(values, dtype=dtype)))
            assert text == f"{said} must be {kind}, got {dtype}"


@every_tensor
def test_every_dtype_of_the_right_kind_is_taken(name, said, way):
    """Each argument alone, as from a host that keeps its fields in different dtypes."""
    given = arguments(name, dtype=F64)
    for dtype in KINDS[kind_of(at(given, way))]:
        if dtype == torch.uint8 and (at(given, way) < 0).any():
            continue
        if name.startswith("logprob.") and said in ("hidden", "head"):
            continue  # The two have one dtype.
        function(name)(**swapped(given, way, at(given, way).to(dtype)))


@pytest.mark.parametrize(
    ("name", "argument", "kind"),
    [
        (name, argument, type(value).__name__)
        for name in all_functions()
        for argument, value in examples(name).items()
        if is_record(value) or argument == "alternative"
    ],
)
def test_what_is_no_record_is_refused_by_name_in_one_line(name, argument, kind):
    given = arguments(name, dtype=F64)
    for got, other in {"None": None, "Tensor": torch.ones(3), "tuple": (1.0,), "dict": {}}.items():
        text = refusal(name, {**given, argument: other})
        assert text == f"{argument} must be of type {kind}, got {got}"


@pytest.mark.parametrize("name", ["logprob.token_logprob", "logprob.head_gradient"])
def test_hidden_states_and_head_of_two_dtypes_are_refused(name):
    given = arguments(name, dtype=F64)
    text = refusal(name, {**given, "head": given["head"].float()})
    assert text == "hidden and head must have one dtype, got [torch.float64, torch.float32]"
