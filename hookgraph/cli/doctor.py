"""``doctor``: rehearse a few calls of a module, without a GPU, and say what forbids a graph and what to do."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hookgraph.cli import factories
from hookgraph.doctor import diagnose

if TYPE_CHECKING:
    from torch import nn

    from hookgraph.diagnosis import Diagnosis
    from hookgraph.doctor import Calls


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``doctor`` and its options to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="say what of a module would be captured, what forbids the rest, and what to do",
        epilog="Exit status: 0 when something can be captured, 1 when nothing can, 2 when it could not be asked.",
    )
    factories.add_option(parser)
    parser.add_argument(
        "--calls",
        type=factories.positive,
        metavar="N",
        help="calls to make in a rehearsal, going round (five times the list, at least three times)",
    )
    parser.add_argument(
        "--child-hooks",
        choices=("refuse", "ignore"),
        default="refuse",
        help="as in attach(): whether forward hooks on submodules, which a replay skips, forbid a graph (refuse)",
    )
    parser.add_argument("--max-graphs", type=factories.positive, default=4, help="signatures to retain (4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Rehearse, and report; 0 when something can be captured, 1 when nothing can."""

    def ask(module: nn.Module, calls: Calls) -> Diagnosis:
        return diagnose(
            module, calls, total_calls=options.calls, max_graphs=options.max_graphs, child_hooks=options.child_hooks
        )

    return 0 if factories.answer(options, ask).can_capture else 1
