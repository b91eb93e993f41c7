"""The harness itself: it passes what is equal, and each kind of difference fails it with a path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from tests.modules import Does, Sample, mlp
from tests.parity import Both, Identities, ParityError, Twins, compare, same_bits
from tests.residue import Snapshot, Watch

X = torch.arange(8.0).reshape(2, 4)


def inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x + 1


OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any], str]] = {
    "value": (lambda x: x + 1, lambda x: x + torch.tensor([1.0, 1.0, 1.0, 1.5]), r"output: values differ by up to 0\.5"),
    "last bit": (lambda x: x + 1, lambda x: torch.nextafter(x + 1, x), "values differ"),
    "sign of zero": (lambda x: x * 0, lambda x: x * -0.0, "values differ"),
    "nan": (lambda x: x + 1, lambda x: x + float("nan"), "values differ"),
    "shape": (lambda x: x + 1, lambda x: (x + 1)[:1], r"shape is \(1, 4\), eager gives \(2, 4\)"),
    "dtype": (lambda x: x + 1, lambda x: (x + 1).double(), "dtype is torch.float64"),
    "strides": (lambda x: x + 1, lambda x: (x + 1).t().contiguous().t(), r"strides is \(1, 2\)"),
    "requires_grad": (lambda x: x + 1, lambda x: (x + 1).requires_grad_(), "requires_grad is True"),
    "is_inference": (lambda x: x + 1, inference, "is_inference is True"),
    "class": (lambda x: x + 1, lambda x: nn.Parameter(x + 1, requires_grad=False), "class is Parameter"),
    "container": (lambda x: (x + 1,), lambda x: [x + 1], "class is list, eager gives tuple"),
    "dataclass": (lambda x: Sample(x + 1), lambda x: Sample(x + 2), r"output\.sample: values differ"),
    "length": (lambda x: (x, x), lambda x: (x,), "has 1 items, eager gives 2"),
    "scalar type": (lambda x: (x + 1, 1), lambda x: (x + 1, True), r"output\[1\]: class is bool"),
    "scalar value": (lambda x: {"a": 1}, lambda x: {"a": 2}, r"output\['a'\]: is 2, eager gives 1"),
    "keys": (lambda x: {"a": 1, "b": 2}, lambda x: {"b": 2, "a": 1}, r"has .*output\['b'\] where eager has"),
    "pass-through": (lambda x: x, lambda x: x.clone(), r"output is the object output of call 0.*eager it is args\[0\]"),
    "view of an input": (lambda x: x[:, 1:], lambda x: x.clone()[:, 1:], "lies in the memory of output of call 0, in eager"),
    "offset of a view": (lambda x: (y := x * 0, y[:1]), lambda x: (y := x * 0, y[1:]), r"16 bytes further on, in eager"),
    "same object twice": (lambda x: (y := x + 1, y), lambda x: (x + 1, x + 1), r"output\[1\] is the object"),
    "shared memory": (lambda x: (y := x + 1, y[:1]), lambda x: (x + 1, (x + 1)[:1]), r"output\[1\] lies in"),
    "argument written": (lambda x: x.add_(1).sum(), lambda x: (x + 1).sum(), r"args\[0\]: values differ"),
    "random numbers": (lambda x: x + 1, lambda x: x + 1 + 0 * torch.rand(2, 4), "random generator of cpu"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_difference_is_seen(kind: str) -> None:
    eager, attached, message = OUTPUTS[kind]
    twins = Twins.build(mlp)
    with torch.no_grad():
        twins.run(Both(eager, eager), X)
        twins.outcomes.clear()
        with pytest.raises(ParityError, match=message):
            twins.run(Both(eager, attached), X)


def _hands_out_one_buffer() -> Callable[[torch.Tensor], torch.Tensor]:
    buffer = torch.empty(2, 4)
    return lambda x: buffer.copy_(x + 1)


def test_a_static_buffer_handed_out_is_seen() -> None:
    twins = Twins.build(mlp)
    leaky = Both(lambda x: x + 1, _hands_out_one_buffer())
    with torch.no_grad():
        twins.run(leaky, X)
        with pytest.raises(ParityError, match=r"output of call 1|lies in the memory of output of call 0"):
            twins.run(leaky, X * 2)
        with pytest.raises(ParityError, match="call 0: output, looked at again after the last call: values differ"):
            twins.compare_kept()


@pytest.mark.parametrize(
    ("event", "message"),
    [
        pytest.param(lambda m: m.linear.weight.data.mul_(2), "parameters.*linear.weight.*values", id="parameter"),
        pytest.param(lambda m: m.count.add_(1), r"buffers\['count'\]: values differ", id="buffer"),
        pytest.param(lambda m: setattr(m, "flag", True), r"attributes\['.flag'\]: is True", id="attribute"),
        pytest.param(lambda m: m.table.append(3), r"attributes\['.table'\]: has 3 items", id="list"),
        pytest.param(
            lambda m: setattr(m.linear.bias, "grad", torch.ones(4)), "gradients.*linear.bias.*class", id="grad"
        ),
    ],
)
def test_a_difference_in_the_module_is_seen(event: Callable[[Any], Any], message: str, no_residue: Watch) -> None:
    twins = Twins.build(lambda: Does(lambda m, x: m.linear(x), count=torch.zeros(1), flag=False, table=[1, 2]))
    event(twins.modules.attached)
    no_residue.allow(twins.modules.attached, "changed: <root>.flag")
    with torch.no_grad(), pytest.raises(ParityError, match=message):
        twins(X)


def test_errors_have_to_be_the_same() -> None:
    twins = Twins.build(mlp)

    def fails(x: torch.Tensor) -> None:
        raise ValueError("eager's")

    def fails_otherwise(x: torch.Tensor) -> None:
        raise ValueError("another")

    with pytest.raises(ValueError, match="eager's"):
        twins.run(Both(fails, fails), X)
    with pytest.raises(ParityError, match=r"raised ValueError\('another'\); eager raises ValueError"):
        twins.run(Both(fails, fails_otherwise), X)
    with pytest.raises(ParityError, match="returned; eager raises"):
        twins.run(Both(fails, lambda x: x), X)
    with pytest.raises(ParityError, match="eager returns"):
        twins.run(Both(lambda x: x, fails), X)


def test_arguments_are_copied_with_what_they_share() -> None:
    twins = Twins.build(mlp)
    base = torch.randn(2, 8)
    state = twins.keep([torch.zeros(1)])
    a, b, side, grad = twins.split((base[:, :4], base, state, nn.Parameter(X)))
    assert a.eager.untyped_storage()._cdata == b.eager.untyped_storage()._cdata
    assert a.eager.untyped_storage()._cdata != a.attached.untyped_storage()._cdata
    assert side.attached is state.attached
    assert side.eager is state.eager
    assert grad.attached.requires_grad


def test_memory_is_not_kept_alive() -> None:
    names = Identities()
    first = torch.randn(1000)
    weak = torch.multiprocessing.reductions.StorageWeakRef(first.untyped_storage())
    assert names.name("a", first) == ("a", ("a", 0))
    assert names.name("b", first[3:]) == ("b", ("a", 12))
    del first
    assert weak.expired()
    assert names.name("c", torch.randn(1000))[1] == ("c", 0)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        (1.0, 1.0, True),
        (float("inf"), float("inf"), True),
        (float("inf"), float("nan"), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_same_bits(a: float, b: float, same: bool, dtype: torch.dtype) -> None:
    assert same_bits(torch.tensor([1.0, a]).to(dtype), torch.tensor([1.0, b]).to(dtype)) is same


def test_compare_opens_objects() -> None:
    class Layer:
        def __init__(self, keys: torch.Tensor) -> None:
            self.keys = keys

    compare({"c": [Layer(X)]}, {"c": [Layer(X)]}, "cache")
    with pytest.raises(ParityError, match=r"cache\['c'\]\[0\]\.keys: values differ"):
        compare({"c": [Layer(X)]}, {"c": [Layer(X + 1)]}, "cache")


@pytest.mark.parametrize(
    ("leave", "message"),
    [
        pytest.param(lambda m: vars(m).__setitem__("forward", m.forward), "new: <root>.forward", id="forward"),
        pytest.param(lambda m: m[0].register_forward_hook(print), r"new: 0\._forward_hooks\[", id="hook of a child"),
        pytest.param(lambda m: setattr(m, "_hookgraph", 1), "new: <root>._hookgraph", id="attribute"),
        pytest.param(lambda m: m.register_buffer("t", X), "changed: state_dict keys", id="buffer"),
        pytest.param(lambda m: setattr(type(m[1]), "_x", 1), "changed: 1 class body", id="class"),
    ],
)
def test_residue_is_seen(leave: Callable[[nn.Module], Any], message: str) -> None:
    module = mlp()
    before = Snapshot(module)
    try:
        leave(module)
        assert any(message.replace("\\", "") in change for change in before.changes(Snapshot(module)))
    finally:
        nn.GELU.__dict__.get("_x") and delattr(nn.GELU, "_x")


def test_the_fixture_watches(no_residue: Watch) -> None:
    module = mlp()
    hookgraph.attach(module)
    module[0].register_forward_hook(print)
    hookgraph.detach(module)
    with pytest.raises(AssertionError, match=r"detach\(\) left: .*new: 0\._forward_hooks"):
        no_residue.check(module)
    no_residue.allow(module, "new: 0._forward_hooks*", "changed: 0._forward_hooks*")
    no_residue.check(module)
