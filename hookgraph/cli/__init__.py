"""The commands of ``python -m hookgraph``; each has a file of its own here."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from hookgraph import __version__
from hookgraph.cli import bench, demo, doctor, report
from hookgraph.cli.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_USAGE = 2  # as argparse has it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit status.

    Args:
        argv: the command and its options; None reads them from the command line.

    Returns:
        0 when all is well, 1 when the command found something wrong, 2 when it could not run.
    """
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except CommandError as error:
        print(f"hookgraph {options.command}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130  # what a shell reports for a program that Ctrl-C ended


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hookgraph", description="CUDA graphs for PyTorch modules, from outside.")
    parser.add_argument("--version", action="version", version=f"hookgraph {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    bench.add_command(commands)
    demo.add_command(commands)
    doctor.add_command(commands)
    report.add_command(commands)
    return parser
