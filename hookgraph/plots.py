"""Stats and recordings as plots; each function draws on one matplotlib ``Axes`` and returns it.

Needs matplotlib: ``pip install 'hookgraph[notebook]'``.  With ``ax`` given, nothing of pyplot is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookgraph.counters import Outcome
from hookgraph.errors import HookgraphError
from hookgraph.recording import Recording
from hookgraph.stats import ModuleStats, Stats
from hookgraph.worth import WORTH_IT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from hookgraph.benchmark import Benchmark
    from hookgraph.recording import CallRecord

    _Call = tuple[int, CallRecord]

_Row = tuple[str, dict[str, float]]  # a label, and the length of each part of its bar

_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
_MOST_ROWS = 24  # beyond this the smaller ones share a row: more labels than that nobody can read
_TIMELINE_ROWS = 6  # as high as a plot of so many rows
_LONGEST_LABEL = 44  # characters

# The palette of Okabe and Ito (https://jfly.uni-koeln.de/color/), told apart under every common colour
# blindness; markers repeat what the colours say.
_COLOURS = {
    Outcome.REPLAY: "#0072B2", Outcome.CAPTURE: "#56B4E9", Outcome.WARMUP: "#009E73", Outcome.EAGER: "#D55E00",
    Outcome.ERROR: "#000000",
}  # fmt: skip
_MARKERS = {
    Outcome.REPLAY: "o", Outcome.CAPTURE: "s", Outcome.WARMUP: "^", Outcome.EAGER: "D", Outcome.ERROR: "X",
}  # fmt: skip
_MEMORY_COLOURS = {"static inputs": "#0072B2", "static outputs": "#56B4E9", "graphs": "#E69F00", "pool": "#CC79A7"}


def outcomes(stats: Stats | ModuleStats, ax: Axes | None = None) -> Axes:
    """Draw one bar a module, of its calls by outcome.

    Args:
        stats: ``handle.stats``, or the stats of one module.
        ax: where to draw; None makes a figure.
    """
    counts = [
        (module.label, {outcome.value: getattr(module, outcome.value) for outcome in _COLOURS})
        for module in _modules(stats)
    ]
    ax = _bars(ax, _largest(counts, "modules"), {outcome.value: colour for outcome, colour in _COLOURS.items()})
    ax.set_xlabel("calls")
    ax.set_title("Calls by outcome")
    return _finish(ax)


def memory(stats: Stats | ModuleStats, ax: Axes | None = None) -> Axes:
    """Draw one bar a graph, of the memory that it retains, and one for what graphs share.

    Args:
        stats: ``handle.stats``, or the stats of one module.
        ax: where to draw; None makes a figure.
    """
    rows: list[_Row] = []
    modules = _modules(stats)
    for module in modules:
        prefix = f"{module.label}: " if len(modules) > 1 else ""
        held = 0
        for signature in module.signatures:
            held += signature.input_bytes + signature.output_bytes
            parts: dict[str, float] = {"static inputs": signature.input_bytes, "static outputs": signature.output_bytes}
            rows.append((prefix + signature.summary, parts))
        rows.append((f"{prefix}(memory of the graphs)", {"graphs": module.bytes - held}))
    if isinstance(stats, Stats):
        rows.append(("(shared pool)", {"pool": stats.pool_bytes}))
    rows = _largest([row for row in rows if any(row[1].values())], "graphs")
    unit, size = _unit(max((sum(parts.values()) for _, parts in rows), default=0))
    scaled = [(label, {part: held / size for part, held in parts.items()}) for label, parts in rows]
    ax = _bars(ax, scaled, _MEMORY_COLOURS)
    ax.set_xlabel(f"retained memory ({unit})")
    ax.set_title("Memory by graph")
    return _finish(ax)


def speedup(stats: Stats | ModuleStats, ax: Axes | None = None) -> Axes:
    """Draw one bar a graph: how many times as fast as eager a replay was when the two were compared.

    Graphs that were never timed (``verify=0``, or still on probation) are left out.

    Args:
        stats: ``handle.stats``, or the stats of one module.
        ax: where to draw; None makes a figure.
    """
    modules = _modules(stats)
    rows = [
        (f"{module.label}: {signature.summary}" if len(modules) > 1 else signature.summary, signature)
        for module in modules
        for signature in module.signatures
        if signature.speedup is not None
    ]
    rows = sorted(rows, key=lambda row: -(row[1].speedup or 0.0))[:_MOST_ROWS]
    ax = _axes(ax, len(rows))
    for place, (_, signature) in enumerate(rows):
        times_as_fast = signature.speedup or 0.0
        colour = _COLOURS[Outcome.REPLAY if times_as_fast >= WORTH_IT else Outcome.EAGER]
        ax.barh(place, times_as_fast, color=colour, height=0.7)
        note = f"{times_as_fast:.2f}× {signature.verdict}"
        ax.annotate(note, (times_as_fast, place), xytext=(6, 0), textcoords="offset points", va="center")
    ax.axvline(1, color="#000000", linewidth=1)  # eager
    _name_rows(ax, [_short(label) for label, _ in rows])
    ax.set_xlabel("times as fast as eager")
    ax.set_title("Speed-up by graph")
    ax.margins(x=0.3)
    return _finish(ax)


def times(result: Benchmark, ax: Axes | None = None) -> Axes:
    """Draw one bar a variant of a benchmark: milliseconds per call, with the tenth to the ninetieth percentile.

    Args:
        result: What ``hookgraph.bench.measure`` gave.
        ax: where to draw; None makes a figure.
    """
    rows = list(result.timings)
    ax = _axes(ax, len(rows))
    places = range(len(rows))
    spread = (
        [row.wall_ms - row.wall_low_ms for row in rows],
        [row.wall_high_ms - row.wall_ms for row in rows],
    )
    colours = [_COLOURS[Outcome.REPLAY if "attached" in row.name else Outcome.EAGER] for row in rows]
    ax.barh(places, [row.wall_ms for row in rows], xerr=spread, color=colours, ecolor="#000000", capsize=3)
    eager = rows[0].wall_ms
    for place, row in zip(places, rows, strict=True):
        ax.annotate(
            f"{eager / row.wall_ms:.2f}×",
            (row.wall_high_ms, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    _name_rows(ax, [row.name for row in rows])
    ax.set_xlabel(f"wall time per call (ms), {result.device_name}")
    ax.set_title("Time per call")
    ax.margins(x=0.15)
    return _finish(ax)


def timeline(recording: Recording, ax: Axes | None = None) -> Axes:
    """Draw one mark a call, in the order in which they ended: how long the host took, and what became of it.

    Calls that never reached hookgraph have no duration, and are left out.

    Args:
        recording: what ``handle.recording()`` gave.
        ax: where to draw; None makes a figure.
    """
    from matplotlib.ticker import LogLocator

    calls = _calls(recording)
    ax = _axes(ax, _TIMELINE_ROWS)
    for outcome, group in _by_outcome(calls).items():
        timed = [(number, record.duration_ns / 1e6) for number, record in group if record.duration_ns is not None]
        if timed:
            _marks(ax, timed, outcome)
    ax.set_yscale("log")
    ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))  # plain numbers, where matplotlib would write powers
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("{x:g}")
    ax.tick_params(axis="y", which="both", labelsize="small")
    ax.set_xlabel("call (number)")
    ax.set_ylabel("host time (ms)")
    ax.set_title("Time of each call")
    return _finish(ax)


def signatures(recording: Recording, ax: Axes | None = None) -> Axes:
    """Draw one mark a call, in the order in which they ended, with a row for each signature.

    Args:
        recording: what ``handle.recording()`` gave.
        ax: where to draw; None makes a figure.
    """
    calls = _calls(recording)
    several = len({record.module for _, record in calls}) > 1
    labels: dict[tuple[str, int | None], str] = {}
    for _, record in calls:
        prefix = f"{record.module}: " if several else ""
        labels.setdefault((record.module, record.signature_id), prefix + (record.signature or "(no signature)"))
    shown = list(labels)[:_MOST_ROWS]
    rows = {key: number for number, key in enumerate(shown)}
    names = [_short(labels[key]) for key in shown]
    if len(labels) > len(shown):
        names.append(f"({len(labels) - len(shown)} more)")
    ax = _axes(ax, len(names))
    for outcome, group in _by_outcome(calls).items():
        places = [(number, rows.get((call.module, call.signature_id), len(shown))) for number, call in group]
        _marks(ax, places, outcome)
    _name_rows(ax, names)
    ax.set_xlabel("call (number)")
    ax.set_title("Signature of each call")
    return _finish(ax)


def _axes(ax: Axes | None, rows: int) -> Axes:
    if ax is not None:
        return ax
    from matplotlib import pyplot

    _, made = pyplot.subplots(figsize=(9, 1.6 + 0.36 * max(rows, 1)), layout="constrained")
    return made


def _modules(stats: Stats | ModuleStats) -> Sequence[ModuleStats]:
    if isinstance(stats, Stats):
        return stats.modules
    if isinstance(stats, ModuleStats):
        return [stats]
    raise HookgraphError(f"this plot needs Stats or ModuleStats, such as handle.stats, not {type(stats).__name__}")


def _unit(largest: float) -> tuple[str, int]:
    """The greatest unit of which there is at least one."""
    return next(((unit, size) for unit, size in _UNITS.items() if largest >= size), ("KiB", _UNITS["KiB"]))


def _largest(rows: list[_Row], noun: str) -> list[_Row]:
    """The rows as they come, or the largest ones and the sum of the others."""
    if len(rows) <= _MOST_ROWS:
        return rows
    ranked = sorted(range(len(rows)), key=lambda index: -sum(rows[index][1].values()))
    kept, others = sorted(ranked[: _MOST_ROWS - 1]), ranked[_MOST_ROWS - 1 :]
    total: dict[str, float] = {}
    for index in others:
        for part, size in rows[index][1].items():
            total[part] = total.get(part, 0) + size
    return [*(rows[index] for index in kept), (f"({len(others)} other {noun})", total)]


def _bars(ax: Axes | None, rows: list[_Row], colours: dict[str, str]) -> Axes:
    """One bar a row, its parts one after the other; parts that are nowhere stay out of the legend."""
    ax = _axes(ax, len(rows))
    left = [0.0] * len(rows)
    for part, colour in colours.items():
        widths = [parts.get(part, 0.0) for _, parts in rows]
        if any(widths):
            ax.barh(range(len(rows)), widths, left=left, color=colour, label=part, height=0.7)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    _name_rows(ax, [_short(label) for label, _ in rows])
    return ax


def _calls(recording: Recording) -> list[_Call]:
    """The records with their numbers, from 1 for the first call that the recording saw."""
    if not isinstance(recording, Recording):
        raise HookgraphError(f"this plot needs what handle.recording() gives, not {type(recording).__name__}")
    records, calls = recording.records, recording.calls
    return list(enumerate(records, start=max(calls - len(records), 0) + 1))


def _by_outcome(calls: list[_Call]) -> dict[Outcome, list[_Call]]:
    """The calls by outcome, the rarest outcomes last, so that they are drawn on top."""
    groups = {outcome: [call for call in calls if call[1].outcome is outcome] for outcome in _COLOURS}
    return dict(sorted(((o, group) for o, group in groups.items() if group), key=lambda item: -len(item[1])))


def _marks(ax: Axes, places: Sequence[tuple[float, float]], outcome: Outcome) -> None:
    x, y = zip(*places, strict=True)
    ax.plot(
        x, y, linestyle="none", marker=_MARKERS[outcome], markersize=6, alpha=0.75, color=_COLOURS[outcome],
        label=f"{outcome.label} ({len(places)})",
    )  # fmt: skip


def _name_rows(ax: Axes, names: list[str]) -> None:
    ax.set_yticks(range(len(names)), names, fontsize="small")
    ax.set_ylim(max(len(names), 1) - 0.5, -0.5)  # the first row on top


def _short(label: str) -> str:
    """A label that leaves room for the plot: its beginning and its end, which tell signatures apart best."""
    if len(label) <= _LONGEST_LABEL:
        return label
    return f"{label[: _LONGEST_LABEL - 17]} … {label[-14:]}"


def _finish(ax: Axes) -> Axes:
    ax.grid(axis="x", alpha=0.25)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return ax
