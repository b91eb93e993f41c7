"""What a forward does beside its result, and what happens to a module between two calls."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import hookgraph
from tests.modules import Does, Drops, Norms, Rope, Scaled, StepCache, mlp
from tests.parity import Both, Twins, check_balance
from tests.residue import Watch

X = torch.arange(8.0).reshape(2, 4) / 8


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def calls(twins: Twins, count: int = 4, rows: int = 2) -> None:
    for _ in range(count):
        twins(torch.randn(rows, 4))


# -- HG-38, HG-40: the module changes between calls ------------------------------------------------


def _in_place(module: nn.Module) -> None:
    module[0].weight.add_(0.5)


def _data(module: nn.Module) -> None:
    module[0].weight.data = module[0].weight.data + 0.5


def _new_parameter(module: nn.Module) -> None:
    module[0].weight = nn.Parameter(module[0].weight + 0.5)


def _load(module: nn.Module) -> None:
    module.load_state_dict({name: value + 0.5 for name, value in module.state_dict().items()})


def _assign(module: nn.Module) -> None:
    module.load_state_dict({name: value + 0.5 for name, value in module.state_dict().items()}, assign=True)


def _new_child(module: nn.Module) -> None:
    module[2] = nn.Linear(4, 7)


def _swap_weights(module: nn.Module) -> None:
    """The two layers change places, weights and all: the same tensors under other names."""
    module[0], module[2] = module[2], module[0]


def _tie(module: nn.Module) -> None:
    module[2].weight = module[0].weight


def _shrink(module: nn.Module) -> None:
    del module[2]


def _grow(module: nn.Module) -> None:
    module.append(nn.ReLU())


def _quantise(module: nn.Module) -> None:
    class Halved(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.register_buffer("weight", linear.weight.half())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight.float())

    torch.manual_seed(0)
    module[2] = Halved(module[2])


# event, and whether a graph may go on without another capture
EVENTS: dict[str, tuple[Callable[[nn.Module], Any], bool]] = {
    "in place": (_in_place, True),
    "load_state_dict": (_load, True),
    "data =": (_data, False),
    "new Parameter": (_new_parameter, False),
    "load_state_dict(assign=True)": (_assign, False),
    "to another dtype and back": (lambda m: m.double().float(), False),
    "a new child": (_new_child, False),
    "children change places": (_swap_weights, False),
    "a tied weight": (_tie, False),
    "a child less": (_shrink, False),
    "a child more": (_grow, False),
    "a quantised child": (_quantise, False),
    "an activation's flag": (lambda m: setattr(m[1], "approximate", "tanh"), False),
    "train() of a child": (lambda m: m[1].train(), False),
}


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("event", EVENTS)
def test_hg_38_the_module_changes_after_the_capture(event: str) -> None:
    """Parity in every case; what moved is captured again, and counted."""
    change, goes_on = EVENTS[event]
    with Twins.build(mlp) as twins:
        calls(twins)
        torch.manual_seed(1)
        state = torch.get_rng_state()
        for module in (twins.modules.eager, twins.modules.attached):
            torch.set_rng_state(state)  # both get the same new weights
            change(module)
        gc.collect()
        calls(twins, 5)
        later = twins.outcomes[4:]
        if goes_on:
            assert later == ["replays"] * 5
        else:
            assert "replays" not in later[:1]
            assert later[-1] == "replays"
            assert twins.handle.stats.modules[0].invalidations == 1


@pytest.mark.parametrize("event", ["in place", "data =", "new Parameter", "load_state_dict(assign=True)"])
@pytest.mark.parametrize("when", [1, 2], ids=["after the warm-up", "after the capture"])
def test_hg_38_early(event: str, when: int) -> None:
    with Twins.build(mlp) as twins:
        calls(twins, when)
        twins.apply(EVENTS[event][0])
        calls(twins, 5)
        assert twins.outcomes[-1] == "replays"


def test_hg_38_another_dtype() -> None:
    with Twins.build(mlp) as twins:
        calls(twins)
        twins.apply(lambda module: module.to(torch.bfloat16))
        for _ in range(4):
            twins(torch.randn(2, 4).bfloat16())
        twins.apply(lambda module: module.to(torch.float32))
        calls(twins)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: m.table.add_(1), id="in place"),
        pytest.param(lambda m: setattr(m, "table", m.table + 1), id="new tensor"),
        pytest.param(lambda m: setattr(m.table, "data", m.table + 1), id="data ="),
        pytest.param(lambda m: m.load_state_dict({"table": m.table + 1}, strict=False, assign=True), id="assign"),
    ],
)
def test_hg_38_buffers(change: Callable[[Any], Any]) -> None:
    with Twins.build(lambda: Does(lambda m, x: m.linear(x) * m.table, table=torch.ones(4))) as twins:
        for _ in range(3):
            calls(twins, 3)
            twins.apply(change)
            gc.collect()
        calls(twins, 3)
        assert twins.count("replays") >= 2


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("calls_before", [1, 2, 4])
def test_hg_38_a_buffer_that_the_forward_writes_is_replaced(calls_before: int) -> None:
    """Between the warm-up and the capture, too: what the audit saw written is not there any more."""
    with Twins.build(lambda: Does(lambda m, x: (m.mean.mul_(0.9), m.linear(x))[1], mean=torch.ones(4))) as twins:
        calls(twins, calls_before)
        twins.apply(lambda module: setattr(module, "mean", module.mean + 1))
        gc.collect()
        calls(twins, 5)
        assert twins.outcomes[-1] == "replays"


def test_hg_38_weights_that_move_on_every_call() -> None:
    """Offloading and layerwise casting: never a stale value, and no capture for ever."""
    with Twins.build(mlp) as twins:
        for _ in range(16):
            calls(twins, 1)
            twins.apply(_data)
        assert twins.handle.stats.captures <= 8


def test_the_replaced_weights_are_freed() -> None:
    module = mlp()
    hookgraph.attach(module)
    for _ in range(3):
        module(X)
    old = torch.multiprocessing.reductions.StorageWeakRef(module[0].weight.untyped_storage())
    _data(module)
    module(X)
    gc.collect()
    assert old.expired()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: setattr(m, "fast", not m.fast), id="flag"),
        pytest.param(lambda m: setattr(m, "scale", m.scale + 1), id="number"),
        pytest.param(lambda m: m.options.__setitem__("scale", m.options["scale"] + 1), id="dict"),
        pytest.param(lambda m: m.steps.append(2.0), id="list"),
        pytest.param(lambda m: m.linear.__setattr__("factor", m.linear.factor + 1), id="attribute of a child"),
        pytest.param(lambda m: setattr(m, "activation", torch.tanh), id="function"),
    ],
)
def test_hg_40_plain_python_state(change: Callable[[Any], Any]) -> None:
    """A flag, a scale, an adapter's name: invisible in arguments, addresses and versions."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.activation(m.linear(x) if m.fast else m.linear(x).double().float() + 1)
        return y * m.scale * m.options["scale"] * sum(m.steps) * m.linear.factor

    def build() -> Does:
        module = Does(forward, fast=True, scale=1.0, options={"scale": 1.0}, steps=[1.0], activation=torch.relu)
        module.linear.factor = 1.0
        return module

    with Twins.build(build) as twins:
        calls(twins)
        twins.apply(change)
        calls(twins)
        assert twins.outcomes[3] == twins.outcomes[-1] == "replays"
        assert twins.outcomes[4] != "replays"


def test_hg_40_a_flag_that_flips_back() -> None:
    with Twins.build(lambda: Does(lambda m, x: m.linear(x) * (2 if m.fast else 3), fast=False)) as twins:
        for flag in (False, True, False, True):
            twins.apply(lambda module, flag=flag: setattr(module, "fast", flag))
            calls(twins, 4)


def test_hg_40_train_and_eval() -> None:
    with Twins.build(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))) as twins:
        for mode in (False, True, False, True):
            twins.apply(lambda module, mode=mode: module.train(mode))
            calls(twins, 4)
        assert twins.outcomes[-4:] == ["eager:training"] * 4


@pytest.mark.usefixtures("with_and_without_proof")
def test_a_child_in_training_mode_below_a_module_in_eval_mode() -> None:
    with Twins.build(Norms) as twins:
        twins.apply(lambda module: module.bn.train())
        for _ in range(6):
            twins(torch.randn(3, 4))


def test_invalidate() -> None:
    with Twins.build(mlp) as twins:
        calls(twins, 4)
        twins.handle.invalidate("weights swapped behind its back")
        calls(twins, 4)
        assert twins.outcomes[4] in ("warmups", "captures")
        assert twins.outcomes[-1] == "replays"
        assert twins.handle.stats.modules[0].invalidations == 1


def test_reset_counters() -> None:
    with Twins.build(mlp) as twins:
        calls(twins, 4)
        twins.handle.reset_counters()
        assert twins.handle.stats.calls == 0
        calls(twins, 2)
        stats = twins.handle.stats
        assert (stats.calls, stats.replays) == (2, 2)


# -- HG-09: writes to arguments ----------------------------------------------------------------------


def _rebind(m: Any, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    state["h"] = m.linear(state["h"]) + x
    state["n"] = state.get("n", 0) + 1
    return state["h"] * 2


def _append(m: Any, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    state["log"].append(m.linear(x))
    return state["log"][-1] + 1


def _pop(m: Any, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    return m.linear(x) + (state["log"].pop() if state["log"] else 0)


def _swap(m: Any, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    state["a"], state["b"] = state["b"], state["a"]
    return m.linear(x) + state["a"]


def _nested_write(m: Any, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    state["log"][0].add_(x)
    state["h"][:, 1:].mul_(2)
    return m.linear(x)


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("forward", [_rebind, _append, _pop, _swap, _nested_write], ids=lambda f: f.__name__)
@pytest.mark.parametrize("how", ["one object", "a fresh one each call"])
def test_hg_09_containers_end_as_in_eager(forward: Callable[..., Any], how: str) -> None:
    def fresh() -> dict[str, Any]:
        h, a, b, first, second = torch.randn(5, 2, 4)
        return {"h": h, "a": a, "b": b, "log": [first, second]}

    with Twins.build(lambda: Does(forward), max_graphs=8) as twins:
        kept = twins.keep(fresh())
        for _ in range(6):
            twins(torch.randn(2, 4), kept if how == "one object" else fresh())


WRITES: dict[str, Callable[..., Any]] = {
    "add_": lambda m, x, c: (c.add_(m.linear(x)), c.sum())[1],
    "add_ and return": lambda m, x, c: c.add_(m.linear(x)),
    "a slice": lambda m, x, c: (c[:, :2].copy_(m.linear(x)[:, :2]), c * 1)[1],
    "setitem": lambda m, x, c: (c.__setitem__((slice(None), 0), 3.0), m.linear(x))[1],
    "setitem of a row": lambda m, x, c: (c.__setitem__(0, m.linear(x)[0]), c.mean())[1],
    "index_copy_": lambda m, x, c: (c.index_copy_(0, torch.tensor([1]), m.linear(x)[:1]), c.sum())[1],
    "fill_": lambda m, x, c: (c.fill_(2.0), m.linear(x))[1],
    "out=": lambda m, x, c: torch.add(m.linear(x), 1, out=c),
    "twice": lambda m, x, c: (c.mul_(2), c.add_(x), c + 1)[2],
    "through a view": lambda m, x, c: (c.view(-1)[3:5].zero_(), m.linear(x))[1],
    "through data": lambda m, x, c: (c.data.add_(1), m.linear(x))[1],
    "both arguments": lambda m, x, c: (c.add_(x), x.mul_(2), m.linear(x))[2],
    "into memory that it shares": lambda m, x, c: (c[0].add_(1), c[1].copy_(c[0]), m.linear(c))[2],
}


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("keep", [True, False], ids=["same argument", "fresh argument"])
def test_hg_09_writes_reach_the_caller_exactly_once(kind: str, keep: bool) -> None:
    with Twins.build(lambda: Does(WRITES[kind])) as twins:
        kept = twins.keep(torch.randn(2, 4))
        for _ in range(5):
            twins(torch.randn(2, 4), kept if keep else torch.randn(2, 4))


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_09_two_arguments_share_memory() -> None:
    with Twins.build(lambda: Does(lambda m, a, b: (a.add_(1), m.linear(a) + b)[1])) as twins:
        for _ in range(5):
            base = torch.randn(3, 4)
            twins(base[:2], base[1:])
            x = torch.randn(2, 4)
            twins(x, x)


def test_a_write_into_an_expanded_argument_fails_as_in_eager() -> None:
    with Twins.build(lambda: Does(lambda m, x, c: (c.add_(x), m.linear(x))[1])) as twins:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="single memory location"):
                twins(torch.randn(2, 4), torch.randn(1, 4).expand(2, 4))


# -- HG-11: state that advances ----------------------------------------------------------------------


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_11_batch_norm_counts_every_call_once() -> None:
    with Twins.build(Norms, evaluate=False) as twins:
        addresses = [buffer.data_ptr() for buffer in twins.modules.attached.buffers()]
        for step in range(6):
            twins(torch.randn(3, 4))
            assert int(twins.modules.attached.bn.num_batches_tracked) == step + 1
        assert addresses == [buffer.data_ptr() for buffer in twins.modules.attached.buffers()]


BUFFERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a counter": lambda m, x: (m.count.add_(1), m.linear(x) * m.count)[1],
    "a moving mean": lambda m, x: (m.count.mul_(0.9).add_(x.mean(), alpha=0.1), m.linear(x) - m.count)[1],
    "a ring buffer": lambda m, x: (m.ring.copy_(m.ring.roll(1, 0)), m.ring[0].copy_(m.linear(x)[0]), m.ring.sum(0))[2],
    "a new tensor each time": lambda m, x: (setattr(m, "count", m.count + 1), m.linear(x) * m.count)[1],
    "a parameter": lambda m, x: (m.linear.bias.add_(1), m.linear(x))[1],
    "the buffer itself": lambda m, x: (m.count.add_(1), m.count)[1],
}


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("kind", BUFFERS)
def test_hg_11_buffers_advance_exactly_once(kind: str) -> None:
    with Twins.build(lambda: Does(BUFFERS[kind], count=torch.zeros(1), ring=torch.zeros(5, 4))) as twins:
        for _ in range(7):
            twins(torch.randn(2, 4))


# -- HG-12: Python state that a forward changes ---------------------------------------------------------


def _last(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.last = m.linear(x)
    return m.linear(m.last)


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_12_an_attribute_assigned_in_forward() -> None:
    """It runs eager, and the reason names the attribute."""
    with Twins.build(lambda: Does(_last, last=None)) as twins:
        for _ in range(6):
            twins(torch.randn(2, 4))
            assert torch.equal(twins.modules.eager.last, twins.modules.attached.last)
        assert twins.outcomes[-1] == "eager:changes_state"
        assert twins.handle.stats.replays == 0
        (detail,) = twins.handle.stats.modules[0].details["changes_state"]
        assert "last" in detail


STATEFUL: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a counter": lambda m, x: (setattr(m, "n", m.n + 1), m.linear(x) * m.n)[1],
    "a list": lambda m, x: (m.log.append(m.linear(x)), m.log[-1] * len(m.log))[1],
    "a dict": lambda m, x: (m.table.__setitem__("x", m.linear(x)), m.table["x"] + 1)[1],
    "of a child": lambda m, x: (setattr(m.linear, "n", getattr(m.linear, "n", 0) + 1), m.linear(x) * m.linear.n)[1],
    "a flag that alternates": lambda m, x: (setattr(m, "n", 1 - m.n), m.linear(x) * (m.n + 1))[1],
    "a counter with a period": lambda m, x: (setattr(m, "n", (m.n + 1) % 3), m.linear(x) * (m.n + 1))[1],
    "a list with a bound": lambda m, x: (m.log.append(x), m.log.__delitem__(slice(0, -2)), sum(m.log) + m.linear(x))[2],
}


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("kind", STATEFUL)
def test_hg_12_python_state(kind: str) -> None:
    with Twins.build(lambda: Does(STATEFUL[kind], n=0, log=[], table={})) as twins:
        for _ in range(9):
            twins(torch.randn(2, 4))
        assert set(twins.handle.stats.reasons) <= {"changes_state", "unstable"}


def _lazy(m: Any, x: torch.Tensor) -> torch.Tensor:
    if m.table is None:
        m.table = torch.arange(4.0)
    return m.linear(x) * m.table


def test_state_made_on_the_first_call_only() -> None:
    """A forward that sets up its tables lazily gets one more warm-up, then a graph."""
    with Twins.build(lambda: Does(_lazy, table=None)) as twins:
        calls(twins, 6)
        assert twins.outcomes == ["warmups", "warmups", "captures", "replays", "replays", "replays"]


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_32_a_table_that_grows() -> None:
    """Length 4, then 8, which rebinds the table to other values, then 4 again."""
    with Twins.build(Rope) as twins:
        for rows in (4, 8, 4, 8, 2):
            calls(twins, 5, rows)
            assert torch.equal(twins.modules.eager.cos, twins.modules.attached.cos)
        assert twins.count("replays") >= 4


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_32_a_table_dropped_from_outside() -> None:
    with Twins.build(Rope) as twins:
        calls(twins, 5)
        twins.apply(lambda module: setattr(module, "cos", None))
        gc.collect()
        calls(twins, 5)
        twins.apply(lambda module: setattr(module, "cos", module.cos * 2))
        gc.collect()
        calls(twins, 5)


TABLES: dict[int, torch.Tensor] = {}


@functools.lru_cache(maxsize=2)
def cached_table(rows: int) -> torch.Tensor:
    return torch.arange(rows)[:, None] + 1.0


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_32_a_table_that_a_cache_evicts() -> None:
    """The graph for two rows must not read the memory of a table that the cache has thrown away."""
    cached_table.cache_clear()
    with Twins.build(lambda: Does(lambda m, x: m.linear(x) * cached_table(x.shape[0])), max_graphs=8) as twins:
        for rows in (2, 3, 4, 2, 3):
            calls(twins, 4, rows)


@pytest.mark.usefixtures("with_and_without_proof")
def test_a_global_tensor_that_is_replaced() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.linear(x) * TABLES[0]

    with Twins.build(lambda: Does(forward)) as twins:
        for value in (1.0, 2.0, 3.0):
            TABLES[0] = torch.full((4,), value)
            gc.collect()
            calls(twins, 4)
        TABLES[0].fill_(5.0)
        calls(twins, 2)


@pytest.mark.usefixtures("with_and_without_proof")
def test_a_global_tensor_that_is_written() -> None:
    total = torch.zeros(4), torch.zeros(4)

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.where().add_(x[0])
        return m.linear(x) + m.where()

    sides = iter(total)
    with Twins.build(lambda: Does(forward, where=functools.partial(lambda t: t, next(sides)))) as twins:
        for _ in range(6):
            twins(torch.randn(2, 4))
            assert torch.equal(*total)


# -- HG-43: values read back ------------------------------------------------------------------------------


READS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "item": lambda m, x: m.linear(x) * x.sum().item(),
    "float": lambda m, x: m.linear(x) * float(x.sum()),
    "int": lambda m, x: m.linear(x)[: int(x.abs().sum()) % 2 + 1],
    "bool": lambda m, x: m.linear(x) if x.sum() > 0 else -x,
    "if all": lambda m, x: m.linear(x) if torch.all(x > -1) else -x,
    "nonzero": lambda m, x: m.linear(x)[x[:, 0].nonzero().flatten()],
    "a boolean mask": lambda m, x: m.linear(x)[x > 0],
    "masked_select": lambda m, x: m.linear(x).masked_select(x > 0),
    "unique": lambda m, x: torch.unique(x.round()),
    "tolist": lambda m, x: m.linear(x) * sum(x[0].tolist()),
    "torch.equal": lambda m, x: m.linear(x) if torch.equal(x, x.abs()) else -x,
    "allclose": lambda m, x: m.linear(x) if torch.allclose(x, x.abs()) else -x,
    "numpy": lambda m, x: m.linear(x) * float(x.numpy().sum()),
    "format": lambda m, x: (m.linear(x), f"{x[0, 0]:.3f}"),
    "repr": lambda m, x: (m.linear(x), repr(x)),
    "repeat_interleave": lambda m, x: m.linear(x).repeat_interleave((x[:, 0] > 0).long() + 1, dim=0),
    "an index": lambda m, x: m.linear(x) * [1.0, 2.0, 3.0][x[0].argmax() % 3],
    "range": lambda m, x: sum((m.linear(x) for _ in range(x[0].argmax() + 1)), start=x),
    "setitem of a mask": lambda m, x: (y := m.linear(x), y.__setitem__(x > 0, 1.0))[0],
    "setitem of values": lambda m, x: (y := m.linear(x), y.__setitem__(x > 0, x[x > 0]))[0],
}


@pytest.mark.parametrize("kind", READS)
def test_hg_43_a_value_read_back_is_never_baked(kind: str) -> None:
    with Twins.build(lambda: Does(READS[kind])) as twins:
        for _ in range(6):
            twins(torch.randn(2, 4))
        if kind != "setitem of a mask":  # a masked fill, which a graph can hold
            assert twins.handle.stats.replays == 0, twins.outcomes
            assert set(twins.handle.stats.reasons) == {"read_back"}


def _reads_in_this_line(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    return y * y.abs().max().item()  # the line that the reason has to name


def test_a_read_back_names_its_line() -> None:
    with Twins.build(lambda: Does(_reads_in_this_line)) as twins:
        calls(twins, 3)
        (detail,) = twins.handle.stats.modules[0].details["read_back"]
        line = _reads_in_this_line.__code__.co_firstlineno + 2
        assert f"test_lifecycle.py:{line}" in detail


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_43_a_step_cache() -> None:
    """Small and large inputs alternate; the branch is never baked, and the inner block can be graphed."""
    for targets in (None, "block"):
        with Twins.build(StepCache, targets=targets) as twins:
            for step in range(10):
                twins(torch.randn(2, 4) * (0.1 if step % 2 else 10.0))
            assert bool(twins.handle.stats.replays) is (targets == "block")


# -- HG-41: hooks of submodules ----------------------------------------------------------------------------


def _double(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 2


@pytest.mark.parametrize("when", ["before attach", "after attach", "after the warm-up", "after the capture"])
def test_hg_41_a_hook_of_a_child(when: str) -> None:
    """Its effect is there whenever it is registered, and gone when it is removed."""
    moments = ["before attach", "after attach", "after the warm-up", "after the capture"]
    counts = Both([], [])

    def register(sides: Both) -> None:
        handles = []
        for module, count in ((sides.eager, counts.eager), (sides.attached, counts.attached)):
            handles.append(module[0].register_forward_hook(_double))
            handles.append(module[2].register_forward_pre_hook(lambda m, a, c=count: c.append(1)))
        hooks.extend(handles)

    hooks: list[Any] = []
    eager, attached = mlp(), mlp()
    attached.load_state_dict(eager.state_dict())
    eager.eval(), attached.eval()
    if when == moments[0]:
        register(Both(eager, attached))
    with Twins(eager, attached) as twins:
        for moment, count in zip(moments[1:], (1, 3, 4), strict=True):
            if when == moment:
                register(twins.modules)
            calls(twins, count)
        assert len(counts.eager) == len(counts.attached) > 0
        assert "child_hooks" in twins.handle.stats.reasons
        for hook in hooks:
            hook.remove()
        calls(twins, 4)
        assert twins.outcomes[-1] == "replays"


def test_hg_41_hooks_of_children_accepted() -> None:
    module, plain = mlp(), mlp()
    plain.load_state_dict(module.state_dict())
    seen: list[int] = []
    module[0].register_forward_hook(lambda m, a, out: seen.append(1))
    with hookgraph.attach(module, child_hooks="ignore") as handle:
        for _ in range(5):
            x = torch.randn(2, 4)
            assert torch.equal(module(x), plain(x))
        assert handle.stats.replays == 3
    assert len(seen) < 5


@pytest.mark.usefixtures("with_and_without_proof")
def test_a_hook_that_changes_the_module_s_own_result() -> None:
    with Twins.build(mlp) as twins:
        calls(twins)
        hooks = twins.apply(lambda module: module.register_forward_hook(_double))
        calls(twins)
        hooks.map(lambda hook: hook.remove())
        calls(twins)
        assert twins.count("replays") >= 8


# -- HG-27: random numbers -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_27_the_sequence_is_eager_s() -> None:
    """The harness compares the generator's state after each call as well."""
    with Twins.build(Drops) as twins:
        torch.manual_seed(0)
        outputs = [twins(X).attached for _ in range(5)]
        assert len({tuple(out.flatten().tolist()) for out in outputs}) == 5
        torch.manual_seed(0)
        again = [twins(X).attached for _ in range(3)]
        assert all(torch.equal(a, b) for a, b in zip(outputs, again, strict=False))
        state = torch.get_rng_state()
        first = twins(X).attached
        torch.set_rng_state(state)
        assert torch.equal(first, twins(X).attached)


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_27_in_training_mode() -> None:
    with Twins.build(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), evaluate=False) as twins:
        torch.manual_seed(0)
        calls(twins, 5)


@pytest.mark.parametrize("own", [True, False], ids=["of the caller", "held by the module"])
def test_hg_27_a_generator(own: bool) -> None:
    """Never baked: each call draws the next numbers from it."""

    def forward(m: Any, x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        return m.linear(x) + torch.randn(4, generator=generator or m.generator)

    module = Does(forward, generator=torch.Generator().manual_seed(3))
    hookgraph.attach(module)
    plain = torch.Generator().manual_seed(3)
    generator = torch.Generator().manual_seed(3)
    for step in range(6):
        x = torch.randn(2, 4)
        got = module(x, generator=generator) if own else module(x)
        assert torch.equal(got, module.linear(x) + torch.randn(4, generator=plain))
        if step == 3:
            plain.manual_seed(9)
            (generator if own else module.generator).manual_seed(9)


def test_random_state_that_the_forward_manages_itself() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return m.linear(x) + torch.randn(4)

    with Twins.build(lambda: Does(forward)) as twins:
        calls(twins, 5)


# -- errors ----------------------------------------------------------------------------------------------------


def _picky(m: Any, x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] == 3:
        raise ValueError("three rows")
    return m.linear(x)


def test_an_error_in_forward_is_the_caller_s() -> None:
    with Twins.build(lambda: Does(_picky)) as twins:
        for _ in range(3):
            calls(twins, 1)
            with pytest.raises(ValueError, match="three rows"):
                twins(torch.randn(3, 4))
        assert twins.outcomes == ["warmups", "errors", "captures", "errors", "replays", "errors"]


def test_an_error_keeps_its_traceback_and_gets_no_chain() -> None:
    module = Does(_picky)
    hookgraph.attach(module)
    with pytest.raises(ValueError, match="three rows") as caught:
        module(torch.randn(3, 4))
    assert caught.traceback[-1].name == "_picky"
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_wrong_arguments_are_python_s_own_error() -> None:
    with Twins.build(Scaled) as twins:
        for _ in range(3):
            with pytest.raises(TypeError, match="scal"):
                twins(torch.randn(2, 4), scal=1.0)
            with pytest.raises(TypeError, match="missing"):
                twins()
        assert twins.outcomes == ["errors"] * 6


def test_a_wrong_shape_is_torch_s_own_error() -> None:
    with Twins.build(mlp) as twins:
        calls(twins, 3)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                twins(torch.randn(2, 5))
        calls(twins, 2)
        assert twins.outcomes[-2:] == ["replays"] * 2


def test_a_forward_that_calls_the_garbage_collector() -> None:
    with Twins.build(lambda: Does(lambda m, x: (gc.collect(), m.linear(x))[1])) as twins:
        calls(twins, 4)


# -- HG-37: every path has one outcome ----------------------------------------------------------------------------


def _reenters(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x) if x.shape[0] == 1 else m(x[:1]) + m.linear(x)


@pytest.mark.usefixtures("with_and_without_proof")
def test_a_module_that_calls_itself() -> None:
    with Twins.build(lambda: Does(_reenters)) as twins:
        for _ in range(5):
            twins(torch.randn(3, 4))
        check_balance(twins.handle.stats)


@pytest.mark.filterwarnings("ignore:.* runs eager. limit")
def test_hg_37_every_path_balances() -> None:
    module = Does(_picky)
    handle = hookgraph.attach(module, max_graphs=1, max_batch_size=8)
    count = 0

    def call(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        with contextlib.suppress(Exception):
            module(*args, **kwargs)
        check_balance(handle.stats)
        assert handle.stats.calls == count

    for _ in range(3):
        call(X)
    call(torch.randn(3, 4))
    call(torch.randn(5, 4))  # beyond the limit
    call(torch.randn(9, 4))  # beyond the batch size
    call(torch.randn(2, 5))  # a wrong shape
    call(X, object())  # too many arguments
    call(X, {1, 2}), call([], {}), call()
    with torch.enable_grad():
        call(X)
    module.train()
    call(X)
    module.eval()
    with hookgraph.disabled():
        call(X)
    with handle.paused():
        call(X)
    call(X.to("meta"))
    call(X.double())
    with torch.autocast("cpu", torch.bfloat16):
        call(X)
    with torch.inference_mode():
        call(X)
    assert handle.stats.replays >= 1
    assert handle.stats.errors >= 1


# -- on_fallback ------------------------------------------------------------------------------------------------


def test_on_fallback_warn() -> None:
    """Once per module and reason."""
    module = Does(lambda m, x: m.linear(x) * x.sum().item())
    hookgraph.attach(module, on_fallback="warn")
    with pytest.warns(hookgraph.HookgraphWarning, match="read_back"):
        module(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(X)
        module(X)


def test_on_fallback_raise() -> None:
    module = Does(lambda m, x: m.linear(x))
    handle = hookgraph.attach(module, on_fallback="raise", max_graphs=1)
    for _ in range(3):
        module(X)
    with pytest.raises(hookgraph.HookgraphError, match="limit"):
        module(torch.randn(3, 4))
    module(X)
    check_balance(handle.stats)
    assert handle.stats.replays == 2


def test_attributes_of_the_module_may_be_read_in_a_replay(no_residue: Watch) -> None:
    """What the user stores on the module between two calls is no business of a graph that never reads it."""
    with Twins.build(mlp) as twins:
        calls(twins, 4)
        twins.apply(lambda module: setattr(module, "note", "mine"))
        calls(twins, 4)
        assert twins.outcomes[-1] == "replays"
