"""A runner seen from outside: its calls become records of recordings and spans of profilers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler

from hookgraph.counters import Outcome
from hookgraph.ledger import Entry
from hookgraph.private_torch import profiler_span
from hookgraph.runner import Forward, Runner

if TYPE_CHECKING:
    from hookgraph.reasons import Fallback
    from hookgraph.recording import Recording


def nvtx_asked() -> bool:
    """Whether ``HOOKGRAPH_NVTX`` asks for NVTX ranges, and there is a device whose tools could show them."""
    return os.environ.get("HOOKGRAPH_NVTX", "") not in ("", "0") and torch.cuda.is_available()


class Observed(Runner):
    """A runner for one call, with acts that tell; all its attributes are those of the one it looks at.

    Made for a call only while somebody looks, so that nobody pays for it otherwise.
    """

    __slots__ = ("_nvtx", "_profiled", "_recordings", "_started")  # the only attributes that are not shared

    def __init__(self, runner: Runner, recordings: tuple[Recording, ...], nvtx: bool) -> None:
        self.__dict__ = runner.__dict__
        self._recordings, self._nvtx, self._profiled = recordings, nvtx, profiler._is_profiler_enabled
        self._started = time.perf_counter_ns()

    def _span(self, act: str) -> AbstractContextManager[Any]:
        if not (self._profiled or self._nvtx):
            return nullcontext()
        name = f"hookgraph::{act} {self.label}"
        return _nvtx_range(name) if self._nvtx else profiler_span(name)

    def _mark(self, outcome: Outcome, entry: Entry | None, fallback: Fallback | None = None) -> None:
        super()._mark(outcome, entry, fallback)
        signature = None if entry is None else entry.signature
        for recording in self._recordings:
            recording.add(self.label, outcome, fallback, signature, self._started)

    def run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._span("call"):
            return super().run(forward, args, kwargs)

    def eager(self, fallback: Fallback, *rest: Any, **named: Any) -> Any:
        with self._span("eager"):
            return super().eager(fallback, *rest, **named)

    def _warm_up(self, *rest: Any) -> Any:
        with self._span("warmup"):
            return super()._warm_up(*rest)

    def _capture(self, *rest: Any) -> Any:
        with self._span("capture"):
            return super()._capture(*rest)

    def _replay(self, *rest: Any) -> Any:
        with self._span("replay"):
            return super()._replay(*rest)

    def _replay_on_probation(self, *rest: Any) -> Any:
        with self._span("verify"):
            return super()._replay_on_probation(*rest)


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        with profiler_span(name):  # which may run as well
            yield
    finally:
        torch.cuda.nvtx.range_pop()
