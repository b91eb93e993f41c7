"""Record the calls of a module as they were made, to diagnose, warm up or time it with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hookgraph.ahead import Arguments, copy_of
from hookgraph.errors import HookgraphError


@contextmanager
def record_calls(module: nn.Module, most: int = 8) -> Iterator[list[Arguments]]:
    """Keep the arguments of the first calls of a module inside the block, as they were when each was made.

    The list serves ``diagnose``, ``Attachment.warmup`` and ``bench.measure``.  A loop often hands one
    cache to all of its calls, and afterwards it is as the last call left it: here each call has its own copy.
    Record before you attach: while a hook of ours is below an attached module, its calls run eager.
    A direct call of ``module.forward(...)`` passes hooks by and is not seen.

    Args:
        module: The module that your loop or pipeline calls; nothing is left on it.
        most: How many calls to keep, the first ones.

    Returns:
        A list of ``(args, kwargs)``, which grows while the block runs.

    Raises:
        HookgraphError: It is no module, or ``most`` is no positive whole number.

    Restores: the hooks of the module.
    Cost: a copy of the arguments of each call that is kept, on their device; nothing for further calls.

    Example:
        >>> import torch, hookgraph
        >>> model = torch.nn.Linear(4, 4).eval()
        >>> with hookgraph.record_calls(model, most=2) as calls, torch.no_grad():
        ...     for step in range(5):  # stands for a pipeline
        ...         out = model(torch.full((2, 4), step / 5))
        >>> len(calls), hookgraph.diagnose(model, calls).can_capture_whole
        (2, True)
    """
    if not isinstance(module, nn.Module):
        raise HookgraphError(f"record_calls() needs a torch.nn.Module, got {type(module).__qualname__}")
    if type(most) is not int or most < 1:
        raise HookgraphError(f"record_calls(most={most!r}): expected an int of at least 1")
    calls: list[Arguments] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(calls) < most and not torch.compiler.is_compiling():
            # Made in inference mode, a copy could not be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                calls.append(copy_of((args, kwargs), module))

    # Before other hooks, which may change the arguments: they will run again when the call is made again.
    handle = module.register_forward_pre_hook(keep, with_kwargs=True, prepend=True)
    try:
        yield calls
    finally:
        handle.remove()
