"""Stats and recordings as tables for a terminal, a notebook and plain text."""

from __future__ import annotations

import io
import math
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.jupyter import JUPYTER_HTML_FORMAT
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hookgraph.benchmark import Benchmark
from hookgraph.counters import Outcome
from hookgraph.diagnosis import Diagnosis
from hookgraph.explain import Explanation
from hookgraph.reasons import FallbackReason
from hookgraph.recording import Recording
from hookgraph.soak_report import SoakReport
from hookgraph.stats import ModuleStats, SignatureStats, Stats, format_mib, plural
from hookgraph.unretained import OTHERS
from hookgraph.worth import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hookgraph.recording import CallRecord

WIDTH = 115  # what a Jupyter cell holds without a scroll bar at its default font; rich's own default there

# Blue and vermilion of Okabe and Ito (https://jfly.uni-koeln.de/color/): told apart under every common colour
# blindness, and readable on white as well as on black. Colour only repeats what a word or number says.
_GOOD = "#0072B2"
_BAD = "#D55E00"
_STATE_STYLES = {"trusted": _GOOD, "blocked": _BAD}
_OUTCOME_STYLES = {"calls": "", "warmups": "", "captures": "", "replays": _GOOD, "eager": _BAD, "errors": _BAD}
_VERDICT_STYLES = {Verdict.WORTH_IT.value: _GOOD, Verdict.NOT_WORTH_IT.value: _BAD}
_SIGNATURE_STYLES = {"calls": "", "replays": _GOOD, "eager": _BAD}

_REASONS = {reason.value: reason for reason in FallbackReason}

_PATHS_IN_A_SENTENCE = 3
_MODULES_IN_FULL = 3  # beyond this the signatures are shown on demand: a page of 60 tables tells nobody anything


def view(shown: object) -> RenderableType:
    """Give the tables of ``Stats``, ``ModuleStats`` or a ``Recording`` as one renderable of at most ``WIDTH`` columns."""
    if isinstance(shown, Stats):
        parts = _stats_parts(shown)
    elif isinstance(shown, ModuleStats):
        parts = [signatures_table(shown), *_unretained_parts(shown), *_reasons_parts([shown], shown.reasons)]
    elif isinstance(shown, Recording):
        parts = _recording_parts(shown)
    elif isinstance(shown, Explanation):
        parts = [Text(str(shown))]
    elif isinstance(shown, Benchmark):
        parts = _benchmark_parts(shown)
    elif isinstance(shown, SoakReport):
        parts = _soak_parts(shown)
    elif isinstance(shown, Diagnosis):
        parts = _diagnosis_parts(shown)
    else:
        raise TypeError(f"a view needs Stats, ModuleStats or a Recording, not {type(shown).__name__}")
    return Constrain(Group(*parts), WIDTH)


def show(shown: object) -> None:
    """Print the tables on standard output, with colours where that is a terminal."""
    if sys.stdout.isatty():
        Console().print(view(shown))
    else:
        print(render_text(shown))


@contextmanager
def live(read: Callable[[], object], refresh_seconds: float) -> Iterator[None]:
    """Show what ``read`` gives while the block runs, again and again, and for good at its end.

    In a terminal and in a notebook the tables stay in their place; elsewhere they are written once, at
    the end.  They go to standard error, since standard output may be a program's data.
    """
    done = threading.Event()
    with _screen() as draw:

        def refresh() -> None:
            while not done.wait(refresh_seconds):
                draw(read())

        thread = threading.Thread(target=refresh, name="hookgraph live", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            draw(read())


@contextmanager
def _screen() -> Iterator[Callable[[object], None]]:
    console = Console(stderr=True)
    if console.is_jupyter:
        from IPython.display import display

        yield display(Text(""), display_id=True).update
        return
    if not console.is_terminal:
        console.width = WIDTH
    # What is drawn is read before, by our own thread: rich's would read while it holds a lock, and wait
    # for a runner that writes a log line, which waits for rich.
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as screen:
        yield lambda shown: screen.update(view(shown), refresh=True)


def render_text(shown: object) -> str:
    """Give the tables as plain text."""
    return _plain(_recorded(shown))


def mimebundle(
    shown: object, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
) -> dict[str, str]:
    """Give the tables as ``text/plain`` and ``text/html``, as IPython asks for them."""
    console = _recorded(shown)
    html = console.export_html(inline_styles=True, code_format=JUPYTER_HTML_FORMAT, clear=False)
    bundle = {"text/plain": _plain(console), "text/html": html}
    wanted = set(include or bundle) - set(exclude or ())
    return {mime: text for mime, text in bundle.items() if mime in wanted}


def modules_table(stats: Stats) -> Table:
    """One row for each module, what they share, and the total."""
    table = _table("hookgraph")
    several = len(stats.modules) > 1 or stats.pool_bytes > 0
    table.add_column("module", footer=Text("total") if several else "", overflow="fold")
    for name, style in _OUTCOME_STYLES.items():
        _add_number_column(table, name, _count(getattr(stats, name), style) if several else "")
    _add_number_column(table, "MiB", Text(format_mib(stats.bytes)) if several else "")
    for module in stats.modules:
        counts = [_count(getattr(module, name), style) for name, style in _OUTCOME_STYLES.items()]
        table.add_row(Text(module.label), *counts, Text(format_mib(module.bytes)))
    if stats.pool_bytes:
        table.add_row(Text("(shared pool)"), *[""] * len(_OUTCOME_STYLES), Text(format_mib(stats.pool_bytes)))
    table.show_footer = several
    return table


def signatures_table(module: ModuleStats) -> Table:
    """One row for each retained signature, what belongs to none of them, and the total."""
    table = _table(_signatures_title(module), leading=1)
    held = sum(map(_signature_bytes, module.signatures))
    loose_calls = any(getattr(module, name) != _sum(module, name) for name in _SIGNATURE_STYLES)
    several = len(module.signatures) + loose_calls + (module.bytes != held) > 1
    table.add_column("signature", footer=Text("total") if several else "", overflow="fold")
    table.add_column("state", no_wrap=True)
    for name, style in _SIGNATURE_STYLES.items():
        _add_number_column(table, name, _count(getattr(module, name), style) if several else "")
    _add_number_column(table, "MiB", Text(format_mib(module.bytes)) if several else "")
    _add_number_column(table, "speed-up", "")
    table.add_column("verdict", no_wrap=True)
    for signature in module.signatures:
        table.add_row(*_signature_cells(signature))
    if loose_calls:
        rest = [_count(getattr(module, name) - _sum(module, name), style) for name, style in _SIGNATURE_STYLES.items()]
        table.add_row(Text("(calls without a retained signature)"), "", *rest, "", "", "")
    if module.bytes != held:
        blank = [""] * (len(_SIGNATURE_STYLES) + 1)
        table.add_row(Text("(memory of the graphs)"), *blank, Text(format_mib(module.bytes - held)), "", "")
    table.show_footer = several
    return table


def reasons_table(modules: Iterable[ModuleStats], reasons: dict[str, int]) -> Table:
    """For each reason: how often, what it means with one example, and what to do."""
    examples: dict[str, Counter[str]] = {}
    for module in modules:
        for reason, seen in module.details.items():
            examples.setdefault(reason, Counter()).update(seen)
    table = _table("why calls ran eager", leading=1)
    several = len(reasons) > 1
    _add_number_column(table, "eager", _count(sum(reasons.values()), _BAD) if several else "")
    table.add_column("reason", footer="total" if several else "", no_wrap=True)
    table.add_column("what was seen", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        known = _REASONS.get(reason)  # a saved file can come from another version
        meaning = Text(known.meaning if known else "this version does not know the reason")
        for detail, _ in examples.get(reason, Counter()).most_common(1):
            if detail:
                meaning.append(f"\ne.g. {detail}", style="italic")
        remedy = known.remedy if known else "look it up in the version that counted it"
        table.add_row(_count(count, _BAD), Text(reason), meaning, Text(remedy))
    table.show_footer = several
    return table


def recording_table(records: Sequence[CallRecord]) -> Table:
    """How long the host took for the calls of each module and outcome, in milliseconds."""
    groups: dict[tuple[str, Outcome], list[int]] = {}
    for record in records:
        times = groups.setdefault((record.module, record.outcome), [])
        times.extend([] if record.duration_ns is None else [record.duration_ns])
    counts = Counter((record.module, record.outcome) for record in records)
    table = _table("recording, host time")
    several = len(groups) > 1
    table.add_column("module", footer="total" if several else "", overflow="fold")
    table.add_column("outcome", no_wrap=True)
    _add_number_column(table, "calls", Text(f"{len(records)}") if several else "")
    for name in ("median ms", "p90 ms", "slowest ms"):
        _add_number_column(table, name, "")
    total = sum(time for times in groups.values() for time in times)
    _add_number_column(table, "sum ms", Text(_ms(total)) if several else "")
    order = list(Outcome)
    for module, outcome in sorted(groups, key=lambda group: (group[0], order.index(group[1]))):
        times = sorted(groups[module, outcome])
        shown = [_ms(time) for time in (_rank(times, 0.5), _rank(times, 0.9), times[-1], sum(times))] if times else []
        label = Text(outcome.label, style=_OUTCOME_STYLES[outcome.value])
        table.add_row(Text(module), label, f"{counts[module, outcome]}", *shown)
    table.show_footer = several
    return table


def _recording_parts(recording: Recording) -> list[RenderableType]:
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


def _stats_parts(stats: Stats) -> list[RenderableType]:
    if not stats.modules:
        return [Text("hookgraph: no module is attached.")]
    parts: list[RenderableType] = [modules_table(stats), _headline(stats)]
    if len(stats.modules) <= _MODULES_IN_FULL:
        for module in stats.modules:
            parts.extend([signatures_table(module)] if module.signatures else [])
            parts.extend(_unretained_parts(module))
    else:
        parts.append(Text(" Signatures of one module: print(stats.modules[0])\n", style="dim"))
    return [*parts, *_reasons_parts(stats.modules, stats.reasons)]


def _reasons_parts(modules: Iterable[ModuleStats], reasons: dict[str, int]) -> list[RenderableType]:
    return [reasons_table(modules, reasons)] if reasons else []


def _unretained_parts(module: ModuleStats) -> list[RenderableType]:
    """What ``max_graphs`` kept out, and which arguments differ most, in a sentence."""
    if not module.unretained:
        return []
    calls = plural(sum(count for _, count in module.unretained), "call")
    named = [summary for summary, _ in module.unretained if summary != OTHERS]
    if len(named) < len(module.unretained):
        words = f"More than {len(named)} other signatures in {calls}."
    else:
        needed = len(named) + sum(signature.state != "blocked" for signature in module.signatures)
        them = "it" if len(named) == 1 else "them"
        words = f"{plural(len(named), 'other signature')} in {calls}: max_graphs={needed} would retain {them}."
    most = [f"{path} ({plural(count, 'call')})" for path, count in list(module.varied.items())[:_PATHS_IN_A_SENTENCE]]
    differing = f" They differ in {', '.join(most)}." if most else ""
    return [Text(f" {words}{differing}\n")]


def findings_table(diagnosis: Diagnosis) -> Table:
    """For each thing that forbids a graph: in how many calls, what was seen and where, and what to do."""
    table = _table("what keeps calls from a graph")
    _add_number_column(table, "calls", "")
    table.add_column("reason", no_wrap=True)
    table.add_column("what was seen", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for finding in diagnosis.findings:
        seen = Text(finding.reason.meaning)
        seen.append(f"\n{finding.seen}" if finding.seen else "", style="italic")
        reason = Text(finding.reason.value, style=_BAD)
        table.add_row(Text(f"{finding.calls}"), reason, seen, Text(finding.reason.remedy))
    table.leading = 1
    return table


def _diagnosis_parts(diagnosis: Diagnosis) -> list[RenderableType]:
    style = _GOOD if diagnosis.can_capture else _BAD
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
    parts.extend(_unretained_parts(whole))
    parts.extend(Text(f" {note}.") for note in diagnosis.notes)
    return parts


def _headline(stats: Stats) -> Text:
    if not stats.balanced:
        return Text(" These counts do not balance: a mistake in hookgraph; please report it.\n", style=f"bold {_BAD}")
    share = f" ({stats.replays / stats.calls:.0%})" if stats.calls else ""
    return Text(f" {stats.replays} of {stats.calls} calls replayed{share}{_saved(stats)}.\n")


def _saved(stats: Stats) -> str:
    """What the replays saved, where times promise anything."""
    timed = [
        signature
        for module in stats.modules
        for signature in module.signatures
        if signature.verdict in _VERDICT_STYLES and signature.replays
    ]
    if not timed:
        return ""
    replayed = sum(signature.replays * (signature.replay_ms or 0.0) for signature in timed) / 1e3
    eager = replayed + sum(signature.saved_ms for signature in timed) / 1e3
    return f": about {replayed:,.2f} s where eager takes {eager:,.2f} s"


def _signatures_title(module: ModuleStats) -> str:
    label = module.label
    words = [label, *([module.class_name] if module.class_name != label else []), f"backend {module.backend}"]
    if module.invalidations:
        words.append(f"{module.invalidations} invalidated")
    return ", ".join(words)


def _signature_cells(signature: SignatureStats) -> list[RenderableType]:
    summary = Text(signature.summary)
    if signature.detail:
        summary.append(f"\n{signature.detail}", style="italic")
    verdict = "" if signature.verdict == Verdict.UNKNOWN else signature.verdict
    return [
        summary,
        Text(signature.state, style=_STATE_STYLES.get(signature.state, "")),
        *(_count(getattr(signature, name), style) for name, style in _SIGNATURE_STYLES.items()),
        Text(format_mib(_signature_bytes(signature))),
        Text(f"{signature.speedup:.2f}×" if signature.speedup and verdict in _VERDICT_STYLES else ""),
        Text(verdict, style=_VERDICT_STYLES.get(verdict, "")),
    ]


def _signature_bytes(signature: SignatureStats) -> int:
    return signature.input_bytes + signature.output_bytes


def _sum(module: ModuleStats, name: str) -> int:
    return sum(getattr(signature, name) for signature in module.signatures)


def _table(title: str, leading: int = 0) -> Table:
    return Table(box=box.SIMPLE, title=Text(title, style="bold"), title_justify="left", leading=leading)


def _add_number_column(table: Table, name: str, footer: RenderableType) -> None:
    table.add_column(name, footer=footer, justify="right", no_wrap=True)


def _count(number: int, style: str) -> Text:
    return Text(f"{number}", style=style if number else "dim")


def _recorded(shown: object) -> Console:
    # force_jupyter=False: inside a notebook a Console would display the table itself, a second time.
    console = Console(
        width=WIDTH, record=True, file=io.StringIO(), force_terminal=True, force_jupyter=False,
        color_system="truecolor", legacy_windows=False,
    )  # fmt: skip
    console.print(view(shown))
    return console


def _plain(console: Console) -> str:
    # Cells are padded with blanks: noise in a log, in a diff and under a reader's cursor.
    return "\n".join(line.rstrip() for line in console.export_text(styles=False).splitlines()).strip("\n")


@contextmanager
def progress(items: Sequence[Any], words: str, shown: bool) -> Iterator[Iterable[Any]]:
    """The items one by one, with a progress bar on standard error while they are gone through."""
    if not shown:
        yield items
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield bar.track(items, description=words)


def _benchmark_parts(result: Benchmark) -> list[RenderableType]:
    table = _table("benchmark")
    table.add_column("variant")
    for name in ("wall ms", "10 to 90 %", "host ms", "times as fast"):
        _add_number_column(table, name, "")
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


def _soak_parts(report: SoakReport) -> list[RenderableType]:
    table = _table("soak")
    table.add_column("")
    _add_number_column(table, "count", "")
    rows = {
        "calls": report.calls, "compared with eager": report.compared, "mismatches": report.mismatches,
        "eager differs from itself": report.undecided, "made to fail, as in eager": report.failures,
        "errors": report.errors,
    }  # fmt: skip
    bad = {"mismatches", "errors"}
    for name, count in rows.items():
        table.add_row(name, _count(count, _BAD if name in bad else ""))
    for title, counts in (("outcome", report.outcomes), ("eager for", report.reasons), ("event", report.events)):
        table.add_section()
        for name, count in counts.items():
            table.add_row(f"{title}: {name}", f"{count}")
    memory = _table("memory, MiB")
    for name in ("of", "after a fifth", "at the end"):
        memory.add_column(name, justify="left" if name == "of" else "right")
    for name, (before, after) in report.memory.items():
        memory.add_row(name, format_mib(before), format_mib(after))
    words = "as in eager, all of it" if report.passed else "WRONG; report it"
    words += "" if report.balanced else "; the counts do not add up"
    head = f"{report.device_name}, {report.seconds:g} s, {plural(report.threads, 'thread')}: {words}"
    return [table, memory, Text("\n".join([head, *report.examples]))]
