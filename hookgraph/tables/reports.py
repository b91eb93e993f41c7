"""The tables of what was recorded, diagnosed, timed and soaked."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hookgraph.benchmark import Benchmark
from hookgraph.counters import Outcome
from hookgraph.diagnosis import Diagnosis
from hookgraph.recording import Recording
from hookgraph.soak_report import SoakReport
from hookgraph.stats import Stats, format_mib, plural
from hookgraph.tables.counts import modules_table, signatures_table, unretained_parts
from hookgraph.tables.style import BAD, GOOD, OUTCOME_STYLES, add_number_column, new_table, number_cell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hookgraph.recording import CallRecord


def recording_table(records: Sequence[CallRecord]) -> Table:
    """How long the host took for the calls of each module and outcome, in milliseconds."""
    groups: dict[tuple[str, Outcome], list[int]] = {}
    for record in records:
        times = groups.setdefault((record.module, record.outcome), [])
        times.extend([] if record.duration_ns is None else [record.duration_ns])
    counts = Counter((record.module, record.outcome) for record in records)
    table = new_table("recording, host time")
    several = len(groups) > 1
    table.add_column("module", footer="total" if several else "", overflow="fold")
    table.add_column("outcome", no_wrap=True)
    add_number_column(table, "calls", Text(f"{len(records)}") if several else "")
    for name in ("median ms", "p90 ms", "slowest ms"):
        add_number_column(table, name, "")
    total = sum(time for times in groups.values() for time in times)
    add_number_column(table, "sum ms", Text(_ms(total)) if several else "")
    order = list(Outcome)
    for module, outcome in sorted(groups, key=lambda group: (group[0], order.index(group[1]))):
        times = sorted(groups[module, outcome])
        shown = [_ms(time) for time in (_rank(times, 0.5), _rank(times, 0.9), times[-1], sum(times))] if times else []
        label = Text(outcome.label, style=OUTCOME_STYLES[outcome.value])
        table.add_row(Text(module), label, f"{counts[module, outcome]}", *shown)
    table.show_footer = several
    return table


def recording_parts(recording: Recording) -> list[RenderableType]:
    records, calls = recording.records, recording.calls
    if not records:
        return [Text("hookgraph: nothing is recorded yet.")]
    if calls == len(records):
        return [recording_table(records)]
    return [recording_table(records), Text(f" The last {len(records)} of {plural(calls, 'call')}.\n")]


def _rank(in_order: list[int], share: float) -> int:
    """The smallest value that is not exceeded by at least this share of all."""
    return in_order[max(math.ceil(share * len(in_order)), 1) - 1]


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:,.2f}"


def findings_table(diagnosis: Diagnosis) -> Table:
    """For each thing that forbids a graph: in how many calls, what was seen and where, and what to do."""
    table = new_table("what keeps calls from a graph")
    add_number_column(table, "calls", "")
    table.add_column("reason", no_wrap=True)
    table.add_column("what was seen", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for finding in diagnosis.findings:
        seen = Text(finding.reason.meaning)
        seen.append(f"\n{finding.seen}" if finding.seen else "", style="italic")
        reason = Text(finding.reason.value, style=BAD)
        table.add_row(Text(f"{finding.calls}"), reason, seen, Text(finding.reason.remedy))
    table.leading = 1
    return table


def diagnosis_parts(diagnosis: Diagnosis) -> list[RenderableType]:
    style = GOOD if diagnosis.can_capture else BAD
    can = "can" if diagnosis.can_capture_whole else "cannot"
    whole = diagnosis.whole
    some = (
        ""
        if diagnosis.can_capture_whole or not whole.replays
        else f" for {whole.eager} of {plural(whole.calls, 'call')}"
    )
    parts: list[RenderableType] = [Text(f"{diagnosis.model} {can} be captured as a whole{some}.")]
    parts.append(Text.assemble("What to do: ", (diagnosis.advice, style), "\n"))
    if diagnosis.findings:
        parts.append(findings_table(diagnosis))
    if diagnosis.parts:
        table = modules_table(Stats.of(diagnosis.parts))
        table.title = Text("its largest parts that can, in a rehearsal", style="bold")
        parts.append(table)
    elif diagnosis.can_capture:
        parts.append(signatures_table(whole))
    parts.extend(unretained_parts(whole))
    parts.extend(Text(f" {note}.") for note in diagnosis.notes)
    return parts


def benchmark_parts(result: Benchmark) -> list[RenderableType]:
    table = new_table("benchmark")
    table.add_column("variant")
    for name in ("wall ms", "10 to 90 %", "host ms", "times as fast"):
        add_number_column(table, name, "")
    table.add_column("parity", overflow="fold")
    eager = result.timings[0]
    for timing in result.timings:
        table.add_row(
            timing.name, f"{timing.wall_ms:.3f}", f"{timing.wall_low_ms:.3f}–{timing.wall_high_ms:.3f}",
            f"{timing.host_ms:.3f}", f"{eager.wall_ms / timing.wall_ms:.2f}", timing.parity,
        )  # fmt: skip
    lines = [
        f"{result.device_name}, medians per call of {plural(result.calls, 'call')} in {plural(result.rounds, 'round')}",
        f"{result.replayed:.0%} of the attached calls replayed, {format_mib(result.retained_bytes)} MiB retained",
        result.verdict,
    ]
    if result.device == "cpu":
        lines.append("on a CPU the tape rehearses what a GPU would do; it does not promise speed")
    return [table, Text("\n".join(lines))]


def soak_parts(report: SoakReport) -> list[RenderableType]:
    table = new_table("soak")
    table.add_column("")
    add_number_column(table, "count", "")
    rows = {
        "calls": report.calls, "compared with eager": report.compared, "mismatches": report.mismatches,
        "eager differs from itself": report.undecided, "made to fail, as in eager": report.failures,
        "errors": report.errors,
    }  # fmt: skip
    bad = {"mismatches", "errors"}
    for name, count in rows.items():
        table.add_row(name, number_cell(count, BAD if name in bad else ""))
    for title, counts in (("outcome", report.outcomes), ("eager for", report.reasons), ("event", report.events)):
        table.add_section()
        for name, count in counts.items():
            table.add_row(f"{title}: {name}", f"{count}")
    memory = new_table("memory, MiB")
    for name in ("of", "after a fifth", "at the end"):
        memory.add_column(name, justify="left" if name == "of" else "right")
    for name, (before, after) in report.memory.items():
        memory.add_row(name, format_mib(before), format_mib(after))
    replays = report.outcomes["replays"]
    reasons = ", ".join(report.reasons) or "no call repeats"
    words = "as in eager, all of it" if report.passed else "WRONG; report it"
    words += "" if replays else f", but nothing was replayed: {reasons}; ask the doctor"
    words += "" if report.balanced else "; the counts do not add up"
    head = f"{report.device_name}, {report.seconds:g} s, {plural(report.threads, 'thread')}: {words}"
    return [table, memory, Text("\n".join([head, *report.examples]))]
