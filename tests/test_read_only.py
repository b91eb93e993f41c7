"""``read_only``: a prompt cache is copied in when it changed, and what a call puts into it is dropped."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from hookgraph.inputs import StaticInputs
from tests.models import zoo
from tests.parity import check_balance

X = torch.arange(8.0).reshape(2, 4) / 8


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each ``_foreach_copy_`` moved."""
    sizes: list[int] = []
    original = torch._foreach_copy_

    def counting(targets: Any, sources: Any, *rest: Any) -> Any:
        sizes.append(len(targets))
        return original(targets, sources, *rest)

    monkeypatch.setattr(torch, "_foreach_copy_", counting)
    return sizes


def forward(m: Any, x: torch.Tensor, cache: dict[str, Any], scale: float = 1.0) -> torch.Tensor:
    """Appends to a cache and attends to all of it, as a decoder does."""
    cache["k"] = torch.cat([cache["k"], m.linear(x)])
    cache["calls"] = cache.get("calls", 0) + 1
    return m.linear(x) * scale + cache["k"].sum(0)  # type: ignore[no-any-return]


class Attends(nn.Module):
    """Its forward names its arguments, so that they are found by position, too."""

    def __init__(self, function: Callable[..., torch.Tensor] = forward) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        self.eval()

    def forward(self, x: torch.Tensor, cache: dict[str, Any], scale: float = 1.0) -> torch.Tensor:
        return self.function(self, x, cache)


def prompt() -> dict[str, Any]:
    return {"k": torch.randn(3, 4)}


def expected(module: Any, x: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
    return forward(module, x, dict(cache))


def test_the_cache_is_untouched_in_every_stage(copied: list[int]) -> None:
    module, cache = Attends(), prompt()
    held = dict(cache)
    with hookgraph.attach(module, read_only=("cache",)) as handle:
        for step in range(8):
            x = X + step
            assert torch.equal(module(x, cache), expected(module, x, cache))
            assert list(cache) == ["k"]
            assert cache["k"] is held["k"]
        assert handle.stats.replays == 6
        assert sum(handle.stats.reasons.values()) == 0
        del copied[:]
        module(X, cache)
        assert copied == [1]  # x alone


@pytest.mark.parametrize("options", [{"read_only": "cache"}, {"read_only": ["cache"], "verify": 0}], ids=str)
def test_a_changed_cache_is_copied_in(options: dict[str, Any]) -> None:
    module, cache = Attends(), prompt()
    with hookgraph.attach(module, **options) as handle:
        for step in range(12):
            if step == 5:
                cache["k"].mul_(2)  # another version
            if step == 8:
                cache["k"] = torch.randn(3, 4)  # another tensor
            if step == 9:
                cache["k"].data = torch.randn(3, 4)  # other memory, of which no version tells
            if step == 10:
                cache["k"] = cache["k"].view(3, 4)  # another view of the same
            assert torch.equal(module(X + step, cache), expected(module, X + step, cache)), step
        assert handle.stats.replays >= 10


@pytest.mark.parametrize("by", ["name", "position"])
def test_the_argument_is_found_by_name_and_by_position(by: str) -> None:
    module, cache = Attends(), prompt()
    with hookgraph.attach(module, read_only=("cache",)):
        for _ in range(4):
            if by == "name":
                module(x=X, cache=cache)
            else:
                module(X, cache)
            assert list(cache) == ["k"]


def _raises(m: Any, x: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
    cache["new"] = x
    raise ValueError("on purpose")


def test_eager_calls_and_errors_leave_it_untouched_too() -> None:
    module, cache = Attends(), prompt()
    with hookgraph.attach(module, read_only=("cache",)) as handle:
        with handle.paused():
            module(X, cache)
        with torch.enable_grad():
            module(X.clone().requires_grad_(), cache)
        module.train()
        module(X, cache)
        module.eval()
        assert list(cache) == ["k"]
        assert handle.stats.eager == 3
    broken = Attends(_raises)
    with hookgraph.attach(broken, read_only=("cache",)) as handle:
        with pytest.raises(ValueError, match="on purpose"):
            broken(X, cache)
        assert list(cache) == ["k"]
        check_balance(handle.stats)


def test_a_tensor_that_is_written_in_place_cannot_be_read_only() -> None:
    def writes(m: Any, x: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
        cache["k"].add_(1)
        return m.linear(x) + cache["k"].sum(0)

    module, plain, cache, other = Attends(writes), Attends(writes), prompt(), prompt()
    plain.load_state_dict(module.state_dict())
    other["k"].copy_(cache["k"])
    with hookgraph.attach(module, read_only=("cache",)) as handle:
        for _ in range(4):
            assert torch.equal(module(X, cache), plain(X, other))
            assert torch.equal(cache["k"], other["k"])
        (detail,) = handle.stats.modules[0].details["unsupported_argument"]
        assert "read_only argument" in detail


def test_inference_tensors_are_copied_once_in_a_loop(copied: list[int]) -> None:
    module = Attends()
    with torch.inference_mode(), hookgraph.attach(module, read_only=("cache",)) as handle:
        cache = prompt()
        for step in range(5):
            module(X + step, cache)
        del copied[:]
        module(X, cache)
        assert sorted(copied) == [1, 1]  # it counts no versions
        with handle.loop():
            module(X, cache)
            del copied[:]
            for step in range(3):
                assert torch.equal(module(X + step, cache), expected(module, X + step, cache))
            assert copied == [1, 1, 1]
            other = {"k": torch.randn(3, 4)}
            assert torch.equal(module(X, other), expected(module, X, other))
        cache["k"].add_(1)
        assert torch.equal(module(X, cache), expected(module, X, cache))
        with handle.loop():  # another loop: the copy of the last one counts no more
            cache["k"].add_(1)
            assert torch.equal(module(X, cache), expected(module, X, cache))


def test_a_loop_holds_other_threads_off() -> None:
    module, cache = Attends(), prompt()
    order: list[str] = []
    with hookgraph.attach(module, read_only=("cache",)) as handle:
        for step in range(4):
            module(X + step, cache)

        def other() -> None:
            with torch.no_grad():
                module(X, cache)
            order.append("other")

        thread = threading.Thread(target=other)
        with handle.loop():
            thread.start()
            thread.join(0.2)
            module(X, cache)
            order.append("loop")
        thread.join()
    assert order == ["loop", "other"]


def test_a_failed_copy_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module, cache = Attends(), prompt()
    with hookgraph.attach(module, read_only=("cache",), verify=0):
        for step in range(4):
            module(X + step, cache)
        cache["k"].add_(1)
        original = StaticInputs._fill_read_only

        def fails(self: Any, *rest: Any) -> None:
            monkeypatch.setattr(StaticInputs, "_fill_read_only", original)
            for kept in self._read_only:
                kept.mark = None
            raise RuntimeError("a fault that cannot be had otherwise")

        monkeypatch.setattr(StaticInputs, "_fill_read_only", fails)
        for _ in range(3):
            assert torch.equal(module(X, cache), expected(module, X, cache))


@pytest.mark.parametrize("make", [zoo.alpamayo_expert, zoo.alpamayo_expert_cfg], ids=["one_prompt", "guided"])
def test_a_driver_with_its_own_crop_gets_the_same_results(make: Callable[..., zoo.Case]) -> None:
    pytest.importorskip("transformers", reason="an environment with transformers would run it")
    eager, attached = make(steps=6), make(steps=6)
    with hookgraph.attach(attached.module, read_only=("past_key_values",)) as handle:
        for mine, theirs in zip(attached.calls, eager.calls, strict=True):
            cache = mine[1]["past_key_values"]
            before = [(layer.keys, layer.values) for layer in cache.layers]
            out, want = attached.module(*mine[0], **mine[1]), eager.module(*theirs[0], **theirs[1])
            assert torch.equal(out.last_hidden_state, want.last_hidden_state)
            after = [(layer.keys, layer.values) for layer in cache.layers]
            assert all(a is c and b is d for (a, b), (c, d) in zip(before, after, strict=True))
            attached.after()
            eager.after()
        assert handle.stats.replays >= 3


def test_explain_agrees() -> None:
    module, cache = Attends(), prompt()
    with hookgraph.attach(module, read_only=("cache",)) as handle:
        plans = []
        for _ in range(4):
            plans.append(handle.explain(X, cache).plan.value)
            module(X, cache)
        assert plans == ["warm up", "capture", "replay", "replay"]


def test_a_deep_copy_of_the_arguments_is_another_cache() -> None:
    module, cache = Attends(), prompt()
    with hookgraph.attach(module, read_only=("cache",)):
        for step in range(6):
            mine = copy.deepcopy(cache)
            assert torch.equal(module(X + step, mine), expected(module, X + step, cache))


@pytest.mark.parametrize(
    ("module", "names", "words"),
    [
        (torch.nn.Linear(4, 4), ("cache",), r"read_only='cache': Linear.forward takes 'input'"),
        (torch.nn.Linear(4, 4), (3,), r"read_only=\(3,\): expected names of arguments"),
    ],
    ids=["no_such_argument", "no_name"],
)
def test_bad_names_are_told_and_leave_nothing(module: Any, names: Any, words: str) -> None:
    with pytest.raises(hookgraph.AttachError, match=words):
        hookgraph.attach(module, read_only=names)
    assert not hookgraph.is_attached(module)
