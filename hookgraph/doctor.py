"""Rehearse calls of a module, and tell what of it would be captured, what forbids the rest, and what to do."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hookgraph import guards, signature, tree
from hookgraph.ahead import Arguments, random_numbers_kept
from hookgraph.attach import attach, is_attached
from hookgraph.audit import Audit, Findings, source_line, watch
from hookgraph.diagnosis import Diagnosis, Finding, is_served
from hookgraph.errors import HookgraphError, HookgraphWarning
from hookgraph.private_torch import compiled_part, storage_key
from hookgraph.reasons import Fallback, FallbackReason
from hookgraph.signature import Call
from hookgraph.state import ModuleState
from hookgraph.stats import ModuleStats, plural
from hookgraph.switch import disabled_by_environment
from hookgraph.targets import select

ROUNDS = 5  # a forward that fills a table twice is watched three times, then captured, then replayed
_REASONS = {reason.value: reason for reason in FallbackReason}

Calls = Sequence[Arguments | dict[str, Any]]


def diagnose(model: nn.Module, calls: Calls, *, total_calls: int | None = None, **options: Any) -> Diagnosis:
    """Rehearse calls of a model, and tell what would be captured, what forbids the rest, and the remedy.

    On a CPU the tape rehearses what a GPU would do: a value that the forward reads there is a read-back.
    The calls run without gradients.

    Args:
        model: In place and in eval mode, with nothing attached to it.
        calls: The arguments of each call, as ``(args, kwargs)`` or a dict of keyword arguments: one step of a loop, or a few that differ.
            Each is made with a copy of its own: a cache that one call fills is not filled for the next.
        total_calls: How many calls a rehearsal makes, going round; by default each five times.  Fewer do not
            reach a replay.
        options: Options of ``attach`` to rehearse with, such as ``max_graphs`` or ``child_hooks``.

    Raises:
        HookgraphError: The calls are not such a list, or one raises; the model is attached already, or
            ``HOOKGRAPH_DISABLE`` is set.
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
    _check(model, calls, total_calls)
    pairs = [_pair(index, call) for index, call in enumerate(calls)]
    total = total_calls or ROUNDS * len(pairs)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", HookgraphWarning)  # what they say is in the findings
        with _as_found(model):
            seen, notes = _look(model, pairs)
        (whole,) = _rehearse(model, [""], pairs, total, options)
        parts: dict[str, ModuleStats] = {}
        targets: tuple[str, ...] = ("",)
        if not is_served(whole):
            parts = _largest_parts(model, pairs, total, options)
            targets = _short(model, list(parts)) or (("",) if whole.replays else ())
    return Diagnosis(
        model=type(model).__name__, targets=targets, findings=_findings(whole, seen), notes=notes, whole=whole,
        parts=tuple(parts.values()),
    )  # fmt: skip


def _check(model: Any, calls: Any, total_calls: Any) -> None:
    if not isinstance(model, nn.Module):
        raise HookgraphError(f"diagnose() needs a torch.nn.Module, got {type(model).__qualname__}")
    if is_attached(model):
        raise HookgraphError(f"{type(model).__name__} is attached already; detach() it, then diagnose()")
    if disabled_by_environment():
        raise HookgraphError("HOOKGRAPH_DISABLE is set in the environment, so nothing can be rehearsed; unset it")
    if not isinstance(calls, (list, tuple)) or not calls:
        raise HookgraphError(f"calls has to be a list of (args, kwargs) with at least one, not {_kind(calls)}")
    if total_calls is not None and (type(total_calls) is not int or total_calls < 1):
        raise HookgraphError(f"total_calls={total_calls!r}: expected an int of at least 1, or None")


def _pair(index: int, call: Any) -> Arguments:
    if isinstance(call, dict):
        return (), call
    if isinstance(call, tuple) and len(call) == 2 and isinstance(call[0], (tuple, list)) and isinstance(call[1], dict):
        return tuple(call[0]), call[1]
    raise HookgraphError(f"calls[{index}] is {_kind(call)}; expected (args, kwargs), or a dict of keyword arguments")


def _kind(value: Any) -> str:
    if not isinstance(value, (tuple, list)):
        return f"a {type(value).__name__}"
    return f"a {type(value).__name__} of {', '.join(type(item).__name__ for item in value) or 'nothing'}"


# -- one look at what the forward does ---------------------------------------------------------------


class _EveryFinding(Findings):
    """Keeps all that forbids a graph, where the audit of a warm-up needs the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.every: list[Fallback] = []

    def block(self, reason: FallbackReason, what: str) -> None:
        self.every.append(Fallback(reason, f"{source_line()}: {what}"))
        super().block(reason, what)


def _look(model: nn.Module, calls: list[Arguments]) -> tuple[Counter[Fallback], tuple[str, ...]]:
    """Watch each call once: everything that forbids a graph, and what a graph would rely on."""
    blockers: Counter[Fallback] = Counter()
    relies = _Relies()
    for index, given in enumerate(calls):
        args, kwargs = _copied(model, given)
        home = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
        call = signature.read(args, kwargs, home)
        try:
            if isinstance(call, Fallback):  # the rehearsal names it
                model(*args, **kwargs)
                continue
            arguments = {storage_key(call.leaves[position]): position for position in reversed(call.tensors)}
            audit = Audit(call.device, arguments, guards.own_tensors(model), compiled_part(model) is not None)
            audit.findings = found = _EveryFinding()
            with watch(audit):
                output = model(*args, **kwargs)
        except Exception as error:
            raise HookgraphError(f"calls[{index}]: the model itself raises {type(error).__name__}: {error}") from error
        audit.finish((output, args, kwargs))
        blockers.update(dict.fromkeys([*found.every, *([found.blocker] if found.blocker else [])], 1))
        relies.add(model, call, found)
    return blockers, tuple(relies.notes())


class _Relies:
    """What graphs of some calls would rely on; each place once, in the order of its first use."""

    def __init__(self) -> None:
        self._written: dict[str, None] = {}
        self._side: dict[str, None] = {}
        self._random = False
        self._constants = 0

    def add(self, model: nn.Module, call: Call, found: Findings) -> None:
        paths = tree.paths(call.spec)
        names = {storage_key(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self._written.update(dict.fromkeys(paths[position] for position in sorted(found.written_arguments)))
        self._written.update(dict.fromkeys(names.get(key, "a tensor from outside") for key in found.written_outside))
        self._side.update(dict.fromkeys(found.side_lines[key] for key in found.side))
        self._random |= found.draws_random_numbers
        self._constants = max(self._constants, len(found.constants.on_host))

    def notes(self) -> Iterator[str]:
        if self._written:
            yield f"writes in place to {', '.join(self._written)}: a replay does so, too"
        if self._side:
            places = ", ".join(self._side)
            yield f"reads tensors that it was not given and that are no buffers, guarded by their places: {places}"
        if self._random:
            yield "draws random numbers from the default generator: a replay advances it as eager does"
        if self._constants:
            yield f"copies {plural(self._constants, 'constant')} from the host: a graph keeps them on the device"


# -- rehearsals --------------------------------------------------------------------------------------


def _copied(model: nn.Module, given: Arguments) -> Arguments:
    """A call with arguments of its own; a parameter or buffer among them stays what it is."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(given, memo)
    except Exception:  # a generator, a handle of another library: such a call is made with what was given
        return given


@contextmanager
def _as_found(model: nn.Module) -> Iterator[None]:
    """Put back what calls do to a model.

    Restores: its plain Python state, its buffers and their values, and the random generators.
    """
    state = ModuleState(model, tensors=True)
    holders = [(child._buffers, dict(child._buffers)) for child in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with random_numbers_kept(model):
            yield
    finally:
        if state.difference() is not None:
            state.restore()
        for holder, before in holders:
            holder.update(before)
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.copy_(values)


def _rehearse(
    model: nn.Module, targets: Iterable[str], calls: list[Arguments], total: int, options: dict[str, Any]
) -> tuple[ModuleStats, ...]:
    """Attach, make the calls, detach: what became of them, for each target."""
    with _as_found(model), attach(model, list(targets), **options) as handle:
        for index in range(total):
            args, kwargs = _copied(model, calls[index % len(calls)])
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


def _findings(whole: ModuleStats, seen: Counter[Fallback]) -> tuple[Finding, ...]:
    """What the rehearsal ran into, and what one look at each call saw beside it."""
    counted: Counter[Fallback] = Counter()
    for reason, details in whole.details.items():
        counted.update({Fallback(_REASONS[reason], detail): count for detail, count in details.items()})
    more = {fallback: count for fallback, count in seen.items() if fallback not in counted}
    ordered = [*counted.most_common(), *more.items()]
    return tuple(Finding(fallback.reason, _plain(fallback.detail), count) for fallback, count in ordered)


def _plain(detail: str) -> str:
    """What was seen, with the one operator that nobody writes in the words that everybody does."""
    return detail.replace(": _local_scalar_dense", ": takes a value by .item(), float(), int(), bool() or if")
