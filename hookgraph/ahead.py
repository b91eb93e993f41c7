"""Capture ahead of traffic: run example calls until each is served from a trusted graph."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hookgraph import containers, tree
from hookgraph.errors import HookgraphError
from hookgraph.inputs import replica

MOST_RUNS = 8  # of one call: warm-ups, the capture and its proofs need four as a rule

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def largest_first(calls: Iterable[Any]) -> list[Arguments]:
    """The example calls, those with the most bytes of tensors first: smaller graphs then fit into their memory.

    Args:
        calls: Each is ``(args, kwargs)``, or a dict of keyword arguments alone.

    Raises:
        HookgraphError: One is neither.
    """
    pairs = [_pair(index, call) for index, call in enumerate(calls)]
    return sorted(pairs, key=_bytes, reverse=True)


def _pair(index: int, call: Any) -> Arguments:
    if isinstance(call, dict):
        return (), call
    if isinstance(call, tuple) and len(call) == 2 and isinstance(call[0], (tuple, list)) and isinstance(call[1], dict):
        return tuple(call[0]), call[1]
    kind = type(call).__qualname__
    raise HookgraphError(f"warmup: call {index} is a {kind}; expected (args, kwargs) or a dict of keyword arguments")


def _bytes(call: Arguments) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in containers.tensors_in(call))


def copy_of(call: Arguments) -> Arguments:
    """The same call with tensors and containers of its own, since a forward may write to them.

    What is given twice, or shares memory, does so in the copy, too.
    """
    try:
        args, kwargs = copy.deepcopy(call)
        return args, kwargs
    except (RuntimeError, TypeError, NotImplementedError):  # a tensor in the middle of autograd, or an odd object
        return _copy_of_leaves(call)


def _copy_of_leaves(call: Arguments) -> Arguments:
    containers.tensors_in(call)  # opens what can be opened
    leaves, spec = tree.flatten(call)
    copies = {id(leaf): replica(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    args, kwargs = tree.rebuild(spec, [copies.get(id(leaf), leaf) for leaf in leaves])
    return args, kwargs


@contextmanager
def random_numbers_kept(model: nn.Module) -> Iterator[None]:
    """Restores: the default generators of the CPU and of the devices that the model is on."""
    tensors = (*model.parameters(), *model.buffers())
    devices = {tensor.device.index for tensor in tensors if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        yield
