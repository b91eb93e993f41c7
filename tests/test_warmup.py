"""``handle.warmup``: capture ahead of traffic, on copies, with nothing but graphs left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from hookgraph import ahead
from tests.modules import Does, mlp


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def x(*shape: int) -> torch.Tensor:
    return torch.ones(*(shape or (2, 4)))


def test_the_first_call_of_traffic_is_replayed() -> None:
    module = mlp()
    with hookgraph.attach(module) as handle:
        handle.warmup([((x(rows, 4),), {}) for rows in (1, 3, 2)], progress=False)
        handle.reset_counters()
        for rows in (2, 1, 3):
            module(torch.randn(rows, 4))
        assert (handle.stats.replays, handle.stats.calls) == (3, 3)


def test_the_largest_goes_first() -> None:
    seen: list[int] = []
    module = Does(lambda m, v: seen.append(len(v)) or m.linear(v))
    with hookgraph.attach(module) as handle:
        handle.warmup([{"v": x(1, 4)}, ((x(5, 4),), {}), ((), {"v": x(3, 4)})], progress=False)
    assert list(dict.fromkeys(seen)) == [5, 3, 1]


def test_arguments_and_random_state_are_left_alone() -> None:
    def forward(m: Any, v: torch.Tensor, bag: list[Any]) -> torch.Tensor:
        bag.append(v.add_(1))
        return nn.functional.dropout(m.linear(v), 0.5, training=True)

    module, v, bag = Does(forward), x(), [x()]
    state = torch.get_rng_state()
    with hookgraph.attach(module) as handle:
        handle.warmup([((v, bag), {})], progress=False)
        assert handle.stats.captures == 1
    assert torch.equal(v, x())
    assert len(bag) == 1
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "v",
    [x(1, 4).expand(2, 4), x(4, 2).t(), x(9)[1:].view(2, 4), x(2, 4).requires_grad_()],
    ids=["expanded", "turned", "misaligned", "gradient"],
)
def test_a_copy_has_the_same_signature(v: torch.Tensor) -> None:
    module = Does(lambda m, v, w: m.linear(v) + w)
    with hookgraph.attach(module) as handle:
        handle.warmup([((v, v), {})], progress=False)
        handle.reset_counters()
        module(v, v)
        assert handle.stats.replays == 1


def test_a_copy_shares_what_the_call_shares() -> None:
    bag, base = [1], x()
    (one, other, whole, part), _ = ahead.copy_of(((bag, bag, base, base[:1]), {}))
    assert one is other
    assert one is not bag
    assert whole.data_ptr() == part.data_ptr() != base.data_ptr()


def test_submodules_of_the_model() -> None:
    model = nn.Sequential(mlp(), nn.Tanh(), mlp()).eval()
    with hookgraph.attach(model, ["0", "2"]) as handle:
        handle.warmup([((x(),), {})], progress=False)
        assert [module.captures for module in handle.stats.modules] == [1, 1]


def test_a_call_that_stays_eager_is_told() -> None:
    with hookgraph.attach(Does(lambda m, v: m.linear(v) * v.sum().item())) as handle:
        with pytest.warns(hookgraph.HookgraphWarning, match=r"warmup: a call runs eager \(read_back\)"):
            handle.warmup([((x(),), {})], progress=False)
        assert handle.stats.calls <= ahead.MOST_RUNS


def test_buffers_advance_once_a_call() -> None:
    module = Does(lambda m, v: m.linear(v) + m.count.add_(1), count=torch.zeros(1))
    with hookgraph.attach(module) as handle:
        handle.warmup([((x(),), {})], progress=False)
        assert handle.stats.calls == int(module.count)


def test_the_progress_bar_counts_calls(capsys: pytest.CaptureFixture[str]) -> None:
    with hookgraph.attach(mlp()) as handle:
        handle.warmup([((x(),), {}), ((x(3, 4),), {})])
    assert "2/2" in capsys.readouterr().err


def test_bad_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = hookgraph.attach(mlp())
    with pytest.raises(hookgraph.HookgraphError, match=r"calls\[1\] is a Tensor; expected \(args, kwargs\)"):
        handle.warmup([((x(),), {}), x()], progress=False)
    assert handle.stats.calls == 0
    handle.detach()
    with pytest.raises(hookgraph.HookgraphError, match="nothing is attached here"):
        handle.warmup([], progress=False)
    monkeypatch.setenv("HOOKGRAPH_DISABLE", "1")
    model = mlp()
    hookgraph.attach(model).warmup([((x(),), {})], progress=False)
