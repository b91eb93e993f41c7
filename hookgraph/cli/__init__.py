"""The commands of ``python -m hookgraph``; each has a file of its own here."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING

from hookgraph import __version__
from hookgraph.cli import bench, demo, doctor, report, soak
from hookgraph.cli.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EXIT_USAGE = 2  # as argparse has it
# What a shell reports for a program that a signal ended: Ctrl-C, and a pipe that nobody reads any more.
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit status.

    Args:
        argv: the command and its options; None reads them from the command line.

    Returns:
        0 when all is well, 1 when the command found something wrong, 2 when it could not run.
    """
    try:
        with _any_output():
            return _run(argv)
    except BrokenPipeError:  # whoever reads has seen enough, as head does
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written at exit
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except CommandError as error:
        print(f"hookgraph {options.command}: error: {error}", file=sys.stderr)
        return EXIT_USAGE


@contextlib.contextmanager
def _any_output() -> Iterator[None]:
    """Write all output before the end, with question marks for what its encoding does not have, such as a table's lines.

    Restores: how standard output treats such characters.
    """
    output = sys.stdout
    handling = output.errors if isinstance(output, io.TextIOWrapper) else None
    try:
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")
        try:
            yield
        finally:
            output.flush()
    finally:
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors=handling)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hookgraph", description="CUDA graphs for PyTorch modules, from outside.")
    parser.add_argument("--version", action="version", version=f"hookgraph {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    bench.add_command(commands)
    demo.add_command(commands)
    doctor.add_command(commands)
    report.add_command(commands)
    soak.add_command(commands)
    return parser
