"""The line to type, from what the rehearsals of a doctor showed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from hookgraph.options import Options
from hookgraph.stats import ModuleStats
from hookgraph.unretained import OTHERS

_DEFAULTS = {spec.name: spec.default for spec in fields(Options)}


def advise(
    *,
    targets: Sequence[str],
    changes: Sequence[str],
    options: Mapping[str, Any],
    single_layers: bool,
    grows: bool = False,
) -> str:
    """Say what to do about a model, in one line.

    Args:
        targets: What to attach to: ``("",)`` is the model itself; nothing where nothing can be captured.
        changes: What to change in the calls first, each as an imperative.
        options: Options of ``attach`` that go with it; those that are its defaults are not repeated.
        single_layers: Whether the model has layers of PyTorch's own outside the targets.
        grows: Whether each call brings another signature, as a growing cache does: to its parts, too.

    Example:
        >>> advise(targets=[""], changes=[], options={"max_graphs": 8}, single_layers=False)
        'hookgraph.attach(model, max_graphs=8)'
        >>> advise(targets=["blocks.*"], changes=["pass args[1] as a tensor"], options={}, single_layers=True)
        "pass args[1] as a tensor, and ask again; meanwhile hookgraph.attach(model, targets=['blocks.*'])"
    """
    first = ", ".join(changes)
    if not targets:
        nothing = (
            "as it is only single layers are left, and a graph for one is not worth it"
            if single_layers
            else "nothing of it can be captured as it is"
        )
        return f"{first or 'change what forbids it, below'}, and ask again; {nothing}"
    attach = _call(targets, options)
    if not first:
        return attach
    if list(targets) == [""]:
        return f"{first}, then {attach}"
    return f"{first}, and ask again" if grows else f"{first}, and ask again; meanwhile {attach}"


def _call(targets: Sequence[str], options: Mapping[str, Any]) -> str:
    told = {} if list(targets) == [""] else {"targets": list(targets)}
    told |= {name: value for name, value in options.items() if _DEFAULTS.get(name) != value}
    return f"hookgraph.attach({', '.join(['model', *(f'{name}={value!r}' for name, value in told.items())])})"


def graphs_needed(modules: Sequence[ModuleStats]) -> int | None:
    """The ``max_graphs`` that retains every signature seen; None where there were too many to count."""
    if any(summary == OTHERS for module in modules for summary, _ in module.unretained):
        return None
    return max(len(module.unretained) + sum(one.state != "blocked" for one in module.signatures) for module in modules)
