"""Rehearse calls of a module, and tell what of it would be captured, what forbids the rest, and what to do."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hookgraph import ahead
from hookgraph.advice import advise, graphs_needed
from hookgraph.ahead import Arguments, as_found, copy_of
from hookgraph.attach import attach, is_attached
from hookgraph.contrast import contrast, shared, shared_notes
from hookgraph.diagnosis import Diagnosis, Finding, is_served
from hookgraph.errors import HookgraphError, HookgraphWarning
from hookgraph.look import Look
from hookgraph.options import Options
from hookgraph.reasons import Fallback, FallbackReason
from hookgraph.stats import ModuleStats
from hookgraph.switch import disabled_by_environment
from hookgraph.targets import select
from hookgraph.words import first_few, names_in

ROUNDS = 5  # a forward that fills a table twice is watched three times, then captured, then replayed
_LEAST_ROUNDS = 3  # watched, captured, replayed
_MOST_GRAPHS = Options().max_graphs
_NO_GRAD = (
    "This is told for calls under torch.no_grad() or torch.inference_mode(): with gradients they run eager (needs_grad)"
)
_REASONS = {reason.value: reason for reason in FallbackReason}

Calls = Sequence[Arguments | dict[str, Any]]


def diagnose(model: nn.Module, calls: Calls, *, total_calls: int | None = None, **options: Any) -> Diagnosis:
    """Rehearse calls of a model, and tell what would be captured, what forbids the rest, and the remedy.

    On a CPU the tape rehearses what a GPU would do: a value that the forward reads there is a read-back.
    The calls run without gradients.

    Args:
        model: In place and in eval mode, with nothing attached to it.
        calls: The arguments of each call, as ``(args, kwargs)`` or a dict of keyword arguments: one step of a loop, or a
            few that differ; ``record_calls`` gets them from a loop or a pipeline.
            Each is made with a copy of its own: a cache that one call fills is not filled for the next.
        total_calls: How many calls a rehearsal makes, going round; by default each five times.  At least three
            times each: fewer reach no replay.
        options: Options of ``attach`` to rehearse with, such as ``max_graphs`` or ``child_hooks``.

    Raises:
        HookgraphError: The calls are not such a list, or one raises; too few calls to reach a replay; the model is
            attached already, or ``HOOKGRAPH_DISABLE`` is set.
        AttachError: A wrong option.

    Restores: buffers, plain attributes and random state.
    Cost: about six eager calls for each of ``calls``, and five more for each level of submodules that is searched.

    Example:
        >>> import torch, hookgraph
        >>> class Gated(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        ...     def forward(self, x):
        ...         return self.body(x) if x.sum().item() > 0 else x
        >>> found = hookgraph.diagnose(Gated().eval(), [((torch.ones(2, 4),), {})])
        >>> found.findings[0].reason.value, found.targets
        ('read_back', ('body',))
    """
    pairs = ahead.pairs(calls)
    _check(model, pairs, total_calls, _LEAST_ROUNDS + _more_warmups(options))
    rounds = ROUNDS + _more_warmups(options)
    total = total_calls or rounds * len(pairs)
    with_gradients = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", HookgraphWarning)  # what they say is in the findings
        with as_found(model):
            look = Look(model, pairs, "; ".join(shared_notes(shared(pairs))))
        (whole,) = _rehearse(model, [""], pairs, total, options)
        if not whole.replays and not whole.reasons:  # a table was filled first, or a list goes round too slowly
            raise HookgraphError(_too_few(total, rounds * len(pairs)))
        parts: dict[str, ModuleStats] = {}
        targets: tuple[str, ...] = ("",)
        if not is_served(whole):
            parts = _largest_parts(model, pairs, total, options)
            targets = _short(model, list(parts)) or (("",) if whole.replays else ())
    diagnosis = _conclude(model, pairs, look, whole, parts, targets, options)
    return dataclasses.replace(diagnosis, notes=(*diagnosis.notes, _NO_GRAD)) if with_gradients else diagnosis


def _check(model: Any, pairs: list[Arguments], total_calls: Any, rounds: int) -> None:
    if not isinstance(model, nn.Module):
        raise HookgraphError(f"diagnose() needs a torch.nn.Module, got {type(model).__qualname__}")
    if is_attached(model):
        raise HookgraphError(f"{type(model).__name__} is attached already; detach() it, then diagnose()")
    if disabled_by_environment():
        raise HookgraphError("HOOKGRAPH_DISABLE is set in the environment, so nothing can be rehearsed; unset it")
    if not pairs:
        raise HookgraphError("calls has to be a list of (args, kwargs) with at least one, not a list of nothing")
    if total_calls is not None and (type(total_calls) is not int or total_calls < 1):
        raise HookgraphError(f"total_calls={total_calls!r}: expected an int of at least 1, or None")
    if total_calls is not None and total_calls < rounds * len(pairs):
        raise HookgraphError(_too_few(total_calls, rounds * len(pairs)))


def _more_warmups(options: dict[str, Any]) -> int:
    """How many more rounds the option ``warmup`` takes; whether it is a good one is for ``attach`` to say."""
    warmup = options.get("warmup", 1)
    return max(warmup - 1, 0) if type(warmup) is int else 0


def _too_few(total_calls: int, enough: int) -> str:
    return (
        f"{total_calls} calls reach no replay: each call of the list is watched, captured and replayed, in this order; "
        f"make at least {enough}, or leave the number out"
    )


# -- rehearsals --------------------------------------------------------------------------------------


def _rehearse(
    model: nn.Module, targets: Iterable[str], calls: list[Arguments], total: int, options: dict[str, Any]
) -> tuple[ModuleStats, ...]:
    """Attach, make the calls, detach: what became of them, for each target."""
    with as_found(model), attach(model, list(targets), **options) as handle:
        for index in range(total):
            args, kwargs = copy_of(calls[index % len(calls)], model)
            model(*args, **kwargs)
        return handle.stats.modules


def _largest_parts(
    model: nn.Module, calls: list[Arguments], total: int, options: dict[str, Any]
) -> dict[str, ModuleStats]:
    """The largest submodules that can be captured, from the top down, and their stats with just these attached."""
    chosen: list[str] = []
    level = _children(model, "")
    while level:
        level = _disjoint(model, [*chosen, *level])[len(chosen) :]
        found = {stats.name: stats for stats in _rehearse(model, [*chosen, *level], calls, total, options)}
        chosen += [name for name in level if name in found and is_served(found[name])]
        level = [below for name in level if name not in chosen for below in _children(model.get_submodule(name), name)]
    proved = _rehearse(model, chosen, calls, total, options) if chosen else ()
    return {stats.name: stats for stats in proved if is_served(stats)}


def _children(module: nn.Module, name: str) -> list[str]:
    return [
        f"{name}.{key}".lstrip(".")
        for key, child in module.named_children()
        if not isinstance(child, torch.jit.ScriptModule) and not _is_single_layer(child)
    ]


def _disjoint(model: nn.Module, names: list[str]) -> list[str]:
    """Without those that share a submodule with an earlier one: a module cannot be in two graphs' hands."""
    taken: set[int] = set()
    kept = []
    for name in names:
        inside = set(map(id, model.get_submodule(name).modules()))
        if taken.isdisjoint(inside):
            taken |= inside
            kept.append(name)
    return kept


def _is_single_layer(module: nn.Module) -> bool:
    """Whether it is one layer of PyTorch's own: launching a graph for it costs more than it saves."""
    return type(module).__module__.startswith("torch.nn.modules.") and not any(True for _ in module.children())


def _short(model: nn.Module, names: list[str]) -> tuple[str, ...]:
    """The same modules with as few names as globs in place of numbers allow."""
    short: list[str] = []
    covered: set[str] = set()
    for name in names:
        if name in covered:
            continue
        matches = {glob: set(select(model, glob)) for glob in _globs(name)}
        fitting = [glob for glob, found in matches.items() if len(found) > 1 and found <= set(names)]
        covered |= matches[fitting[0]] if fitting else {name}
        short.append(fitting[0] if fitting else name)
    return tuple(short)


def _globs(name: str) -> list[str]:
    """A name with all its numbers, then each one, replaced by a star."""
    parts = name.split(".")
    numbers = [
        place for place, part in enumerate(parts) if part.isdecimal() and len(parts) > 1
    ]  # "*" is the model, too
    chosen = [numbers, *([place] for place in numbers)] if len(numbers) > 1 else [numbers] if numbers else []
    return [".".join("*" if place in stars else part for place, part in enumerate(parts)) for stars in chosen]


# -- conclusions -------------------------------------------------------------------------------------


def _conclude(
    model: nn.Module, calls: list[Arguments], look: Look, whole: ModuleStats, parts: dict[str, ModuleStats],
    targets: tuple[str, ...], options: dict[str, Any],
) -> Diagnosis:  # fmt: skip
    most = options.get("max_graphs", _MOST_GRAPHS)
    seen = _seen(whole, look)
    known = [
        path for one in seen if one.reason is FallbackReason.SCALAR_CHURN for path in names_in(one.detail)
    ]  # fmt: skip
    compared = contrast(calls, look.signatures, look.lengthened, most, known)
    if compared.churning:  # in the rehearsal another reason came first
        paths = first_few([number.path for number in compared.churning])
        seen[Fallback(FallbackReason.SCALAR_CHURN, paths)] = max(number.calls for number in compared.churning)
    needed = None if compared.grows else graphs_needed(list(parts.values()) or [whole])
    advice = advise(
        targets=targets, changes=compared.changes, options=options | {"max_graphs": max(most, needed or 0)},
        single_layers=any(map(_is_single_layer, model.modules())), grows=compared.grows,
    )  # fmt: skip
    if whole.reasons.keys() == {FallbackReason.TRAINING.value}:  # nothing else was seen yet
        advice = "call model.eval(), and ask again"
    named = functools.partial(_with_names, _positional_names(model))
    return Diagnosis(
        model=type(model).__name__, targets=targets, advice=named(advice),
        notes=tuple(map(named, (*compared.notes, *look.notes()))),
        findings=tuple(Finding(fallback.reason, named(fallback.detail), count) for fallback, count in seen.items()),
        whole=whole, parts=tuple(parts.values()),
    )  # fmt: skip


def _seen(whole: ModuleStats, look: Look) -> Counter[Fallback]:
    """What the rehearsal ran into, the most frequent first, and what one look at each call saw beside it."""
    counted: Counter[Fallback] = Counter()
    for reason, details in whole.details.items():
        if reason == FallbackReason.SCALAR_CHURN:  # with each call more numbers may be seen to change
            paths = dict.fromkeys(path for detail in details for path in names_in(detail))
            details = {first_few(list(paths)): sum(details.values())}
        counted.update({Fallback(_REASONS[reason], detail): count for detail, count in details.items()})
    ordered = Counter(dict(counted.most_common()))
    lines = {_line(fallback) for fallback in ordered}
    for fallback, count in look.blockers.items():
        if _line(fallback) not in lines:
            lines.add(_line(fallback))
            ordered[fallback] = count
    return ordered


def _line(fallback: Fallback) -> tuple[FallbackReason, str]:
    return fallback.reason, fallback.detail.partition(": ")[0]


def _positional_names(model: nn.Module) -> list[str]:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a forward written in C, or a callable that hides what it takes
        return []
    return [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


def _with_names(names: list[str], text: str) -> str:
    """Say the name of a positional argument, too: ``args[1] (timestep)``."""

    def named(found: re.Match[str]) -> str:
        index = int(found[1])
        return f"{found[0]} ({names[index]})" if index < len(names) else found[0]

    return re.sub(r"(?<![\w.])args\[(\d+)\](?![\[.])", named, text)
