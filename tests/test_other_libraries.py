"""Hooks and wrappers of other libraries on an attached module, in every order of coming and going."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from hookgraph import foreign
from tests.models import zoo
from tests.modules import Blocks, mlp
from tests.parity import Both, Twins

Undo = Callable[[], Any]
Wrap = Callable[[nn.Module], Undo]


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _pair(make: Callable[[], nn.Module] = mlp) -> Both:
    sides = []
    for _ in range(2):
        torch.manual_seed(0)
        sides.append(make())
    return Both(*sides)


def _call(twins: Twins, times: int = 4) -> None:
    for _ in range(times):
        twins(torch.randn(2, 4))


def _details(twins: Twins) -> list[str]:
    return [detail for of_reason in twins.handle.stats.modules[0].details.values() for detail in of_reason]


# -- wrappers, each with its way out ----------------------------------------------------------


def _aligned(module: nn.Module) -> Undo:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    return lambda: hooks.remove_hook_from_module(module)


def _doubled_by_accelerate(module: nn.Module) -> Undo:
    hooks = pytest.importorskip("accelerate.hooks")

    class Doubles(hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 2

    hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))
    hooks.add_hook_to_module(module, Doubles(), append=True)
    return lambda: hooks.remove_hook_from_module(module)


def _model_offload(module: nn.Module) -> Undo:
    accelerate = pytest.importorskip("accelerate")
    _, hook = accelerate.cpu_offload_with_hook(module, execution_device=torch.device("cpu"))
    return hook.remove


def _doubled_by_diffusers(module: nn.Module) -> Undo:
    hooks = pytest.importorskip("diffusers.hooks")

    class Doubles(hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 2

    registry = hooks.HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(Doubles(), "doubles")
    return lambda: registry.remove_hook("doubles")


def _two_of_diffusers(module: nn.Module) -> Undo:
    """One that calls the forward itself, as the step caches do, and one before it."""
    hooks = pytest.importorskip("diffusers.hooks")

    class Overrides(hooks.ModelHook):
        def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.fn_ref.original_forward(*args, **kwargs) + 1

    class Halves(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return tuple(arg / 2 for arg in args), kwargs

    registry = hooks.HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(Overrides(), "overrides")
    registry.register_hook(Halves(), "halves")

    def undo() -> None:
        registry.remove_hook("overrides")  # the inner one first
        registry.remove_hook("halves")

    return undo


_WRAPS = {
    "AlignDevicesHook": _aligned, "SequentialHook": _doubled_by_accelerate, "CpuOffload": _model_offload,
    "HookRegistry": _doubled_by_diffusers, "two in a HookRegistry": _two_of_diffusers,
}  # fmt: skip
_OF_ACCELERATE = ("AlignDevicesHook", "SequentialHook", "CpuOffload")
_ORDERS = ["us theirs -us -theirs", "us theirs -theirs -us", "theirs us -us -theirs", "theirs us -theirs -us",
           "theirs us -theirs theirs -us -theirs", "us theirs -theirs theirs -us -theirs"]  # fmt: skip


def _play(order: str, wraps: dict[str, Wrap], make: Callable[[], nn.Module] = mlp, **options: Any) -> Twins:
    """Go through the events, with calls in between; both sides get the same but for hookgraph's."""
    sides, undo, twins = _pair(make), {}, None
    for event in order.split():
        name = event.removeprefix("-")
        if event == "us":
            twins = Twins(sides.eager, sides.attached, **options)
        elif event == "-us":
            assert twins is not None
            twins.handle.detach()
        elif event == name:
            undo[name] = sides.map(wraps[name])
        else:
            undo[name].map(lambda function: function())
        if twins is not None:
            _call(twins)
    assert twins is not None
    twins.finish()
    left = {key: value for key, value in vars(sides.attached).items() if "hookgraph" in repr(type(value))}
    assert not left
    return twins


@pytest.mark.parametrize("order", _ORDERS)
@pytest.mark.parametrize("name", _WRAPS)
def test_hg_44_a_wrapper_of_the_attached_module(name: str, order: str) -> None:
    """Both effects in either order, and whichever leaves first leaves the other's."""
    twins = _play(order, {"theirs": _WRAPS[name]})
    assert twins.count("replays") >= 2
    dropped = order.startswith("theirs") and "-theirs" in order.split("-us")[0] and name not in _OF_ACCELERATE
    assert twins.count("eager:displaced") == dropped  # once: the seam is put back
    assert twins.outcomes[-1] == ""  # detached by then, and not counted


def _nested_orders() -> list[str]:
    orders = []
    for start, end in itertools.combinations_with_replacement(range(5), 2):
        events = ["accelerate", "diffusers", "-diffusers", "-accelerate"]
        events.insert(end, "-us")
        events.insert(start, "us")
        orders.append(" ".join(events))
    return orders


@pytest.mark.parametrize("order", _nested_orders())
def test_two_libraries_and_we_anywhere_between(order: str) -> None:
    twins = _play(order, {"accelerate": _doubled_by_accelerate, "diffusers": _two_of_diffusers})
    assert twins.count("errors") == 0
    assert twins.count("eager") == twins.count("eager:displaced") <= 1


def test_what_a_wrapper_copied_from_our_seam_goes_with_it() -> None:
    """functools.update_wrapper copies a forward's attributes to the wrapper."""
    sides = _pair()
    plain, attached = sides.eager, sides.attached
    handle = hookgraph.attach(attached)
    wrappers = [_aligned(side) and vars(side)["forward"] for side in (plain, attached)]
    handle.detach()
    assert vars(wrappers[0]).keys() == vars(wrappers[1]).keys()
    assert "hookgraph" not in repr([type(value) for value in vars(wrappers[1]).values()])
    assert wrappers[1].__module__ == wrappers[0].__module__
    assert type(attached._old_forward) is types.MethodType
    pytest.importorskip("accelerate.hooks").remove_hook_from_module(attached)
    del attached.forward  # accelerate leaves a bound method there


# -- a seam that is left out ------------------------------------------------------------------


def test_a_forward_that_is_replaced_altogether() -> None:
    """Nobody can call our seam any more, so it is put back around the new forward."""
    sides = _pair()
    with Twins(sides.eager, sides.attached) as twins:
        _call(twins)

        def tripled(self: Any, x: torch.Tensor) -> torch.Tensor:
            return type(self).forward(self, x) * 3

        twins.apply(lambda module: setattr(module, "forward", types.MethodType(tripled, module)))
        _call(twins, 5)
        assert twins.outcomes[4:] == ["eager:displaced", "warmups", "captures", "replays", "replays"]
        assert any("tripled" in detail for detail in _details(twins))
        twins.apply(lambda module: delattr(module, "forward"))
        _call(twins, 5)
        assert twins.outcomes[9:] == ["eager:displaced", "warmups", "captures", "replays", "replays"]


def test_a_wrapper_that_leaves_our_seam_out_now_and_then() -> None:
    """As a cache that skips a block: it holds the seam still, and a second one would be one too many."""
    sides = _pair()
    switch = {"skip": False}

    def wrap(module: nn.Module) -> None:
        inner = module.forward
        module.forward = lambda x: x * 3 if switch["skip"] else inner(x)  # type: ignore[method-assign]

    with Twins(sides.eager, sides.attached) as twins:
        _call(twins)
        twins.apply(wrap)
        for skip in (False, True, False, True) * 3:
            switch["skip"] = skip
            _call(twins, 2)
        assert twins.count("eager:displaced") == twins.count("eager") == 12
        assert twins.count("replays") >= 5
        switch["skip"] = False
        twins.handle.detach()
        _call(twins, 1)
        twins.apply(lambda module: delattr(module, "forward"))


# -- offloading that comes back after every pipeline call ----------------------------------------


class Pipeline:
    """The hooks of diffusers' ``enable_model_cpu_offload``, which its pipelines install anew after each call."""

    def __init__(self, *models: nn.Module) -> None:
        self.models = models
        self.hooks: list[Any] = []

    def enable_offload(self) -> None:
        accelerate = pytest.importorskip("accelerate")
        hooks = pytest.importorskip("accelerate.hooks")
        for model in self.models:
            hooks.remove_hook_from_module(model, recurse=True)
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()  # the weights go, and come back elsewhere
        self.hooks = []
        for model in self.models:
            previous = self.hooks[-1] if self.hooks else None
            _, hook = accelerate.cpu_offload_with_hook(model, torch.device("cpu"), previous)
            self.hooks.append(hook)

    def disable_offload(self) -> None:
        for hook in self.hooks:
            hook.remove()


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_offload_hooks_that_are_installed_anew_after_each_pipeline_call(first: str) -> None:
    sides = _pair()
    pipelines = sides.map(lambda module: Pipeline(mlp(), module))
    if first == "theirs":
        pipelines.map(Pipeline.enable_offload)
    with Twins(sides.eager, sides.attached) as twins:
        if first == "ours":
            pipelines.map(Pipeline.enable_offload)
        for _ in range(3):
            _call(twins, 6)
            pipelines.map(Pipeline.enable_offload)
        _call(twins, 2)
        assert twins.count("eager") == 0
        assert twins.count("replays") >= 9
        pipelines.map(Pipeline.disable_offload)
        _call(twins, 2)


# -- features that no graph can follow ---------------------------------------------------------


def _offloaded_by_accelerate(module: nn.Module) -> Undo:
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    hooks = pytest.importorskip("accelerate.hooks")
    return lambda: hooks.remove_hook_from_module(module, recurse=True)


def _dispatched(module: nn.Module) -> Undo:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.attach_align_device_hook_on_blocks(module, {"": "cpu"}, {"": False})
    return lambda: hooks.remove_hook_from_module(module, recurse=True)


def _cast_by_layers(module: nn.Module) -> Undo:
    hooks = pytest.importorskip("diffusers.hooks")
    hooks.apply_layerwise_casting(module, torch.bfloat16, torch.float32)
    return lambda: None


def _cast_by_accelerate(module: nn.Module) -> Undo:
    hooks = pytest.importorskip("accelerate.hooks")
    pytest.importorskip("accelerate.big_modeling").attach_layerwise_casting_hooks(module, torch.bfloat16, torch.float32)
    return lambda: hooks.remove_hook_from_module(module, recurse=True).float()


def _offloaded_by_groups(module: nn.Module) -> Undo:
    hooks = pytest.importorskip("diffusers.hooks")
    hooks.apply_group_offloading(
        module, onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), offload_type="leaf_level"
    )
    return lambda: None


def _child_to_elsewhere(module: nn.Module) -> Undo:
    hooks = pytest.importorskip("accelerate.hooks")
    hook = hooks.AlignDevicesHook(execution_device="cpu")
    hooks.add_hook_to_module(module.blocks[0].mlp, hook)
    hook.execution_device = "meta"
    return lambda: hooks.remove_hook_from_module(module, recurse=True)


_FEATURES = {
    "accelerate offload": (_offloaded_by_accelerate, "AlignDevicesHook offloading weights on blocks.0.norm"),
    "accelerate casting": (_cast_by_accelerate, "LayerwiseCastingHook casting weights on blocks.0.mlp.0"),
    "layerwise casting": (_cast_by_layers, "layerwise casting by diffusers on blocks.0.mlp.0"),
    "group offloading": (_offloaded_by_groups, "group offloading by diffusers on "),
    "another device": (_child_to_elsewhere, "AlignDevicesHook moving arguments to meta on blocks.0.mlp"),
}


@pytest.mark.parametrize("name", _FEATURES)
def test_a_feature_is_named(name: str) -> None:
    wrap, words = _FEATURES[name]
    model = Blocks()
    assert foreign.recognise(model) is None
    undo = wrap(model)
    found = foreign.recognise(model)
    assert found is not None
    assert found.startswith(words)
    undo()


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("name", [name for name in _FEATURES if name != "another device"])
def test_offloading_and_casting_are_eager(name: str, first: str) -> None:
    wrap, words = _FEATURES[name]
    sides = _pair(Blocks)
    if first == "theirs":
        undo = sides.map(wrap)
    with Twins(sides.eager, sides.attached) as twins:
        _call(twins)
        if first == "ours":
            undo = sides.map(wrap)
        _call(twins)
        assert set(twins.outcomes[-3:]) == {"eager:foreign_hook"}
        assert any(words in detail for detail in _details(twins))
        undo.map(lambda function: function())
        _call(twins)
        if name.startswith("accelerate"):
            assert twins.outcomes[-1] == "replays"


def test_a_model_that_is_dispatched_to_one_device_is_served() -> None:
    """Hooks on every submodule that move nothing."""
    sides = _pair(Blocks)
    undo = sides.map(_dispatched)
    with Twins(sides.eager, sides.attached) as twins:
        _call(twins)
        assert twins.outcomes == ["warmups", "captures", "replays", "replays"]
        undo.map(lambda function: function())
        _call(twins)
        assert twins.outcomes[4:] == ["warmups", "captures", "replays", "replays"]


def test_a_hook_of_a_child_that_only_computes_is_captured() -> None:
    """It is one more part of the forward; when it comes or goes, the graph goes."""
    sides = _pair(Blocks)
    undo = sides.map(lambda model: _doubled_by_diffusers(model.blocks[0]))
    with Twins(sides.eager, sides.attached) as twins:
        _call(twins)
        assert twins.outcomes[-1] == "replays"
        undo.map(lambda function: function())
        _call(twins)
        undo = twins.apply(lambda model: _doubled_by_accelerate(model.blocks[1].mlp))
        _call(twins)
        assert twins.outcomes[-1] == "replays"
        assert twins.count("captures") == 3
        undo.map(lambda function: function())
        _call(twins)


def test_a_hook_of_a_child_that_keeps_state_is_named() -> None:
    hooks = pytest.importorskip("diffusers.hooks")

    class Remembers(hooks.ModelHook):
        _is_stateful = True
        last: Any = None

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            before, self.last = self.last, output
            return output if before is None else output + before

    def remember(model: Any) -> None:
        hooks.HookRegistry.check_if_exists_or_initialize(model.blocks[1]).register_hook(Remembers(), "remembers")

    sides = _pair(Blocks)
    with Twins(sides.eager, sides.attached, attributes=False) as twins:
        _call(twins)
        twins.apply(remember)
        _call(twins)
        assert twins.outcomes[-1] == "eager:foreign_hook"
        assert any("Remembers, which keeps state" in detail for detail in _details(twins))


_steps_done = [0]


def _timestep() -> int:
    return 1000 - 100 * _steps_done[0]  # the caches begin below 800


def _first_block_cache(model: Any) -> None:
    hooks = pytest.importorskip("diffusers.hooks")
    model.enable_cache(hooks.FirstBlockCacheConfig(threshold=0.5))


def _pyramid(model: Any) -> None:
    hooks = pytest.importorskip("diffusers.hooks")
    model.enable_cache(
        hooks.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, spatial_attention_block_identifiers=("transformer_blocks",),
            spatial_attention_timestep_skip_range=(0, 800), current_timestep_callback=_timestep,
        )
    )  # fmt: skip


def _faster_cache(model: Any) -> None:
    hooks = pytest.importorskip("diffusers.hooks")
    model.enable_cache(
        hooks.FasterCacheConfig(
            spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(-1, 800),
            spatial_attention_block_identifiers=("transformer_blocks",), tensor_format="BFCHW",
            unconditional_batch_skip_range=2, unconditional_batch_timestep_skip_range=(-1, 800),
            attention_weight_callback=lambda _: 0.5, is_guidance_distilled=True,
            current_timestep_callback=_timestep,
        )
    )  # fmt: skip


_CACHES = {
    "first-block cache": _first_block_cache, "pyramid attention broadcast": _pyramid, "faster cache": _faster_cache,
}  # fmt: skip


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("name", _CACHES)
def test_hg_43_step_caches_of_diffusers(name: str, first: str) -> None:
    """They skip blocks by what an earlier step saw; the model is eager while they are on, and no longer."""
    cases = [zoo.flux(steps=12) for _ in range(2)]
    sides = Both(*(case.module for case in cases))
    steps = zip(*(case.calls for case in cases), strict=True)

    def run(times: int) -> None:
        for (args, kwargs), (other_args, other_kwargs) in itertools.islice(steps, times):
            _steps_done[0] += 1
            pairs = {key: Both(kwargs[key], other_kwargs[key]) for key in kwargs}
            contexts: list[AbstractContextManager[Any]] = [
                side.cache_context("cond") if side.is_cache_enabled else nullcontext() for side in (sides.eager, sides.attached)
            ]  # fmt: skip
            with contexts[0], contexts[1]:
                twins.run(twins.modules, *map(Both, args, other_args), **pairs)

    _steps_done[0] = 0
    if first == "theirs":
        sides.map(_CACHES[name])
    with Twins(sides.eager, sides.attached, attributes=False) as twins:
        if first == "ours":
            run(3)
            _steps_done[0] = 0
            sides.map(_CACHES[name])
        run(5)
        assert set(twins.outcomes[-5:]) == {"eager:foreign_hook"}
        assert any(f"{name} by diffusers on " in detail for detail in _details(twins))
        twins.apply(lambda model: model.disable_cache())
        run(4)
        assert twins.outcomes[-1] == "replays"


# -- peft -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_adapters_come_switch_and_go(first: str) -> None:
    peft = pytest.importorskip("peft")
    layers = pytest.importorskip("peft.tuners.tuners_utils")

    def inject(model: nn.Module) -> Any:
        config = peft.LoraConfig(r=2, target_modules=r".*mlp\.[02]", init_lora_weights=False)
        torch.manual_seed(1)
        tuner = peft.LoraModel(model, {"a": config}, "a")
        tuner.inject_adapter(model, "a")
        torch.manual_seed(2)
        tuner.peft_config["b"] = config
        tuner.inject_adapter(model, "b")
        tuner.set_adapter("a")
        model.eval()
        return tuner

    def for_layers(act: Callable[[Any], Any]) -> Callable[[nn.Module], None]:
        def each(model: nn.Module) -> None:
            for layer in model.modules():
                if isinstance(layer, layers.BaseTunerLayer):
                    act(layer)

        return each

    sides = _pair(Blocks)
    if first == "theirs":
        tuners = sides.map(inject)
    with Twins(sides.eager, sides.attached, attributes=False) as twins:
        _call(twins)
        if first == "ours":
            tuners = sides.map(inject)
        _call(twins)
        for event in (
            for_layers(lambda layer: layer.set_adapter("b")),
            for_layers(lambda layer: layer.set_scale("b", 0.3)),
            for_layers(lambda layer: layer.set_adapter(["a", "b"])),
            for_layers(lambda layer: layer.enable_adapters(False)),
            for_layers(lambda layer: layer.enable_adapters(True)),
            for_layers(lambda layer: layer.merge()),
            for_layers(lambda layer: layer.unmerge()),
            for_layers(lambda layer: layer.delete_adapter("b")),
        ):
            twins.apply(event)
            _call(twins, 5)
            assert twins.outcomes[-1] == "replays"
        tuners.map(lambda tuner: tuner.unload())
        _call(twins, 5)
        assert twins.outcomes[-1] == "replays"


# -- hooks of the user's ----------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before attach", "after attach", "after capture"])
@pytest.mark.parametrize("prepend", [False, True], ids=["last", "first"])
def test_hooks_of_the_attached_module_run_around_a_replay(when: str, prepend: bool) -> None:
    sides, counts = _pair(), Both([], [])

    def register(module: nn.Module) -> list[Any]:
        calls = counts.eager if module is sides.eager else counts.attached

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            calls.append("before")
            return tuple(arg + 1 for arg in args), kwargs

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            calls.append("after")
            return {"out": output * 2, "seen": args[0] + output}

        return [
            module.register_forward_pre_hook(before, prepend=prepend, with_kwargs=True),
            module.register_forward_hook(after, prepend=prepend, with_kwargs=True, always_call=True),
        ]

    if when == "before attach":
        handles = sides.map(register)
    with Twins(sides.eager, sides.attached) as twins:
        if when == "after attach":
            handles = twins.apply(register)
        _call(twins)
        if when == "after capture":
            handles = twins.apply(register)
        _call(twins)
        assert twins.outcomes == ["warmups", "captures"] + ["replays"] * 6
        assert counts.eager == counts.attached
        assert len(counts.eager) == (8 if when == "after capture" else 16)
        handles.map(lambda each: [handle.remove() for handle in each])
        _call(twins, 2)
        assert twins.outcomes[-1] == "replays"


@pytest.mark.parametrize("kind", ["pre-hook", "hook"])
def test_a_hook_that_raises_leaves_the_counts_in_order(kind: str) -> None:
    sides = _pair()

    def fail(*args: Any) -> None:
        raise ValueError("by the hook")

    with Twins(sides.eager, sides.attached) as twins:
        _call(twins)
        handles = twins.apply(getattr(nn.Module, f"register_forward_{kind.replace('-', '_')}").__get__)
        handles = handles.map(lambda register: register(fail))
        for _ in range(2):
            with pytest.raises(ValueError, match="by the hook"):
                twins(torch.randn(2, 4))
        handles.map(lambda handle: handle.remove())
        _call(twins)
        assert twins.outcomes[-1] == "replays"


@pytest.mark.parametrize("accepted", [False, True], ids=["refuse", "ignore"])
def test_hg_41_hooks_of_descendants(accepted: bool) -> None:
    sides, counts = _pair(Blocks), Both(0, 0)

    def register(model: Any) -> Any:
        def count(module: nn.Module, args: Any, output: Any) -> None:
            if model is sides.eager:
                counts.eager += 1
            else:
                counts.attached += 1

        return model.blocks[1].mlp[0].register_forward_hook(count)

    with Twins(sides.eager, sides.attached, child_hooks="ignore" if accepted else "refuse") as twins:
        _call(twins)
        handles = twins.apply(register)
        _call(twins)
        if accepted:
            assert twins.outcomes[4:] == ["warmups", "captures", "replays", "replays"]
        else:
            assert twins.outcomes[4:] == ["eager:child_hooks"] * 4
            assert counts.eager == counts.attached == 4
        handles.map(lambda handle: handle.remove())
        _call(twins)
        assert twins.outcomes[-1] == "replays"
