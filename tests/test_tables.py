"""Tables: golden text, columns that add up, at most 115 columns wide."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hookgraph import tables
from hookgraph.counters import Outcome
from hookgraph.recording import CallRecord
from hookgraph.stats import ModuleStats, SignatureStats, Stats
from hookgraph.tables import counts, reports

MIB = 1 << 20


def qwen_image() -> ModuleStats:
    """A module that met about everything: a trusted and a blocked signature, three reasons, an invalidation."""
    trusted = SignatureStats(
        summary="hidden_states bf16 (1,256,64), timestep bf16 (1,), encoder_hidden_states bf16 (1,21,128), return_dict False",
        state="trusted",
        calls=20,
        warmups=1,
        captures=1,
        replays=18,
        eager=0,
        errors=0,
        input_bytes=3 * MIB,
        output_bytes=MIB,
        capture_ns=1_031_234_567,
        eager_ms=24.0,
        replay_ms=7.2,
        verdict="worth it",
    )
    blocked = SignatureStats(
        summary="hidden_states bf16 (1,256,64), padding_mask bool (1,9)",
        state="blocked",
        calls=20,
        warmups=1,
        captures=0,
        replays=0,
        eager=19,
        errors=0,
        detail="read_back: model.py:292 reads a device value: if mask[0].all()",
    )
    return ModuleStats(
        name="transformer",
        class_name="QwenImageTransformer2DModel",
        backend="cuda",
        calls=48,
        warmups=2,
        captures=1,
        replays=18,
        eager=26,
        errors=1,
        reasons={"limit": 5, "read_back": 19, "scalar_churn": 2},
        details={
            "limit": {"hidden_states bf16 (1,100,64)": 1, "hidden_states bf16 (1,300,64)": 4},
            "read_back": {"model.py:292 reads a device value: if mask[0].all()": 19},
            "scalar_churn": {"kwargs['conditioning_scale']: 0.7 -> 0.0": 2},
        },
        invalidations=1,
        bytes=421 * MIB,
        signatures=(trusted, blocked),
    )


def action_expert() -> ModuleStats:
    """A module of which there is nothing to say but that it works."""
    return ModuleStats(
        name="",
        class_name="Expert",
        backend="cuda",
        calls=3,
        warmups=1,
        captures=1,
        replays=1,
        eager=0,
        errors=0,
        bytes=MIB,
        signatures=(
            SignatureStats(
                summary="x f32 (2,3)",
                state="captured",
                calls=3,
                warmups=1,
                captures=1,
                replays=1,
                eager=0,
                errors=0,
                input_bytes=MIB // 2,
                output_bytes=MIB // 2,
                capture_ns=3_000_000,
            ),
        ),
    )


FULL = Stats.of([qwen_image(), action_expert()], pool_bytes=300 * MIB)

FULL_TEXT = """
hookgraph

  module          calls   warmups   captures   replays   eager   errors      MiB
 ────────────────────────────────────────────────────────────────────────────────
  transformer        48         2          1        18      26        1   421.00
  Expert              3         1          1         1       0        0     1.00
  (shared pool)                                                           300.00
 ────────────────────────────────────────────────────────────────────────────────
  total              51         3          2        19      26        1   722.00

 19 of 51 calls replayed (37%): about 0.13 s where eager takes 0.43 s.

transformer, QwenImageTransformer2DModel, backend cuda, 1 invalidated

  signature                                      state     calls   replays   eager      MiB   speed-up   verdict
 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────
  hidden_states bf16 (1,256,64), timestep bf16   trusted      20        18       0     4.00      3.33×   worth it
  (1,), encoder_hidden_states bf16 (1,21,128),
  return_dict False

  hidden_states bf16 (1,256,64), padding_mask    blocked      20         0      19     0.00
  bool (1,9)
  read_back: model.py:292 reads a device
  value: if mask[0].all()

  (calls without a retained signature)                         8         0       7

  (memory of the graphs)                                                             417.00
 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────
  total                                                       48        18      26   421.00

Expert, backend cuda

  signature     state      calls   replays   eager    MiB   speed-up   verdict
 ──────────────────────────────────────────────────────────────────────────────
  x f32 (2,3)   captured       3         1       0   1.00

why calls ran eager

  eager   reason         what was seen                                what to do
 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────
     19   read_back      the forward reads a device value back to     keep the value on the device (torch.where),
                         the host                                     print it elsewhere, or attach to the
                         e.g. model.py:292 reads a device value: if   submodules around it
                         mask[0].all()

      5   limit          max_graphs signatures are retained already   raise max_graphs, or pad inputs to fewer
                         e.g. hidden_states bf16 (1,300,64)           shapes

      2   scalar_churn   a number that is not a tensor changes from   pass it as a tensor on the module's device
                         call to call
                         e.g. kwargs['conditioning_scale']: 0.7 ->
                         0.0
 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────
     26   total
"""

SMALL_TEXT = """
hookgraph

  module   calls   warmups   captures   replays   eager   errors    MiB
 ───────────────────────────────────────────────────────────────────────
  Expert       3         1          1         1       0        0   1.00

 1 of 3 calls replayed (33%).

Expert, backend cuda

  signature     state      calls   replays   eager    MiB   speed-up   verdict
 ──────────────────────────────────────────────────────────────────────────────
  x f32 (2,3)   captured       3         1       0   1.00
"""


def call(milliseconds: float | None, outcome: Outcome, **changes: Any) -> CallRecord:
    plain: dict[str, Any] = {
        "start_ns": 0, "duration_ns": None if milliseconds is None else round(milliseconds * 1e6), "outcome": outcome,
        "module": "transformer", "reason": None, "signature": "", "signature_id": None, "thread": 1,
    }  # fmt: skip
    return CallRecord(**plain | changes)


CALLS = [
    call(1_031.2, Outcome.WARMUP),
    call(23.1, Outcome.CAPTURE),
    *(call(0.5 + step / 100, Outcome.REPLAY) for step in range(20)),
    call(9.75, Outcome.EAGER, module="vae", reason="limit"),
    call(None, Outcome.EAGER, module="vae", reason="displaced"),
]

RECORDING_TEXT = """
recording, host time

  module        outcome   calls   median ms     p90 ms   slowest ms     sum ms
 ──────────────────────────────────────────────────────────────────────────────
  transformer   warmup        1    1,031.20   1,031.20     1,031.20   1,031.20
  transformer   capture       1       23.10      23.10        23.10      23.10
  transformer   replay       20        0.59       0.67         0.69      11.90
  vae           eager         2        9.75       9.75         9.75       9.75
 ──────────────────────────────────────────────────────────────────────────────
  total                      24                                       1,075.95
"""


def test_recording_is_golden() -> None:
    text = "\n".join(line.rstrip() for line in drawn(reports.recording_table(CALLS)).splitlines())
    assert f"\n{text.strip()}\n" == RECORDING_TEXT


def test_a_recording_of_unserved_calls_has_no_times() -> None:
    row = drawn(reports.recording_table([call(None, Outcome.EAGER, reason="displaced")])).splitlines()[-2]
    assert row.split() == ["transformer", "eager", "1"]


def drawn(table: Table) -> str:
    console = Console(width=tables.WIDTH, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def test_full_table_is_golden() -> None:
    assert f"\n{FULL}\n" == FULL_TEXT


def test_one_module_needs_no_totals() -> None:
    assert f"\n{Stats.of([action_expert()])}\n" == SMALL_TEXT


def test_nothing_attached_is_one_sentence() -> None:
    assert str(Stats.of([])) == "hookgraph: no module is attached."


def test_a_module_that_was_never_called() -> None:
    idle = ModuleStats(
        name="vae", class_name="VAE", backend="tape", calls=0, warmups=0, captures=0, replays=0, eager=0, errors=0
    )
    assert "0 of 0 calls replayed." in str(Stats.of([idle]))


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(counts.modules_table(FULL), id="modules"),
        pytest.param(counts.signatures_table(qwen_image()), id="signatures"),
        pytest.param(counts.reasons_table([qwen_image()], FULL.reasons), id="reasons"),
        pytest.param(reports.recording_table(CALLS), id="recording"),
    ],
)
def test_columns_add_up(table: Table) -> None:
    assert table.show_footer
    summed = 0
    for column in table.columns:
        total = str(column.footer)
        if column.justify == "right" and total:
            assert sum(number(cell) for cell in column.cells) == number(column.footer), column.header
            summed += 1
    assert summed >= 1


def number(cell: object) -> float:
    return float(str(cell).replace(",", "") or 0)


@pytest.mark.parametrize("width", [60, 80, 115, 200])
def test_no_line_is_wider_than_the_terminal_or_115_columns(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(FULL)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= min(width, 115)
    if width >= 115:
        assert "\n".join(line.rstrip() for line in lines).strip() == str(FULL)


def test_no_table_has_more_than_eight_columns() -> None:
    module = qwen_image()
    drawn_tables = [counts.modules_table(FULL), counts.signatures_table(module), counts.reasons_table([module], {})]
    drawn_tables.append(reports.recording_table(CALLS))
    assert all(len(table.columns) <= 8 for table in drawn_tables)


def test_square_brackets_are_text_and_not_markup() -> None:
    module = qwen_image()
    odd = "kwargs['x'][0] [bold]"
    shown = str(Stats.of([ModuleStats(**fields(module) | {"name": odd, "details": {"limit": {odd: 1}}})]))
    assert shown.count(odd) == 3  # the row, the title of its signatures, the example


def fields(module: ModuleStats) -> dict[str, object]:
    return {name: getattr(module, name) for name in module.__dataclass_fields__}


@pytest.mark.parametrize("name", ["", "Expert"], ids=["empty", "class name"])
def test_the_model_itself_is_named_once(name: str) -> None:
    table = counts.signatures_table(ModuleStats(**fields(action_expert()) | {"name": name}))
    assert str(table.title) == "Expert, backend cuda"


def test_many_modules_show_their_signatures_on_demand() -> None:
    blocks = [ModuleStats(**fields(action_expert()) | {"name": f"blocks.{index}"}) for index in range(60)]
    shown = str(Stats.of(blocks))
    assert "blocks.59" in shown
    assert "x f32 (2,3)" not in shown
    assert "print(stats.modules[0])" in shown
    assert "x f32 (2,3)" in str(blocks[0])


def test_counts_that_do_not_balance_are_called_a_mistake() -> None:
    broken = ModuleStats(**fields(action_expert()) | {"calls": 4})
    assert "do not balance" in str(Stats.of([broken]))


def test_a_reason_of_another_version_is_shown_by_its_name() -> None:
    shown = drawn(counts.reasons_table([], {"moon_phase": 2}))
    assert "moon_phase" in shown
    assert "does not know" in shown


def test_notebook_gets_html_and_text() -> None:
    bundle = FULL._repr_mimebundle_()
    assert list(bundle) == ["text/plain", "text/html"]
    assert bundle["text/plain"] == str(FULL)
    assert bundle["text/html"].startswith("<pre style=")
    assert "transformer" in bundle["text/html"]
    assert "\x1b" not in bundle["text/plain"] + bundle["text/html"]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        pytest.param(["text/html"], None, ["text/html"], id="include"),
        pytest.param(None, ["text/html"], ["text/plain"], id="exclude"),
        pytest.param(["image/png"], None, [], id="neither"),
    ],
)
def test_notebook_gets_what_it_asks_for(
    include: list[str] | None, exclude: list[str] | None, expected: list[str]
) -> None:
    assert list(FULL._repr_mimebundle_(include=include, exclude=exclude)) == expected


def test_colours_are_told_apart_by_the_colour_blind() -> None:
    """Blue, vermilion and grey; what they mark is also a word or a number."""
    colours = set(re.findall(r"color: (#[0-9a-f]{6})", FULL._repr_mimebundle_()["text/html"]))
    assert colours == {"#0072b2", "#d55e00", "#7f7f7f"}


def test_only_stats_can_be_shown() -> None:
    with pytest.raises(TypeError, match="needs Stats, ModuleStats or a Recording, not Text"):
        tables.view(Text("x"))
