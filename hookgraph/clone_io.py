"""A companion for ``torch.compile(mode="reduce-overhead")``: what goes in and what comes out has memory of its own.

Such a module replays CUDA graphs of PyTorch's own, whose outputs the next run overwrites; a loop
that keeps an output, or hands it back in, fails with "accessing tensor output of CUDAGraphs that has
been overwritten by a subsequent run".  Cloning at the module's border avoids that without an edit of
its source, as https://github.com/huggingface/diffusers/issues/13263 asks for.
"""

from __future__ import annotations

import sys
import weakref
from types import TracebackType
from typing import Any

import torch
from torch import nn

from hookgraph import containers, tree
from hookgraph.containers import Contents
from hookgraph.errors import AttachError
from hookgraph.hooks import ABSENT, BoundForward, Seam
from hookgraph.private_torch import storage_key


def clone_io(module: nn.Module) -> CloneIO:
    """Clone the tensors that go into a module and those that come out of it, on every call.

    Args:
        module: A module that was compiled before, as a whole (``module.compile(...)``,
            ``torch.compile(module)``) or in its blocks.

    Returns:
        The handle; ``remove()`` ends it, as does leaving it as a context.

    Raises:
        AttachError: Not a module, or one that has this already.

    Aliasing: outputs share no memory with the compiled module's graphs; among each other they share
        what they shared.  An argument or a parameter that the forward returns is still that very tensor.
    Restores: what the forward writes to an argument, and what it puts into a container or a cache,
        reaches the caller's objects.
    Cost: a copy of each tensor in and out.

    Example:
        >>> import torch, hookgraph
        >>> module = torch.compile(torch.nn.Linear(4, 4).eval(), backend="eager")
        >>> with hookgraph.clone_io(module), torch.no_grad():
        ...     y = module(torch.ones(2, 4))
    """
    if not isinstance(module, nn.Module):
        raise AttachError(f"clone_io: expected a torch.nn.Module, got {type(module).__qualname__}")
    if any(isinstance(vars(module).get(slot), _Border) for slot in _SLOTS):
        raise AttachError(f"clone_io: {type(module).__qualname__} has it already; remove() the first handle")
    return CloneIO(module)


_SLOTS = ("_compiled_call_impl", "forward")


class _Border(Seam):
    """The seam of ``clone_io``; a class of its own so that it is told from one of ``attach``."""

    __slots__ = ()


class CloneIO:
    """What ``clone_io`` put on one module; see there."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        # A module's own hooks are compiled into its graphs, so the border is around the whole call.
        self._slot = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
        self._found = vars(module).get(self._slot, ABSENT)
        inner = BoundForward(module) if self._found is ABSENT else self._found
        self._active = True
        self._border = vars(module)[self._slot] = _Border(inner, self._serve)

    def _serve(self, inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._module()
        if not self._active:
            return inner(*args, **kwargs)
        if "torch._inductor.cudagraph_trees" in sys.modules:  # no graphs of PyTorch's own without it; slow to import
            torch.compiler.cudagraph_mark_step_begin()
        crossing = _Crossing(module)
        try:
            inner_args, inner_kwargs = crossing.inward((args, kwargs))
            output = inner(*inner_args, **inner_kwargs)
            return crossing.outward(output)
        finally:
            crossing.leave()

    def remove(self) -> None:
        """Take it off; calling it twice is fine.  Where another library wrapped it meanwhile, it is switched off."""
        module, self._active = self._module(), False
        if module is None or vars(module).get(self._slot) is not self._border:
            return
        if self._found is ABSENT:
            del vars(module)[self._slot]
        else:
            vars(module)[self._slot] = self._found

    def __enter__(self) -> CloneIO:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class _Crossing:
    """One call: which clone stands for which tensor of the caller, and what has to be put back."""

    def __init__(self, module: nn.Module | None) -> None:
        own = (*module.parameters(), *module.buffers()) if module is not None else ()
        self._own = {storage_key(tensor) for tensor in own}
        self._clones: dict[int, tuple[torch.Tensor, torch.Tensor, int | None]] = {}  # by the id of the original
        self._originals: dict[int, torch.Tensor] = {}  # by the id of the clone
        self._given: dict[int, torch.Tensor] = {}  # copies of memory that goes in, by storage
        self._taken: dict[int, torch.Tensor] = {}  # and of memory that came out
        self._containers: dict[int, Any] = {}

    def inward(self, arguments: Any) -> Any:
        """The arguments with clones in them; containers stay the caller's, with clones inside meanwhile."""
        containers.tensors_in(arguments)  # opens what can be opened
        return self._replace(arguments, self._clone)

    def outward(self, output: Any) -> Any:
        """The output with tensors of its own, and the caller's arguments as the forward left them."""
        with torch.no_grad():
            for original, clone, version in self._clones.values():
                if version is None or clone._version != version:
                    (original.data if original.is_inference() else original).copy_(clone)
        for container in list(self._containers.values()):
            self._replace_inside(container, self._freed)
        containers.tensors_in(output)
        return self._replace(output, self._freed, fresh=True)

    def leave(self) -> None:
        """Take every clone out of the caller's containers again, also after an error."""
        for container in list(self._containers.values()):
            self._replace_inside(container, lambda tensor: self._originals.get(id(tensor), tensor))

    def _clone(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._clones.get(id(tensor))
        if known is not None:
            return known[1]
        if storage_key(tensor) in self._own or not _is_plain(tensor):
            return tensor
        if tensor.requires_grad and torch.is_grad_enabled():
            clone = tensor.clone()
        else:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                clone = self._in_copied_memory(tensor, self._given).requires_grad_(tensor.requires_grad)
        self._clones[id(tensor)] = tensor, clone, None if clone.is_inference() else clone._version
        self._originals[id(clone)] = tensor
        return clone

    def _freed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that came out, in memory of its own."""
        original = self._originals.get(id(tensor))
        if original is not None:
            return original
        if storage_key(tensor) in self._own or id(tensor) in self._clones:
            return tensor
        if not _is_plain(tensor) or (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor.clone()
        fresh = self._in_copied_memory(tensor, self._taken)
        self._originals[id(fresh)] = fresh  # it is out: it is cloned no second time
        return fresh

    def _in_copied_memory(self, tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
        """The same view of a copy of its memory; tensors that share memory go on sharing it."""
        key = storage_key(tensor)
        if key not in copies:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            copies[key] = whole.clone()
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return fresh.set_(copies[key].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def _replace(self, value: Any, change: Any, fresh: bool = False) -> Any:
        """``value`` with other tensors; mutable containers are changed in place, those of an output made anew."""
        if isinstance(value, torch.Tensor):
            return change(value)
        if id(value) in self._containers:
            return value
        if containers.is_mutable(value) and not fresh:
            self._containers[id(value)] = value
            self._replace_inside(value, change)
            return value
        parts, spec = tree.flatten(value, lambda node: node is not value)
        if spec.is_leaf():
            return value
        return tree.rebuild(spec, [self._replace(part, change, fresh) for part in parts])

    def _replace_inside(self, container: Any, change: Any) -> None:
        contents = Contents.of(container)
        values = [self._replace(value, change) for value in contents.values()]
        if any(a is not b for a, b in zip(values, contents.values(), strict=True)):
            contents.with_values(values).put_into(container)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its memory, looked at by shape and strides, and nothing else."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
