"""What the proof makes of kernels that do not agree with themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import hookgraph

_noise: Callable[[int], float] = float
_runs = 0


@torch.library.custom_op("hookgraph_tests::unsettled", mutates_args=())
def _unsettled(x: torch.Tensor) -> torch.Tensor:
    """A kernel whose result depends on how often it has run, as one with atomic additions may seem to."""
    global _runs
    _runs += 1
    return x * (1 + _noise(_runs))


class Unsettled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _unsettled(x) + 1


@pytest.fixture
def noise() -> Iterator[Callable[[Callable[[int], float]], None]]:
    def use(function: Callable[[int], float]) -> None:
        global _noise, _runs
        _noise, _runs = function, 0

    yield use
    use(float)


def _handle(calls: int) -> hookgraph.Attachment:
    module = Unsettled().eval()
    handle = hookgraph.attach(module)
    with torch.no_grad():
        for call in range(calls):
            module(torch.full((8,), 2.0 + call))
    return handle


ULP = 2.0**-22  # more than one unit in the last place of the results here, and well within a float32 tolerance


@pytest.mark.parametrize(
    "differs",
    [lambda run: ULP * (run % 2), lambda run: ULP * (run % 3 == 0), lambda run: ULP * (run in (2, 4))],
    ids=["every_other_run", "every_third_run", "now_and_then"],
)  # fmt: skip
def test_a_kernel_that_differs_from_itself_is_no_mismatch(noise, differs) -> None:
    noise(differs)
    stats = _handle(6).stats
    assert (stats.reasons, stats.replays) == ({}, 4)


def test_a_difference_that_eager_never_shows_is_a_mismatch(noise) -> None:
    noise(lambda run: ULP * (run == 3))  # warm-up, capture, replay; eager comes after it and is settled
    with pytest.warns(hookgraph.HookgraphWarning, match="parity"):
        stats = _handle(4).stats
    assert stats.reasons == {"parity": 3}


def test_a_difference_beyond_the_tolerance_is_a_mismatch(noise) -> None:
    noise(lambda run: 0.01 * run)
    with pytest.warns(hookgraph.HookgraphWarning, match="parity"):
        stats = _handle(4).stats
    assert stats.reasons == {"parity": 3}
