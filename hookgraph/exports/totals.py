"""Counts by module name that do not fall: what a detached attachment counted stays in."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from typing import TYPE_CHECKING

from hookgraph.attach import counting
from hookgraph.counters import Counters, Counts, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookgraph.stats import Stats


class Total:
    """The counts of all modules of one name, since the process began to export."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter({outcome.label: 0 for outcome in Outcome})
        self.eager_calls: Counter[str] = Counter()

    def add(self, counts: Counts) -> None:
        """Add the counts of one module."""
        self.calls.update({outcome.label: counts.outcomes[outcome.value] for outcome in Outcome})
        self.eager_calls.update(counts.reasons)


class Totals:
    """Sum the counts of all attachments of the process by the name of the module.

    An attachment counts from the first read that finds it attached, with all its calls until then, to
    its last call.  One that comes and goes between two reads is not seen.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[int, tuple[str, Counters]] = {}  # what was attached at the last read; keeps no module alive
        self._gone: dict[str, Total] = {}

    def read(self) -> Mapping[str, Total]:
        """Give the sum for each name, as of now."""
        with self._lock:
            live = {id(counters): (name, counters) for name, counters in counting()}
            for key, (name, counters) in self._live.items():
                if key not in live:
                    self._gone.setdefault(name, Total()).add(counters.read())
            self._live = live
            totals = copy.deepcopy(self._gone)
            for name, counters in live.values():
                totals.setdefault(name, Total()).add(counters.read())
            return totals


def retained_bytes(stats: Stats) -> Mapping[str, int]:
    """What the modules of each name retain, without the pools that several share."""
    sizes: Counter[str] = Counter()
    for module in stats.modules:
        sizes[module.label] += module.bytes
    return sizes


def signatures(stats: Stats) -> Mapping[tuple[str, str], int]:
    """How many signatures the modules of each name have in each state."""
    return Counter((module.label, signature.state) for module in stats.modules for signature in module.signatures)
