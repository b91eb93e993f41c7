"""``soak``: call a module from several threads for a while, change it in between, and compare with eager."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

import torch

from hookgraph import soak, tables
from hookgraph.cli import factories
from hookgraph.cli.errors import CommandError
from hookgraph.errors import HookgraphError


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
    # Standard output belongs to the report: whatever a library prints meanwhile goes to standard error.
    with contextlib.redirect_stdout(sys.stderr):
        module, calls = factories.load(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            report = soak.run(
                module, calls, seconds=60 * options.minutes, threads=options.threads,
                compare_every=options.compare_every, seed=options.seed,
            )  # fmt: skip
        except (HookgraphError, ValueError) as error:
            raise CommandError(str(error)) from error
    if options.json:
        print(json.dumps(report.to_dict()))
    else:
        tables.show(report)
    return 0 if report.passed else 1


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of minutes")
    return minutes
