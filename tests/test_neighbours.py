"""Beside other libraries: their hooks and wrappers, in whatever order they come and go."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import hookgraph
from tests.models import zoo
from tests.modules import mlp
from tests.parity import Both, Twins
from tests.residue import Watch


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _accelerate(module: nn.Module) -> Callable[[], Any]:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))
    return lambda: hooks.remove_hook_from_module(module)


def _registry(module: nn.Module) -> Callable[[], Any]:
    hooks = pytest.importorskip("diffusers.hooks")

    class Doubles(hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 2

    registry = hooks.HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(Doubles(), "doubles")
    return lambda: registry.remove_hook("doubles")


@pytest.mark.parametrize("wrap", [_accelerate, _registry], ids=["accelerate", "diffusers"])
@pytest.mark.parametrize("first", ["theirs", "ours"])
@pytest.mark.parametrize("leaves", ["theirs", "ours"])
def test_hg_44_a_library_s_wrapper(
    wrap: Callable[[nn.Module], Callable[[], Any]], first: str, leaves: str, no_residue: Watch
) -> None:
    """Both effects in either order, and whichever leaves first leaves the other's."""
    model, plain = mlp(), mlp()
    plain.load_state_dict(model.state_dict())
    wrapped = copy.deepcopy(plain)
    wrap(wrapped)

    def same_as(other: nn.Module, calls: int) -> None:
        for _ in range(calls):
            x = torch.randn(2, 4)
            assert torch.equal(model(x), other(x))

    if first == "theirs":
        undo = wrap(model)
    handle = hookgraph.attach(model)
    if first == "ours":
        undo = wrap(model)
    same_as(wrapped, 5)
    assert handle.stats.calls == 5
    assert handle.stats.balanced
    (handle.detach if leaves == "ours" else undo)()
    same_as(wrapped if leaves == "ours" else plain, 3)
    (undo if leaves == "ours" else handle.detach)()
    same_as(plain, 2)
    assert handle.stats.balanced
    no_residue.allow(model, "new: <root>.*", "gone: <root>.*", "changed: <root>*")  # what they leave is theirs
    assert "__reduce_ex__" not in vars(model)
    assert not any("hookgraph" in repr(type(value)) for value in vars(model).values())


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
def test_adapters_are_switched() -> None:
    """Invisible in arguments, addresses and versions."""
    peft = pytest.importorskip("peft")
    sides = [zoo.flux(steps=16) for _ in range(2)]
    for side in sides:
        torch.manual_seed(0)
        for name in ("a", "b"):
            config = peft.LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)
            side.module.add_adapter(config, name)
        side.module.set_adapters(["a"], [1.0])
        side.module.eval()
    events: dict[int, Callable[[Any], Any]] = {
        4: lambda model: model.set_adapters(["b"], [1.0]),
        7: lambda model: model.set_adapters(["b"], [0.3]),
        10: lambda model: model.disable_adapters(),
        13: lambda model: model.enable_adapters(),
    }
    with Twins(sides[0].module, sides[1].module) as twins:
        for step, ((args, kwargs), (other_args, other_kwargs)) in enumerate(
            zip(*(side.calls for side in sides), strict=True)
        ):
            if step in events:
                twins.apply(events[step])
                twins.apply(lambda model: model.eval())
            pairs = {name: Both(kwargs[name], other_kwargs[name]) for name in kwargs}
            twins.run(twins.modules, *map(Both, args, other_args), **pairs)
        assert twins.outcomes[-1] == "replays"
        assert twins.handle.stats.modules[0].invalidations >= 3


@pytest.mark.parametrize("what", ["a child", "the whole"])
def test_compiled_modules(what: str, no_residue: Watch) -> None:
    torch._dynamo.reset()
    model, plain = mlp(), mlp()
    plain.load_state_dict(model.state_dict())
    if what == "a child":
        model[0].compile(backend="eager")
    target: Any = model if what == "a child" else torch.compile(model, backend="eager")
    with hookgraph.attach(target) as handle:
        for _ in range(5):
            x = torch.randn(2, 4)
            assert torch.equal(target(x), plain(x))
        assert handle.stats.calls == 5
        assert handle.stats.balanced
    no_residue.allow(target, "changed: *", "new: *")  # dynamo marks what it has compiled
    torch._dynamo.reset()


def test_a_mode_that_watches_operators_sees_them() -> None:
    """A FLOP counter around a replay would count nothing."""
    model = mlp()
    handle = hookgraph.attach(model)
    for _ in range(3):
        model(torch.randn(2, 4))
    with FlopCounterMode(display=False) as flops:
        model(torch.randn(2, 4))
    assert flops.get_total_flops() == 2 * 2 * 2 * 4 * 4
    assert handle.stats.reasons == {"mode_active": 1}


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_script_module_is_served_or_refused() -> None:
    scripted = torch.jit.trace(mlp(), torch.randn(2, 4))
    try:
        handle = hookgraph.attach.__wrapped__(scripted)
    except hookgraph.AttachError as error:
        message = str(error)
    else:
        message = "served"
        for _ in range(4):
            scripted(torch.randn(2, 4))
        assert handle.stats.calls == 4
        handle.detach()
    assert "served" in message or "script" in message.lower()
