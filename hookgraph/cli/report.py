"""``report``: the tables of stats that a service saved as JSON."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hookgraph import tables
from hookgraph.cli.errors import CommandError
from hookgraph.errors import HookgraphError
from hookgraph.stats import Stats


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``report`` and its options to the command line."""
    parser = commands.add_parser("report", help="show the tables of a file that stats.to_json() wrote")
    parser.add_argument("file", help="what stats.to_json() gave; - reads standard input")
    parser.add_argument("--json", action="store_true", help="print the stats as JSON again, checked and indented")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show saved stats; 0 when their counts balance."""
    try:
        stats = Stats.from_json(_read(options.file))
    except HookgraphError as error:
        raise CommandError(f"{options.file}: {error}") from error
    if options.json:
        print(stats.to_json(indent=2))
    else:
        tables.show(stats)
    return 0 if stats.balanced else 1


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read {file}: {error}") from error
