"""What a call would run into if it were made now, found out without making it."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from torch import nn

from hookgraph import refusals
from hookgraph.backends import Backends
from hookgraph.ledger import Ledger
from hookgraph.options import Options
from hookgraph.policy import Decision, Plan
from hookgraph.reasons import Fallback
from hookgraph.signature import Call, Signature


def foretell(
    trial: Ledger, module: nn.Module, call: Call, key: Signature, options: Options, backends: Backends
) -> tuple[Decision, str | None]:
    """Decide as for a real call.

    Args:
        trial: A copy of the module's ledger, which the decision may write to.

    Returns:
        The decision, and what has changed in the module since its graph or its warm-up.
    """
    entry, decision = trial.decide(key)
    change = None
    if decision.plan is Plan.REPLAY:
        assert entry.graph is not None
        unfit = refusals.of_replay(entry.graph, call)
        if unfit is not None:
            return Decision(Plan.EAGER, unfit), None
        change = entry.graph.guards.difference()
    elif decision.plan is Plan.CAPTURE:
        change = entry.change_since_warmup()
    if change is not None:
        entry.graph = None  # not ours to release
        entry.invalidate(change)
        decision = trial.decide_again(entry)
    obstacle = None
    if decision.plan in (Plan.WARM_UP, Plan.CAPTURE):
        obstacle = refusals.of_module(module, call.device, options, backends)
    if decision.plan is Plan.CAPTURE and obstacle is None:
        assert entry.findings is not None
        obstacle = refusals.of_capture(module, entry.findings, call)
        obstacle = entry.places if obstacle is None and isinstance(entry.places, Fallback) else obstacle
    return (decision if obstacle is None else Decision(Plan.EAGER, obstacle)), change


def check_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse arguments that the forward itself would refuse.

    Pre-hooks of others may change the arguments first, so with one of these nothing is refused.

    Raises:
        TypeError: One that it does not take, one too many, or one missing.
    """
    if any(not type(hook).__module__.startswith("hookgraph.") for hook in module._forward_pre_hooks.values()):
        return
    try:
        forward = inspect.signature(module.forward)
    except (TypeError, ValueError):  # a forward written in C, or a callable that hides what it takes
        return
    try:
        forward.bind(*args, **kwargs)
    except TypeError as error:
        unknown = [name for name in kwargs if name not in forward.parameters]
        near = difflib.get_close_matches(unknown[0], list(forward.parameters), n=1) if unknown else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"explain(): {type(module).__name__}.forward() {error}{hint}") from None
