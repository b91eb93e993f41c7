"""Stats and reports as tables for a terminal, a notebook and plain text."""

from __future__ import annotations

import io
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.jupyter import JUPYTER_HTML_FORMAT
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from hookgraph.benchmark import Benchmark
from hookgraph.diagnosis import Diagnosis
from hookgraph.explain import Explanation
from hookgraph.recording import Recording
from hookgraph.soak_report import SoakReport
from hookgraph.stats import ModuleStats, Stats
from hookgraph.tables import counts, reports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

WIDTH = 115  # what a Jupyter cell holds without a scroll bar at its default font; rich's own default there


def view(shown: object) -> RenderableType:
    """Give the tables of ``Stats``, ``ModuleStats`` or a ``Recording`` as one renderable of at most ``WIDTH`` columns."""
    if isinstance(shown, Stats):
        parts = counts.stats_parts(shown)
    elif isinstance(shown, ModuleStats):
        parts = [
            counts.signatures_table(shown),
            *counts.unretained_parts(shown),
            *counts.reasons_parts([shown], shown.reasons),
        ]
    elif isinstance(shown, Recording):
        parts = reports.recording_parts(shown)
    elif isinstance(shown, Explanation):
        parts = [Text(str(shown))]
    elif isinstance(shown, Benchmark):
        parts = reports.benchmark_parts(shown)
    elif isinstance(shown, SoakReport):
        parts = reports.soak_parts(shown)
    elif isinstance(shown, Diagnosis):
        parts = reports.diagnosis_parts(shown)
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
