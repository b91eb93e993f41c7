"""What a soak came to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from hookgraph.stats import Shown

SOAK_SCHEMA = 1  # raised whenever a field is added, removed or changes its meaning


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SoakReport(Shown):
    """What a soak came to; ``print`` shows it as a table, ``to_dict()`` gives it as data.

    Args:
        compared: calls whose result was compared with eager's.
        mismatches: how many of them differed; more than none is a wrong number.
        undecided: differences where eager did not agree with itself either.
        examples: the first mismatches and errors, in words.
        failures: calls that were made to fail, and raised what eager raises.
        errors: calls that raised anything else.
        events: what was done between calls, and how often.
        outcomes, reasons: the counts of the attached module, over all attachments.
        balanced: whether each call has one outcome, and each eager one a reason.
        memory: bytes after the first fifth of the time and at the end: of the process, and allocated and reserved on
            the device.
    """

    device: str
    device_name: str
    seconds: float
    threads: int
    calls: int
    compared: int
    mismatches: int
    undecided: int
    failures: int
    errors: int
    events: dict[str, int]
    outcomes: dict[str, int]
    reasons: dict[str, int]
    balanced: bool
    memory: dict[str, tuple[int, int]]
    examples: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong: every result as in eager, every call counted once."""
        return not self.mismatches and not self.errors and self.balanced

    def __repr__(self) -> str:
        return f"SoakReport({self.calls} calls, {self.mismatches} mismatches, {self.errors} errors)"

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe data."""
        return {"schema": SOAK_SCHEMA, **asdict(self), "passed": self.passed, "versions": {"torch": torch.__version__}}
