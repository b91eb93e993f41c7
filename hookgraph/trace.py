"""Records of calls in the Trace Event Format, which Perfetto and ``chrome://tracing`` open.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookgraph.recording import CallRecord

Event = dict[str, Any]
_Track = tuple[str, int]  # a module, and the thread that called it: spans of one track must not overlap


def events(records: Iterable[CallRecord]) -> list[Event]:
    """Give one event for each call, in microseconds since the recording began, after those that name the tracks."""
    tracks: dict[_Track, int] = {}
    calls = [_event(record, tracks) for record in records]
    process = os.getpid()
    names: list[Event] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": "hookgraph"}}]
    for track, number in tracks.items():
        named = {"name": _name(track, tracks)}
        names.append({"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": named})
        order = {"sort_index": number}
        names.append({"ph": "M", "name": "thread_sort_index", "pid": process, "tid": number, "args": order})
    return names + calls


def write(path: str | Path, trace_events: list[Event], began_ns: int) -> None:
    """Write events as one JSON object; compressed when the path ends in ``.gz``.

    Args:
        began_ns: the Unix time from which the events count, under the name that PyTorch's profiler uses.
    """
    whole = {"traceEvents": trace_events, "displayTimeUnit": "ms", "baseTimeNanoseconds": began_ns}
    text = json.dumps(whole)
    if str(path).endswith(".gz"):
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def _event(record: CallRecord, tracks: dict[_Track, int]) -> Event:
    event: Event = {
        "name": record.outcome.label,
        "cat": "hookgraph",
        "pid": os.getpid(),
        "tid": tracks.setdefault((record.module, record.thread), len(tracks) + 1),
        "ts": record.start_ns / 1e3,
        "args": {"module": record.module, "signature": record.signature},
    }
    if record.reason is not None:
        event["args"]["reason"] = record.reason
    if record.duration_ns is None:
        return event | {"ph": "i", "s": "t"}
    return event | {"ph": "X", "dur": record.duration_ns / 1e3}


def _name(track: _Track, tracks: dict[_Track, int]) -> str:
    """``transformer``, and ``transformer (thread 2)`` for the second thread that calls it."""
    module, _ = track
    number = [other for other in tracks if other[0] == module].index(track) + 1
    return module if number == 1 else f"{module} (thread {number})"
