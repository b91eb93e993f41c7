"""Which calls are the same to a graph and which are not: every one of them is right."""

from __future__ import annotations

import copy
import enum
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hookgraph
from tests.modules import Does, Norms, Sample, Scaled, Tagged, mlp
from tests.parity import Twins

NAN = float("nan")
loud = pytest.mark.filterwarnings("ignore:.* runs eager. (limit|scalar_churn)")  # said once, and expected here


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def by_type(module: Does, x: torch.Tensor, t: Any = None) -> torch.Tensor:
    """A different formula for each type, and for each sign of zero."""
    if isinstance(t, torch.Tensor):
        return module.linear(x) * t.sum() + t.numel()
    offsets = {bool: 100.0, int: 200.0, float: 300.0, str: 400.0, type(None): 500.0}
    sign = math.copysign(1.0, t) if isinstance(t, (int, float)) else 1.0
    return module.linear(x) + offsets.get(type(t), 600.0) * sign + (0.0 if t is None or isinstance(t, str) else t)


# -- scalars -----------------------------------------------------------------------------------


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


class Level(enum.IntEnum):
    ONE = 1


SCALARS: dict[str, list[Any]] = {
    "1, 1.0, True": [1, 1.0, True],
    "0, 0.0, False, -0.0": [0, 0.0, False, -0.0],
    "nan": [NAN, float("nan"), 1.0],
    "infinities": [math.inf, -math.inf],
    "numpy scalars": [np.float32(0.5), np.float64(0.5), 0.5, np.int64(1), np.bool_(True)],
    "integer enum": [Level.ONE, 1],
    "big integers": [2**62, 2**62 + 1],
}


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("values", SCALARS.values(), ids=SCALARS)
@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
def test_hg_14_scalars_count_by_type_and_value(values: list[Any], by_name: bool) -> None:
    with Twins.build(lambda: Does(by_type), max_graphs=8) as twins:
        for _ in range(4):
            for value in values:
                x = torch.randn(2, 4)
                twins(x, t=value) if by_name else twins(x, value)


def test_hg_14_nan_equals_itself() -> None:
    """NaN does not capture for ever."""
    with Twins.build(lambda: Does(by_type)) as twins:
        for _ in range(6):
            twins(torch.randn(2, 4), float("nan"))
        assert twins.outcomes == ["warmups", "captures"] + ["replays"] * 4


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(["fast", "slow"], id="strings"),
        pytest.param([Mode.FAST, Mode.SLOW], id="enums"),
        pytest.param([torch.float64, torch.float16], id="dtypes"),
        pytest.param([torch.device("cpu"), torch.device("meta")], id="devices"),
        pytest.param([(1, 2), (2, 1), [1, 2]], id="tuples and lists"),
        pytest.param([torch.Size([1, 2]), (1, 2)], id="sizes"),
        pytest.param([{"a": 1}, {"a": 2}, {"b": 1}], id="dicts"),
        pytest.param([b"a", b"b"], id="bytes"),
        pytest.param([slice(0, 1), slice(1, 2)], id="slices"),
        pytest.param([1 + 2j, 1 - 2j], id="complex"),
    ],
)
def test_plain_values_count_by_value(values: list[Any]) -> None:
    def forward(module: Does, x: torch.Tensor, value: Any) -> tuple[torch.Tensor, str]:
        text = f"{type(value).__name__} {value}"
        return module.linear(x) + sum(map(ord, text)), text

    with Twins.build(lambda: Does(forward), max_graphs=8) as twins:
        for _ in range(4):
            for value in values:
                twins(torch.randn(2, 4), value)


def test_equal_strings_and_enums_are_one_signature() -> None:
    with Twins.build(lambda: Does(lambda m, x, mode, text: m.linear(x))) as twins:
        for i in range(5):
            twins(torch.randn(2, 4), Mode.FAST, "".join(["fa", "st"]) if i % 2 else "fast")
        assert twins.outcomes == ["warmups", "captures", "replays", "replays", "replays"]


@loud
def test_hg_14_a_scalar_that_changes_on_every_call() -> None:
    """At most ``max_graphs`` captures; seen in the stats, with the name of the argument."""
    with Twins.build(Scaled, max_graphs=4) as twins:
        for step in range(40):
            twins(torch.randn(2, 4), t=999.0 - step)
        stats = twins.handle.stats
        assert stats.captures <= 4
        assert stats.reasons["scalar_churn"] >= 30
        details = stats.modules[0].details["scalar_churn"]
        assert all("t" in text for text in details)
        assert any("kwargs['t']" in text for text in details), details


@loud
def test_hg_14_churn_leaves_room_for_what_can_be_replayed() -> None:
    """A scalar that changes on every call does not eat the bound."""
    with Twins.build(Scaled, max_graphs=2) as twins:
        for step in range(30):
            twins(torch.randn(2, 4), 1.0 + step)
        for _ in range(5):
            twins(torch.randn(3, 4), torch.tensor(2.0))
        assert twins.outcomes[-3:] == ["replays"] * 3


def test_hg_14_a_scalar_with_few_values_is_no_churn() -> None:
    """ControlNet's scale, or a classifier-free guidance flag."""
    with Twins.build(Scaled, max_graphs=2) as twins:
        for step in range(12):
            twins(torch.randn(2, 4), scale=(0.7, 0.0)[step % 2])
        assert twins.count("captures") == 2
        assert twins.count("replays") == 8


def test_hg_17_a_tensor_in_place_of_a_scalar_is_an_input() -> None:
    with Twins.build(Scaled) as twins:
        for step in range(6):
            twins(torch.randn(2, 4), torch.tensor(999.0 - step))
        assert twins.outcomes == ["warmups", "captures"] + ["replays"] * 4


# -- None, containers, style of the call ---------------------------------------------------------


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_20_none_given_empty_and_omitted() -> None:
    with Twins.build(lambda: Does(by_type), max_graphs=8) as twins:
        for _ in range(4):
            x = torch.randn(2, 4)
            twins(x, None)
            twins(x, torch.randn(1, 3, 4))
            twins(x, torch.randn(1, 0, 4))
            twins(x)
        assert twins.count("replays") == 8


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_06_tensors_in_containers() -> None:
    def forward(module: Does, x: torch.Tensor, extras: Any, res: Any) -> torch.Tensor:
        y = module.linear(x) + extras["added"]["emb"]
        for i, tensor in enumerate(res):
            y = y + tensor * (i + 1)
        return y

    with Twins.build(lambda: Does(forward), max_graphs=8) as twins:
        t1, t2, t3 = torch.randn(3, 2, 4)
        for _ in range(3):
            twins(torch.ones(2, 4), extras={"added": {"emb": t1}}, res=[t2, t3])
        t3 = torch.randn(2, 4)  # only this one changes
        twins(torch.ones(2, 4), extras={"added": {"emb": t1}}, res=[t2, t3])
        assert twins.outcomes[-1] == "replays"
        for _ in range(4):
            twins(torch.ones(2, 4), extras={"added": {"emb": t1}}, res=[t2])
            twins(torch.ones(2, 4), res=[t2, t3], extras={"added": {"emb": t1, "more": t2}})
            twins(torch.ones(2, 4), res=(t3, t2), extras={"added": {"more": t2, "emb": t1}})


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda t: Sample(t, 2.0), id="dataclass"),
        pytest.param(lambda t: SimpleNamespace(sample=t, scale=2.0), id="namespace"),
    ],
)
def test_hg_15_tensors_in_objects(wrap: Callable[[torch.Tensor], Any]) -> None:
    """A fresh object for each call, same shapes, other values: never a stale replay."""
    with Twins.build(lambda: Does(lambda m, x, meta: m.linear(x) * meta.sample + meta.scale)) as twins:
        for _ in range(6):
            twins(torch.randn(2, 4), wrap(torch.randn(2, 4)))
        stats = twins.handle.stats
        assert stats.replays == 4 or set(stats.reasons) == {"unsupported_argument"}


class PositionCache:
    """Knows its length in Python; the forward makes positions from it."""

    def __init__(self) -> None:
        self.keys = torch.zeros(0, 4)

    def get_seq_length(self) -> int:
        return self.keys.shape[0] % 3

    def update(self, x: torch.Tensor) -> torch.Tensor:
        self.keys = torch.cat([self.keys, x])
        return self.keys


def test_hg_15_positions_made_from_an_object_s_length() -> None:
    def forward(module: Does, x: torch.Tensor, cache: Any) -> torch.Tensor:
        start = cache.get_seq_length()
        return (module.linear(x) * torch.arange(start, start + 2)[:, None]) + cache.update(x).sum()

    with Twins.build(lambda: Does(forward)) as twins:
        cache = twins.keep(PositionCache())
        for _ in range(6):
            twins(torch.randn(2, 4), cache)
        assert set(twins.handle.stats.reasons) <= {"unsupported_argument"}


def test_an_opaque_argument_is_named() -> None:
    with Twins.build(lambda: Does(lambda m, x, thing=None: m.linear(x))) as twins:
        thing = twins.keep(PositionCache())
        for _ in range(3):
            twins(torch.randn(2, 4), thing=thing)
        assert twins.outcomes == ["eager:unsupported_argument"] * 3
        (detail,) = twins.handle.stats.modules[0].details["unsupported_argument"]
        assert "kwargs['thing']" in detail
        assert "PositionCache" in detail


def test_a_callable_argument_is_never_baked() -> None:
    with Twins.build(lambda: Does(lambda m, x, act: act(m.linear(x)))) as twins:
        for _ in range(3):
            for act in (torch.relu, torch.tanh, torch.nn.functional.silu):
                twins(torch.randn(2, 4), act)


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_46_by_position_and_by_name() -> None:
    with Twins.build(Scaled) as twins:
        t = torch.tensor(3.0)
        for _ in range(4):
            twins(torch.randn(2, 4), t)
            twins(torch.randn(2, 4), t=t)
            twins(x=torch.randn(2, 4), t=t)
        assert twins.count("errors") == 0


# -- layouts of tensors ----------------------------------------------------------------------------


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(3, 4),
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "expanded from a number": lambda: torch.randn(()).expand(3, 4),
    "transposed": lambda: torch.randn(4, 3).t(),
    "every other column": lambda: torch.randn(3, 8)[:, ::2],
    "a slice with an offset": lambda: torch.randn(9, 4)[3:6],
    "no dimensions": lambda: torch.randn(()),
    "no elements": lambda: torch.randn(0, 4),
    "no elements, strided": lambda: torch.randn(3, 0, 4)[:, :, ::2].sum(1)[:, :0],
    "half": lambda: torch.randn(3, 4).half(),
    "bfloat16": lambda: torch.randn(3, 4).bfloat16(),
    "double": lambda: torch.randn(3, 4).double(),
    "int32": lambda: torch.randint(9, (3, 4), dtype=torch.int32),
    "int64": lambda: torch.randint(9, (3, 4)),
    "bool": lambda: torch.rand(3, 4) > 0.5,
    "complex": lambda: torch.randn(3, 4, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, 4, dtype=torch.complex64).conj().imag,
    "parameter": lambda: nn.Parameter(torch.randn(3, 4), requires_grad=False),
}


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hg_21_layouts(layout: str) -> None:
    """Same layout, other values: one signature, whatever the layout."""

    def forward(module: Does, t: torch.Tensor) -> Any:
        return t * 2, t.flatten(), t.stride() if t.dim() > 1 else None

    with Twins.build(lambda: Does(forward)) as twins:
        for _ in range(5):
            twins(LAYOUTS[layout]())
        if layout != "parameter":
            assert twins.outcomes == ["warmups", "captures", "replays", "replays", "replays"]


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_21_expanded_then_contiguous() -> None:
    with Twins.build(lambda: Does(lambda m, x, mask: m.linear(x) * mask)) as twins:
        for _ in range(4):
            twins(torch.randn(3, 1, 4), torch.randn(1, 1, 4).expand(3, 1, 4))
        for _ in range(4):
            twins(torch.randn(3, 1, 4), torch.randn(3, 1, 4))
        assert twins.count("replays") == 4


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_23_dtypes_and_shapes_are_signatures_of_their_own() -> None:
    with Twins.build(lambda: Does(lambda m, x: (x * 2, x.sum())), max_graphs=16) as twins:
        for _ in range(4):
            for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64):
                twins(torch.arange(12).reshape(4, 3).to(dtype))
            for shape in ((4, 3), (1, 3), (3,), ()):
                twins(torch.randn(shape))
        assert twins.count("captures") == 8
        assert twins.count("replays") == 20


@pytest.mark.parametrize("part", range(3), ids=lambda i: f"offset {i * 8}")
def test_a_storage_offset_makes_no_signature(part: int) -> None:
    """A step's timestep is a view that moves through one tensor."""
    with Twins.build(lambda: Does(lambda m, x: m.linear(x))) as twins:
        for step in range(6):
            steps = torch.randn(6, 2, 4)
            twins(steps[(step + part) % 6])
        assert twins.outcomes == ["warmups", "captures"] + ["replays"] * 4


def test_strides_of_dimensions_of_one_make_no_signature() -> None:
    with Twins.build(lambda: Does(lambda m, x: m.linear(x))) as twins:
        for step in range(6):
            twins(torch.randn(50).as_strided((1, 4, 1, 4), (step, 4, 7 * step, 1)))
        assert twins.outcomes == ["warmups", "captures"] + ["replays"] * 4


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.randn(3, 4).relu().to_sparse(), id="sparse"),
        pytest.param(lambda: torch.randn(6).as_strided((3, 4), (1, 1)), id="overlapping"),
        pytest.param(lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 0, torch.qint8), id="quantized"),
        pytest.param(lambda: torch.randn(3, 4).as_subclass(Tagged), id="subclass"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_unusual_kinds_of_tensors_run_eager(make: Callable[[], torch.Tensor]) -> None:
    module = Does(lambda m, x, t: (m.linear(x), t.shape[0]))
    handle = hookgraph.attach(module)
    for _ in range(4):
        x = torch.randn(2, 4)
        y, size = module(x, make())
        assert torch.equal(y, module.linear(x))
        assert size == 3
    stats = handle.stats
    assert stats.replays == 4 - 2 or stats.reasons == {"tensor_kind": 4}


def test_hg_30_mixed_devices() -> None:
    with Twins.build(lambda: Does(lambda m, x, shape: m.linear(x) + shape.shape[0])) as twins:
        for n in (3, 3, 3, 4):
            twins(torch.randn(2, 4), torch.empty(n, device="meta"))
        assert twins.outcomes == ["eager:mixed_devices"] * 4


# -- which argument is which -------------------------------------------------------------------------


@pytest.mark.usefixtures("with_and_without_proof")
def test_the_same_tensor_twice_is_not_two_equal_tensors() -> None:
    """``MultiheadAttention`` packs its projections when ``query is key is value``."""
    with Twins.build(lambda: nn.MultiheadAttention(8, 2, batch_first=True), max_graphs=8) as twins:
        for _ in range(4):
            x = torch.randn(2, 3, 8)
            twins(x, x, x)
            y = torch.randn(2, 3, 8)
            twins(x, y, y)
            twins(x, y, y.clone())


@pytest.mark.usefixtures("with_and_without_proof")
def test_identity_of_arguments() -> None:
    def forward(module: Does, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return module.linear(a) + (b if a is b else 10 * b)

    with Twins.build(lambda: Does(forward), max_graphs=4) as twins:
        for _ in range(4):
            a, b = torch.randn(2, 2, 4)
            twins(a, b)
            twins(a, a)
            twins(a, a.clone())


@pytest.mark.usefixtures("with_and_without_proof")
def test_one_list_twice_is_not_two_equal_lists() -> None:
    def forward(module: Does, a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
        a.append(a[0] + 1)
        return sum(b, start=module.linear(a[0]))  # type: ignore[return-value]

    with Twins.build(lambda: Does(forward), max_graphs=4) as twins:
        for _ in range(4):
            same = [torch.randn(2, 4)]
            twins(same, same)
            twins([torch.randn(2, 4)], [torch.randn(2, 4)])


# -- what surrounds a call ---------------------------------------------------------------------------


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AMBIENTS: dict[str, list[Callable[[], AbstractContextManager[Any]]]] = {
    "inference mode": [torch.no_grad, torch.inference_mode],
    "autocast": [
        nullcontext,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.autocast("cpu", torch.bfloat16, enabled=False),
    ],
    "default dtype": [nullcontext, lambda: default_dtype(torch.float64)],
    "default device": [nullcontext, lambda: torch.device("cpu"), lambda: torch.device("meta")],
    "attention kernel": [nullcontext, lambda: sdpa_kernel(SDPBackend.MATH)],
    "deterministic": [nullcontext, deterministic],
}


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("contexts", AMBIENTS.values(), ids=AMBIENTS)
@pytest.mark.parametrize("order", ["in blocks", "in turn"])
def test_ambient_state(contexts: list[Callable[[], AbstractContextManager[Any]]], order: str) -> None:
    """HG-24, HG-25: the same arguments in another context are another call."""

    def forward(module: Does, x: torch.Tensor) -> Any:
        q = module.linear(x)[None, None]
        attended = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        return attended, torch.ones(2).dtype, torch.zeros(2, 2, dtype=torch.float32).device, module.linear(x)

    calls = [context for context in contexts for _ in range(4)] if order == "in blocks" else contexts * 4
    with Twins.build(lambda: Does(forward), max_graphs=8) as twins:
        for context in calls:
            x = torch.randn(8, 4)
            with context():
                twins(x)
        assert twins.count("replays") >= 4, twins.outcomes


def test_hg_24_a_weight_edited_between_two_autocast_blocks() -> None:
    """Inside one block eager keeps its cast of the old weight, until the block ends."""
    with Twins.build(mlp) as twins:
        for step in range(8):
            with torch.autocast("cpu", torch.bfloat16):
                twins(torch.randn(2, 4))
            if step in (1, 4, 6):
                twins.apply(lambda module: module[0].weight.mul_(2))
        assert twins.count("replays") == 6, twins.outcomes


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_24_trainable_weights_and_the_autocast_cache() -> None:
    """The cache holds casts of weights that require grad; a graph must neither fill nor keep it."""
    with Twins.build(mlp) as twins:
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                twins(torch.randn(2, 4))
        gc.collect()
        with torch.autocast("cpu", torch.bfloat16):
            twins(torch.randn(2, 4))


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_25_inference_grad_and_no_grad_in_turn() -> None:
    with Twins.build(mlp) as twins:
        with torch.inference_mode():
            for _ in range(3):
                twins(torch.randn(2, 4))
        with torch.enable_grad():
            out = twins(torch.randn(2, 4))
            twins.backward(out)
        for _ in range(3):
            twins(torch.randn(2, 4))
        with torch.inference_mode():
            twins(torch.randn(2, 4))
        assert twins.outcomes[3] == "eager:needs_grad"
        assert twins.outcomes[2] == twins.outcomes[-1] == "replays"


def test_hg_25_inference_tensors_outside_of_inference_mode() -> None:
    with torch.inference_mode():
        inputs = [torch.randn(2, 4) for _ in range(8)]
    with Twins.build(mlp) as twins:
        for x in inputs[:4]:
            twins(x)
        with torch.inference_mode():
            for x in inputs[4:]:
                twins(x)
            twins(torch.randn(2, 4))


def test_needs_grad() -> None:
    with Twins.build(mlp) as twins:
        for _ in range(3):
            twins(torch.randn(2, 4))
        with torch.enable_grad():
            for _ in range(3):
                out = twins(torch.randn(2, 4))
                twins.backward(out)
        twins(torch.randn(2, 4))
        assert twins.outcomes[3:6] == ["eager:needs_grad"] * 3
        assert twins.outcomes[6] == "replays"


def test_gradients_reach_an_argument() -> None:
    with torch.enable_grad(), Twins.build(lambda: mlp().requires_grad_(False)) as twins:
        for _ in range(3):
            x = twins.keep(nn.Parameter(torch.randn(2, 4)))
            twins.backward(twins(x))
            assert torch.equal(x.eager.grad, x.attached.grad)
        assert twins.outcomes == ["eager:needs_grad"] * 3


def test_grad_mode_without_anything_that_needs_it_replays() -> None:
    with torch.enable_grad(), Twins.build(lambda: mlp().requires_grad_(False)) as twins:
        for _ in range(5):
            twins(torch.randn(2, 4))
        assert twins.count("replays") == 3


def test_an_argument_that_requires_grad_under_no_grad() -> None:
    with Twins.build(lambda: Does(lambda m, x: (m.linear(x), x.requires_grad))) as twins:
        for _ in range(4):
            twins(torch.randn(2, 4).requires_grad_())
            twins(torch.randn(2, 4))


def test_training_mode() -> None:
    with Twins.build(Norms) as twins:
        for _ in range(3):
            twins(torch.randn(3, 4))
        twins.apply(lambda module: module.train())
        for _ in range(3):
            twins(torch.randn(3, 4))
        assert twins.outcomes[3:] == ["eager:training"] * 3
        twins.apply(lambda module: module.eval())
        twins(torch.randn(3, 4))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_functorch() -> None:
    module = mlp()
    handle = hookgraph.attach(module)
    x, direction = torch.randn(3, 2, 4), torch.randn(2, 4)
    for _ in range(3):
        module(x[0])
    plain = copy.deepcopy(module)
    assert torch.equal(torch.func.vmap(module)(x), torch.func.vmap(plain)(x))
    mine, theirs = (torch.func.jvp(m, (x[0],), (direction,)) for m in (module, plain))
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])
    assert handle.stats.reasons == {"tracing": 2}


def test_swapped_parameters_are_used() -> None:
    """``functional_call`` runs the hooks with other parameters: a graph would use the module's own."""
    module = mlp()
    handle = hookgraph.attach(module)
    x = torch.randn(2, 4)
    for _ in range(4):
        module(x)
    other = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    expected = torch.nn.functional.linear(x, other["0.weight"], other["0.bias"])
    expected = torch.nn.functional.linear(torch.nn.functional.gelu(expected), other["2.weight"], other["2.bias"])
    for _ in range(3):
        assert torch.equal(torch.func.functional_call(module, other, (x,)), expected)
    before = handle.stats.replays
    module(x)
    module(x)
    module(x)
    assert handle.stats.replays > before


# -- bounds --------------------------------------------------------------------------------------------


def test_max_batch_size() -> None:
    """The batch is dimension 0 of the first floating-point tensor; a larger one runs eager."""

    def forward(module: Does, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return module.linear(x) + ids.sum()

    with Twins.build(lambda: Does(forward), max_batch_size=2) as twins:
        for _ in range(4):
            twins(torch.arange(9), torch.randn(2, 4))
            twins(torch.arange(9), torch.randn(3, 4))
            twins(torch.arange(9), x=torch.randn(1, 4))
        assert twins.outcomes[1::3] == ["eager:batch_size"] * 4
        assert twins.count("replays") == 4
        (detail,) = twins.handle.stats.modules[0].details["batch_size"]
        assert "3" in detail


@loud
def test_hg_34_no_eviction() -> None:
    with Twins.build(mlp, max_graphs=2) as twins:
        a, b, c, d = (torch.randn(n, 4) for n in (1, 2, 3, 4))
        for x in (a, a, a, b, b, b):
            twins(x)
        for x in (c, d, c, d):
            twins(x)
        assert twins.outcomes[-4:] == ["eager:limit"] * 4
        for x in (a, b, a, b):
            twins(x)
        assert twins.outcomes[-4:] == ["replays"] * 4


@loud
def test_hg_35_a_hundred_lengths() -> None:
    with Twins.build(mlp, max_graphs=4) as twins:
        for length in range(1, 101):
            twins(torch.randn(length, 4))
        assert twins.outcomes == ["warmups"] * 4 + ["eager:limit"] * 96
        for length in range(1, 5):
            twins(torch.randn(length, 4))
        assert twins.outcomes[-4:] == ["captures"] * 4
        for length in range(1, 5):
            twins(torch.randn(length, 4))
        assert twins.outcomes[-4:] == ["replays"] * 4


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@loud
def test_hg_35_what_is_beyond_the_bound_is_not_kept() -> None:
    module = mlp()
    hookgraph.attach(module, max_graphs=2)
    for _ in range(2):
        for length in range(1, 4):
            module(torch.randn(length, 4))
    before = _live_tensors()
    alive = []
    for length in range(4, 60):
        x = torch.randn(length, 4)
        alive.append(weakref.ref(x))
        alive.append(weakref.ref(module(x)))
        del x
    assert _live_tensors() == before
    assert not [ref for ref in alive if ref() is not None]


def test_arguments_of_a_captured_signature_are_not_kept() -> None:
    module = Does(lambda m, x, more: (m.linear(x), more["a"] + 1))
    hookgraph.attach(module)
    alive = []
    for _ in range(4):
        x, more = torch.randn(2, 4), {"a": torch.randn(3)}
        alive += [weakref.ref(x), weakref.ref(more["a"])]
        module(x, more)
        del x, more
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


def test_max_bytes() -> None:
    with Twins.build(mlp, max_bytes=64 * 4 * 4, max_graphs=8) as twins:
        for _ in range(4):
            twins(torch.randn(2, 4))
            twins(torch.randn(4096, 4))
        assert twins.outcomes[-1] == "eager:memory"
        assert twins.outcomes[-2] == "replays"


def test_a_warm_up_count_of_three() -> None:
    with Twins.build(mlp, warmup=3) as twins:
        for _ in range(6):
            twins(torch.randn(2, 4))
        assert twins.outcomes == ["warmups"] * 3 + ["captures"] + ["replays"] * 2
