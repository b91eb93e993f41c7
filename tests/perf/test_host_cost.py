"""What hookgraph costs the host on a call: measured and reported, never a limit that a test could miss.

    python -m pytest tests/perf -p no:xdist --benchmark-only --benchmark-json=perf.json
    python -m tests.perf.report perf.json docs/results/perf_cpu.json

In the ordinary suite each of these runs once, as a check of what it measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from hookgraph import ambient, signature
from hookgraph.guards import Guards
from hookgraph.likeness import Likeness
from hookgraph.signature import Call

CPU = torch.device("cpu")
Measure = Callable[..., Any]


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _call(leaves: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call as diffusion transformers get it: a third of the leaves are numbers; beyond twelve, a list of tensors."""
    x = [torch.randn(2, 4, 8) for _ in range(8)]
    kwargs: dict[str, Any] = {
        "scale": 1.5,
        "flag": True,
        "steps": 3,
        "mode": "x",
        **dict(zip("abcd", x[4:], strict=True)),
    }
    if leaves > 12:
        kwargs["cache"] = [torch.randn(2, 4, 8) for _ in range(leaves - 12)]
    return tuple(x[:4]), kwargs


def _take_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    call = signature.read(args, kwargs, CPU)
    assert isinstance(call, Call)
    return call


@pytest.mark.parametrize("leaves", [12, 74])
def test_signature_hit(benchmark: Measure, leaves: int) -> None:
    """The decision that a call may be replayed: surroundings and looks, guards apart."""
    args, kwargs = _call(leaves)
    likeness = Likeness.of(_take_apart(args, kwargs), args, kwargs)
    assert likeness is not None
    before = ambient.read(CPU)

    def decide() -> Any:
        return ambient.standing_aside() is None and ambient.read(CPU) == before and likeness.leaves(args, kwargs)

    assert len(benchmark(decide)) == leaves


@pytest.mark.parametrize("leaves", [12, 74])
def test_flatten_up_to_and_attributes(benchmark: Measure, leaves: int) -> None:
    """The yardstick for a hit: optree against a known structure, and each tensor's attributes read once."""
    args, kwargs = _call(leaves)
    spec = _take_apart(args, kwargs).spec

    def read() -> list[Any]:
        found = spec.flatten_up_to((args, kwargs))
        return [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in found if type(t) is torch.Tensor]

    assert len(benchmark(read)) == leaves - 4


@pytest.mark.parametrize("leaves", [12, 74])
def test_signature_in_full(benchmark: Measure, leaves: int) -> None:
    """The long way, for a call that looks like none of the last ones."""
    args, kwargs = _call(leaves)
    key = signature.of(_take_apart(args, kwargs), ambient.read(CPU))
    assert benchmark(lambda: signature.of(_take_apart(args, kwargs), ambient.read(CPU))) == key


@pytest.mark.filterwarnings("ignore:.* runs eager. limit")
def test_miss(benchmark: Measure) -> None:
    """A call beyond the bound, which runs eager; with the forward's own time."""
    module = nn.Linear(8, 8).eval()
    with hookgraph.attach(module, max_graphs=1) as handle:
        module(torch.randn(1, 8))
        benchmark(module, torch.randn(2, 8))
        assert handle.stats.reasons["limit"] > 0


@pytest.mark.parametrize("parameters", [100, 1000, 2000])
def test_guards(benchmark: Measure, parameters: int) -> None:
    """Both halves of the guards, on blocks of four parameters and two plain attributes each."""
    module = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(parameters // 4))).eval()
    assert len(list(module.parameters())) == parameters
    guards = Guards(module, [], "full")
    assert benchmark(guards.difference) is None


@pytest.mark.parametrize("parameters", [100, 1000, 2000])
def test_guards_before_the_launch(benchmark: Measure, parameters: int) -> None:
    """The half that has to come before: the addresses."""
    module = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(parameters // 4))).eval()
    assert benchmark(Guards(module, [], "full").moved) is None


class Layers(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: torch.Tensor, scale: float = 1.5, y: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * scale + (0 if y is None else y)
        return x


@pytest.mark.parametrize("layers", [1, 8])
@pytest.mark.parametrize("side", ["eager", "replay"])
def test_tape(benchmark: Measure, layers: int, side: str) -> None:
    """A small module on the CPU, eager and replayed by the tape."""
    module, x, y = Layers(layers).eval(), torch.randn(2, 8), torch.randn(2, 8)
    expected = module(x, y=y)
    with hookgraph.attach(module, verify=0) as handle:
        for _ in range(4):
            module(x, y=y)
        if side == "eager":
            handle.detach()
        out = benchmark(lambda: module(x, y=y))
    assert torch.equal(out, expected)
