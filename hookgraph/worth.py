"""Is a graph worth its memory?  How long eager and a replay of the same call take."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

WORTH_IT = 1.05  # times faster; what is below is within what the weather of a machine does


class Verdict(StrEnum):
    """What the times of a trusted graph say."""

    WORTH_IT = "worth it"
    NOT_WORTH_IT = "not worth it"
    REHEARSAL = "rehearsal"  # the tape runs the operators one by one, and promises no speed
    UNKNOWN = "not measured"


@dataclass(frozen=True, slots=True)
class Worth:
    """The shortest times of one call seen so far, in nanoseconds.

    Each is the longer of the host's time and the device's: what a call costs in a stream of calls.
    """

    eager_ns: int
    replay_ns: int

    @property
    def speedup(self) -> float:
        """How many times faster than eager a replay is."""
        return self.eager_ns / max(self.replay_ns, 1)

    def best(self, other: Worth | None) -> Worth:
        """The shortest times of two measurements: the first launch of a graph uploads it, other work disturbs."""
        if other is None:
            return self
        return Worth(min(self.eager_ns, other.eager_ns), min(self.replay_ns, other.replay_ns))
