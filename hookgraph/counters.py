"""Live counts of what became of each call; the totals balance at every moment."""

from __future__ import annotations

import threading
from collections import Counter
from enum import StrEnum

from hookgraph.reasons import Fallback

_DETAILS = 4  # examples kept for each reason; bounds the memory of a long-lived service


class Outcome(StrEnum):
    """What became of one call."""

    WARMUP = "warmups"
    CAPTURE = "captures"
    REPLAY = "replays"
    EAGER = "eager"
    ERROR = "errors"

    @property
    def label(self) -> str:
        """The word for one call: ``replay``, where the count is ``replays``."""
        return self.name.lower()


class Counters:
    """Counts of outcomes and of fallback reasons, safe to use from many threads.

    ``calls`` is the sum of the outcomes and ``eager`` that of the reasons, so they cannot disagree, not
    even when a KeyboardInterrupt comes in the middle of ``mark``.
    """

    __slots__ = ("_details", "_lock", "_outcomes", "_reasons")

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may ask while its own thread counts
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._reasons: Counter[str] = Counter()
        self._details: dict[str, dict[str, int]] = {}

    def mark(self, outcome: Outcome, fallback: Fallback | None = None) -> None:
        """Count one call; an eager one comes with its reason."""
        if (outcome is Outcome.EAGER) != (fallback is not None):
            raise ValueError(f"outcome {outcome.value!r} with fallback {fallback!r}")
        with self._lock:
            if fallback is None:
                self._outcomes[outcome] += 1
                return
            reason = fallback.reason.value
            self._reasons[reason] += 1
            seen = self._details.setdefault(reason, {})
            if fallback.detail in seen or len(seen) < _DETAILS:
                seen[fallback.detail] = seen.get(fallback.detail, 0) + 1

    def reset(self) -> None:
        """Set every count to zero."""
        with self._lock:
            self._outcomes = dict.fromkeys(Outcome, 0)
            self._reasons.clear()
            self._details.clear()

    def read(self) -> Counts:
        """A consistent copy of the counts."""
        with self._lock:
            outcomes = {outcome.value: count for outcome, count in self._outcomes.items()}
            return Counts(
                outcomes=outcomes | {Outcome.EAGER.value: sum(self._reasons.values())},
                reasons=dict(self._reasons),
                details={reason: dict(seen) for reason, seen in self._details.items()},
            )


class Counts:
    """A copy of a module's counts at one moment."""

    __slots__ = ("calls", "details", "outcomes", "reasons")

    def __init__(self, outcomes: dict[str, int], reasons: dict[str, int], details: dict[str, dict[str, int]]) -> None:
        self.outcomes, self.reasons, self.details = outcomes, reasons, details
        self.calls = sum(outcomes.values())
