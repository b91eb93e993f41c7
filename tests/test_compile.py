"""torch.compile, export, tracing and functional transforms around, above and below an attached module."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

import hookgraph
from tests.modules import Blocks, Scaled, mlp
from tests.parity import Twins
from tests.residue import Watch


@pytest.fixture(autouse=True)
def fresh_dynamo(no_residue: Watch) -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    for entry in no_residue._watched.values():  # Dynamo marks what it has compiled
        entry.allowed.add("new: <root>._is_torch_compile")
    torch._dynamo.reset()


class Parent(nn.Module):
    """Calls the attached module as a module, or past its hooks as VLA code does."""

    def __init__(self, direct: bool = False) -> None:
        super().__init__()
        self.expert = mlp()
        self.direct = direct
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.direct:
            return self.expert.forward(x) + 1
        return self.expert(x) + 1


def _pair(make: Callable[[], Any]) -> tuple[Any, Any]:
    sides = []
    for _ in range(2):
        torch.manual_seed(0)
        sides.append(make())
    return sides[0], sides[1]


def _same(function: Callable[..., Any], plain: Callable[..., Any], times: int = 5) -> None:
    for _ in range(times):
        x = torch.randn(2, 4)
        assert torch.equal(function(x), plain(x))


def _compilations() -> int:
    return counters["stats"]["unique_graphs"]


# -- compiled parts ------------------------------------------------------------------------------


def _compile_blocks(model: Any) -> None:
    """What diffusers' ``compile_repeated_blocks`` does."""
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)


def _compile_by_wrapper(model: Any) -> None:
    model.blocks[0].mlp = torch.compile(model.blocks[0].mlp, backend="eager", fullgraph=True)


@pytest.mark.parametrize("compiling", [_compile_blocks, _compile_by_wrapper], ids=["module.compile", "torch.compile"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_over_compiled_children(compiling: Callable[[Any], None], when: str, no_residue: Watch) -> None:
    """The tape cannot look into compiled code, so it stands aside; the compiled code is left as it is."""
    model, plain = _pair(Blocks)
    if when == "before":
        compiling(model)
        _same(model, plain)
        made = _compilations()
    handle = hookgraph.attach(model)
    if when == "after":
        _same(model, plain, 3)
        compiling(model)
        replaced = ("*",) if compiling is _compile_by_wrapper else ()  # by a module of another class
        no_residue.allow(model, "new: blocks.0._compiled_call_impl", "new: blocks.1._compiled_call_impl", *replaced)
        _same(model, plain, 2)
        made = _compilations()
    handle.reset_counters()
    _same(model, plain)
    assert handle.stats.reasons == {"compiled_part": 5}
    assert _compilations() == made
    assert not counters["graph_break"]
    handle.detach()
    _same(model, plain)
    assert _compilations() == made


def test_over_diffusers_compile_repeated_blocks(no_residue: Watch) -> None:
    zoo = pytest.importorskip("tests.models.zoo")
    case, plain = zoo.flux(steps=3), zoo.flux(steps=3)
    case.module.compile_repeated_blocks(backend="eager", fullgraph=True)
    handle = hookgraph.attach(case.module)
    made = []
    for (args, kwargs), (other_args, other_kwargs) in zip(case.calls, plain.calls, strict=True):
        out, expected = case.module(*args, **kwargs), plain.module(*other_args, **other_kwargs)
        assert torch.equal(out[0], expected[0])
        made.append(_compilations())
    assert handle.stats.reasons == {"compiled_part": 3}
    assert len(set(made)) == 1


@pytest.mark.parametrize("direct", [False, True], ids=["called", "forward"])
@pytest.mark.parametrize("fullgraph", [False, True], ids=["breaks allowed", "fullgraph"])
def test_inside_a_compiled_parent(direct: bool, fullgraph: bool) -> None:
    """It stands aside: one graph, no break, no compilation for each call."""
    model, plain = _pair(lambda: Parent(direct))
    handle = hookgraph.attach(model, "expert")
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    _same(compiled, plain)
    assert (_compilations(), dict(counters["graph_break"])) == (1, {})
    assert handle.stats.calls == 0
    _same(model, plain)  # the same module, called as it is, is served
    assert handle.stats.replays == 3
    _same(compiled, plain)
    assert _compilations() == 1
    handle.detach()
    _same(compiled, plain)
    assert _compilations() <= 2  # at most once for what has changed


def test_inside_a_parent_compiled_before() -> None:
    model, plain = _pair(Parent)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    _same(compiled, plain, 2)
    with hookgraph.attach(model, "expert"):
        _same(compiled, plain)
        assert _compilations() <= 2
        assert not counters["graph_break"]


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_an_attached_module_is_compiled_itself(how: str, no_residue: Watch) -> None:
    model, plain = _pair(mlp)
    handle = hookgraph.attach(model)
    _same(model, plain)
    compiled = model
    if how == "torch.compile":
        compiled = torch.compile(model, backend="eager", fullgraph=True)
    else:
        model.compile(backend="eager", fullgraph=True)
        no_residue.allow(model, "new: <root>._compiled_call_impl")
    _same(compiled, plain)
    assert (_compilations(), dict(counters["graph_break"])) == (1, {})
    assert handle.stats.calls == 5


def test_an_optimized_module(no_residue: Watch) -> None:
    """It is a module whose forward is compiled: served as any that has compiled parts."""
    model, plain = _pair(mlp)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    _same(compiled, plain, 2)
    handle = hookgraph.attach(compiled)
    _same(compiled, plain)
    assert handle.stats.reasons == {"compiled_part": 5}
    assert _compilations() == 1
    handle.detach()
    _same(compiled, plain)
    assert _compilations() == 1


def test_hg_52_late_attach_to_a_compiled_module(no_residue: Watch) -> None:
    """Hooks that come after the first compiled call never fire; the user is told."""
    model, plain = _pair(mlp)
    model.compile(backend="eager")
    _same(model, plain, 2)
    with pytest.warns(hookgraph.HookgraphWarning, match=r"the module itself is compiled in place by module\.compile"):
        handle = hookgraph.attach(model)
    _same(model, plain)
    assert handle.stats.calls == 0
    handle.detach()
    _same(model, plain)
    assert _compilations() <= 2


def test_hg_52_late_attach_to_what_torch_compile_wraps(no_residue: Watch) -> None:
    model, plain = _pair(mlp)
    compiled = torch.compile(model, backend="eager")
    _same(compiled, plain, 2)
    with pytest.warns(hookgraph.HookgraphWarning, match=r"given to torch\.compile.* Attach to what torch\.compile"):
        handle = hookgraph.attach(model)
    _same(compiled, plain)
    assert handle.stats.calls == 0
    assert _compilations() <= 2
    _same(model, plain)
    assert handle.stats.replays == 3


def test_hg_52_late_attach_names_the_compiled_targets(no_residue: Watch) -> None:
    model, plain = _pair(Blocks)
    _compile_blocks(model)
    with pytest.warns(hookgraph.HookgraphWarning, match="compiled in place") as told:
        hookgraph.attach(model, "blocks.*")
    assert [str(warning.message).split()[0] for warning in told] == ["blocks.0", "blocks.1"]
    _same(model, plain)


def test_hg_52_an_unhooked_twin_is_compiled_first() -> None:
    """The class's code is compiled for the twin, without hooks; the attached one must not suffer."""
    model, plain = _pair(mlp)
    twin = mlp()
    torch.compile(twin, backend="eager")(torch.randn(2, 4))
    handle = hookgraph.attach(model)
    _same(torch.compile(model, backend="eager"), plain)
    _same(model, plain)
    assert handle.stats.replays == 3


# -- export, tracing, transforms -------------------------------------------------------------------


@pytest.fixture(name="served")
def _served() -> tuple[nn.Module, nn.Module, hookgraph.Attachment]:
    """A module that replays, its plain twin, and the handle."""
    model, plain = _pair(mlp)
    handle = hookgraph.attach(model)
    _same(model, plain)
    assert handle.stats.replays == 3
    return model, plain, handle


def _still_replays(model: Any, plain: Any, handle: hookgraph.Attachment) -> None:
    before = handle.stats.replays
    _same(model, plain, 3)
    assert handle.stats.replays > before
    assert handle.stats.balanced


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("names", [False, True], ids=["by position", "by name"])
def test_hg_46_export_while_attached(strict: bool, names: bool) -> None:
    model, plain = _pair(Scaled)
    signature = inspect.signature(plain.forward)
    handle = hookgraph.attach(model)
    _same(model, plain)
    assert inspect.signature(model.forward) == signature
    x, t = torch.randn(2, 4), torch.tensor(2.0)
    args, kwargs = ((), {"x": x, "t": t}) if names else ((x, t), {})
    program = torch.export.export(model, args, kwargs, strict=strict)
    assert "hookgraph" not in str(program.graph_module.code)
    x = torch.randn(2, 4)
    args, kwargs = ((), {"x": x, "t": t}) if names else ((x, t), {})
    assert torch.equal(program.module()(*args, **kwargs), plain(x, t))
    assert handle.stats.calls == 5
    _still_replays(model, plain, handle)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_jit_trace(served: Any) -> None:
    model, plain, handle = served
    traced = torch.jit.trace(model, torch.randn(2, 4), check_trace=False)
    _same(traced, plain)
    assert handle.stats.reasons == {"tracing": 1}
    _still_replays(model, plain, handle)


def test_fx_symbolic_trace(served: Any) -> None:
    model, plain, handle = served
    _same(torch.fx.symbolic_trace(model), plain)
    _still_replays(model, plain, handle)


def test_fx_symbolic_trace_of_a_parent() -> None:
    model, plain = _pair(Blocks)
    handle = hookgraph.attach(model, "blocks.0")
    _same(model, plain)
    _same(torch.fx.symbolic_trace(model), plain)
    assert handle.stats.reasons == {"tracing": 1}


def test_make_fx(served: Any) -> None:
    model, plain, handle = served
    _same(make_fx(model)(torch.randn(2, 4)), plain)
    assert handle.stats.eager == 1
    _still_replays(model, plain, handle)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_vmap_and_jvp(served: Any) -> None:
    model, plain, handle = served
    x = torch.randn(5, 2, 4)
    assert torch.equal(torch.vmap(model)(x), torch.vmap(plain)(x))
    got, expected = (torch.func.jvp(module, (x[0],), (x[1],)) for module in (model, plain))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert handle.stats.reasons == {"tracing": 2}
    _still_replays(model, plain, handle)


def test_functional_call_with_other_weights() -> None:
    """The hooks fire with parameters exchanged for the time of the call."""
    model, plain = _pair(mlp)
    with Twins(plain, model) as twins:
        for step in range(12):
            twins(torch.randn(2, 4))
            if step % 3 == 2:
                weights = {name: torch.randn_like(value) for name, value in plain.named_parameters()}
                twins.run(
                    twins.modules.map(lambda module: lambda w, x: torch.func.functional_call(module, w, (x,))),
                    weights, torch.randn(2, 4),
                )  # fmt: skip
        assert twins.count("errors") == 0


@pytest.mark.parametrize("direct", [False, True], ids=["called", "forward"])
def test_replicas_of_data_parallel_run_with_their_own_weights(served: Any, direct: bool) -> None:
    """As torch.nn.parallel.replicate makes them: a copied ``__dict__``, other parameters."""
    model, plain, handle = served

    def replicate(root: Any) -> Any:
        copies = {child: child._replicate_for_data_parallel() for child in root.modules()}
        for child, other in copies.items():
            other._modules = {name: copies[inner] for name, inner in child._modules.items()}
            for name, value in child._parameters.items():
                setattr(other, name, value * 3)
        return copies[root]

    ours, theirs = replicate(model), replicate(plain)
    if direct:
        _same(ours.forward, theirs.forward)
    else:
        _same(ours, theirs)
    assert handle.stats.reasons == {"foreign_module": 5}
    again = copy.deepcopy(ours)
    assert not [value for value in vars(again).values() if "hookgraph" in repr(type(value))]
    _still_replays(model, plain, handle)


def test_copies_run_with_their_own_weights(served: Any) -> None:
    model, plain, handle = served
    for make in (copy.copy, copy.deepcopy):
        ours, theirs = make(model), make(plain)
        for other in (ours, theirs):
            other._modules = dict(copy.deepcopy(other)._modules)
            other[0].weight.mul_(3)
        _same(ours, theirs)
        _same(ours.forward, theirs.forward)
        assert vars(ours).keys() == vars(theirs).keys()
    assert handle.stats.calls == 5
    _still_replays(model, plain, handle)


def test_a_script_module_is_refused() -> None:
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        scripted = torch.jit.script(mlp())
    with pytest.raises(hookgraph.AttachError, match=r"script module .* Attach to the module"):
        hookgraph.attach.__wrapped__(scripted)
