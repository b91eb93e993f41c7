"""What a graph is worth, and what inference mode hides, where only a GPU can show it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the name that everyone uses)

import hookgraph
from hookgraph import soak
from tests.modules import Does, mlp
from tests.parity import Twins

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a machine with a CUDA device would run it"),
]


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def verdict_of(module: nn.Module, *shape: int, **options: Any) -> tuple[str, float, dict[str, int]]:
    with hookgraph.attach(module, **options) as handle:
        for _ in range(8):
            module(torch.randn(*shape, device="cuda"))
        (signature,) = handle.stats.modules[0].signatures
        return signature.verdict, signature.speedup or 0.0, dict(handle.stats.reasons)


def test_where_the_host_is_slow_a_graph_is_worth_it() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return m.linear(x)

    verdict, speedup, _ = verdict_of(Does(forward).cuda(), 2, 4)
    assert verdict == "worth it"
    assert speedup > 3


def test_where_the_device_is_busy_it_is_not() -> None:
    """A chain of products that take the device much longer than their launches take the host."""
    busy = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(6)]).cuda().eval()
    verdict, speedup, _ = verdict_of(busy, 8192, 8192)
    assert verdict == "not worth it"
    assert 0.9 < speedup < 1.05
    _, _, reasons = verdict_of(busy, 8192, 8192, min_speedup=1.1)
    assert reasons.keys() == {"not_worth_it"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_table_is_moved_over_inside_the_forward(mode: Any) -> None:
    """In inference mode ``to`` arrives whole; what it copies from the host has to be seen all the same."""
    table = torch.arange(4.0)
    with mode(), Twins.build(lambda: Does(lambda m, x: m.linear(x) + table.to(x.device)).cuda()) as twins:
        for _ in range(6):
            twins(torch.randn(2, 4, device="cuda"))
        assert twins.outcomes[-1] == "replays", twins.outcomes


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: x * x.sum().cpu().item(),
        lambda m, x: m.linear(x.cpu().to(x.device)),
        lambda m, x: F.one_hot((x * 10).long().abs()),
    ],
    ids=["cpu", "there and back", "one_hot"],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_value_is_read_back(mode: Any, forward: Any) -> None:
    with mode(), Twins.build(lambda: Does(forward).cuda()) as twins:
        for _ in range(4):
            twins(torch.randn(2, 4, device="cuda"))
        assert twins.outcomes[-1] == "eager:read_back", twins.outcomes


def test_inside_another_capture_the_plain_forward_is_recorded() -> None:
    module = mlp().cuda()
    x = torch.randn(2, 4, device="cuda")
    handle = hookgraph.attach(module)
    expected = module(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(x)
    graph.replay()
    assert torch.equal(out, expected)
    assert handle.stats.reasons == {"capturing": 1}


def test_a_soak_on_streams_of_their_own() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda().eval()
    calls = [((torch.randn(rows, 64, device="cuda"),), {}) for rows in (1, 8, 32)]
    report = soak.run(module, calls, seconds=10, threads=4)
    assert report.passed, report.examples
    assert report.outcomes["replays"] > 1_000
