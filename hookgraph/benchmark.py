"""What a comparison of eager and attached came to: times, memory, parity and a verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from hookgraph.stats import Shown
from hookgraph.worth import WORTH_IT

_GOOD = ("bitwise", "within tolerance")
BENCHMARK_SCHEMA = 1  # raised whenever a field is added, removed or changes its meaning


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long one call took, over all calls of all rounds, in milliseconds.

    Args:
        name: ``"eager"``, ``"attached"`` or ``"compiled"``.
        wall_ms: Median until the device is done, per call of a pass through all calls.
        wall_low_ms, wall_high_ms: Tenth and ninetieth percentile.
        host_ms: Median until the last call of a pass is issued, per call; as the wall time on a CPU.
        parity: ``"bitwise"``, ``"within tolerance"``, or where it differs from eager.
    """

    name: str
    wall_ms: float
    wall_low_ms: float
    wall_high_ms: float
    host_ms: float
    parity: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Benchmark(Shown):
    """What ``measure`` found; ``print`` shows it as a table, ``to_dict()`` gives it as data."""

    device: str
    device_name: str
    calls: int
    rounds: int
    timings: tuple[Timing, ...]
    replayed: float  # the share of the timed attached calls that were replays
    reasons: dict[str, int]  # why the others were eager
    retained_bytes: int

    def __repr__(self) -> str:
        return f"Benchmark({self.verdict})"

    def time_of(self, name: str) -> Timing | None:
        """One of the timings, by name."""
        return next((timing for timing in self.timings if timing.name == name), None)

    @property
    def speedup(self) -> float:
        """How many times faster than eager the attached module is, by the wall."""
        eager, attached = self.time_of("eager"), self.time_of("attached")
        assert eager is not None
        assert attached is not None
        return eager.wall_ms / attached.wall_ms

    @property
    def bytes_per_ms_saved(self) -> float | None:
        """What a saved millisecond costs in retained memory; None where nothing is saved."""
        eager, attached = self.time_of("eager"), self.time_of("attached")
        assert eager is not None
        assert attached is not None
        saved = eager.wall_ms - attached.wall_ms
        return self.retained_bytes / saved if saved > 0 else None

    @property
    def agrees(self) -> bool:
        """Whether every variant gives what eager gives."""
        return all(timing.parity in _GOOD for timing in self.timings)

    @property
    def verdict(self) -> str:
        """Whether graphs pay here, in a sentence."""
        attached = self.time_of("attached")
        if attached is not None and attached.parity not in _GOOD:
            return f"WRONG: {attached.parity}; report it"
        if not self.replayed:
            return f"nothing was replayed: {', '.join(self.reasons) or 'no call repeats'}; ask the doctor"
        if self.speedup < 1 / WORTH_IT:
            return f"not worth it: {1 / self.speedup:.2f} times slower than eager"
        if self.speedup < WORTH_IT:
            return f"not worth it: {self.speedup:.2f} times as fast as eager, the device is busy already"
        return f"worth it: {self.speedup:.2f} times as fast as eager, for {self.retained_bytes / (1 << 20):.1f} MiB"

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe data, with the derived figures."""
        return {
            "schema": BENCHMARK_SCHEMA, **asdict(self), "timings": [asdict(timing) for timing in self.timings],
            "speedup": self.speedup, "bytes_per_ms_saved": self.bytes_per_ms_saved, "verdict": self.verdict,
            "versions": {"torch": torch.__version__},
        }  # fmt: skip
