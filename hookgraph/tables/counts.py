"""The tables of stats: modules, signatures, reasons, and sentences about them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hookgraph.reasons import FallbackReason
from hookgraph.stats import ModuleStats, SignatureStats, Stats, format_mib, plural
from hookgraph.tables.style import BAD, GOOD, OUTCOME_STYLES, add_number_column, new_table, number_cell
from hookgraph.unretained import OTHERS
from hookgraph.worth import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

_STATE_STYLES = {"trusted": GOOD, "blocked": BAD}
_VERDICT_STYLES = {Verdict.WORTH_IT.value: GOOD, Verdict.NOT_WORTH_IT.value: BAD}
_SIGNATURE_STYLES = {"calls": "", "replays": GOOD, "eager": BAD}

_REASONS = {reason.value: reason for reason in FallbackReason}

_PATHS_IN_A_SENTENCE = 3
_MODULES_IN_FULL = 3  # beyond this the signatures are shown on demand: a page of 60 tables tells nobody anything


def modules_table(stats: Stats) -> Table:
    """One row for each module, what they share, and the total."""
    table = new_table("hookgraph")
    several = len(stats.modules) > 1 or stats.pool_bytes > 0
    table.add_column("module", footer=Text("total") if several else "", overflow="fold")
    for name, style in OUTCOME_STYLES.items():
        add_number_column(table, name, number_cell(getattr(stats, name), style) if several else "")
    add_number_column(table, "MiB", Text(format_mib(stats.bytes)) if several else "")
    for module in stats.modules:
        counts = [number_cell(getattr(module, name), style) for name, style in OUTCOME_STYLES.items()]
        table.add_row(Text(module.label), *counts, Text(format_mib(module.bytes)))
    if stats.pool_bytes:
        table.add_row(Text("(shared pool)"), *[""] * len(OUTCOME_STYLES), Text(format_mib(stats.pool_bytes)))
    table.show_footer = several
    return table


def signatures_table(module: ModuleStats) -> Table:
    """One row for each retained signature, what belongs to none of them, and the total."""
    table = new_table(_signatures_title(module), leading=1)
    held = sum(map(_signature_bytes, module.signatures))
    loose_calls = any(getattr(module, name) != _sum(module, name) for name in _SIGNATURE_STYLES)
    several = len(module.signatures) + loose_calls + (module.bytes != held) > 1
    table.add_column("signature", footer=Text("total") if several else "", overflow="fold")
    table.add_column("state", no_wrap=True)
    for name, style in _SIGNATURE_STYLES.items():
        add_number_column(table, name, number_cell(getattr(module, name), style) if several else "")
    add_number_column(table, "MiB", Text(format_mib(module.bytes)) if several else "")
    add_number_column(table, "speed-up", "")
    table.add_column("verdict", no_wrap=True)
    for signature in module.signatures:
        table.add_row(*_signature_cells(signature))
    if loose_calls:
        rest = [
            number_cell(getattr(module, name) - _sum(module, name), style) for name, style in _SIGNATURE_STYLES.items()
        ]
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
    table = new_table("why calls ran eager", leading=1)
    several = len(reasons) > 1
    add_number_column(table, "eager", number_cell(sum(reasons.values()), BAD) if several else "")
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
        table.add_row(number_cell(count, BAD), Text(reason), meaning, Text(remedy))
    table.show_footer = several
    return table


def stats_parts(stats: Stats) -> list[RenderableType]:
    if not stats.modules:
        return [Text("hookgraph: no module is attached.")]
    parts: list[RenderableType] = [modules_table(stats), _headline(stats)]
    if len(stats.modules) <= _MODULES_IN_FULL:
        for module in stats.modules:
            parts.extend([signatures_table(module)] if module.signatures else [])
            parts.extend(unretained_parts(module))
    else:
        parts.append(Text(" Signatures of one module: print(stats.modules[0])\n", style="dim"))
    return [*parts, *reasons_parts(stats.modules, stats.reasons)]


def reasons_parts(modules: Iterable[ModuleStats], reasons: dict[str, int]) -> list[RenderableType]:
    return [reasons_table(modules, reasons)] if reasons else []


def unretained_parts(module: ModuleStats) -> list[RenderableType]:
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


def _headline(stats: Stats) -> Text:
    if not stats.balanced:
        return Text(" These counts do not balance: a mistake in hookgraph; please report it.\n", style=f"bold {BAD}")
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
        *(number_cell(getattr(signature, name), style) for name, style in _SIGNATURE_STYLES.items()),
        Text(format_mib(_signature_bytes(signature))),
        Text(f"{signature.speedup:.2f}×" if signature.speedup and verdict in _VERDICT_STYLES else ""),
        Text(verdict, style=_VERDICT_STYLES.get(verdict, "")),
    ]


def _signature_bytes(signature: SignatureStats) -> int:
    return signature.input_bytes + signature.output_bytes


def _sum(module: ModuleStats, name: str) -> int:
    return sum(getattr(signature, name) for signature in module.signatures)
