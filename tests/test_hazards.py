"""What goes wrong silently when a graph outlives what it was captured on, on real models: each ends right.

Each test changes something that the arguments do not show, between calls of a model that replays,
and compares every call with a plain twin, bit for bit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import zoo
from tests.parity import Both, Twins

diffusers = pytest.importorskip("diffusers", reason="needs the extra: pip install 'hookgraph[models]'")

# Trusted unseen, since then each replay's own values count; where the forward keeps state, with proof as well.
UNPROVED = {"verify": 0}
with_and_without_proof = pytest.mark.parametrize("proof", [{"verify": 1}, UNPROVED], ids=["proved", "unproved"])

GRAPHED = ["warmups", "captures", "replays", "replays"]
Event = Callable[[Any], Any]
Context = Callable[[], AbstractContextManager[Any]]


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def attention_backend_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """``module.set_attention_backend`` leaves its choice on the whole process; ``reset`` takes it off the module only."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", _AttentionBackendRegistry._active_backend)


class Driven:
    """A model and its twin, and the calls that their pipeline has yet to make."""

    def __init__(
        self,
        build: Callable[..., zoo.Case] = zoo.flux,
        prepare: Event = lambda module: None,
        steps: int = 14,
        **options: Any,
    ) -> None:
        self.eager, self.attached = build(steps=steps), build(steps=steps)
        for case in (self.eager, self.attached):
            torch.manual_seed(0)
            prepare(case.module)
        self._calls = iter(list(zip(self.eager.calls, self.attached.calls, strict=True)))
        self.twins = Twins(self.eager.module, self.attached.module, **UNPROVED | options)

    def __enter__(self) -> Driven:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.twins.__exit__(*exception)

    def calls(self, count: int, context: Context = nullcontext) -> list[str]:
        """Make the next calls, each in a context of its own; what became of them."""
        first = len(self.twins.outcomes)
        for _ in range(count):
            (args, kwargs), (other_args, other_kwargs) = next(self._calls)
            named = {name: Both(kwargs[name], other_kwargs[name]) for name in kwargs}
            with context():
                self.twins.run(self.twins.modules, *map(Both, args, other_args), **named)
        return self.twins.outcomes[first:]

    def event(self, change: Event) -> None:
        """Do the same to both models, from the same random state."""
        state = torch.get_rng_state()
        for module in (self.twins.modules.eager, self.twins.modules.attached):
            torch.set_rng_state(state)
            change(module)
        gc.collect()


def test_nothing_changes() -> None:
    with Driven() as driven:
        assert driven.calls(6) == [*GRAPHED, "replays", "replays"]


# -- weights -----------------------------------------------------------------------------------------


def _rebind(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 1.5


def _move(module: nn.Module) -> None:
    """Off the device and back: each tensor gets other memory, as offloading does."""
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


def _cast_and_back(module: nn.Module) -> None:
    module.to(torch.float64).to(torch.float32)


WEIGHTS: dict[str, tuple[Event, bool]] = {
    "updated in place": (lambda m: [p.data.mul_(1.5) for p in m.parameters()], True),
    "loaded": (lambda m: m.load_state_dict({name: v * 1.5 for name, v in m.state_dict().items()}), True),
    "rebound": (_rebind, False),
    "moved away and back": (_move, False),
    "cast and back": (_cast_and_back, False),
}


@pytest.mark.parametrize("change", WEIGHTS)
def test_weights(change: str) -> None:
    event, goes_on = WEIGHTS[change]
    with Driven() as driven:
        driven.calls(4)
        driven.event(event)
        assert driven.calls(4) == (["replays"] * 4 if goes_on else GRAPHED)


def test_weights_move_at_every_step() -> None:
    """As sequential offloading does; never stale, and no capture for ever."""
    with Driven() as driven:
        for _ in range(12):
            driven.calls(1)
            driven.event(_move)
        assert driven.twins.handle.stats.captures <= 6


@pytest.mark.parametrize("kind", ["sequential", "model"])
def test_accelerate_moves_weights(kind: str) -> None:
    """Their hooks stay on the module or on its children; on the CPU they move nothing, and change who is called."""
    accelerate = pytest.importorskip("accelerate")

    def offload(module: nn.Module) -> None:
        if kind == "sequential":
            accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
        else:
            accelerate.cpu_offload_with_hook(module, execution_device=torch.device("cpu"))

    with Driven(prepare=offload, attributes=False) as driven:  # where they keep the forward, ours is
        driven.calls(6)
        assert driven.twins.count("errors") == 0


# -- switches that no argument shows -----------------------------------------------------------------------


def test_attention_backend() -> None:
    with Driven() as driven:
        driven.calls(4)
        driven.event(lambda module: module.set_attention_backend("_native_math"))
        assert driven.calls(4)[0] != "replays"
        driven.event(lambda module: module.reset_attention_backend())
        assert driven.calls(4)[0] != "replays"
        assert driven.twins.outcomes[-1] == "replays"


@pytest.mark.parametrize("verify", [1, 0])
def test_attention_backend_of_the_process(verify: int) -> None:
    """``diffusers.attention_backend`` switches every model without touching any."""
    from diffusers.models.attention_dispatch import attention_backend

    with Driven(verify=verify) as driven:
        driven.calls(4)
        with attention_backend("_native_math"):
            assert driven.calls(3)[0] == "warmups"
        assert driven.calls(1) == ["replays"]
        with attention_backend("_native_math"):
            assert driven.calls(1) == ["replays"]


def test_attention_processors_are_fused() -> None:
    with Driven() as driven:
        driven.calls(4)
        driven.event(lambda module: module.fuse_qkv_projections())
        outcomes = driven.calls(4)
        assert outcomes[0] != "replays"
        assert outcomes[-1] == "replays"


def _add_adapters(module: Any) -> None:
    peft = pytest.importorskip("peft")
    for name in ("a", "b"):
        config = peft.LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)
        module.add_adapter(config, name)
    module.set_adapters(["a"], [1.0])
    module.eval().requires_grad_(False)


def _then_eval(change: Event) -> Event:
    def event(module: Any) -> None:
        change(module)
        module.eval().requires_grad_(False)

    return event


ADAPTERS: dict[str, Event] = {
    "another adapter": lambda m: m.set_adapters(["b"], [1.0]),
    "another weight": lambda m: m.set_adapters(["a"], [0.3]),
    "both": lambda m: m.set_adapters(["a", "b"], [0.5, 0.5]),
    "disabled": lambda m: m.disable_adapters(),
    "fused": lambda m: m.fuse_lora(),
    "deleted": lambda m: m.delete_adapters(["a"]),
}


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute", "ignore:Adapter a was active")
@pytest.mark.parametrize("change", ADAPTERS)
def test_lora(change: str) -> None:
    with Driven(prepare=_add_adapters) as driven:
        assert driven.calls(4) == GRAPHED
        driven.event(_then_eval(ADAPTERS[change]))
        outcomes = driven.calls(4)
        assert outcomes[0] != "replays"
        assert outcomes[-1] == "replays"


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
def test_lora_is_added_after_the_capture() -> None:
    with Driven() as driven:
        assert driven.calls(4) == GRAPHED
        driven.event(_add_adapters)
        assert driven.calls(4) == GRAPHED
        driven.event(_then_eval(lambda module: module.unload_lora()))
        assert driven.calls(4)[0] != "replays"


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
def test_lora_switched_to_and_fro() -> None:
    """Each state is right each time, also one that was captured before."""
    with Driven(prepare=_add_adapters, steps=16) as driven:
        for name in ("a", "b", "a", "b"):
            driven.event(_then_eval(lambda module, name=name: module.set_adapters([name], [1.0])))
            assert driven.calls(4)[-1] == "replays"


def _cast_layerwise(module: Any) -> None:
    module.enable_layerwise_casting(torch.bfloat16, torch.float32, skip_modules_pattern=())


@with_and_without_proof
@pytest.mark.parametrize("when", ["before attach", "after the capture"])
def test_layerwise_casting(when: str, proof: dict[str, int]) -> None:
    """Weights are cast up for each layer's call and down after it: by Python that a replay does not run."""
    with Driven(prepare=_cast_layerwise if when == "before attach" else lambda module: None, **proof) as driven:
        if when == "after the capture":
            assert driven.calls(4) == GRAPHED
            driven.event(_cast_layerwise)
        outcomes = driven.calls(6)
        assert not {"replays", "captures"} & set(outcomes), outcomes
        details = driven.twins.handle.stats.modules[0].details
        assert not details.keys() & {"parity", "capture_failed"}, details


# -- tables that lie elsewhere in the process ------------------------------------------------------------------


def test_qwen_image_s_rope_cache_is_overrun_by_other_sizes() -> None:
    """130 image sizes through an ``lru_cache`` of 128, which drops the table that the graph reads."""

    def other_sizes(_: nn.Module) -> None:
        embed: Any = zoo.qwen_image().module.pos_embed
        for size in range(1, 131):
            embed._compute_video_freqs(1, 2, size, 0, torch.device("cpu"))

    with Driven(zoo.qwen_image) as driven:
        driven.calls(4)
        driven.event(other_sizes)
        assert driven.calls(4)[-1] == "replays"


def test_z_image_s_rope_table_is_made_anew() -> None:
    """As a move to another device does."""
    with Driven(zoo.z_image) as driven:
        assert driven.calls(4)[-1] == "replays"
        driven.event(lambda module: setattr(module.rope_embedder, "freqs_cis", None))
        outcomes = driven.calls(6)
        assert outcomes[0] != "replays"
        assert outcomes[-1] == "replays"


# -- autocast ------------------------------------------------------------------------------------------------


# Said by PyTorch once in a process: on whichever side comes first.
one_sided = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")


def _autocast(dtype: torch.dtype = torch.bfloat16, cached: bool = True) -> Context:
    return lambda: torch.autocast("cpu", dtype, cache_enabled=cached)


@one_sided
@pytest.mark.parametrize("cached", [True, False], ids=["with its weight cache", "without"])
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
def test_autocast_blocks_come_and_go(cached: bool, trainable: bool) -> None:
    """The cache dies with its block; a graph that reads it would read freed memory."""
    with Driven(prepare=lambda module: module.requires_grad_(trainable)) as driven:
        driven.calls(6, _autocast(cached=cached))
        driven.event(lambda module: [p.mul_(1.5) for p in module.parameters()])
        driven.calls(2, _autocast(cached=cached))
        assert driven.twins.outcomes == [*GRAPHED, *["replays"] * 4]


@one_sided
def test_autocast_one_block_around_all() -> None:
    """As a whole pipeline run under autocast: the warm-up fills the cache that later calls would use."""
    with Driven(prepare=lambda module: module.requires_grad_(True)) as driven:
        with torch.autocast("cpu", torch.bfloat16):
            assert driven.calls(5) == [*GRAPHED, "replays"]
        gc.collect()
        with torch.autocast("cpu", torch.bfloat16):
            assert driven.calls(2) == ["replays"] * 2


@one_sided
def test_autocast_is_another_call_than_none() -> None:
    with Driven(steps=20, max_graphs=3) as driven:
        for _ in range(4):
            driven.calls(1)
            driven.calls(1, _autocast())
            driven.calls(1, _autocast(torch.float16))
        assert driven.twins.outcomes[-3:] == ["replays"] * 3


# -- outputs ---------------------------------------------------------------------------------------------------


def test_an_output_is_read_after_the_next_replay() -> None:
    """The harness looks at every output again after the last call."""
    with Driven() as driven:
        driven.calls(8)
        outputs = [attached[0] for _, _, attached in driven.twins._kept]
        assert len({output.untyped_storage()._cdata for output in outputs}) == 8
        driven.twins.compare_kept()


# -- caches between steps ------------------------------------------------------------------------------------------


def _pyramid() -> Any:
    return diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(1, 1000),
        current_timestep_callback=lambda: 500,
    )  # fmt: skip


STEP_CACHES: dict[str, Callable[[], Any]] = {
    "first block": lambda: diffusers.FirstBlockCacheConfig(threshold=10.0),
    "first block, rarely": lambda: diffusers.FirstBlockCacheConfig(threshold=0.02),
    "pyramid attention broadcast": _pyramid,
}


def _cached_calls(driven: Driven, count: int) -> list[str]:
    with ExitStack() as stack:
        for module in (driven.twins.modules.eager, driven.twins.modules.attached):
            stack.enter_context(module.cache_context("cond"))
        return driven.calls(count)


@with_and_without_proof
@pytest.mark.parametrize("kind", STEP_CACHES)
@pytest.mark.parametrize("when", ["before attach", "after the capture"])
def test_a_step_cache(kind: str, when: str, proof: dict[str, int]) -> None:
    """It decides in Python, step by step, what is computed; enabled at any time, switched off again later."""
    enable: Event = lambda module: module.enable_cache(STEP_CACHES[kind]())  # noqa: E731
    with Driven(prepare=enable if when == "before attach" else lambda module: None, steps=18, **proof) as driven:
        if when == "after the capture":
            assert _cached_calls(driven, 4) == GRAPHED
            driven.event(enable)
        outcomes = _cached_calls(driven, 7)
        assert "replays" not in outcomes, outcomes
        assert "parity" not in driven.twins.handle.stats.reasons
        driven.event(lambda module: module.disable_cache())
        _cached_calls(driven, 2)
        driven.twins.handle.invalidate()
        assert _cached_calls(driven, 4)[-1] == "replays"


@pytest.mark.filterwarnings("ignore:.* runs eager. limit")
@pytest.mark.parametrize("targets", [["transformer_blocks.*"], ["single_transformer_blocks.*"]], ids=str)
def test_a_step_cache_around_attached_blocks(targets: Sequence[str]) -> None:
    """The cache decides in Python whether a block runs; the block itself is a graph."""
    enable: Event = lambda module: module.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.02))  # noqa: E731
    with Driven(prepare=enable, targets=list(targets)) as driven:
        _cached_calls(driven, 10)
