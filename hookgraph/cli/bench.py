"""``bench``: time a module eager and attached, and say whether graphs pay."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hookgraph import bench
from hookgraph.cli import factories
from hookgraph.cli.errors import CommandError

if TYPE_CHECKING:
    from torch import nn

    from hookgraph.benchmark import Benchmark
    from hookgraph.doctor import Calls


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench`` and its options to the command line."""
    parser = commands.add_parser(
        "bench",
        help="time a module eager and attached, and say whether graphs pay",
        epilog="Exit status: 0 when all variants agree with eager, 1 when one does not, 2 when it could not be asked.",
    )
    factories.add_option(parser)
    parser.add_argument("--rounds", type=factories.positive, default=20, help="passes through all calls (20)")
    parser.add_argument(
        "--compile", nargs="?", const="inductor", metavar="BACKEND", help="time torch.compile, too (inductor)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the times as bars, as PNG, SVG or PDF")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, and report; 0 when all variants agree with eager."""

    def ask(module: nn.Module, calls: Calls) -> Benchmark:
        result = bench.measure(module, calls, rounds=options.rounds, compiled=options.compile)
        if options.plot is not None:
            _draw(result, options.plot)
        return result

    return 0 if factories.answer(options, ask, factories.best_device()).agrees else 1


def _draw(result: Benchmark, path: Path) -> None:
    try:
        from hookgraph import plots
    except ImportError as error:
        raise CommandError(f"--plot needs matplotlib: pip install 'hookgraph[notebook]' ({error})") from error
    figure = plots.times(result).get_figure(root=True)
    assert figure is not None  # plots made it
    try:
        figure.savefig(path, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise CommandError(f"--plot {path}: {error}") from error
