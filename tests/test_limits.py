"""The limits that docs/limits.md names and that no other test is about: what is not noticed, and what each option gives up."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from hookgraph import ambient, audit, private_torch
from hookgraph.audit import Audit, watch
from tests.modules import Does, mlp
from tests.residue import Watch

X = torch.arange(8.0).reshape(2, 4) / 8


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _trusted(module: nn.Module, **options: Any) -> hookgraph.Attachment:
    """Attach, and call until the one signature is trusted."""
    handle = hookgraph.attach(module, **options)
    for step in range(4):
        module(X + step)
    assert handle.stats.modules[0].signatures[0].state == "trusted"
    return handle


def _agrees(module: nn.Module, handle: hookgraph.Attachment) -> bool:
    """Whether the next call is a replay (it has to be) that gives what eager gives."""
    replays = handle.stats.replays
    found = module(X)
    assert handle.stats.replays == replays + 1
    with hookgraph.disabled():
        return torch.equal(found, module(X))


# -- not noticed, until the user tells ----------------------------------------------------------------


def _check_that_it_has_to_be_told(module: nn.Module, handle: hookgraph.Attachment) -> None:
    """A replay is stale now, and right again after ``invalidate()``."""
    assert not _agrees(module, handle)
    handle.invalidate("told by the user")
    for step in range(4):
        module(X + step)
    assert _agrees(module, handle)


def _change_a_global(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(SETTINGS, "factor", 3.0)


def _change_the_environment(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HOOKGRAPH_TEST_FACTOR", "3.0")


def _change_a_class_attribute(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Child, "factor", 3.0)


def _replace_a_forward(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Child, "forward", lambda self, x: x * 3.0)


SETTINGS = {"factor": 1.0}


class Child(nn.Module):
    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.child = nn.Linear(4, 4), Child()
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(self.linear(x)) * SETTINGS["factor"] * float(os.environ.get("HOOKGRAPH_TEST_FACTOR", "1"))


@pytest.mark.parametrize(
    "change",
    [_change_a_global, _change_the_environment, _change_a_class_attribute, _replace_a_forward],
    ids=["global", "environment", "class attribute", "forward of a class"],
)
def test_values_from_outside_are_fixed_until_invalidated(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Parent()
    handle = _trusted(module)
    assert _agrees(module, handle)
    with monkeypatch.context() as patch:
        change(patch)
        _check_that_it_has_to_be_told(module, handle)


class Scale:
    scale = 1.0


def _event() -> tuple[Any, Callable[[Any], float], Callable[[Any], Any]]:
    return threading.Event(), lambda event: 2.0 if event.is_set() else 1.0, lambda event: event.set()


def _long_list() -> tuple[Any, Callable[[Any], float], Callable[[Any], Any]]:
    return [1.0] * 5000, lambda values: values[7], lambda values: values.__setitem__(7, 3.0)


def _weak() -> tuple[Any, Callable[[Any], float], Callable[[Any], Any]]:
    kept = Scale()
    return weakref.ref(kept), lambda ref: kept.scale if ref() is kept else 0.0, lambda ref: setattr(ref(), "scale", 3.0)


def _function() -> tuple[Any, Callable[[Any], float], Callable[[Any], Any]]:
    def act() -> float:
        return float(act.scale)  # type: ignore[attr-defined]

    act.scale = 1.0  # type: ignore[attr-defined]
    return act, lambda function: function(), lambda function: setattr(function, "scale", 3.0)


@pytest.mark.parametrize("make", [_event, _long_list, _weak, _function])
def test_state_that_is_not_looked_at(make: Callable[[], Any]) -> None:
    state, read, change = make()
    module = Does(lambda m, x: m.linear(x) * read(m.state[0]))
    module.state = (state,)
    handle = _trusted(module)
    assert _agrees(module, handle)
    change(state)
    _check_that_it_has_to_be_told(module, handle)


def test_an_attribute_of_a_weight_is_looked_at() -> None:
    """Quantised weights carry their scale so."""
    module = Does(lambda m, x: m.linear(x) * m.linear.weight.scale)
    module.linear.weight.scale = 1.0
    handle = _trusted(module)
    assert _agrees(module, handle)
    module.linear.weight.scale = 3.0
    assert torch.equal(module(X), module.linear(X) * 3.0)
    assert handle.stats.modules[0].invalidations == 1


def test_a_forward_put_on_a_submodule_is_noticed(no_residue: Watch) -> None:
    module = Parent()
    handle = _trusted(module)
    no_residue.allow(module, "new: child.forward*", "changed: child signature")
    module.child.forward = lambda x: x * 3.0
    assert torch.equal(module(X), module.linear(X) * 3.0)
    assert handle.stats.modules[0].invalidations == 1


def test_python_runs_at_the_warm_up_the_capture_and_the_comparisons_only() -> None:
    runs = []
    module = Does(lambda m, x: (runs.append(1), m.linear(x))[1])
    with hookgraph.attach(module, verify=1) as handle:
        for step in range(12):
            module(X + step)
        assert len(runs) == 4  # warm-up, capture, and eager beside the first two replays
        assert (handle.stats.warmups, handle.stats.captures, handle.stats.replays) == (1, 1, 10)


@pytest.mark.parametrize(("verify_every", "runs_in_all"), [(None, 2), (5, 4)])
def test_without_proof_a_capture_is_trusted_unseen(verify_every: int | None, runs_in_all: int) -> None:
    runs = []
    module = Does(lambda m, x: (runs.append(1), m.linear(x))[1])
    with hookgraph.attach(module, verify=0, verify_every=verify_every):
        for step in range(12):
            module(X + step)
        assert len(runs) == runs_in_all


# -- options that check less -----------------------------------------------------------------------------


def test_without_guards_moved_weights_are_not_seen() -> None:
    module = mlp()
    handle = _trusted(module, guards="off")
    before = module[0].weight.data  # kept alive: the graph goes on reading it
    module[0].weight.data = before * 2
    assert not _agrees(module, handle)


def test_guards_of_weights_do_not_see_plain_attributes(no_residue: Watch) -> None:
    module = Does(lambda m, x: m.linear(x) * m.factor, factor=1.0)
    handle = _trusted(module, guards="weights")
    no_residue.allow(module, "changed: <root>.factor")
    module.factor = 2.0
    assert not _agrees(module, handle)
    module.linear.weight.data = module.linear.weight.data.clone()  # weights they do see
    module(X)
    assert handle.stats.modules[0].invalidations == 1


def test_full_guards_see_a_plain_attribute(no_residue: Watch) -> None:
    module = Does(lambda m, x: m.linear(x) * m.factor, factor=1.0)
    handle = _trusted(module)
    no_residue.allow(module, "changed: <root>.factor")
    module.factor = 2.0
    replays = handle.stats.replays
    assert torch.equal(module(X), module.linear(X) * 2.0)
    assert handle.stats.replays == replays


# -- several processes -------------------------------------------------------------------------------------


@pytest.fixture
def one_process() -> Iterator[Any]:
    """A process group of this process alone, on the CPU: the real libraries, with nobody to talk to."""
    import torch.distributed as dist

    if not dist.is_available():
        pytest.skip("a build of torch with torch.distributed would run it")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


def test_weights_sharded_by_fsdp_are_named(one_process: Any) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    module = mlp()
    fsdp.fully_shard(module, mesh=one_process.init_device_mesh("cpu", (1,)))
    handle = hookgraph.attach.__wrapped__(module)  # type: ignore[attr-defined]
    for _ in range(3):
        module(X)
    assert handle.stats.modules[0].details["foreign_hook"] == {"sharded weights (FSDP) on the module itself": 3}
    handle.detach()


def test_the_module_inside_data_parallel_is_served(one_process: Any) -> None:
    wrapped = nn.parallel.DistributedDataParallel(mlp())
    expected = [wrapped(X + step) for step in range(5)]
    handle = hookgraph.attach(wrapped, "module")
    for step in range(5):
        assert torch.equal(wrapped(X + step), expected[step])
    assert (handle.stats.warmups, handle.stats.captures, handle.stats.replays) == (1, 1, 3)


def test_tensor_parallel_layers_have_hooks(one_process: Any) -> None:
    parallel = pytest.importorskip("torch.distributed.tensor.parallel")
    module = mlp()
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    parallel.parallelize_module(module, one_process.init_device_mesh("cpu", (1,)), plan)
    handle = hookgraph.attach.__wrapped__(module)  # type: ignore[attr-defined]
    for _ in range(3):
        module(X)
    assert handle.stats.reasons == {"child_hooks": 3}
    handle.detach()


# -- what a replay cannot give back -------------------------------------------------------------------------


def test_an_output_with_attributes_of_its_own_runs_eager() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = m.linear(x)
        y.note = "made by the forward"  # type: ignore[attr-defined]
        return y

    module = Does(forward)
    handle = hookgraph.attach(module)
    for _ in range(4):
        assert module(X).note == "made by the forward"
    assert set(handle.stats.reasons) == {"output_kind"}


def test_attributes_on_an_argument_are_not_part_of_the_signature() -> None:
    module = mlp()
    handle = _trusted(module)
    marked = X.clone()
    marked.note = "by the caller"  # type: ignore[attr-defined]
    module(marked)
    assert len(handle.stats.modules[0].signatures) == 1


# -- who looks for hooks or for the forward itself ---------------------------------------------------------------


def test_a_layer_that_looks_for_hooks_finds_ours() -> None:
    """``nn.TransformerEncoderLayer`` names the hooks as the reason why it leaves its fused path."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)

    def operators() -> set[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            layer(x)
        return {event.key for event in profiled.key_averages()}

    fused = "aten::_transformer_encoder_layer_fwd"
    assert fused in operators()
    with hookgraph.attach(layer), hookgraph.disabled():
        assert fused not in operators()
    inside = nn.Sequential(layer).eval()
    with hookgraph.attach(inside), hookgraph.disabled():
        assert fused in operators()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripting_needs_a_plain_module(no_residue: Watch) -> None:
    module = mlp()
    handle = hookgraph.attach(module)
    marked = ("<root>", "0", "1", "2")
    no_residue.allow(module, *(f"new: {name}.__overloads__*" for name in marked))  # by the script compiler
    with pytest.raises(TypeError, match="Seam"):
        torch.jit.script(module)
    handle.detach()
    assert torch.equal(torch.jit.script(module)(X), module(X))


# -- rules that only a GPU meets ------------------------------------------------------------------------------------


def test_too_much_from_the_host_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for one that is not the host, and a kilobyte for 256 MiB."""
    monkeypatch.setattr(audit, "_LARGEST_CONSTANTS", 1 << 10)
    meta = torch.device("meta")

    def blocked(elements: int) -> str | None:
        watching = Audit(meta, {}, {}, False)
        with watch(watching):
            torch.empty(2, 4, device=meta) + torch.arange(float(elements)).to(meta).sum()
        return watching.findings.blocker and watching.findings.blocker.reason.value

    assert blocked(4) is None
    assert blocked(1 << 10) == "host_copy"


def test_inside_another_capture_we_stand_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CPU can capture a stream, so the question to CUDA is answered here."""
    module = mlp()
    handle = hookgraph.attach(module)
    monkeypatch.setattr(private_torch, "stream_is_capturing", lambda: True)
    aside = ambient.standing_aside()
    assert aside is not None
    module(X)
    assert handle.stats.reasons == {aside.reason.value: 1} == {"capturing": 1}


def test_strides_of_a_cache_are_not_asked() -> None:
    """One signature whatever the layout of the cache; what the forward computes from its values is right."""
    caches = pytest.importorskip("transformers.cache_utils", reason="an environment with transformers would run it")

    def cache(turned: bool) -> Any:
        made, keys = caches.DynamicCache(), torch.arange(24.0).reshape(1, 2, 3, 4)
        made.update(keys, keys + 1, 0)
        if turned:
            for name in ("keys", "values"):
                tensor = getattr(made.layers[0], name)
                setattr(made.layers[0], name, tensor.transpose(1, 2).contiguous().transpose(1, 2))
        return made

    module = Does(lambda m, x, c: (m.linear(x) * c.layers[0].keys.sum(), c.layers[0].keys + 1))
    with torch.no_grad(), hookgraph.attach(module) as handle:
        for step in range(6):
            value, moved = module(torch.ones(2, 4), cache(turned=step > 3))
            expected = module.function(module, torch.ones(2, 4), cache(turned=step > 3))
            assert torch.equal(value, expected[0])
            assert torch.equal(moved, expected[1])
        assert handle.stats.replays == 4
        assert moved.stride() != expected[1].stride()


def test_a_write_that_counts_no_version() -> None:
    class Prompted(nn.Module):
        def forward(self, x: torch.Tensor, prompt: list[torch.Tensor]) -> torch.Tensor:
            return x * prompt[0]

    module, prompt = Prompted().eval(), [torch.ones(4)]
    with torch.no_grad(), hookgraph.attach(module, read_only=("prompt",)) as handle:
        for step in range(5):
            module(torch.full((4,), float(step)), prompt)
        prompt[0].data.mul_(3)
        assert torch.equal(module(torch.ones(4), prompt), torch.ones(4))
        handle.invalidate()
        assert torch.equal(module(torch.ones(4), prompt), torch.full((4,), 3.0))
