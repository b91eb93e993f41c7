"""``soak``: call a module from several threads for a while, change it in between, and compare with eager."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hookgraph import soak
from hookgraph.cli import factories

if TYPE_CHECKING:
    from torch import nn

    from hookgraph.doctor import Calls
    from hookgraph.soak_report import SoakReport


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``soak`` and its options to the command line."""
    parser = commands.add_parser(
        "soak",
        help="call a module from threads for a while, change it in between, and compare every result with eager",
        epilog="Exit status: 0 when all was as in eager, 1 when something was not, 2 when it could not be asked.",
    )
    factories.add_option(parser)
    parser.add_argument("--minutes", type=_minutes, default=1.0, help="how long (1)")
    parser.add_argument("--threads", type=factories.positive, default=4, help="threads that make calls (4)")
    parser.add_argument(
        "--compare-every", type=factories.positive, default=1, metavar="N", help="compare one call of N with eager (1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="for the order of calls, values and events (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Soak, and report; 0 when nothing was wrong."""

    def ask(module: nn.Module, calls: Calls) -> SoakReport:
        return soak.run(
            module, calls, seconds=60 * options.minutes, threads=options.threads,
            compare_every=options.compare_every, seed=options.seed,
        )  # fmt: skip

    return 0 if factories.answer(options, ask, factories.best_device()).passed else 1


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of minutes")
    return minutes
