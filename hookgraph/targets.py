"""Which submodules get graphs: what the ``targets`` of ``attach`` name."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hookgraph.errors import AttachError

Target = None | str | re.Pattern[str] | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool]


def select(model: nn.Module, targets: Target | Iterable[Target]) -> dict[str, nn.Module]:
    """The modules that ``targets`` names, by qualified name, each once.

    Raises:
        AttachError: Nothing matches, or one match lies inside another.
    """
    wanted = targets if isinstance(targets, (list, tuple, set, frozenset)) else [targets]
    if not wanted:
        raise AttachError("targets is empty; None selects the model itself")
    named = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[str, nn.Module] = {}
    for target in wanted:
        chosen.update(_matches(model, named, target))
    in_order: dict[str, nn.Module] = {}
    for name, module in named.items():
        if name in chosen and all(module is not other for other in in_order.values()):
            in_order[name] = module
    _refuse_nested(in_order)
    for name, module in in_order.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise AttachError(
                f"{name or 'the model'} is a script module ({type(module).__name__}): its forward is not Python. "
                "Attach to the module that it was made from."
            )
    return in_order


def _matches(model: nn.Module, named: dict[str, nn.Module], target: Any) -> dict[str, nn.Module]:
    found = {name: module for name, module in named.items() if _is_match(model, target, name, module)}
    if not found and target == "auto":
        raise AttachError(
            "targets='auto': what can be captured is known from calls. Give them, "
            "attach(model, 'auto', calls=calls), as your loop makes them; hookgraph.record_calls records some"
        )
    if not found:
        raise AttachError(f"targets={target!r} matches no module of {type(model).__name__}{_nearest(named, target)}")
    return found


def _is_match(model: nn.Module, target: Any, name: str, module: nn.Module) -> bool:
    if target is None:
        return module is model
    if isinstance(target, str):
        return name == target or (any(sign in target for sign in "*?[") and _glob(name.split("."), target.split(".")))
    if isinstance(target, re.Pattern):
        return bool(name) and target.search(name) is not None
    if isinstance(target, type):
        return isinstance(module, target)
    if isinstance(target, nn.Module):
        return module is target
    if callable(target):
        return bool(target(name, module))
    raise AttachError(
        f"targets={target!r}: expected None, a name, a glob, a compiled regex, a class, a function of name and "
        "module, a submodule, or a list of these"
    )


def _glob(name: list[str], pattern: list[str]) -> bool:
    """Match a dotted name part by part, as a shell does with paths; ``**`` stands for any parts."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_glob(name[skipped:], pattern[1:]) for skipped in range(len(name) + 1))
    return bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and _glob(name[1:], pattern[1:])


def _nearest(named: dict[str, nn.Module], target: Any) -> str:
    if not isinstance(target, (str, re.Pattern)):
        return ""
    text = target if isinstance(target, str) else target.pattern
    near = difflib.get_close_matches(text, list(named), n=3, cutoff=0.4) or [name for name in named if name][:3]
    return f"; nearest are {', '.join(map(repr, near))}" if near else ""


def _refuse_nested(chosen: dict[str, nn.Module]) -> None:
    for name, module in chosen.items():
        inside = {id(child) for child in module.modules()} - {id(module)}
        for other, candidate in chosen.items():
            if id(candidate) in inside:
                raise AttachError(
                    f"{other!r} lies inside {name or 'the model itself'!r}, which is selected too; "
                    "a graph of the outer one holds the inner one already. Select one of them."
                )
