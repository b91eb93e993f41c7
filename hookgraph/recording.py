"""A recording: what became of each call and how long it took, one small record a call."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookgraph import trace
from hookgraph.counters import Outcome
from hookgraph.errors import HookgraphError
from hookgraph.frames import frame
from hookgraph.stats import Shown, plural

if TYPE_CHECKING:
    from hookgraph.reasons import Fallback
    from hookgraph.signature import Signature

_SUMMARIES = 1024  # signatures whose summary is kept at hand; others are written out again


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """Tell what became of one call; it holds no tensors.

    Args:
        start_ns: when the call began, since the recording did.
        duration_ns: how long the host took for it, which on a GPU is not how long the device did;
            None for a call that never reached hookgraph, as another library kept it.
        module: qualified name, or the class name for the model itself.
        reason: why it ran eager; None for every other outcome.
        signature: the arguments in one line; empty where the call has no signature, or ended before it was read.
        signature_id: equal for calls of one signature in this process; None where there is none.
        thread: ``threading.get_ident()`` of the caller.
    """

    start_ns: int
    duration_ns: int | None
    module: str
    outcome: Outcome
    reason: str | None
    signature: str
    signature_id: int | None
    thread: int


class Recording(Shown):
    """Keep one record for each call of an attachment, as ``handle.recording()`` began it.

    It may be read at any time, from any thread, also after its block.

    Example:
        >>> import torch, hookgraph
        >>> model = torch.nn.Linear(4, 4).eval()
        >>> with torch.no_grad(), hookgraph.attach(model) as handle, handle.recording() as recording:
        ...     for _ in range(3):
        ...         out = model(torch.ones(2, 4))
        >>> [record.outcome.label for record in recording.records]
        ['warmup', 'capture', 'replay']
    """

    def __init__(self, most: int) -> None:
        if most < 1:
            raise HookgraphError(f"recording(most={most!r}): it is how many calls to keep; give at least 1")
        self._records: deque[CallRecord] = deque(maxlen=most)
        self._calls = 0
        self._lock = threading.Lock()
        # Bounded as well: a number that changes on each call makes each a new signature.
        self._summary = functools.lru_cache(_SUMMARIES)(_summary)
        self.began_ns = time.time_ns()
        self._began = time.perf_counter_ns()

    def __repr__(self) -> str:
        with self._lock:
            counts = Counter(record.outcome for record in self._records)
        kept = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome])
        dropped = f"; {self.dropped} dropped" if self.dropped else ""
        return f"<hookgraph.Recording of {plural(self.calls, 'call')}{': ' if kept else ''}{kept}{dropped}>"

    @property
    def records(self) -> tuple[CallRecord, ...]:
        """The last calls that ended, the oldest first; at most ``most`` of them."""
        with self._lock:
            return tuple(self._records)

    @property
    def calls(self) -> int:
        """How many calls ended while it recorded, the dropped ones included."""
        return self._calls

    @property
    def dropped(self) -> int:
        """How many calls were given up to keep the bound; the oldest go first."""
        with self._lock:
            return self._calls - len(self._records)

    def add(
        self,
        module: str,
        outcome: Outcome,
        fallback: Fallback | None,
        signature: Signature | None = None,
        started: int | None = None,
    ) -> None:
        """Keep a call that ends now.

        Args:
            started: ``time.perf_counter_ns()`` at its beginning; None when nobody looked.
        """
        now = time.perf_counter_ns()
        record = CallRecord(
            start_ns=(now if started is None else started) - self._began,
            duration_ns=None if started is None else now - started,
            module=module,
            outcome=outcome,
            reason=None if fallback is None else fallback.reason.value,
            signature="" if signature is None else self._summary(signature),
            signature_id=None if signature is None else hash(signature),
            thread=threading.get_ident(),
        )
        with self._lock:
            self._records.append(record)
            self._calls += 1

    def to_frame(self) -> Any:
        """Give the records as a ``pandas.DataFrame``, one row a call.

        Raises:
            HookgraphError: pandas is not installed.
        """
        names = list(CallRecord.__dataclass_fields__)
        rows = [{name: getattr(record, name) for name in names} for record in self.records]
        return frame([row | {"outcome": row["outcome"].label} for row in rows], names)

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write the calls as a timeline for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``.

        One track a module, or one for each thread that calls it; times are those of the host.

        Args:
            path: where to; compressed when it ends in ``.gz``.
        """
        trace.write(path, trace.events(self.records), self.began_ns)


def _summary(signature: Signature) -> str:
    return signature.summary()
