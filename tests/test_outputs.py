"""What comes out of a replay is what eager would have given: classes, sharing, pass-through, and for ever."""

from __future__ import annotations

import gc
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from tests.modules import AttributeDict, Does, FrozenSample, Pair, Returns, Sample, mlp
from tests.parity import Twins

Make = Callable[[torch.Tensor, torch.Tensor], Any]
Typed = namedtuple("Typed", ["first", "second"])


def _model_output(y: torch.Tensor, x: torch.Tensor, hidden: Any = None) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    return BaseModelOutputWithPast(last_hidden_state=y, hidden_states=hidden or (y * 2, y * 3))


def _pipeline_output(y: torch.Tensor, x: torch.Tensor) -> Any:
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    return Transformer2DModelOutput(sample=y)


# Each has to replay.
REPLAYED: dict[str, Make] = {
    "tensor": lambda y, x: y,
    "tuple": lambda y, x: (y, y + 1),
    "one in a tuple": lambda y, x: (y,),
    "list": lambda y, x: [y, y + 1],
    "lists in a tuple": lambda y, x: ([y, y + 1], y + 2),
    "dict": lambda y, x: {"b": y, "a": y + 1},
    "dict of None": lambda y, x: {"sample": y, "hidden": None},
    "dict with other keys": lambda y, x: {1: y, (2, "x"): y + 1, None: y + 2},
    "OrderedDict": lambda y, x: OrderedDict(b=y, a=y + 1),
    "dict with attributes": lambda y, x: AttributeDict(sample=y, loss=None),
    "NamedTuple": lambda y, x: Pair(y, [y + 1, None]),
    "namedtuple": lambda y, x: Typed(y, y + 1),
    "dataclass": lambda y, x: Sample(y, scale=0.5),
    "frozen dataclass": lambda y, x: FrozenSample(y, (y + 1, y + 2)),
    "transformers ModelOutput": _model_output,
    "diffusers BaseOutput": _pipeline_output,
    "nested": lambda y, x: {"a": [(y, {"b": Pair(y + 1)}), None], "c": Sample(y + 2)},
    "None": lambda y, x: None,
    "None beside a tensor": lambda y, x: (None, y, None),
    "empty containers": lambda y, x: (y, (), [], {}),
    "scalars": lambda y, x: (y, 1, 1.0, True, "text", float("inf"), -0.0, y.shape[0]),
    "only scalars": lambda y, x: (1, 2.5, "x"),
    "size": lambda y, x: (y, y.shape),
    "dtype and device": lambda y, x: (y, y.dtype, y.device),
    # Memory and identity.
    "one tensor twice": lambda y, x: (y, y),
    "one tensor under two keys": lambda y, x: {"a": y, "b": y},
    "tensor and its view": lambda y, x: (y, y[:, :1]),
    "view before its base": lambda y, x: (y[:, 1:], y),
    "overlapping views": lambda y, x: (y[:, :3], y[:, 1:]),
    "views of what is not returned": lambda y, x: y.chunk(2, dim=1),
    "unbind": lambda y, x: y.unbind(0),
    "the input": lambda y, x: x,
    "the input beside the output": lambda y, x: (x, y),
    "the input twice": lambda y, x: [x, x],
    "a view of the input": lambda y, x: x[:, 1:],
    "views of the input": lambda y, x: (x.t(), x.view(-1), y),
    "the input detached": lambda y, x: (x.detach(), y),
    # Layouts and kinds.
    "transposed": lambda y, x: y.t(),
    "strided": lambda y, x: y[:, ::2],
    "expanded": lambda y, x: y[:, :1].expand(-1, 4),
    "expanded to a new dimension": lambda y, x: y.expand(3, *y.shape),
    "channels last": lambda y, x: y.reshape(2, 2, 2, 1).expand(2, 2, 2, 2).contiguous(memory_format=torch.channels_last),
    "with dimensions of one": lambda y, x: y[:, None].transpose(1, 2),
    "no dimensions": lambda y, x: y.sum(),
    "no elements": lambda y, x: (y[:0], y[:, 4:]),
    "long": lambda y, x: y.argmax(-1),
    "bool": lambda y, x: y > 0,
    "half": lambda y, x: y.half(),
    "bfloat16": lambda y, x: y.bfloat16(),
    "double": lambda y, x: y.double(),
    "complex": lambda y, x: torch.complex(y, x),
    "nan and infinities": lambda y, x: torch.stack([y / 0, (y - y) / 0, -y / 0]),
    "a constant made inside": lambda y, x: (torch.ones(3), torch.arange(4), y),
}  # fmt: skip


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("kind", REPLAYED)
def test_outputs(kind: str) -> None:
    with torch.no_grad(), Twins.build(lambda: Returns(REPLAYED[kind])) as twins:
        for _ in range(5):
            twins(torch.randn(2, 4))
        assert twins.outcomes == ["warmups", "captures", "replays", "replays", "replays"]


class Opaque:
    """Holds a tensor where nobody can know of it."""

    __slots__ = ("held",)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


def _generator(y: torch.Tensor, x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from y


# Each may run eager; what is never allowed is a static buffer, a stale value or another class.
UNUSUAL: dict[str, Make] = {
    "one list twice": lambda y, x: (lambda inner: (inner, inner))([y]),
    "reinterpreted memory": lambda y, x: (y, y.view(torch.int32)),
    "conjugate view": lambda y, x: torch.complex(y, x).conj(),
    "negative view": lambda y, x: torch.complex(y, x).conj().imag,
    "ModelOutput with a list": lambda y, x: _model_output(y, x, [y * 2, y * 3]),
    "namespace": lambda y, x: SimpleNamespace(sample=y, n=1),
    "UserDict": lambda y, x: UserDict(sample=y),
    "deque": lambda y, x: deque([y, y + 1]),
    "set of numbers": lambda y, x: (y, {1, 2}),
    "sparse": lambda y, x: y.relu().to_sparse(),
    "parameter": lambda y, x: (y, nn.Parameter(y, requires_grad=False)),
    "iterator": lambda y, x: iter([y, y + 1]),
    "function": lambda y, x: (y, len),
    "meta tensor": lambda y, x: (y, torch.empty(3, device="meta")),
    "numpy": lambda y, x: (y, y.numpy()),
}


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_outputs(kind: str) -> None:
    with torch.no_grad(), Twins.build(lambda: Returns(UNUSUAL[kind])) as twins:
        for _ in range(5):
            twins(torch.randn(2, 4))
        assert twins.count("errors") == 0


@pytest.mark.parametrize(
    ("make", "read"),
    [
        pytest.param(lambda y, x: Opaque(y), lambda out: out.held, id="object with slots"),
        pytest.param(lambda y, x: lambda: y, lambda out: out(), id="closure"),
        pytest.param(_generator, lambda out: torch.stack(list(out)), id="generator"),
        pytest.param(lambda y, x: map(torch.neg, y), lambda out: torch.stack(list(out)), id="map"),
        pytest.param(lambda y, x: {Opaque(y): 1}, lambda out: next(iter(out)).held, id="key of a dict"),
    ],
)
def test_what_cannot_be_rebuilt_runs_eager(make: Make, read: Callable[[Any], torch.Tensor]) -> None:
    """HG-04: an object whose contents are not known must never carry a static buffer out."""
    module = Returns(make)
    handle = hookgraph.attach(module)
    with torch.no_grad():
        inputs = [torch.randn(2, 4) for _ in range(4)]
        values = [read(module(x)) for x in inputs]
        expected = [module.linear(x) for x in inputs]
    for value, right in zip(values, expected, strict=True):
        assert torch.equal(value.abs(), right.abs())
    stats = handle.stats
    assert stats.replays == stats.captures == 0
    assert set(stats.reasons) == {"output_kind"}


def test_values_read_from_tensors_are_never_frozen() -> None:
    """A number computed from a value cannot come out of a graph."""
    make = {
        "item": lambda y, x: (y, y.sum().item()),
        "list": lambda y, x: x.tolist(),
        "float": lambda y, x: float(x[0, 0]),
    }
    for function in make.values():
        with torch.no_grad(), Twins.build(lambda function=function: Returns(function)) as twins:
            for _ in range(4):
                twins(torch.randn(2, 4))
            assert twins.outcomes[1:] == ["eager:read_back"] * 3


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("weight", ["linear.weight", "linear.bias"])
def test_parameters_that_come_out_are_the_module_s_own(weight: str) -> None:
    def make(module: Does, x: torch.Tensor) -> Any:
        parameter = module.get_parameter(weight)
        return module.linear(x), parameter, parameter[:1], module.table

    with torch.no_grad(), Twins.build(lambda: Does(make, table=torch.ones(3))) as twins:
        for _ in range(4):
            twins(torch.randn(2, 4))
        twins.apply(lambda module: module.get_parameter(weight).data.add_(1))
        twins(torch.randn(2, 4))


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("container", [list, dict], ids=lambda c: c.__name__)
def test_a_container_of_the_caller_comes_back_as_itself(container: type) -> None:
    argument: Any = [torch.randn(2, 4)] if container is list else {"x": torch.randn(2, 4)}
    with torch.no_grad(), Twins.build(lambda: Does(lambda m, c: (m.linear(next(iter(_values(c)))), c))) as twins:
        for _ in range(4):
            twins(argument)


def _values(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


# -- HG-01, HG-03: an output lives for as long as its owner wants it --------------------------


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_01_guidance_uses_two_outputs_of_one_signature() -> None:
    with torch.no_grad(), Twins.build(mlp) as twins:
        for _ in range(3):
            twins(torch.randn(2, 4))
        first, second = twins(torch.randn(2, 4)), twins(torch.randn(2, 4))
        guided = [a + 4.0 * (b - a) for a, b in ((first.eager, second.eager), (first.attached, second.attached))]
        assert torch.equal(*guided)
        assert first.attached.untyped_storage()._cdata != second.attached.untyped_storage()._cdata
        assert twins.outcomes[-2:] == ["replays", "replays"]


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_01_outputs_kept_in_a_list() -> None:
    with torch.no_grad(), Twins.build(mlp) as twins:
        outputs = [twins(torch.randn(2, 4)) for _ in range(6)]
        for output in outputs:
            assert torch.equal(output.eager, output.attached)
        assert len({output.attached.data_ptr() for output in outputs}) == 6


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_03_recurrent_use() -> None:
    with torch.no_grad(), Twins.build(mlp) as twins:
        h: Any = torch.randn(2, 4)
        for _ in range(10):
            h = twins(h)
        assert twins.outcomes == ["warmups", "captures"] + ["replays"] * 8


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_03_an_older_output_comes_back_as_input() -> None:
    with torch.no_grad(), Twins.build(lambda: Does(lambda m, x, y: m.linear(x) + y)) as twins:
        previous: Any = torch.randn(2, 4)
        x: Any = torch.randn(2, 4)
        for _ in range(6):
            x, previous = twins(x, previous), x
        assert twins.count("replays") == 4


@pytest.mark.parametrize("start", [0, 4, 2], ids=["first half", "second half", "middle, not aligned"])
@pytest.mark.filterwarnings("ignore:.* runs eager. parity")
def test_hg_03_a_part_of_an_output_comes_back_as_input(start: int) -> None:
    """Matrix kernels differ in the last bit by the alignment of their input: an address of 8 modulo 16, here."""
    with torch.no_grad(), Twins.build(lambda: nn.Linear(4, 8)) as twins:
        h: Any = twins(torch.randn(2, 8)[:, start : start + 4])
        for _ in range(6):
            h = twins(h[:, start : start + 4])
        if start != 2:
            assert twins.count("replays") == 5


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_04_classes_keep_their_contents_after_the_next_call() -> None:
    for make in (lambda y, x: Sample(y), lambda y, x: AttributeDict(sample=y), lambda y, x: Pair(y)):
        with torch.no_grad(), Twins.build(lambda make=make: Returns(make)) as twins:
            for _ in range(3):
                twins(torch.randn(2, 4))
            a = twins(torch.randn(2, 4))
            twins(torch.randn(2, 4))
            assert type(a.attached) is type(a.eager)
            assert torch.equal(a.attached.sample, a.eager.sample)


@pytest.mark.usefixtures("with_and_without_proof")
def test_what_the_caller_does_to_an_output_does_not_reach_the_next() -> None:
    with torch.no_grad(), Twins.build(lambda: Returns(lambda y, x: (y, y[:, :2]))) as twins:
        for _ in range(5):
            out = twins(torch.randn(2, 4))
            out[0].map(lambda y: y.zero_())
            out[1].map(lambda y: y.add_(1))  # memory shared as in eager: seen through the first
        assert twins.count("replays") == 3


def test_outputs_outlive_the_graphs() -> None:
    with torch.no_grad():
        twins = Twins.build(mlp)
        outputs = [twins(torch.randn(2, 4)) for _ in range(4)]
        twins.finish()
        gc.collect()
        for output in outputs:
            assert torch.equal(output.eager, output.attached)


def test_view_outputs_are_right_until_the_next_replay() -> None:
    module, plain = mlp(), mlp()
    plain.load_state_dict(module.state_dict())
    handle = hookgraph.attach(module, outputs="view")
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(2, 4)
            assert torch.equal(module(x), plain(x))
    assert handle.stats.replays == 3


@pytest.mark.usefixtures("with_and_without_proof")
def test_an_in_place_operation_on_the_input_that_is_the_output() -> None:
    """``relu_(x)`` returns the caller's own tensor, changed."""
    with torch.no_grad(), Twins.build(lambda: Does(lambda m, x: x.relu_())) as twins:
        for _ in range(4):
            twins(torch.randn(2, 4))
