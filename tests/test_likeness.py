"""What a likeness accepts has the signature of the call it was made from."""

from __future__ import annotations

import enum
import gc
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hookgraph import private_torch, signature, tree
from hookgraph.likeness import Likeness
from hookgraph.reasons import Fallback

CPU = torch.device("cpu")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _x(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(*(shape or (2, 4)), **options)


def _twice(value: Any) -> Arguments:
    return (value, value), {}


SHARED = [1]


class Key(str, enum.Enum):  # noqa: UP042 (libraries have these)
    A = "a"


# Each differs from every other in something that a forward can see.
CALLS: dict[str, Callable[[], Arguments]] = {
    "plain": lambda: ((_x(),), {}),
    "named": lambda: ((), {"x": _x()}),
    "other_name": lambda: ((), {"y": _x()}),
    "shape": lambda: ((_x(2, 5),), {}),
    "dimensions": lambda: ((_x(2, 4, 1),), {}),
    "double": lambda: ((_x(dtype=torch.float64),), {}),
    "strided": lambda: ((_x(4, 2).t(),), {}),
    "expanded": lambda: ((_x(1, 4).expand(2, 4),), {}),
    "misaligned": lambda: ((_x(9)[1:].view(2, 4),), {}),
    "gradient": lambda: ((_x(requires_grad=True),), {}),
    "parameter": lambda: ((torch.nn.Parameter(_x(), requires_grad=False),), {}),
    "two": lambda: ((_x(), _x()), {}),
    "same_twice": lambda: _twice(_x()),
    "none": lambda: ((_x(), None), {}),
    "none_first": lambda: ((None, _x()), {}),
    "int": lambda: ((_x(), 1), {}),
    "another_int": lambda: ((_x(), 2), {}),
    "float": lambda: ((_x(), 1.0), {}),
    "bool": lambda: ((_x(), True), {}),
    "zero": lambda: ((_x(), 0.0), {}),
    "minus_zero": lambda: ((_x(), -0.0), {}),
    "nan": lambda: ((_x(), float("nan")), {}),
    "complex": lambda: ((_x(), 1 + 0j), {}),
    "numpy": lambda: ((_x(), np.float32(1)), {}),
    "numpy_double": lambda: ((_x(), np.float64(1)), {}),
    "text": lambda: ((_x(), "1"), {}),
    "bytes": lambda: ((_x(), b"1"), {}),
    "dtype": lambda: ((_x(), torch.float32), {}),
    "size": lambda: ((_x(), torch.Size([1])), {}),
    "slice": lambda: ((_x(), slice(1)), {}),
    "slice_of_bool": lambda: ((_x(), slice(True)), {}),
    "class": lambda: ((_x(), int), {}),
    "list": lambda: ((_x(), [1]), {}),
    "tuple": lambda: ((_x(), (1,)), {}),
    "list_in_list": lambda: ((_x(), [[1]]), {}),
    "empty_list": lambda: ((_x(), []), {}),
    "empty_dict": lambda: ((_x(), {}), {}),
    "dict": lambda: ((_x(), {"a": 1, "b": 2}), {}),
    "dict_in_another_order": lambda: ((_x(), {"b": 2, "a": 1}), {}),
    "ordered_dict": lambda: ((_x(), OrderedDict(a=1, b=2)), {}),
    "dict_keys_of_int": lambda: ((_x(), {1: 2}), {}),
    "dict_keys_of_bool": lambda: ((_x(), {True: 2}), {}),
    "tensor_in_list": lambda: (([_x()],), {}),
    "tensors_in_list": lambda: (([_x(), _x()],), {}),
    "two_lists": lambda: ((_x(), [1], [1]), {}),
    "one_list_twice": lambda: ((_x(), SHARED, SHARED), {}),
    "two_named_lists": lambda: ((_x(),), {"a": [1], "b": [1]}),
    "one_named_list_twice": lambda: ((_x(),), {"a": SHARED, "b": SHARED}),
    "lists_with_tensors": lambda: (([_x(), [1]], [_x(), [1]]), {"c": 1}),
    "lists_with_tensors_and_one_list": lambda: (([_x(), SHARED], [_x(), SHARED]), {"c": 1}),
    "one_empty_list_twice": lambda: (lambda e: ((_x(), e, e), {}))([]),
    "two_empty_lists": lambda: ((_x(), [], []), {}),
    "names_in_order": lambda: ((_x(),), {"a": 1, "b": 1}),
    "names_in_another_order": lambda: ((_x(),), {"b": 1, "a": 1}),
    "day": lambda: ((_x(), np.timedelta64(1, "D")), {}),
    "hour": lambda: ((_x(), np.timedelta64(1, "h")), {}),
    "range": lambda: ((_x(), range(0, 3, 2)), {}),
    "range_that_ends_elsewhere": lambda: ((_x(), range(0, 4, 2)), {}),
    "ordered_keys_of_int": lambda: ((_x(), OrderedDict({1: 2})), {}),
    "ordered_keys_of_bool": lambda: ((_x(), OrderedDict({True: 2})), {}),
    "key_zero": lambda: ((_x(), {0.0: 2}), {}),
    "key_minus_zero": lambda: ((_x(), {-0.0: 2}), {}),
    "key_tuple_of_int": lambda: ((_x(), {(1,): 2}), {}),
    "key_tuple_of_bool": lambda: ((_x(), {(True,): 2}), {}),
    "key_text": lambda: ((_x(), {"a": 2}), {}),
    "key_enum": lambda: ((_x(), {Key.A: 2}), {}),
    "device": lambda: ((_x(), torch.device("cpu")), {}),
}


def _signature(arguments: Arguments) -> Any:
    call = signature.read(*arguments, CPU)
    return call if isinstance(call, Fallback) else signature.of(call, ())


def _likeness(arguments: Arguments) -> Likeness | None:
    call = signature.read(*arguments, CPU)
    assert not isinstance(call, Fallback)
    return Likeness.of(call, *arguments)


@pytest.fixture(params=["dynamo", "python"])
def without_dynamo(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Dynamo's guard where this torch has it, and as on a torch without it."""
    if request.param == "python":
        monkeypatch.setattr(private_torch, "_dynamo_guard_is_exact", lambda: False)
    else:
        assert private_torch._dynamo_guard_is_exact()


@pytest.mark.usefixtures("without_dynamo")
@pytest.mark.parametrize("name", CALLS)
def test_only_calls_of_the_same_signature_are_accepted(name: str) -> None:
    likeness, mine = _likeness(CALLS[name]()), _signature(CALLS[name]())
    for other in CALLS:
        arguments = CALLS[other]()
        leaves = likeness.leaves(*arguments) if likeness is not None else None
        if leaves is not None:
            assert _signature(arguments) == mine, other


# A likeness of these is not made, or the full look is needed to tell them.
LOOKED_AT_IN_FULL = {
    "same_twice", "dict_keys_of_int", "dict_keys_of_bool", "ordered_keys_of_int", "ordered_keys_of_bool", "key_zero",
    "key_minus_zero", "key_tuple_of_int", "key_tuple_of_bool", "key_enum",
}  # fmt: skip


@pytest.mark.usefixtures("without_dynamo")
@pytest.mark.parametrize("name", CALLS)
def test_the_next_call_that_looks_the_same_is_recognised(name: str) -> None:
    likeness, arguments = _likeness(CALLS[name]()), CALLS[name]()
    leaves = likeness.leaves(*arguments) if likeness is not None else None
    assert (leaves is None) == (name in LOOKED_AT_IN_FULL)
    if leaves is not None:
        expected, _ = tree.flatten(arguments)
        assert len(leaves) == len(expected)
        assert all(a is b for a, b in zip(leaves, expected, strict=True))


@pytest.mark.usefixtures("without_dynamo")
@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view], ids=["conjugate", "negative"])
def test_lazy_bits_are_told(lazy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = _x(dtype=torch.complex64)
    likeness = _likeness(((x,), {}))
    assert likeness is not None
    assert likeness.leaves((x,), {}) is not None
    assert likeness.leaves((lazy(x),), {}) is None


@pytest.mark.usefixtures("without_dynamo")
def test_other_kinds_of_tensors_are_turned_down() -> None:
    likeness = _likeness(((_x(),), {}))
    assert likeness is not None
    subclass = _x().as_subclass(type("Sub", (torch.Tensor,), {}))
    for other in (subclass, _x().to_sparse(), _x().to("meta"), _x().to_mkldnn()):
        assert likeness.leaves((other,), {}) is None


@pytest.mark.usefixtures("without_dynamo")
def test_no_tensor_is_kept_alive() -> None:
    x = _x()
    likeness, alive = _likeness(((x, [x + 1]), {})), weakref.ref(x)
    del x
    gc.collect()
    assert likeness is not None
    assert alive() is None


def test_the_calls_above_are_all_different() -> None:
    signatures = {name: _signature(make()) for name, make in CALLS.items()}
    equal = [
        (a, b)
        for a, b in itertools.combinations(CALLS, 2)
        if not isinstance(signatures[a], Fallback) and signatures[a] == signatures[b]
    ]
    assert equal == []
