"""Capture ahead of traffic: run example calls until each is served from a trusted graph."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hookgraph import containers, tree
from hookgraph.audit import told
from hookgraph.errors import HookgraphError
from hookgraph.inputs import replica
from hookgraph.state import ModuleState
from hookgraph.words import with_article

MOST_RUNS = 8  # of one call: warm-ups, the capture and its proofs need four as a rule

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def pairs(calls: Any) -> list[Arguments]:
    """Calls in the one form that all work is done with.

    Args:
        calls: A list of calls; each is ``(args, kwargs)``, or a dict of keyword arguments alone.

    Raises:
        HookgraphError: It is not, or one of them is neither.

    Example:
        >>> pairs([{"x": 1}, ([2], {})])
        [((), {'x': 1}), ((2,), {})]
    """
    if _is_call(calls) or _is_pair_in_a_list(calls):
        raise HookgraphError("calls is a single call; put it into a list: [(args, kwargs)]")
    if isinstance(calls, torch.Tensor) or not isinstance(calls, Iterable):
        raise HookgraphError(f"calls has to be a list of (args, kwargs), not {_kind(calls)}")
    return [_pair(index, call) for index, call in enumerate(calls)]


def _pair(index: int, call: Any) -> Arguments:
    if not _is_call(call):
        raise HookgraphError(
            f"calls[{index}] is {_kind(call)}; expected (args, kwargs), or a dict of keyword arguments"
        )
    return ((), call) if isinstance(call, dict) else (tuple(call[0]), call[1])


def _is_call(value: Any) -> bool:
    """Whether something is one call; a tuple of two calls is none, though its second may be a dict."""
    if isinstance(value, dict):
        return True
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)):
        return False
    return isinstance(value[0], (tuple, list)) and not (isinstance(value[0], tuple) and _is_call(value[0]))


def _is_pair_in_a_list(value: Any) -> bool:
    """Whether somebody wrote ``[args, kwargs]``."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[1], dict) and not _is_call(value[0])


def _kind(value: Any) -> str:
    if not isinstance(value, (tuple, list)):
        return with_article(type(value).__name__)
    return f"a {type(value).__name__} of {', '.join(type(item).__name__ for item in value) or 'nothing'}"


def largest_first(calls: Any) -> list[Arguments]:
    """The example calls, those with the most bytes of tensors first: smaller graphs then fit into their memory.

    Raises:
        HookgraphError: As for ``pairs``.
    """
    return sorted(pairs(calls), key=_bytes, reverse=True)


def _bytes(call: Arguments) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in containers.tensors_in(call))


def copy_of(call: Arguments, model: nn.Module | None = None) -> Arguments:
    """The same call with tensors and containers of its own, since a forward may write to them.

    What is given twice, or shares memory, does so in the copy, too.

    Args:
        model: Its parameters and buffers stay what they are.
    """
    own = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())} if model is not None else {}
    try:
        args, kwargs = copy.deepcopy(call, dict(own))
        return args, kwargs
    except Exception:  # a tensor in the middle of autograd, a generator, an object of another library
        return _copy_of_leaves(call, own)


def _copy_of_leaves(call: Arguments, own: dict[int, Any]) -> Arguments:
    containers.tensors_in(call)  # opens what can be opened
    leaves, spec = tree.flatten(call)
    copies = {id(leaf): replica(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)} | own
    args, kwargs = tree.rebuild(spec, [copies.get(id(leaf), leaf) for leaf in leaves])
    return args, kwargs


@contextmanager
def random_numbers_kept(model: nn.Module) -> Iterator[None]:
    """Restores: the default generators of the CPU and of the devices that the model is on."""
    tensors = (*model.parameters(), *model.buffers())
    devices = {tensor.device.index for tensor in tensors if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        yield


@contextmanager
def as_found(model: nn.Module) -> Iterator[None]:
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


def check(model: nn.Module, calls: Iterable[Arguments]) -> None:
    """Make each call once, plain.

    Raises:
        HookgraphError: One raises; it names the line.

    Restores: as ``as_found``.
    """
    for index, call in enumerate(calls):
        args, kwargs = copy_of(call, model)
        try:
            with torch.no_grad(), as_found(model):
                model(*args, **kwargs)
        except Exception as error:
            raise HookgraphError(f"calls[{index}]: the model itself raises {told(error)}") from error
