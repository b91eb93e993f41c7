"""What the adversary found: each test is the smallest forward, call or change that once gave a wrong number.

``Watched`` names one forward, what it reads, and what happens between two calls.
"""

from __future__ import annotations

import array
import copy
import functools
import itertools
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the name that everyone uses)
from torch.nn.attention import SDPBackend, sdpa_kernel

import hookgraph
from hookgraph import private_torch
from tests.modules import Does
from tests.parity import Both, Twins

pytestmark = pytest.mark.usefixtures("with_and_without_proof")


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def build(forward: Callable[..., Any], state: Callable[[], dict[str, Any]] = dict) -> Twins:
    """Twins of a module that runs ``forward``; tensors in ``state`` become plain attributes."""

    def make() -> nn.Module:
        module = Does(forward)
        for name, value in state().items():
            setattr(module, name, value)
        return module.eval()

    return Twins.build(make)


def buffers(forward: Callable[..., Any], state: Callable[[], dict[str, torch.Tensor]]) -> Twins:
    return Twins.build(lambda: Does(forward, **state()))


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, 4)))


def steadily(twins: Twins, calls: int = 4, make: Callable[[], tuple[Any, ...]] = lambda: (x(),)) -> None:
    """Enough calls for a warm-up, a capture, both proofs and replays."""
    for _ in range(calls):
        twins(*make())


def parity_free(twins: Twins) -> None:
    """No graph was wrong and only found out by its proof."""
    assert not twins.count("eager:parity"), twins.handle.stats


@dataclass(frozen=True)
class Watched:
    """A forward that reads something of its module, which then changes without any argument changing."""

    forward: Callable[..., Any]
    state: Callable[[], dict[str, Any]]
    change: Callable[[Any], Any]
    make: Callable[[], tuple[Any, ...]] = field(default=lambda: (x(),))


def _set(name: str, value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda module: setattr(module, name, value())


def _put(name: str, key: Any, value: Any) -> Callable[[Any], None]:
    return lambda module: getattr(module, name).__setitem__(key, value)


@dataclass(slots=True)
class Slots:
    gain: float = 1.0


@dataclass
class ComparesNothing:
    gain: float = field(default=1.0, compare=False)


class AttributesOfADict(dict):  # type: ignore[type-arg]
    gain = 1.0


class Owner:
    gain = 1.0

    def times(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.gain


def _whole() -> tuple[torch.Tensor]:
    return (torch.arange(4),)


def _in_order(m: Any, value: torch.Tensor) -> torch.Tensor:
    for key, number in m.d.items():
        value = value * number if key == "a" else value + number
    return value


def _reorder(m: Any) -> None:
    m.d["a"] = m.d.pop("a")


def _deep() -> dict[str, Any]:
    return {"d": {"a": {"b": {"c": {"d": {"e": 1.0}}}}}}


def _deepen(m: Any) -> None:
    m.d["a"]["b"]["c"]["d"]["e"] = 3.0


def _two_names() -> dict[str, torch.Tensor]:
    table = torch.randn(4)
    return {"a": table, "b": table}


def _two_views() -> dict[str, torch.Tensor]:
    a, b = torch.randn(2, 4).unbind()
    return {"a": a, "b": b}


def _three() -> torch.Tensor:
    return torch.full((4,), 3.0)


WATCHED = {
    # Python values that compare equal and are not the same.
    "int becomes float": Watched(lambda m, v: v * m.k, lambda: {"k": 1}, _set("k", lambda: 1.0), _whole),
    "bool becomes int": Watched(lambda m, v: (v > 1) * m.k, lambda: {"k": True}, _set("k", lambda: 1), _whole),
    "zero changes its sign": Watched(lambda m, v: v * m.k, lambda: {"k": 0.0}, _set("k", lambda: -0.0)),
    "number becomes an equal tensor": Watched(
        lambda m, v: v * m.k, lambda: {"k": 1}, _set("k", lambda: torch.tensor([1.0])), _whole
    ),
    "int in a list becomes float": Watched(lambda m, v: v * m.k[0], lambda: {"k": [1]}, _put("k", 0, 1.0), _whole),
    "int in a set becomes float": Watched(
        lambda m, v: v * sum(m.k), lambda: {"k": {1, 2}}, lambda m: (m.k.clear(), m.k.update({1.0, 2})), _whole
    ),
    "an object whose fields are not compared": Watched(
        lambda m, v: v * m.c.gain, lambda: {"c": ComparesNothing()}, _set("c", lambda: ComparesNothing(3.0))
    ),
    # Containers and objects that the snapshot does not look into, or not deep enough.
    "order of a dict": Watched(_in_order, lambda: {"d": {"a": 2.0, "b": 3.0}}, _reorder),
    "item of a long list": Watched(lambda m, v: v * m.k[7], lambda: {"k": [1.0] * 300}, _put("k", 7, 3.0)),
    "item of a long dict": Watched(
        lambda m, v: v * m.k[7], lambda: {"k": dict.fromkeys(range(300), 1.0)}, _put("k", 7, 3.0)
    ),
    "five levels deep": Watched(lambda m, v: v * m.d["a"]["b"]["c"]["d"]["e"], _deep, _deepen),
    "item of a deque": Watched(lambda m, v: v * m.k[0], lambda: {"k": deque([1.0])}, _put("k", 0, 3.0)),
    "item of a bytearray": Watched(lambda m, v: v * m.k[0], lambda: {"k": bytearray(b"ab")}, _put("k", 0, 1)),
    "element of an array": Watched(lambda m, v: v * float(m.k[0]), lambda: {"k": np.ones(2)}, _put("k", 0, 3.0)),
    "attribute in a slot": Watched(
        lambda m, v: v * m.k.gain, lambda: {"k": Slots()}, lambda m: setattr(m.k, "gain", 3.0)
    ),
    "attribute of a dict": Watched(
        lambda m, v: v * m.k.gain, lambda: {"k": AttributesOfADict()}, lambda m: setattr(m.k, "gain", 3.0)
    ),
    "keyword of a partial": Watched(
        lambda m, v: m.act(v),
        lambda: {"act": functools.partial(F.leaky_relu, negative_slope=0.1)},
        lambda m: m.act.keywords.update(negative_slope=0.9),
    ),
    "owner of a bound method": Watched(
        lambda m, v: m.times(v), lambda: {"times": Owner().times}, lambda m: setattr(m.times.__self__, "gain", 3.0)
    ),
    # Modules that are not registered as submodules.
    "attribute of a module in a list": Watched(
        lambda m, v: m.acts[0](v),
        lambda: {"acts": [nn.LeakyReLU(0.1)]},
        lambda m: setattr(m.acts[0], "negative_slope", 0.5),
    ),
    "hook on a module in a list": Watched(
        lambda m, v: m.acts[0](v),
        lambda: {"acts": [nn.ReLU()]},
        lambda m: m.acts[0].register_forward_hook(lambda module, args, out: out + 1),
    ),
    "name of a child": Watched(
        lambda m, v: m.linear(v) + hasattr(m, "b"),
        lambda: {"b": nn.ReLU()},
        lambda m: m._modules.update(c=m._modules.pop("b")),
    ),
    "class of the module": Watched(
        lambda m, v: m.linear(v), dict, lambda m: setattr(m, "__class__", type("Other", (Does,), {"forward": _other}))
    ),
    "requires_grad of a parameter": Watched(
        lambda m, v: m.linear(v) + m.linear.weight.requires_grad, dict, lambda m: m.requires_grad_(False)
    ),
    # Tensors that stay at their address and change their geometry.
    "parameter transposed": Watched(
        lambda m, v: m.linear(v), dict, lambda m: setattr(m.linear.weight, "data", m.linear.weight.data.t())
    ),
    "parameter cropped": Watched(
        lambda m, v: v[:, : m.w.shape[0]] * m.w,
        lambda: {"w": nn.Parameter(torch.randn(4))},
        lambda m: setattr(m.w, "data", m.w.data[:2]),
    ),
    "side tensor transposed": Watched(
        lambda m, v: m.linear(v) @ m.r, lambda: {"r": torch.randn(4, 4)}, lambda m: m.r.t_()
    ),
    # Tensors that are no buffers.
    "second name of a tensor": Watched(lambda m, v: m.linear(v) * m.b, _two_names, _set("b", _three)),
    "second view of a table": Watched(lambda m, v: m.linear(v) * m.a + m.b, _two_views, _set("b", _three)),
    "shape alone": Watched(
        lambda m, v: m.linear(v)[:, : m.r.shape[0]], lambda: {"r": torch.zeros(2)}, _set("r", lambda: torch.zeros(3))
    ),
    "shape alone, in a list": Watched(
        lambda m, v: m.linear(v)[:, : m.r[0].shape[0]], lambda: {"r": [torch.zeros(2)]}, _put("r", 0, torch.zeros(3))
    ),
    "dtype alone": Watched(
        lambda m, v: m.linear(v).to(m.r.dtype), lambda: {"r": torch.zeros(2)}, _set("r", lambda: torch.zeros(2).double())
    ),
    "identity alone": Watched(lambda m, v: v + (m.a is m.b), _two_names, _set("b", lambda: torch.zeros(2))),
}  # fmt: skip


def _other(self: Any, value: torch.Tensor) -> torch.Tensor:
    return value * 7


@pytest.mark.parametrize("case", WATCHED.values(), ids=WATCHED.keys())
def test_a_change_of_the_module_is_noticed(case: Watched) -> None:
    with build(case.forward, case.state) as twins:
        twins._attributes = False  # outputs tell; some of these attributes cannot be compared
        steadily(twins, 4, case.make)
        assert twins.count("replays"), twins.outcomes
        twins.apply(case.change)
        steadily(twins, 3, case.make)
        parity_free(twins)


def test_a_view_of_a_parameter_in_an_attribute_is_replaced() -> None:
    def make() -> nn.Module:
        module = Does(lambda m, v: m.linear(v) @ m.turned)
        module.turned = module.linear.weight.detach().t()
        return module

    with Twins.build(make) as twins:
        steadily(twins)
        twins.apply(_set("turned", lambda: torch.eye(4)))
        steadily(twins, 3)


@pytest.mark.parametrize("change", [lambda m: m.b.t_(), lambda m: m.b.resize_(2, 2)], ids=["t_", "resize_"])
def test_a_buffer_changes_its_geometry_in_place(change: Callable[[Any], Any]) -> None:
    with buffers(lambda m, v: v[:, : m.b.shape[0]] @ m.b, lambda: {"b": torch.randn(4, 4)}) as twins:
        steadily(twins)
        twins.apply(change)
        steadily(twins, 3)


def test_a_view_in_an_attribute_has_exchanged_its_memory_and_is_written() -> None:
    def forward(m: Any, v: torch.Tensor) -> torch.Tensor:
        m.table.add_(1)
        return m.linear(v) + m.table

    with build(forward, lambda: {"bank": SimpleNamespace(rows=torch.zeros(2, 4))}) as twins:
        twins.apply(lambda module: setattr(module, "table", module.bank.rows[0]))
        twins.apply(lambda module: setattr(module.table, "data", torch.ones(4)))
        steadily(twins, 6)


class InASlot:
    """Holds a tensor where no walk over ``__dict__`` finds it."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_a_tensor_in_a_slot_is_not_taken_for_a_closure_that_holds_it_too() -> None:
    table = torch.randn(4)

    def unrelated() -> torch.Tensor:
        return table

    with build(lambda m, v: m.linear(v) * m.holder.tensor, lambda: {"holder": InASlot(table)}) as twins:
        steadily(twins)
        twins.apply(lambda m: setattr(m.holder, "tensor", torch.ones(4)))
        steadily(twins, 3)
    assert unrelated() is table


# -- arguments that share memory with the module --------------------------------------------------------


def test_a_written_argument_is_a_side_tensor_in_a_later_call() -> None:
    def forward(m: Any, v: torch.Tensor) -> torch.Tensor:
        v.add_(1)
        return m.linear(m.r) + v

    with build(forward, lambda: {"r": torch.randn(3, 4)}) as twins:
        steadily(twins)
        for _ in range(3):
            twins(twins.modules.map(lambda m: m.r))
        parity_free(twins)


def test_a_side_tensor_was_an_argument_while_it_was_captured() -> None:
    with build(lambda m, v: m.linear(m.r) + v, lambda: {"r": torch.randn(3, 4)}) as twins:
        for _ in range(4):
            twins(twins.modules.map(lambda m: m.r))
        twins.apply(_set("r", lambda: torch.ones(3, 4)))
        steadily(twins, 3)


@pytest.mark.parametrize("kind", ["buffer", "side"])
def test_the_forward_writes_to_a_tensor_of_the_module_that_is_given_as_argument(kind: str) -> None:
    def forward(m: Any, v: torch.Tensor) -> torch.Tensor:
        m.r.mul_(0.5)
        return v + 1

    twins = (buffers if kind == "buffer" else build)(forward, lambda: {"r": torch.randn(3, 4)})
    with twins:
        for _ in range(5):
            twins(twins.modules.map(lambda m: m.r))
        parity_free(twins)


def test_a_tensor_given_twice_is_written_without_its_version_counting() -> None:
    def forward(m: Any, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        v.data.mul_(0.5)
        return m.linear(w)

    with build(forward) as twins:
        for _ in range(5):
            value = x()
            twins(value, value)
        parity_free(twins)


def test_an_inference_tensor_is_written_through_its_data() -> None:
    def forward(m: Any, v: torch.Tensor) -> torch.Tensor:
        v.data.mul_(0.5)  # allowed outside of inference mode, where an update of the tensor itself is not
        return m.linear(v)

    with build(forward) as twins:
        for _ in range(5):
            with torch.inference_mode():
                value = x()
            twins(value)


@pytest.mark.parametrize(
    "make", [lambda: x(3, 4, 2)[..., 0], lambda: x().requires_grad_()], ids=["strided", "requires_grad"]
)
def test_a_proof_compares_an_argument_written_in_place_as_it_is(make: Callable[[], torch.Tensor]) -> None:
    def forward(m: Any, v: torch.Tensor) -> torch.Tensor:
        v.mul_(0.5)
        return m.linear(v)

    with build(forward) as twins:
        steadily(twins, 6, lambda: (make(),))
        parity_free(twins)


@pytest.mark.parametrize(
    "layout", [lambda v: v.reshape(-1), lambda v: v.mT, lambda v: v.view_as(v)], ids=["reshape", "mT", "view_as"]
)
def test_a_watched_call_keeps_the_flags_of_a_view_in_inference_mode(layout: Callable[..., torch.Tensor]) -> None:
    with build(lambda m, v: (m.linear(v), layout(v))) as twins:
        for _ in range(5):
            value = x().requires_grad_()  # no inference tensor
            with torch.inference_mode():
                twins(value)


# -- tensors of the module that share memory with each other ----------------------------------------------


def test_a_proof_puts_back_every_buffer_of_one_memory() -> None:
    def forward(m: Any, v: torch.Tensor) -> torch.Tensor:
        m.b.add_(1)
        return m.linear(v) + m.a

    def state() -> dict[str, torch.Tensor]:
        a, b = torch.zeros(2, 4).unbind()
        return {"a": a, "b": b}

    with buffers(forward, state) as twins:
        steadily(twins, 6)
        parity_free(twins)


def test_a_proof_puts_back_every_side_tensor_of_one_memory() -> None:
    def forward(m: Any, v: torch.Tensor) -> torch.Tensor:
        m.a.add_(1)
        m.b.add_(2)
        return m.linear(v)

    with build(forward, _two_views) as twins:
        steadily(twins, 6)
        parity_free(twins)


def test_a_returned_buffer_is_itself_though_another_shares_its_memory() -> None:
    with buffers(lambda m, v: (m.linear(v), m.b), _two_views) as twins:
        steadily(twins, 6)


# -- what a forward does inside ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda v: torch.tensor([1.0, 2.0, 3.0, 4.0]),
        lambda v: torch.as_tensor([1.0, 2.0, 3.0, 4.0]),
        lambda v: torch.Tensor([1.0, 2.0, 3.0, 4.0]),
        lambda v: v.new_tensor([1.0, 2.0, 3.0, 4.0]),
    ],
    ids=["tensor", "as_tensor", "Tensor", "new_tensor"],
)
def test_a_constant_is_written_in_place(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def forward(m: Any, v: torch.Tensor) -> torch.Tensor:
        constant = make(v)
        constant += v[0]
        return m.linear(v) + constant

    with build(forward) as twins:
        steadily(twins, 6)
        parity_free(twins)


@pytest.mark.parametrize("turn", [torch.Tensor.t_, lambda y: y.unsqueeze_(0)], ids=["t_", "unsqueeze_"])
def test_an_intermediate_changes_its_geometry_in_place(turn: Callable[[torch.Tensor], Any]) -> None:
    def forward(m: Any, v: torch.Tensor) -> Any:
        y = m.linear(v)
        z = y @ y.t()
        turn(y)
        return z, y

    with build(forward) as twins:
        steadily(twins, 6, lambda: (x(4, 4),))
        parity_free(twins)


def test_the_forward_turns_a_buffer_in_place() -> None:
    with buffers(lambda m, v: m.linear(v) @ m.b.t_(), lambda: {"b": torch.randn(4, 4)}) as twins:
        steadily(twins, 7)
        parity_free(twins)


def test_the_forward_exchanges_the_memory_of_a_buffer() -> None:
    def forward(m: Any, v: torch.Tensor) -> torch.Tensor:
        out = m.linear(v) + m.b
        m.b.data = v * 2
        return out

    with buffers(forward, lambda: {"b": torch.randn(3, 4)}) as twins:
        steadily(twins, 7)
        parity_free(twins)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, v, n: m.linear(v).tensor_split(n),
        lambda m, v, n: nn.utils.rnn.pack_padded_sequence(v[None].expand(2, 6, 4), n.flip(0), batch_first=True).data,
    ],
    ids=["tensor_split", "pack_padded_sequence"],
)
def test_an_operator_reads_the_host_values_of_a_tensor_below_the_dispatcher(forward: Callable[..., Any]) -> None:
    with build(forward) as twins:
        for k in range(7):
            twins(x(6, 4), torch.tensor([1 + k % 3, 4]))
        parity_free(twins)


def test_instance_norm_advances_its_statistics_in_inference_mode() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True), nn.Identity()).eval()
        model[0].train()
        return model

    with Twins.build(make, evaluate=False) as twins, torch.inference_mode():
        steadily(twins, 6, lambda: (x(2, 4, 5),))
        parity_free(twins)


# -- signatures that are too equal -----------------------------------------------------------------------


def test_strides_of_a_dimension_of_one_decide_the_layout_of_a_convolution() -> None:
    with Twins.build(lambda: nn.Sequential(nn.Conv2d(1, 3, 3))) as twins:
        steadily(twins, 4, lambda: (x(2, 1, 5, 5),))
        steadily(twins, 3, lambda: (x(2, 1, 5, 5).as_strided((2, 1, 5, 5), (25, 1, 5, 1)),))


@pytest.mark.parametrize("other", [1.0, True], ids=["float", "bool"])
def test_keys_of_a_dict_that_compare_equal(other: Any) -> None:
    def forward(m: Any, v: torch.Tensor, d: dict[Any, Any]) -> torch.Tensor:
        return v * next(iter(d))

    with build(forward) as twins:
        steadily(twins, 4, lambda: (torch.arange(4) > 1, {1: x(1)}))
        steadily(twins, 3, lambda: (torch.arange(4) > 1, {other: x(1)}))


def test_one_list_of_numbers_is_given_twice() -> None:
    def forward(m: Any, v: torch.Tensor, *, one: list[int], other: list[int]) -> torch.Tensor:
        one.append(2)
        return v * len(other)

    with build(forward) as twins:
        for _ in range(5):
            twins(x(), one=[1], other=[1])
        for _ in range(3):
            bag = Both([1], [1])
            twins(x(), one=bag, other=bag)


def test_the_fast_path_of_attention_is_switched_off() -> None:
    # In a parent: a layer that has hooks itself, ours or anybody's, gives up its fast path.
    with Twins.build(lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))) as twins:
        steadily(twins, 4, lambda: (x(2, 3, 4),))
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            steadily(twins, 3, lambda: (x(2, 3, 4),))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


# -- what comes out ---------------------------------------------------------------------------------------


def test_a_list_is_returned_and_left_with_the_caller() -> None:
    def forward(m: Any, v: torch.Tensor, bag: list[Any]) -> list[torch.Tensor]:
        out = [m.linear(v)]
        bag.append(out)
        return out

    with build(forward) as twins:
        steadily(twins, 5, lambda: (x(), []))


def test_a_returned_dict_is_the_one_of_the_module() -> None:
    with build(lambda m, v: {"y": m.linear(v), "cfg": m.cfg}, lambda: {"cfg": {"a": 1}}) as twins:
        for _ in range(5):
            out = twins(x())
            mine = Both(out.eager["cfg"] is twins.modules.eager.cfg, out.attached["cfg"] is twins.modules.attached.cfg)
            assert mine.eager == mine.attached


def test_a_zero_in_a_container_changes_its_sign() -> None:
    def forward(m: Any, v: torch.Tensor, d: dict[str, float]) -> torch.Tensor:
        d["k"] = -d["k"]
        return m.linear(v)

    with build(forward) as twins:
        steadily(twins, 6, lambda: (x(), {"k": 0.0}))


@pytest.mark.parametrize("calls", [1, 2, 5], ids=["at_the_capture", "at_the_proof", "at_a_replay"])
def test_eager_refuses_to_write_to_an_inference_tensor(calls: int) -> None:
    with build(lambda m, v: m.linear(v.mul_(2))) as twins:
        steadily(twins, calls)
        with torch.inference_mode():
            frozen = Both(torch.ones(2, 4), torch.ones(2, 4))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
                twins(frozen)
        steadily(twins, 4)
        assert twins.count("replays") >= 2


@pytest.mark.parametrize("what", ["argument", "parameter"])
@pytest.mark.parametrize(
    "view", [torch.Tensor.detach, lambda v: v.view(-1), lambda v: v.data], ids=["detach", "view", "data"]
)
def test_a_view_requires_gradients_only_where_eager_s_does(what: str, view: Callable[[Any], Any]) -> None:
    def forward(m: Any, v: torch.Tensor) -> Any:
        return m.linear(v), view(v if what == "argument" else m.linear.weight)

    with build(forward) as twins:
        for _ in range(5):
            value = torch.randn(2, 4)
            twins(Both(value.clone().requires_grad_(), value.clone().requires_grad_()))


def test_a_lazy_conjugate_is_resolved() -> None:
    with build(lambda m, v: (v * 2, v.resolve_conj())) as twins:
        for _ in range(6):
            value = torch.randn(3, dtype=torch.complex64)
            twins(Both(value.clone().conj(), value.clone().conj()))


# -- what the second adversary found -------------------------------------------------------------------


TABLE = torch.ones(4)
KEPT: list[torch.Tensor] = []


@pytest.fixture
def table() -> Iterator[None]:
    yield
    globals()["TABLE"] = torch.ones(4)
    KEPT.clear()


def _rebind(value: float) -> None:
    globals()["TABLE"] = torch.full((4,), value)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("also", ["a_list", "an_attribute", "a_namespace"])
def test_a_side_tensor_that_others_hold_too_is_replaced(also: str) -> None:
    space = SimpleNamespace(table=TABLE)
    KEPT.append(TABLE)

    def forward(m: Any, v: torch.Tensor) -> torch.Tensor:
        return m.linear(v) * (space.table if also == "a_namespace" else TABLE)

    with build(forward) as twins:
        if also == "an_attribute":
            twins.apply(lambda module: setattr(module, "other", TABLE))
        steadily(twins, 5)
        _rebind(3.0)
        space.table = TABLE
        steadily(twins, 4)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_side_tensor_is_replaced_early_and_the_old_one_lives_on(calls: int) -> None:
    with build(lambda m, v: m.linear(v) * TABLE) as twins:
        steadily(twins, calls)
        for value in (3.0, 5.0):
            KEPT.append(TABLE)
            _rebind(value)
            steadily(twins, 4)


@pytest.mark.usefixtures("table")
def test_an_argument_of_the_warm_up_is_read_as_a_global_too() -> None:
    with build(lambda m, v: m.linear(v) * TABLE) as twins:
        twins(TABLE)
        steadily(twins, 4)
        KEPT.append(TABLE)
        _rebind(5.0)
        steadily(twins, 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (itertools.count(1), next),
        lambda: (random.Random(1), lambda source: source.random()),
        lambda: (np.random.default_rng(1), lambda source: source.random()),
        lambda: (itertools.cycle([1, 2, 3]), next),
        lambda: ((n for n in range(1, 100)), next),
        lambda: (None, lambda _: random.random()),
        lambda: (None, lambda _: float(np.random.random())),
    ],
    ids=["count", "random", "numpy", "cycle", "generator", "everyone's_random", "everyone's_numpy"],
)
def test_numbers_that_python_draws_advance_once_a_call(make: Callable[[], Any]) -> None:
    states = Both(random.getstate(), random.getstate()), Both(np.random.get_state(), np.random.get_state())
    sides = Both(*(make() for _ in range(2)))

    def forward(m: Any, v: torch.Tensor) -> torch.Tensor:
        return m.linear(v) * m.read(m.source)

    def keep(side: str) -> None:
        setattr(states[0], side, random.getstate())
        setattr(states[1], side, np.random.get_state())

    with build(forward) as twins:
        for side in ("eager", "attached"):
            source, read = getattr(sides, side)
            vars(getattr(twins.modules, side)).update(source=source, read=read)
        for _ in range(8):
            value = x()
            outputs = []
            for side in ("eager", "attached"):  # each with the numbers that its twin had
                random.setstate(getattr(states[0], side))
                np.random.set_state(getattr(states[1], side))
                outputs.append(getattr(twins.modules, side)(value))
                keep(side)
            assert torch.equal(*outputs)


def _swap_names(module: Any) -> None:
    a, b = module.a, module.b
    del module.a, module.b
    module.register_parameter("b", a)
    module.register_parameter("a", b)


def test_parameters_that_change_their_names() -> None:
    with build(lambda m, v: m.linear(v) * m.a + m.b) as twins:
        for module in (twins.modules.eager, twins.modules.attached):
            module.a, module.b = nn.Parameter(torch.full((4,), 2.0)), nn.Parameter(torch.full((4,), 3.0))
        steadily(twins, 5)
        twins.apply(_swap_names)
        steadily(twins, 3)


@pytest.mark.parametrize("guards", ["full", "weights"])
def test_the_dict_of_parameters_is_replaced(guards: str) -> None:
    def replace(module: Any) -> None:
        module.linear._parameters = {key: nn.Parameter(p + 1) for key, p in module.linear._parameters.items()}

    with Twins.build(lambda: Does(lambda m, v: m.linear(v)), guards=guards) as twins:
        steadily(twins, 5)
        with torch.no_grad():
            twins.apply(replace)
        steadily(twins, 3)


class ListWithScale(list):  # type: ignore[type-arg]
    scale = 1.0


class Scale:
    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self) -> float:
        return self.scale


def _space(module: Any) -> None:
    module.state.__dict__ = {"scale": 4.0}


@pytest.mark.parametrize(
    ("make", "read", "change"),
    [
        (ListWithScale, lambda s: s.scale, lambda m: setattr(m.state, "scale", 4.0)),
        (lambda: functools.partial(Scale()), lambda s: s(), lambda m: setattr(m.state.func, "scale", 4.0)),
        (Scale, lambda s: s.scale, _space),
        (lambda: array.array("d", [1.0]), lambda s: s[0], lambda m: m.state.__setitem__(0, 4.0)),
        (lambda: SimpleNamespace(c=complex(1, 0.0)), lambda s: math.copysign(2.0, s.c.imag),
         lambda m: setattr(m.state, "c", complex(1, -0.0))),
    ],
    ids=["attribute_of_a_list", "function_of_a_partial", "whole_dict", "array", "sign_of_a_complex"],
)  # fmt: skip
def test_plain_state_in_odd_places(make: Any, read: Any, change: Any) -> None:
    with build(lambda m, v: m.linear(v) * read(m.state)) as twins:
        twins.apply(lambda module: setattr(module, "state", make()))
        steadily(twins, 5)
        twins.apply(change)
        steadily(twins, 3)


def test_a_module_is_moved_by_swapping_its_tensors() -> None:
    # Without the harness, which refers weakly to parameters itself.
    module = Does(lambda m, v: m.linear(v.to(m.linear.weight.dtype)) + m.shift, shift=torch.ones(4))
    plain = copy.deepcopy(module)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with torch.no_grad(), hookgraph.attach.__wrapped__(module) as handle:
            for step in range(10):
                if step == 5:
                    module.double()
                    plain.double()
                assert torch.equal(module(torch.ones(2, 4) * step), plain(torch.ones(2, 4) * step))
            assert handle.stats.replays >= 4
        module.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_sparse_buffer_that_nobody_uses() -> None:
    with build(lambda m, v: m.linear(v), lambda: {"odd": torch.eye(2).to_sparse()}) as twins:
        steadily(twins, 5)
        assert twins.count("replays") >= 3


# -- operators that arrive whole in inference mode ----------------------------------------------------------


def _attention(m: Any, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(v, v, v)


def test_a_kernel_is_chosen_inside_the_forward() -> None:
    """Which kernel an attention used is recorded, and not asked again outside of the forward's own context."""
    with torch.inference_mode(), build(_attention) as twins:
        steadily(twins, 6, lambda: (x(1, 2, 22, 16),))
        assert twins.count("replays") >= 3


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda m, v: F.one_hot((v * 10).long().abs()), "read_back"),
        (lambda m, v: v * bool(torch.allclose(v, v)), "read_back"),
        (lambda m, v: F.dropout(v, training=False) + 1, None),
    ],
    ids=["one_hot", "allclose", "dropout at inference"],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_an_operator_does_inside(mode: Any, forward: Callable[..., Any], reason: str | None) -> None:
    with mode(), build(forward) as twins:
        steadily(twins, 4)
        outcome = "replays" if reason is None else f"eager:{reason}"
        assert twins.outcomes[-1] == outcome, twins.outcomes


TABLES: list[list[torch.Tensor]] = []


def test_an_attribute_is_also_read_through_a_list_of_a_global() -> None:
    """Each way by which a tensor can be reached is watched, those through containers too."""

    def forward(m: Any, v: torch.Tensor) -> torch.Tensor:
        return m.linear(v) + TABLES[0][0]

    def replace(_: nn.Module) -> None:
        TABLES[0][0] = torch.full((4,), 7.0)

    try:
        with build(forward) as twins:
            table = torch.ones(4)
            TABLES.append([table])
            twins.apply(lambda module: setattr(module, "table", table))
            steadily(twins, 5)
            assert twins.count("replays") >= 3
            replace(twins.modules.attached)
            steadily(twins, 2)
    finally:
        TABLES.clear()


def test_a_view_of_a_table_is_replaced_by_itself() -> None:
    """Both are globals; what the forward reads is the view."""
    try:
        VIEWS["table"] = torch.arange(40.0).reshape(10, 4)
        VIEWS["current"] = VIEWS["table"][2]
        with build(lambda m, v: m.linear(v) + VIEWS["current"]) as twins:
            steadily(twins, 5)
            assert twins.count("replays") >= 3
            VIEWS["current"] = VIEWS["table"][3]
            steadily(twins, 3)
    finally:
        VIEWS.clear()


VIEWS: dict[str, torch.Tensor] = {}


# -- what a dispatch mode changes inside an operator ------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Does(lambda m, v: torch.einsum("bi,bj->bij", m.linear(v), v)),
        lambda: Does(lambda m, v: torch.einsum("bi,bj->ij", v, v)),
        lambda: Does(lambda m, v: torch.tensordot(v, v, dims=([0], [0]))),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        lambda: nn.GRU(4, 4),
    ],
    ids=["einsum", "einsum_of_one", "tensordot", "transformer_layer", "gru"],
)
def test_autocast_acts_inside_an_operator(make: Callable[[], nn.Module], mode: Any) -> None:
    with mode(), torch.autocast("cpu", torch.bfloat16), Twins.build(lambda: nn.Sequential(make())) as twins:
        steadily(twins, 5)
    with mode(), torch.autocast("cpu", torch.bfloat16), Twins.build(lambda: nn.Sequential(make())) as twins:
        steadily(twins, 5, lambda: (x(2, 3, 4)[0],))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_autocast_that_the_forward_leaves_acts_no_more(mode: Any) -> None:
    def forward(m: Any, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.einsum("bi,bj->ij", v, v)

    with mode(), torch.autocast("cpu", torch.bfloat16), build(forward) as twins:
        steadily(twins, 5)
        assert twins.count("replays") >= 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_gru_to_the_last_bit(mode: Any) -> None:
    """What its matmul is made of depends on flags of views, which a dispatch mode changes."""
    with mode(), Twins.build(lambda: nn.GRU(8, 16, batch_first=True)) as twins:
        steadily(twins, 5, lambda: (x(4, 10, 8),))
        assert twins.count("replays") >= 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_inside_the_forward(layout: torch.layout, mode: Any) -> None:
    def forward(m: Any, v: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.nested_tensor([v[:1], v], layout=layout)
        return torch.nested.to_padded_tensor(m.linear(nested), 0.0)

    with mode(), build(forward) as twins:
        steadily(twins, 4)
    assert not torch._C._len_torch_dispatch_stack()


@torch.library.custom_op("hookgraph_tests::noise", mutates_args=())
def noise(v: torch.Tensor) -> torch.Tensor:
    return v + torch.randn_like(v)


def test_an_operator_that_draws_and_does_not_say_so() -> None:
    with build(lambda m, v: noise(m.linear(v))) as twins:
        steadily(twins, 6)
        assert twins.count("replays") == 0
        assert twins.outcomes[-1] == "eager:changes_state"


class Config:
    table: torch.Tensor


CONFIG, ORDERED, LAST = Config(), OrderedDict[str, torch.Tensor](), deque[torch.Tensor](maxlen=1)
SHARED = torch.ones(4)  # a global, which is found in any case


@pytest.mark.parametrize(
    ("put", "get"),
    [
        (lambda t: setattr(CONFIG, "table", t), lambda: CONFIG.table),
        (lambda t: ORDERED.__setitem__("t", t), lambda: ORDERED["t"]),
        (LAST.append, lambda: LAST[-1]),
    ],
    ids=["object", "ordered_dict", "deque"],
)
def test_a_global_tensor_is_read_by_another_way(put: Callable[[torch.Tensor], Any], get: Callable[[], Any]) -> None:
    put(SHARED)
    with build(lambda m, v: m.linear(v) + get()) as twins:
        steadily(twins, 5)
        assert twins.count("replays") >= 3
        put(torch.full((4,), 5.0))
        steadily(twins, 3)


@pytest.mark.parametrize(
    "function", [torch.linalg.svdvals, torch.linalg.eigvalsh, lambda v: torch.linalg.matrix_norm(v, 2)]
)
def test_what_takes_another_algorithm_while_it_is_watched(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Not by twins: the one watched call has the other algorithm's last bits, and no later one."""
    module = Does(lambda m, v: function(v @ v.mT))
    plain = copy.deepcopy(module)
    with hookgraph.attach(module) as handle:
        module(x(6, 6))
        for _ in range(6):
            v = x(6, 6)
            assert torch.equal(module(v), plain(v))
        assert handle.stats.reasons == {"capture_failed": 6}


def test_the_order_of_an_einsum_is_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """With opt_einsum, which need not be here: it is read where PyTorch keeps it, so the place has to be right."""
    einsum = torch.backends.opt_einsum
    monkeypatch.setattr(private_torch, "_READERS", {})
    monkeypatch.setattr(einsum.m, "is_available", lambda: True)
    monkeypatch.setattr(einsum.m, "enabled", False)
    before = private_torch.numerics_flags("cpu")
    with einsum.flags(enabled=True):
        assert einsum.enabled is True
        assert private_torch.numerics_flags("cpu") != before
    assert private_torch.numerics_flags("cpu") == before
