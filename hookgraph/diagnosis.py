"""What the doctor says of a model: what can be captured, what forbids the rest, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hookgraph.reasons import FallbackReason
from hookgraph.stats import ModuleStats, Shown, Stats

_HARMLESS = {FallbackReason.LIMIT.value}  # the forward can be captured; there were more signatures than places


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that keeps calls of the whole model from a graph.

    Args:
        reason: Its name, with a meaning and a remedy.
        seen: What was seen, with file and line where it is in the forward.
        calls: In how many of the rehearsed calls.
    """

    reason: FallbackReason
    seen: str
    calls: int

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data, with the words for its reason."""
        words = {"meaning": self.reason.meaning, "remedy": self.reason.remedy}
        return {"reason": self.reason.value, "seen": self.seen, "calls": self.calls} | words


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Shown):
    """Say what of a model would be captured, what forbids the rest, and what to do about it.

    Args:
        model: Class name of the model.
        targets: What to give to ``attach``: ``("",)`` is the model itself; names and globs of its largest
            parts that can be captured, where some of its calls cannot; empty where nothing can.
        advice: What to type, or to change first, in one line.
        findings: What keeps calls of the whole model from a graph, the most frequent first.
        notes: Sentences on what the calls tell when they are compared (shared caches, numbers that differ, sizes
            that grow), and on what a graph would rely on and do right: writes, random numbers, side tensors.
        whole: What became of the rehearsed calls with the model itself attached.
        parts: The same for each of the parts, with these attached instead.

    Example:
        >>> import torch, hookgraph
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()).eval()
        >>> found = hookgraph.diagnose(model, [((torch.ones(2, 4),), {})])
        >>> found.targets, found.findings
        (('',), ())
        >>> handle = hookgraph.attach(model, found.targets)
        >>> handle.detach()
    """

    model: str
    targets: tuple[str, ...]
    advice: str
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    whole: ModuleStats
    parts: tuple[ModuleStats, ...] = ()

    @property
    def can_capture(self) -> bool:
        """Whether anything can be captured."""
        return bool(self.targets)

    @property
    def can_capture_whole(self) -> bool:
        """Whether the model itself can be captured, for every rehearsed call that there is a place for."""
        return is_served(self.whole)

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain dicts, lists, strings and ints; modules as in ``Stats.to_dict()``."""
        whole, *parts = Stats.of([self.whole, *self.parts]).to_dict()["modules"]
        return {
            "model": self.model,
            "can_capture": self.can_capture,
            "can_capture_whole": self.can_capture_whole,
            "targets": list(self.targets),
            "advice": self.advice,
            "findings": [finding.to_dict() for finding in self.findings],
            "notes": list(self.notes),
            "whole": whole,
            "parts": parts,
        }


def is_served(stats: ModuleStats) -> bool:
    """Whether rehearsed calls of a module end in replays, as far as there is a place for their signatures."""
    return stats.replays > 0 and stats.reasons.keys() <= _HARMLESS
