"""Plots: what is drawn, as data."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import matplotlib
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import hookgraph
from hookgraph import plots
from hookgraph.counters import Outcome
from hookgraph.reasons import Fallback, FallbackReason
from hookgraph.recording import Recording
from hookgraph.stats import ModuleStats, SignatureStats, Stats
from tests import modules

MIB = 1 << 20
OKABE_ITO = {"#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"}


@pytest.fixture(autouse=True)
def no_window() -> Iterator[None]:
    matplotlib.use("Agg")
    yield
    from matplotlib import pyplot

    pyplot.close("all")


def counted(**counts: int) -> dict[str, Any]:
    outcomes = dict.fromkeys(("warmups", "captures", "replays", "eager", "errors"), 0) | counts
    return outcomes | {"calls": sum(outcomes.values())}


def signature(summary: str, inputs: int, outputs: int) -> SignatureStats:
    return SignatureStats(
        summary=summary, state="trusted", input_bytes=inputs, output_bytes=outputs, **counted(replays=1)
    )


def module(name: str, *signatures: SignatureStats, size: int = 0, **counts: int) -> ModuleStats:
    return ModuleStats(
        name=name, class_name="Block", backend="tape", signatures=signatures, bytes=size, **counted(**counts)
    )


TWO = Stats.of(
    [
        module("unet", signature("x", 2 * MIB, MIB), signature("x", 4 * MIB, MIB), size=10 * MIB, warmups=1, replays=5),
        module("vae", replays=2, eager=7, errors=1),
    ],
    pool_bytes=3 * MIB,
)


def timed(summary: str, eager_ms: float, replay_ms: float, verdict: str) -> SignatureStats:
    known = signature(summary, MIB, MIB)
    return dataclasses.replace(known, eager_ms=eager_ms, replay_ms=replay_ms, verdict=verdict)


TIMED = Stats.of(
    [
        module("vae", timed("slow", 5.0, 5.0, "not worth it"), signature("on probation", MIB, 0)),
        module("unet", timed("fast", 8.0, 2.0, "worth it")),
    ]
)


def bars(ax: Axes) -> dict[str, list[float]]:
    """The lengths of the bars, by what they stand for."""
    return {str(group.get_label()): [bar.get_width() for bar in group] for group in ax.containers}


def ends(ax: Axes) -> list[float]:
    """Where the whole of each row ends."""
    last = ax.containers[-1]
    return [bar.get_x() + bar.get_width() for bar in last]


def rows(ax: Axes) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def marks(ax: Axes) -> dict[str, list[tuple[float, float]]]:
    return {
        str(line.get_label()): list(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))
        for line in ax.lines
    }


def legend(ax: Axes) -> list[str]:
    shown = ax.get_legend()
    return [] if shown is None else [text.get_text() for text in shown.get_texts()]


def recorded() -> Recording:
    recording = Recording(100)
    for outcome, width in [("WARMUP", 2), ("CAPTURE", 2), ("REPLAY", 2), ("REPLAY", 2), ("WARMUP", 3)]:
        recording.add("unet", Outcome[outcome], None, Signature(width), started=recording._began + 1000)
    recording.add("unet", Outcome.EAGER, Fallback(FallbackReason.DISPLACED))
    return recording


class Signature:
    """As much of a signature as a recording asks for."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __hash__(self) -> int:
        return self._width

    def __eq__(self, other: object) -> bool:
        return hash(self) == hash(other)

    def summary(self) -> str:
        return f"x float32[{self._width}]"


# -- what is drawn --------------------------------------------------------------------------------


def test_outcomes_are_bars_that_add_up_to_the_calls() -> None:
    ax = plots.outcomes(TWO)
    assert rows(ax) == ["unet", "vae"]
    assert bars(ax) == {"replays": [5, 2], "warmups": [1, 0], "eager": [0, 7], "errors": [0, 1]}
    assert ends(ax) == [module.calls for module in TWO.modules]
    assert legend(ax) == ["replays", "warmups", "eager", "errors"]
    assert ax.get_xlabel() == "calls"


def test_two_modules_of_one_name_have_two_bars() -> None:
    ax = plots.outcomes(Stats.of([module("", replays=3), module("", replays=4)]))
    assert rows(ax) == ["Block", "Block"]
    assert bars(ax) == {"replays": [3, 4]}


def test_memory_is_a_bar_for_each_graph_and_adds_up() -> None:
    ax = plots.memory(TWO)
    assert rows(ax) == ["unet: x", "unet: x", "unet: (memory of the graphs)", "(shared pool)"]
    assert bars(ax) == {
        "static inputs": [2, 4, 0, 0],
        "static outputs": [1, 1, 0, 0],
        "graphs": [0, 0, 2, 0],
        "pool": [0, 0, 0, 3],
    }
    assert sum(ends(ax)) * MIB == TWO.bytes
    assert ax.get_xlabel() == "retained memory (MiB)"


@pytest.mark.parametrize(
    ("size", "unit", "drawn"), [(512, "KiB", 0.5), (3 << 10, "KiB", 3), (3 << 20, "MiB", 3), (3 << 30, "GiB", 3)]
)
def test_memory_has_a_unit_that_fits(size: int, unit: str, drawn: float) -> None:
    ax = plots.memory(module("unet", signature("x", size, 0), size=size))
    assert ax.get_xlabel() == f"retained memory ({unit})"
    assert bars(ax) == {"static inputs": [drawn]}
    assert rows(ax) == ["x"]


def test_speedup_is_a_bar_for_each_graph_that_was_timed() -> None:
    ax = plots.speedup(TIMED)
    assert rows(ax) == ["unet: fast", "vae: slow"]
    assert [bar.get_width() for bar in ax.patches] == [4.0, 1.0]
    assert [text.get_text() for text in ax.texts] == ["4.00× worth it", "1.00× not worth it"]
    assert len({to_hex(bar.get_facecolor()) for bar in ax.patches}) == 2
    (eager,) = ax.lines
    assert list(eager.get_xdata()) == [1, 1]


def test_of_many_rows_the_small_ones_are_summed() -> None:
    many = Stats.of([module(f"blocks.{index}", replays=index) for index in range(60)])
    ax = plots.outcomes(many)
    assert len(rows(ax)) == 24
    assert rows(ax)[0] == "blocks.37"
    assert rows(ax)[-2:] == ["blocks.59", "(37 other modules)"]
    assert sum(ends(ax)) == many.calls


def test_a_long_label_keeps_both_ends() -> None:
    long = "hidden_states bfloat16[1, 256, 64], " * 4 + "guidance=3.5"
    (label,) = rows(plots.memory(module("unet", signature(long, MIB, 0), size=MIB)))
    assert len(label) <= 44
    assert label.startswith("hidden_states bfloat16[1, ")
    assert label.endswith(" guidance=3.5")


def test_timeline_has_a_mark_for_each_call_that_was_served() -> None:
    recording = recorded()
    ax = plots.timeline(recording)
    drawn = marks(ax)
    assert {label: [x for x, _ in places] for label, places in drawn.items()} == {
        "warmup (2)": [1, 5],
        "capture (1)": [2],
        "replay (2)": [3, 4],
    }
    assert [y for _, y in sorted(place for places in drawn.values() for place in places)] == pytest.approx(
        [(record.duration_ns or 0) / 1e6 for record in recording.records[:5]]
    )
    assert ax.get_yscale() == "log"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("call (number)", "host time (ms)")
    assert sorted(legend(ax)) == sorted(drawn)


def test_signatures_have_a_row_each_in_the_order_of_their_first_calls() -> None:
    ax = plots.signatures(recorded())
    assert rows(ax) == ["x float32[2]", "x float32[3]", "(no signature)"]
    assert marks(ax) == {
        "replay (2)": [(3, 0), (4, 0)],
        "warmup (2)": [(1, 0), (5, 1)],
        "capture (1)": [(2, 0)],
        "eager (1)": [(6, 2)],
    }
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first row on top


def test_signatures_beyond_the_rows_share_one() -> None:
    recording = Recording(100)
    for width in range(30):
        recording.add("unet", Outcome.EAGER, Fallback(FallbackReason.LIMIT), Signature(width), started=1)
    ax = plots.signatures(recording)
    assert rows(ax)[-2:] == ["x float32[23]", "(6 more)"]
    assert [y for _, y in marks(ax)["eager (30)"]] == [*range(24), *[24] * 6]


def test_numbers_of_calls_go_on_where_records_were_dropped() -> None:
    recording = Recording(2)
    for _ in range(5):
        recording.add("unet", Outcome.REPLAY, None, started=1)
    assert [x for x, _ in marks(plots.timeline(recording))["replay (2)"]] == [4, 5]


def test_real_stats_and_a_real_recording() -> None:
    model = modules.Blocks()
    handle = hookgraph.attach(model, "blocks.*")
    with torch.no_grad(), handle.recording() as recording:
        for width in (2, 2, 2, 3):
            model(torch.ones(width, 4))
    assert bars(plots.outcomes(handle.stats)) == {"replays": [1, 1], "captures": [1, 1], "warmups": [2, 2]}
    size = 1 << 10
    assert sum(ends(plots.memory(handle.stats))) * size == pytest.approx(handle.stats.bytes)
    assert {label: len(places) for label, places in marks(plots.timeline(recording)).items()} == {
        "warmup (4)": 4,
        "capture (2)": 2,
        "replay (2)": 2,
    }
    assert len(rows(plots.signatures(recording))) == 4


# -- how it is drawn ------------------------------------------------------------------------------

ALL = [
    (plots.outcomes, TWO),
    (plots.memory, TWO),
    (plots.speedup, TIMED),
    (plots.timeline, recorded()),
    (plots.signatures, recorded()),
]
each_plot = pytest.mark.parametrize(("draw", "shown"), ALL, ids=[draw.__name__ for draw, _ in ALL])
Draw = Callable[..., Axes]


@each_plot
def test_it_draws_on_the_axes_it_is_given(draw: Draw, shown: Any) -> None:
    from matplotlib import pyplot

    ax = Figure().subplots()
    assert draw(shown, ax=ax) is ax
    assert draw(shown, ax) is ax
    assert pyplot.get_fignums() == []


@each_plot
def test_without_axes_it_makes_a_figure(draw: Draw, shown: Any) -> None:
    from matplotlib import pyplot

    ax = draw(shown)
    assert pyplot.get_fignums() == [ax.figure.number]


@each_plot
def test_its_colours_are_those_of_okabe_and_ito(draw: Draw, shown: Any) -> None:
    ax = draw(shown)
    colours = [to_hex(bar.get_facecolor()) for bar in ax.patches] + [to_hex(line.get_color()) for line in ax.lines]
    assert colours
    assert set(colours) <= OKABE_ITO


@pytest.mark.parametrize("draw", [plots.timeline, plots.signatures], ids=["timeline", "signatures"])
def test_outcomes_differ_in_more_than_colour(draw: Draw) -> None:
    ax = draw(recorded())
    assert len({line.get_marker() for line in ax.lines}) == len(ax.lines) > 2


@each_plot
def test_it_is_drawn_without_a_complaint(draw: Draw, shown: Any, tmp_path: Any) -> None:
    """Warnings are errors here: of a layout without room, of a missing glyph."""
    draw(shown).figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("draw", "nothing"),
    [(plots.outcomes, Stats.of([])), (plots.memory, Stats.of([])), (plots.speedup, TWO), (plots.timeline, Recording(1)),
     (plots.signatures, Recording(1))],
    ids=[draw.__name__ for draw, _ in ALL],
)  # fmt: skip
def test_nothing_is_drawn_of_nothing(draw: Draw, nothing: Any, tmp_path: Any) -> None:
    ax = draw(nothing)
    ax.figure.savefig(tmp_path / "plot.png")
    assert not ax.patches
    assert len(ax.lines) == (draw is plots.speedup)  # eager's own line
    assert not legend(ax)


@pytest.mark.parametrize(
    ("draw", "other", "match"),
    [
        (plots.outcomes, recorded(), "needs Stats or ModuleStats, such as handle.stats, not Recording"),
        (plots.memory, {}, "needs Stats or ModuleStats, such as handle.stats, not dict"),
        (plots.speedup, None, "needs Stats or ModuleStats, such as handle.stats, not NoneType"),
        (plots.timeline, TWO, r"needs what handle.recording\(\) gives, not Stats"),
        (plots.signatures, None, r"needs what handle.recording\(\) gives, not NoneType"),
    ],
    ids=[draw.__name__ for draw, _ in ALL],
)
def test_other_things_are_refused(draw: Draw, other: Any, match: str) -> None:
    with pytest.raises(hookgraph.HookgraphError, match=match):
        draw(other)


def test_nobody_loads_matplotlib_who_does_not_plot() -> None:
    code = "import sys, hookgraph, hookgraph.plots; assert 'matplotlib' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
