"""Stats as tables for a terminal, a notebook and plain text."""

from __future__ import annotations

import io
from collections import Counter
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.jupyter import JUPYTER_HTML_FORMAT
from rich.table import Table
from rich.text import Text

from hookgraph.reasons import FallbackReason
from hookgraph.stats import ModuleStats, SignatureStats, Stats, format_mib

if TYPE_CHECKING:
    from collections.abc import Iterable

WIDTH = 115  # what a Jupyter cell holds without a scroll bar at its default font; rich's own default there

# Blue and vermilion of Okabe and Ito (https://jfly.uni-koeln.de/color/): told apart under every common colour
# blindness, and readable on white as well as on black. Colour only repeats what a word or number says.
_GOOD = "#0072B2"
_BAD = "#D55E00"
_STATE_STYLES = {"trusted": _GOOD, "blocked": _BAD}
_OUTCOME_STYLES = {"calls": "", "warmups": "", "captures": "", "replays": _GOOD, "eager": _BAD, "errors": _BAD}
_SIGNATURE_STYLES = {"calls": "", "replays": _GOOD, "eager": _BAD}

_REASONS = {reason.value: reason for reason in FallbackReason}

_MODULES_IN_FULL = 3  # beyond this the signatures are shown on demand: a page of 60 tables tells nobody anything


def view(shown: object) -> RenderableType:
    """Give the tables of ``Stats`` or ``ModuleStats`` as one renderable of at most ``WIDTH`` columns."""
    if isinstance(shown, Stats):
        parts = _stats_parts(shown)
    elif isinstance(shown, ModuleStats):
        parts = [signatures_table(shown), *_reasons_parts([shown], shown.reasons)]
    else:
        raise TypeError(f"a view needs Stats or ModuleStats, not {type(shown).__name__}")
    return Constrain(Group(*parts), WIDTH)


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
        table.add_row(Text(_label(module)), *counts, Text(format_mib(module.bytes)))
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
    _add_number_column(table, "capture ms", "")
    _add_number_column(table, "MiB", Text(format_mib(module.bytes)) if several else "")
    for signature in module.signatures:
        table.add_row(*_signature_cells(signature))
    if loose_calls:
        rest = [_count(getattr(module, name) - _sum(module, name), style) for name, style in _SIGNATURE_STYLES.items()]
        table.add_row(Text("(calls without a retained signature)"), "", *rest, "", "")
    if module.bytes != held:
        blank = [""] * (len(_SIGNATURE_STYLES) + 2)
        table.add_row(Text("(memory of the graphs)"), *blank, Text(format_mib(module.bytes - held)))
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


def _stats_parts(stats: Stats) -> list[RenderableType]:
    if not stats.modules:
        return [Text("hookgraph: no module is attached.")]
    parts: list[RenderableType] = [modules_table(stats), _headline(stats)]
    if len(stats.modules) <= _MODULES_IN_FULL:
        parts.extend(signatures_table(module) for module in stats.modules if module.signatures)
    else:
        parts.append(Text(" Signatures of one module: print(stats.modules[0])\n", style="dim"))
    return [*parts, *_reasons_parts(stats.modules, stats.reasons)]


def _reasons_parts(modules: Iterable[ModuleStats], reasons: dict[str, int]) -> list[RenderableType]:
    return [reasons_table(modules, reasons)] if reasons else []


def _headline(stats: Stats) -> Text:
    if not stats.balanced:
        return Text(" These counts do not balance: a mistake in hookgraph; please report it.\n", style=f"bold {_BAD}")
    share = f" ({stats.replays / stats.calls:.0%})" if stats.calls else ""
    return Text(f" {stats.replays} of {stats.calls} calls replayed{share}.\n")


def _signatures_title(module: ModuleStats) -> str:
    label = _label(module)
    words = [label, *([module.class_name] if module.class_name != label else []), f"backend {module.backend}"]
    if module.invalidations:
        words.append(f"{module.invalidations} invalidated")
    return ", ".join(words)


def _signature_cells(signature: SignatureStats) -> list[RenderableType]:
    summary = Text(signature.summary)
    if signature.detail:
        summary.append(f"\n{signature.detail}", style="italic")
    capture = "" if signature.capture_ns is None else f"{signature.capture_ns / 1e6:,.1f}"
    return [
        summary,
        Text(signature.state, style=_STATE_STYLES.get(signature.state, "")),
        *(_count(getattr(signature, name), style) for name, style in _SIGNATURE_STYLES.items()),
        Text(capture),
        Text(format_mib(_signature_bytes(signature))),
    ]


def _signature_bytes(signature: SignatureStats) -> int:
    return signature.input_bytes + signature.output_bytes


def _sum(module: ModuleStats, name: str) -> int:
    return sum(getattr(signature, name) for signature in module.signatures)


def _label(module: ModuleStats) -> str:
    return module.name or module.class_name


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
