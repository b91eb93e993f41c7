"""attach and detach: which modules, which options, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from hookgraph.runner import Runner
from tests.modules import Block, Blocks, Does, Parent, Scaled, Shared, mlp
from tests.parity import Twins
from tests.residue import Snapshot, Watch

X = torch.arange(8.0).reshape(2, 4) / 8


def names(handle: Any) -> list[str]:
    return [module.name for module in handle.stats.modules]


@pytest.fixture(autouse=True)
def without_grad() -> Any:
    with torch.no_grad():
        yield


# -- targets -----------------------------------------------------------------------------------


TARGETS: dict[str, tuple[Any, list[str]]] = {
    "None": (None, [""]),
    "name": ("head", ["head"]),
    "dotted name": ("blocks.1.mlp", ["blocks.1.mlp"]),
    "glob": ("blocks.*", ["blocks.0", "blocks.1"]),
    "glob in the middle": ("blocks.*.mlp", ["blocks.0.mlp", "blocks.1.mlp"]),
    "glob with a class of characters": ("blocks.[1-9]", ["blocks.1"]),
    "regex": (re.compile(r"blocks\.\d+$"), ["blocks.0", "blocks.1"]),
    "type": (Block, ["blocks.0", "blocks.1"]),
    "list": (["head", Block], ["blocks.0", "blocks.1", "head"]),
    "tuple": (("blocks.0", re.compile("head$")), ["blocks.0", "head"]),
    "list that names one twice": (["head", "hea*", re.compile("^head$")], ["head"]),
}


@pytest.mark.parametrize("form", TARGETS)
def test_targets(form: str) -> None:
    targets, expected = TARGETS[form]
    with Twins.build(Blocks, targets=targets) as twins:
        assert sorted(names(twins.handle)) == expected
        for _ in range(4):
            twins(torch.randn(2, 4))
        for module in twins.handle.stats.modules:
            assert (module.calls, module.warmups, module.captures, module.replays) == (4, 1, 1, 2)


def test_a_callable_chooses_by_name_and_module() -> None:
    model = Blocks()
    handle = hookgraph.attach(model, lambda name, module: name.endswith("mlp") and isinstance(module, nn.Sequential))
    assert names(handle) == ["blocks.0.mlp", "blocks.1.mlp"]


def test_only_the_selected_modules_carry_anything() -> None:
    model = Blocks()
    before = Snapshot(model)
    hookgraph.attach(model, "blocks.0")
    changed = {re.split(r"[: ]+", change)[1] for change in before.changes(Snapshot(model))}
    assert changed
    assert all(fact.startswith("blocks.0.") and fact.count(".") == 2 for fact in changed), changed


@pytest.mark.parametrize(
    ("targets", "nearest"),
    [
        pytest.param("haed", "head", id="name"),
        pytest.param("blocks.0.mpl", "blocks.0.mlp", id="dotted name"),
        pytest.param("block.*", "blocks", id="glob"),
        pytest.param(["head", "blocks.9"], "blocks.", id="one of a list"),
    ],
)
def test_no_match_names_the_nearest(targets: Any, nearest: str) -> None:
    with pytest.raises(hookgraph.AttachError, match=re.escape(nearest)):
        hookgraph.attach(Blocks(), targets)


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param(re.compile("nothing"), id="regex"),
        pytest.param(nn.Conv2d, id="type"),
        pytest.param(lambda name, module: False, id="callable"),
        pytest.param([], id="empty list"),
    ],
)
def test_a_selection_of_nothing_is_an_error(targets: Any) -> None:
    with pytest.raises(hookgraph.AttachError, match=r"(?i)no |empty|match"):
        hookgraph.attach(Blocks(), targets)


@pytest.mark.parametrize("targets", [3, 2.5, b"head", {"head": 1}, object()], ids=lambda t: type(t).__name__)
def test_targets_of_another_kind_are_an_error(targets: Any) -> None:
    with pytest.raises(hookgraph.AttachError, match=r"targets=.*expected"):
        hookgraph.attach(Blocks(), targets)


def test_a_nested_selection_is_refused() -> None:
    with pytest.raises(hookgraph.AttachError, match=r"blocks\.0\.mlp.*blocks\.0|blocks\.0.*blocks\.0\.mlp"):
        hookgraph.attach(Blocks(), ["blocks.0", "blocks.0.mlp"])


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (["blocks.0", "blocks.0.mlp"], r"blocks\.0\.mlp lies inside Block, which is attached already.*detach\(\)"),
        (["blocks.0.mlp", "blocks.0"], r"blocks\.0 holds mlp, which is attached already.*detach\(\) on mlp first"),
    ],
    ids=["outer first", "inner first"],
)
def test_a_nested_attachment_is_refused(order: list[str], said: str) -> None:
    """An inner graph inside an outer one would be swallowed by its capture."""
    model = Blocks()
    plain = copy.deepcopy(model)
    first = hookgraph.attach(model, order[0])
    with pytest.raises(hookgraph.AttachError, match=said):
        hookgraph.attach(model, order[1])
    assert len(hookgraph.stats(model).modules) == 1
    for _ in range(5):
        x = torch.randn(2, 4)
        assert torch.equal(model(x), plain(x))
    assert first.stats.balanced


def test_a_shared_module_is_attached_once() -> None:
    with Twins.build(Shared, targets=["first", "second"]) as twins:
        assert len(twins.handle.stats.modules) == 1
        for _ in range(3):
            twins(torch.randn(2, 4))
        assert twins.handle.stats.calls == 6


def test_a_shared_module_by_type() -> None:
    with Twins.build(Shared, targets=nn.Linear) as twins:
        assert len(twins.handle.stats.modules) == 1
        for _ in range(3):
            twins(torch.randn(2, 4))


# -- wrong use ---------------------------------------------------------------------------------


BAD_OPTIONS: dict[str, list[Any]] = {
    "max_graphs": [0, -1, 2.5, "4", None, True],
    "max_batch_size": [0, -1, "2", 1.5],
    "max_bytes": [-1, "1GB", 0.5],
    "min_speedup": [0, -1.5, "1.1", True, float("inf"), float("nan")],
    "warmup": [0, -1, 1.5, None],
    "verify": [-1, 0.5, None],
    "guards": ["fulll", None, True],
    "outputs": ["copy", None],
    "child_hooks": ["allow", None],
    "on_fallback": ["log", None],
    "backend": ["gpu", None, "cudagraph"],
}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        pytest.param(option, value, id=f"{option}={value!r}")
        for option, values in BAD_OPTIONS.items()
        for value in values
    ],
)
def test_a_bad_option_is_named(option: str, value: Any) -> None:
    with pytest.raises(hookgraph.AttachError, match=rf"{option}.*{re.escape(repr(value))}"):
        hookgraph.attach(mlp(), **{option: value})


def test_what_is_not_compared_is_not_timed() -> None:
    with pytest.raises(hookgraph.AttachError, match="min_speedup needs verify=1"):
        hookgraph.attach(mlp(), min_speedup=1.1, verify=0)


def test_targets_are_not_guessed_without_calls() -> None:
    with pytest.raises(hookgraph.AttachError, match=r"attach\(model, 'auto', calls=calls\)"):
        hookgraph.attach(mlp(), "auto")
    named = nn.ModuleDict({"auto": mlp()})
    with hookgraph.attach(named, "auto") as handle:
        assert [module.name for module in handle.stats.modules] == ["auto"]


class Split(nn.Module):
    """Reads a value back between two parts that can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = mlp(), mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        return self.after(h) if h.sum().item() < 1e9 else h


def test_targets_are_found_from_calls() -> None:
    calls = [((torch.ones(2, 4),), {})]
    with torch.no_grad(), Twins.build(Split, targets="auto", calls=calls, max_graphs=2) as twins:
        assert [module.name for module in twins.handle.stats.modules] == ["before", "after"]
        for _ in range(5):
            twins(torch.randn(2, 4))
        assert twins.handle.stats.replays == 6
    with hookgraph.attach(mlp(), "auto", calls=calls) as handle:
        assert [module.name for module in handle.stats.modules] == [""]


def test_calls_without_auto_and_auto_without_a_way() -> None:
    with pytest.raises(hookgraph.AttachError, match="calls are for targets='auto' alone, not for targets=None"):
        hookgraph.attach(mlp(), calls=[((torch.ones(2, 4),), {})])
    reads = Does(lambda m, x: m.linear(x) * x.sum().item())
    with pytest.raises(hookgraph.AttachError, match=r"targets='auto': .*only single layers are left"):
        hookgraph.attach(reads, "auto", calls=[((torch.ones(2, 4),), {})])
    assert not hookgraph.is_attached(reads)


def test_an_unknown_option_is_python_s_own_error() -> None:
    with pytest.raises(TypeError, match="max_graph"):
        hookgraph.attach(mlp(), max_graph=4)


@pytest.mark.parametrize(
    "thing", [None, 3, nn.Linear, torch.relu, "model", [mlp()]], ids=["None", "int", "class", "function", "str", "list"]
)
def test_not_a_module(thing: Any) -> None:
    with pytest.raises(hookgraph.AttachError, match=r"(?i)module"):
        hookgraph.attach(thing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA would run it")
def test_the_cuda_backend_without_a_gpu() -> None:
    with pytest.raises(hookgraph.AttachError, match=r"(?i)cuda"):
        hookgraph.attach(mlp(), backend="cuda")


def test_an_attach_error_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="max_graphs"):
        hookgraph.attach(mlp(), max_graphs=0)


class Stubborn(nn.Linear):
    """Refuses every hook."""

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no hooks here")

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no hooks here")


def test_all_or_nothing() -> None:
    """A target that cannot be attached leaves those before it as they were; the fixture looks."""
    model = nn.ModuleDict({"a": mlp(), "b": Stubborn(4, 4), "c": mlp()})
    with pytest.raises(RuntimeError, match="no hooks here"):
        hookgraph.attach(model, ["a", "b", "c"])
    assert not any(hookgraph.is_attached(module) for module in model.modules())


# -- once, twice, and off -----------------------------------------------------------------------


def test_hg_48_attach_is_idempotent() -> None:
    model, plain = mlp(), mlp()
    plain.load_state_dict(model.state_dict())
    handle = hookgraph.attach(model)
    assert hookgraph.attach(model) is handle
    assert hookgraph.attach(model, max_graphs=4) is handle
    for _ in range(4):
        x = torch.randn(2, 4)
        assert torch.equal(model(x), plain(x))
    assert handle.stats.calls == 4
    handle.detach()
    assert not hookgraph.is_attached(model)
    model(X)
    assert handle.stats.calls == 4


def test_hg_48_other_options_are_refused_and_both_named() -> None:
    model = mlp()
    handle = hookgraph.attach(model, max_graphs=4)
    with pytest.raises(hookgraph.AttachError, match=r"max_graphs(?=.*8)(?=.*4)"):
        hookgraph.attach(model, max_graphs=8)
    assert hookgraph.is_attached(model)
    model(X)
    assert handle.stats.calls == 1


def test_other_targets_of_the_same_model() -> None:
    """Two parts of one model can be attached one after the other."""
    model = Blocks()
    plain = copy.deepcopy(model)
    first, second = hookgraph.attach(model, "blocks.0"), hookgraph.attach(model, "head", max_graphs=2)
    assert first is not second
    for _ in range(4):
        x = torch.randn(2, 4)
        assert torch.equal(model(x), plain(x))
    assert names(first) == ["blocks.0"]
    assert names(second) == ["head"]
    assert first.stats.replays == second.stats.replays == 2
    first.detach()
    model(X)
    assert (first.stats.calls, second.stats.calls) == (4, 5)


def test_attach_again_after_detach() -> None:
    model = mlp()
    first = hookgraph.attach(model)
    first.detach()
    second = hookgraph.attach(model, max_graphs=8)
    assert second is not first
    first.detach()
    assert hookgraph.is_attached(model)
    for _ in range(3):
        model(X)
    assert second.stats.replays == 1


@pytest.mark.parametrize("how", ["handle", "function", "both"])
def test_detach_twice(how: str) -> None:
    model = mlp()
    handle = hookgraph.attach(model)
    for _ in range(3):
        model(X)
    for _ in range(2):
        if how != "function":
            handle.detach()
        if how != "handle":
            hookgraph.detach(model)
    assert not hookgraph.is_attached(model)
    assert handle.stats.calls == 3
    assert "forward" not in vars(model)


def test_with() -> None:
    model = mlp()
    with hookgraph.attach(model) as handle:
        assert hookgraph.is_attached(model)
        for _ in range(3):
            model(X)
        assert handle.stats.replays == 1
    assert not hookgraph.is_attached(model)
    assert handle.stats.calls == 3


def test_with_and_an_error() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="mine"), hookgraph.attach(model):
        raise ValueError("mine")
    assert not hookgraph.is_attached(model)


def test_is_attached() -> None:
    model, other = Blocks(), Blocks()
    assert not hookgraph.is_attached(model)
    hookgraph.attach(model)
    assert hookgraph.is_attached(model)
    assert not hookgraph.is_attached(other)


def test_stats_of_a_model_and_of_everything() -> None:
    model, other = mlp(), Blocks()
    handle = hookgraph.attach(model)
    hookgraph.attach(other, "head")
    for _ in range(3):
        model(X)
        other(X)
    assert hookgraph.stats(model) == handle.stats
    assert hookgraph.stats().calls >= 6
    assert hookgraph.stats().balanced


def test_a_dropped_model_is_freed() -> None:
    """An attachment keeps no module alive."""
    model = mlp()
    handle = hookgraph.attach.__wrapped__(model)
    for _ in range(3):
        model(X)
    gone = weakref.ref(model), weakref.ref(model[0].weight)
    del model, handle
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# -- switched off ---------------------------------------------------------------------------------


def test_paused() -> None:
    with Twins.build(mlp) as twins:
        for _ in range(3):
            twins(torch.randn(2, 4))
        with twins.handle.paused():
            twins(torch.randn(2, 4))
            with twins.handle.paused():
                twins(torch.randn(2, 4))
            twins(torch.randn(2, 4))
        twins(torch.randn(2, 4))
        assert twins.outcomes[3:] == ["eager:paused"] * 3 + ["replays"]


def test_paused_ends_with_an_error() -> None:
    with Twins.build(mlp) as twins:
        for _ in range(2):
            twins(torch.randn(2, 4))
        with pytest.raises(ValueError, match="mine"), twins.handle.paused():
            raise ValueError("mine")
        twins(torch.randn(2, 4))
        assert twins.outcomes[-1] == "replays"


def test_paused_is_for_one_attachment() -> None:
    first, second = mlp(), mlp()
    one, two = hookgraph.attach(first), hookgraph.attach(second)
    with one.paused():
        for _ in range(3):
            first(X)
            second(X)
    assert one.stats.reasons == {"paused": 3}
    assert two.stats.replays == 1


def test_disabled() -> None:
    with Twins.build(mlp) as twins:
        for _ in range(3):
            twins(torch.randn(2, 4))
        with hookgraph.disabled():
            twins(torch.randn(2, 4))
            with hookgraph.disabled():
                twins(torch.randn(2, 4))
            twins(torch.randn(2, 4))
        twins(torch.randn(2, 4))
        assert twins.outcomes[3:] == ["eager:disabled"] * 3 + ["replays"]


def test_the_environment_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """HOOKGRAPH_DISABLE=1 is read at each attach."""
    model, plain = mlp(), mlp()
    plain.load_state_dict(model.state_dict())
    monkeypatch.setenv("HOOKGRAPH_DISABLE", "1")
    with hookgraph.attach(model) as handle:
        for _ in range(4):
            x = torch.randn(2, 4)
            assert torch.equal(model(x), plain(x))
        assert handle.stats.captures == handle.stats.replays == 0
        assert handle.stats.balanced
    for value in ("0", ""):
        monkeypatch.setenv("HOOKGRAPH_DISABLE", value)
        with hookgraph.attach(model) as handle:
            for _ in range(3):
                model(X)
            assert handle.stats.replays == 1


def test_a_wrong_option_is_an_error_even_when_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKGRAPH_DISABLE", "1")
    with pytest.raises(hookgraph.AttachError, match="max_graphs"):
        hookgraph.attach(mlp(), max_graphs=0)


# -- a copy of an attached module is a plain module ---------------------------------------------------


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_save,
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("calls", [0, 1, 4], ids=lambda n: f"after {n} calls")
@pytest.mark.parametrize("targets", [None, "blocks.*"], ids=["whole", "parts"])
def test_hg_50_a_copy_is_plain_and_uses_its_own_weights(
    make: Callable[[nn.Module], nn.Module], calls: int, targets: Any
) -> None:
    model, plain = Blocks(), Blocks()
    plain.load_state_dict(model.state_dict())
    handle = hookgraph.attach(model, targets)
    for _ in range(calls):
        model(X)
    duplicate = make(model)
    counted = handle.stats.calls
    for name, module in duplicate.named_modules():
        assert vars(module).keys() == vars(plain.get_submodule(name)).keys()
        assert not hookgraph.is_attached(module)
        hooks = {key: len(value) for key, value in vars(module).items() if "hook" in key and isinstance(value, dict)}
        assert not any(hooks.values()), (name, hooks)
    assert duplicate.state_dict().keys() == plain.state_dict().keys()
    for parameter in duplicate.parameters():
        parameter.fill_(9.0)
    assert torch.equal(model(X), plain(X))
    for parameter in plain.parameters():
        parameter.fill_(9.0)
    assert torch.equal(duplicate(X), plain(X))
    assert handle.stats.calls == counted + len(handle.stats.modules)
    with hookgraph.attach(duplicate) as second:
        for _ in range(3):
            assert torch.equal(duplicate(X), plain(X))
        assert second.stats.replays == 1


def test_hg_50_a_shallow_copy_uses_its_own_attributes() -> None:
    model = Does(lambda m, x: m.linear(x) * m.scale, scale=2.0)
    handle = hookgraph.attach(model)
    for _ in range(3):
        model(X)
    shallow = copy.copy(model)
    shallow.scale = 3.0
    assert torch.equal(shallow(X), model.linear(X) * 3.0)
    assert torch.equal(shallow.forward(X), model.linear(X) * 3.0)
    assert torch.equal(model(X), model.linear(X) * 2.0)
    assert handle.stats.balanced


def test_a_copy_of_the_bound_forward_is_plain() -> None:
    model = mlp()
    hookgraph.attach(model)
    forward = copy.deepcopy(model.forward)
    assert torch.equal(forward(X), model(X))
    assert forward.__self__ is not model
    assert not hookgraph.is_attached(forward.__self__)


def test_a_replica_uses_its_own_parameters() -> None:
    """``DataParallel`` copies a module's ``__dict__``: hooks, seam and all."""
    model = Scaled()
    handle = hookgraph.attach(model)
    for _ in range(3):
        model(X)
    replica = model._replicate_for_data_parallel()
    replica.linear = nn.Linear(4, 4)
    assert torch.equal(replica(X), replica.linear(X) * 1.0 + 7.5)
    assert torch.equal(model(X), model.linear(X) * 1.0 + 7.5)
    assert handle.stats.balanced


def test_state_dict_of_an_attached_module() -> None:
    model = Blocks()
    keys = list(model.state_dict())
    hookgraph.attach(model, "blocks.*")
    for _ in range(3):
        model(X)
    assert list(model.state_dict()) == keys
    Blocks().load_state_dict(model.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in Blocks().named_modules()]
    assert repr(model) == repr(Blocks())


def test_hg_46_the_signature_stays() -> None:
    model = Scaled()
    before = inspect.signature(model.forward)
    hookgraph.attach(model)
    model(X)
    assert inspect.signature(model.forward) == before
    assert list(before.parameters) == ["x", "t", "scale"]
    assert model.forward.__name__ == "forward"
    assert model.forward.__doc__ == Scaled.forward.__doc__
    assert model.forward.__self__ is model
    assert inspect.ismethod(model.forward) or callable(model.forward)
    assert inspect.unwrap(model.forward) is not None


def test_hg_46_export_while_attached() -> None:
    model = Scaled()
    plain = copy.deepcopy(model)
    handle = hookgraph.attach(model)
    for _ in range(3):
        model(X)
    program = torch.export.export(model, (X,), {"scale": 2.0})
    assert torch.equal(program.module()(X, scale=2.0), plain(X, scale=2.0))
    assert "hookgraph" not in str(program.graph)
    assert handle.stats.balanced


def test_hg_47_forward_called_directly() -> None:
    """A parent that calls ``self.expert.forward(x)`` runs no hooks; the call is served all the same."""
    with Twins.build(Parent, targets="expert") as twins:
        for _ in range(4):
            twins(torch.randn(2, 4))
        assert twins.outcomes == ["warmups", "captures", "replays", "replays"]


def test_hg_47_both_ways_in_turn() -> None:
    with Twins.build(mlp) as twins:
        for _ in range(3):
            twins(torch.randn(2, 4))
            twins.forward(torch.randn(2, 4))
        assert twins.outcomes == ["warmups", "captures"] + ["replays"] * 4


# -- together with others ---------------------------------------------------------------------------


def scale_forward(module: nn.Module) -> Callable[[], None]:
    """Wrap ``forward`` as hook registries do, and return the undoing."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) * 2

    module.forward = forward

    def undo() -> None:
        module.forward = original

    return undo


@pytest.mark.parametrize("order", ["wrap, attach", "attach, wrap", "wrap, attach, wrap"])
def test_hg_44_a_wrapper_of_another_library(order: str, no_residue: Watch) -> None:
    """Both effects, in whatever order; parity with the wrapped plain module."""
    model = mlp()
    plain = copy.deepcopy(model)
    factor = 2.0 ** order.count("wrap")
    for step in order.split(", "):
        if step == "wrap":
            scale_forward(model)
        else:
            hookgraph.attach(model)
    for _ in range(4):
        x = torch.randn(2, 4)
        assert torch.equal(model(x), plain(x) * factor)
    hookgraph.detach(model)
    no_residue.allow(model, "new: <root>.forward", "changed: <root>.forward", "changed: <root> signature")
    for _ in range(2):
        x = torch.randn(2, 4)
        assert torch.equal(model(x), plain(x) * factor)


def test_a_wrapper_that_goes_after_us_leaves_a_plain_module() -> None:
    model = mlp()
    plain = copy.deepcopy(model)
    handle = hookgraph.attach(model)
    undo = scale_forward(model)
    for _ in range(3):
        model(X)
    handle.detach()
    assert torch.equal(model(X), plain(X) * 2)
    undo()  # puts our old seam back, which must be nothing but the plain forward now
    assert torch.equal(model(X), plain(X))
    assert torch.equal(model.forward(X), plain(X))
    assert handle.stats.balanced
    del model.forward
    assert torch.equal(model(X), plain(X))


def test_hooks_of_the_user_on_the_attached_module() -> None:
    """They run around a replay as around an eager call, in their order."""

    def build(module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        module.register_forward_hook(lambda m, args, out: out * 2)

    for first in ("hooks", "attach"):
        model = mlp()
        plain = copy.deepcopy(model)
        build(plain)
        if first == "hooks":
            build(model)
        handle = hookgraph.attach.__wrapped__(model)
        if first == "attach":
            build(model)
        for _ in range(5):
            x = torch.randn(2, 4)
            assert torch.equal(model(x), plain(x))
        assert handle.stats.replays == 3
        handle.detach()
        x = torch.randn(2, 4)
        assert torch.equal(model(x), plain(x))


def test_a_pre_hook_of_the_user_that_raises() -> None:
    model = mlp()
    handle = hookgraph.attach(model)
    fail = [False]

    def check(module: nn.Module, args: Any) -> None:
        if fail[0]:
            raise ValueError("the hook's own")

    hook = model.register_forward_pre_hook(check)
    for _ in range(3):
        model(X)
    fail[0] = True
    with pytest.raises(ValueError, match="the hook's own"):
        model(X)
    fail[0] = False
    model(X)
    assert handle.stats.balanced
    assert handle.stats.replays == 2
    hook.remove()


@pytest.mark.parametrize("order", ["compile, attach", "attach, compile", "compile, call, attach"])
def test_hg_52_torch_compile(order: str, no_residue: Watch) -> None:
    """Inside compiled code hookgraph stands aside; the values are right and nothing is lost."""
    torch._dynamo.reset()
    model = mlp()
    plain = copy.deepcopy(model)
    compiled: Any = None
    for step in order.split(", "):
        if step == "compile":
            compiled = torch.compile(model, backend="eager")
        elif step == "call":
            compiled(X)
        elif compiled is None:
            handle = hookgraph.attach(model)
        else:
            with pytest.warns(hookgraph.HookgraphWarning, match=r"torch\.compile"):
                handle = hookgraph.attach(model)
    for _ in range(4):
        x = torch.randn(2, 4)
        assert torch.equal(compiled(x), plain(x))
    assert torch.equal(model(X), plain(X))
    assert handle.stats.balanced
    no_residue.allow(model, "new: <root>._is_torch_compile")  # torch's own
    torch._dynamo.reset()


def test_a_release_that_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a poisoned CUDA context: the error is the caller's, and the module is as it was."""

    def fails(_: Any) -> None:
        raise RuntimeError("CUDA says no")

    module = mlp()
    before = set(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks)
    handle = hookgraph.attach.__wrapped__(module)
    monkeypatch.setattr(Runner, "release", fails)
    with pytest.raises(RuntimeError, match="CUDA says no"):
        handle.detach()
    assert (set(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks)) == before


def test_switched_off_by_the_environment_nothing_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKGRAPH_DISABLE", "1")
    module = Split()
    handle = hookgraph.attach(module, "auto", calls=[((torch.ones(2, 4),), {})])
    assert not handle.stats.modules
    assert not hookgraph.is_attached(module)
