"""``clone_io``: a module whose graphs overwrite their outputs gives tensors that stay what they are.

Graphs of ``mode="reduce-overhead"`` exist on a GPU only (tests/gpu); here a compiler backend of ours
stands for them: it hands out the same memory each time, and refuses inputs in it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from hookgraph.private_torch import storage_key
from tests.modules import Does, Pair, mlp

X = torch.arange(8.0).reshape(2, 4) / 8


def overwriting(graph: Any, _: Any) -> Callable[..., Any]:
    """Compiled code that computes as eager and returns the same static outputs at each run of one shape."""
    statics: dict[Any, list[torch.Tensor]] = {}

    def run(*inputs: Any) -> Any:
        given = {storage_key(tensor) for tensor in inputs if isinstance(tensor, torch.Tensor)}
        if given & {storage_key(static) for kept in statics.values() for static in kept}:
            raise RuntimeError("accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run")
        outputs = graph(*inputs)
        made = [out for out in outputs if isinstance(out, torch.Tensor) and storage_key(out) not in given]
        kept = statics.setdefault(tuple(out.shape for out in made), [out.clone() for out in made])
        fresh = {id(out): static.copy_(out) for out, static in zip(made, kept, strict=True)}
        return [fresh.get(id(out), out) for out in outputs]

    return run


def compiled_whole(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend=overwriting)  # type: ignore[return-value]


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend=overwriting)
    return module


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


each_way = pytest.mark.parametrize("compiled", [compiled_whole, compiled_in_place], ids=["torch.compile", "compile()"])


@each_way
def test_without_it_outputs_are_overwritten_and_cannot_be_handed_back(compiled: Any) -> None:
    module = compiled(Does(lambda m, x: m.linear(x)))
    first = module(X)
    kept = first.clone()
    module(X + 1)
    assert not torch.equal(first, kept)
    with pytest.raises(RuntimeError, match="overwritten by a subsequent run"):
        module(module(X))


@each_way
def test_outputs_stay_and_can_be_handed_back(compiled: Any) -> None:
    plain = Does(lambda m, x: m.linear(x))
    module = compiled(copy.deepcopy(plain))
    with hookgraph.clone_io(module):
        outputs = [module(X + step) for step in range(3)]
        again = module(outputs[0])
    for step, out in enumerate(outputs):
        torch.testing.assert_close(out, plain(X + step))
    torch.testing.assert_close(again, plain(outputs[0]))


@each_way
@pytest.mark.parametrize(
    "wrap",
    [lambda y: (y, y + 1), lambda y: {"a": y, "b": [y * 2]}, lambda y: Pair(y, None), lambda y: [(y, 3)]],
    ids=["tuple", "dict", "named_tuple", "list"],
)
def test_nested_outputs_and_arguments(compiled: Any, wrap: Callable[[Any], Any]) -> None:
    plain = Does(lambda m, x, bag, *, more: wrap(m.linear(x) + bag[0]["k"] + more[1]))
    module = compiled(copy.deepcopy(plain))
    with hookgraph.clone_io(module):
        outputs = [module(X + i, [{"k": X}], more=(1, X + i)) for i in range(3)]
    for i, out in enumerate(outputs):
        expected = plain(X + i, [{"k": X}], more=(1, X + i))
        assert type(out) is type(expected)
        torch.testing.assert_close(out, expected)


@each_way
def test_what_the_forward_writes_reaches_the_caller(compiled: Any) -> None:
    def forward(m: Any, x: torch.Tensor, bag: dict[str, Any]) -> torch.Tensor:
        x.add_(1)
        bag["new"] = m.linear(x)
        bag["old"].mul_(2)
        return m.linear(x)

    plain = Does(forward)
    module = compiled(copy.deepcopy(plain))
    with hookgraph.clone_io(module):
        for _ in range(3):
            mine, theirs = X.clone(), X.clone()
            bag, other = {"old": X.clone()}, {"old": X.clone()}
            old = bag["old"]
            out, expected = module(mine, bag), plain(theirs, other)
            torch.testing.assert_close((out, mine, bag), (expected, theirs, other))
            assert bag["old"] is old
            kept, copied = bag["new"], bag["new"].clone()
            module(X.clone() + 3, {"old": X.clone()})
            assert torch.equal(kept, copied)


@each_way
def test_an_argument_that_is_returned_is_the_caller_s(compiled: Any) -> None:
    module = compiled(Does(lambda m, x, bag: (x, bag, m.linear(x))))
    bag = [X]
    with hookgraph.clone_io(module):
        x, same, _ = module(X, bag)
    assert x is X
    assert same is bag
    assert bag[0] is X


@each_way
def test_a_cache_is_left_with_tensors_of_its_own(compiled: Any) -> None:
    caches = pytest.importorskip("transformers.cache_utils", reason="an environment with transformers would run it")

    def forward(m: Any, x: torch.Tensor, cache: Any) -> torch.Tensor:
        y = m.linear(x).reshape(1, 1, 2, 4)
        keys, values = cache.update(y, y + 1, 0)
        return keys.sum(2) + values.mean(2)

    plain = Does(forward)
    module = compiled(copy.deepcopy(plain))
    mine, theirs = caches.DynamicCache(), caches.DynamicCache()
    with hookgraph.clone_io(module):
        for step in range(4):
            torch.testing.assert_close(module(X + step, mine), plain(X + step, theirs))
            torch.testing.assert_close(mine.layers[0].keys, theirs.layers[0].keys)


def test_an_error_leaves_the_caller_s_containers_as_they_were() -> None:
    def forward(m: Any, x: torch.Tensor, bag: list[Any]) -> torch.Tensor:
        raise ValueError("on purpose")

    module, bag = Does(forward), [X]
    with hookgraph.clone_io(module), pytest.raises(ValueError, match="on purpose"):
        module(X, bag)
    assert bag[0] is X


def test_arguments_that_share_memory_go_on_sharing_it() -> None:
    plain = Does(lambda m, a, b: (a.add_(1), m.linear(b))[1])
    module = copy.deepcopy(plain)
    mine, theirs = X.clone(), X.clone()
    with hookgraph.clone_io(module):
        out = module(mine[:], mine)
    assert torch.equal(out, plain(theirs[:], theirs))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view], ids=["conjugate", "negative"])
def test_lazy_outputs_keep_their_values(lazy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module = Does(lambda m, v: lazy(v * 2))
    value = torch.randn(4, dtype=torch.complex64)
    with hookgraph.clone_io(module):
        out = module(value)
    assert torch.equal(out, lazy(value * 2))


def test_strides_of_arguments_are_kept() -> None:
    seen: list[Any] = []
    module = Does(lambda m, v: (seen.append((v.stride(), v.shape)), m.linear(v))[1])
    with hookgraph.clone_io(module):
        for value in (X[:1].expand(2, 4), X.repeat(1, 2)[:, ::2], X.t().contiguous().t()):
            module(value)
            assert seen[-1] == (value.stride(), value.shape)


def test_it_is_switched_off_where_it_was_wrapped() -> None:
    module = mlp()
    handle = hookgraph.clone_io(module)
    attachment = hookgraph.attach(module)
    handle.remove()
    seen: list[Any] = []
    watching = module[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    module(X)
    watching.remove()
    assert seen[-1] is X  # nothing is cloned any more
    attachment.detach()


def test_gradients_flow_through() -> None:
    module = mlp()
    with torch.enable_grad(), hookgraph.clone_io(module):
        x = X.clone().requires_grad_()
        module(x).sum().backward()
        mine, x.grad = x.grad, None
    with torch.enable_grad():
        module(x).sum().backward()
    assert torch.equal(mine, x.grad)


@pytest.mark.parametrize(
    "compiled", [compiled_whole, compiled_in_place, lambda m: m], ids=["whole", "in_place", "plain"]
)
def test_nothing_is_left(compiled: Any) -> None:
    module = compiled(mlp())
    before = dict(vars(module))
    handle = hookgraph.clone_io(module)
    handle.remove()
    handle.remove()
    assert dict(vars(module)) == before
    assert list(vars(module)) == list(before)


def test_copies_are_plain() -> None:
    module = mlp()
    with hookgraph.clone_io(module):
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            with torch.no_grad():
                other[0].weight.zero_()
                other[2].bias.fill_(3.0) if len(other) > 2 else None
            assert not torch.equal(other(X), module(X))


def test_bad_use_is_named() -> None:
    with pytest.raises(hookgraph.AttachError, match=r"expected a torch.nn.Module, got function"):
        hookgraph.clone_io(lambda x: x)  # type: ignore[arg-type]
    module = mlp()
    with hookgraph.clone_io(module), pytest.raises(hookgraph.AttachError, match=r"has it already; remove\(\)"):
        hookgraph.clone_io(module)
