"""Static inputs: the buffers at fixed addresses that a graph reads, and how a call fills them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hookgraph.signature import Call, fresh_alignment


class StaticInputs:
    """One buffer for each tensor argument of a signature, in the argument's own layout.

    Args:
        call: The call whose tensors give shapes, strides, dtypes and the device.

    Aliasing: an argument that is given twice has one buffer.  A buffer never shares memory with
        an argument.
    """

    def __init__(self, call: Call) -> None:
        self.device = call.device
        with torch.inference_mode(False):  # an inference tensor could not be filled outside that mode
            buffers = {id(call.leaves[i]): _buffer_like(call.leaves[i], i in call.any_strides) for i in call.tensors}
        self.leaves: list[Any] = [
            buffers[id(leaf)] if id(leaf) in buffers else leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
            for leaf in call.leaves  # a clone: one value on the host, which the capture must not change
        ]
        self._plans = [_CopyPlan.of(position, self.leaves[position]) for position in call.tensors]
        self._groups = _by_dtype(self._plans)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The buffers, in the order of the call's tensor positions."""
        return [self.leaves[plan.position] for plan in self._plans]

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def fill(self, leaves: list[Any]) -> None:
        """Copy the tensors of a call of the same signature into the buffers.

        Cost: one ``_foreach_copy_`` for each dtype.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._copy(leaves)
        else:
            self._copy(leaves)

    def _copy(self, leaves: list[Any]) -> None:
        for plans, targets in self._groups:
            torch._foreach_copy_(targets, [plan.source(leaves) for plan in plans])


class _CopyPlan:
    """How one argument gets into its buffer; expanded dimensions are copied once."""

    __slots__ = ("expanded", "position", "shape", "target")

    def __init__(self, position: int, target: torch.Tensor, shape: tuple[int, ...], expanded: bool) -> None:
        self.position, self.target, self.shape, self.expanded = position, target, shape, expanded

    @classmethod
    def of(cls, position: int, buffer: torch.Tensor) -> _CopyPlan:
        pairs = list(zip(buffer.shape, buffer.stride(), strict=True))
        shape = tuple(1 if size > 1 and stride == 0 else size for size, stride in pairs)
        expanded = shape != tuple(buffer.shape)
        target = buffer.as_strided(shape, buffer.stride()) if expanded else buffer
        return cls(position, target, shape, expanded)

    def source(self, leaves: list[Any]) -> torch.Tensor:
        leaf: torch.Tensor = leaves[self.position]
        if self.expanded:
            # Flags such as conj are part of the signature and refused where they matter.
            return leaf.as_strided(self.shape, leaf.stride())
        return leaf


def _by_dtype(plans: Iterable[_CopyPlan]) -> list[tuple[list[_CopyPlan], list[torch.Tensor]]]:
    groups: dict[torch.dtype, list[_CopyPlan]] = {}
    for plan in plans:
        groups.setdefault(plan.target.dtype, []).append(plan)
    return [(group, [plan.target for plan in group]) for group in groups.values()]


def _empty_aligned_like(leaf: torch.Tensor) -> torch.Tensor:
    """With the same strides, and an address that is as much of a multiple; see ``signature.alignment``."""
    unit = fresh_alignment(leaf.device)
    if leaf.dim() < 2 or not leaf.data_ptr() % unit:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    memory = torch.empty(reach * leaf.element_size() + unit, dtype=torch.uint8, device=leaf.device)
    start = (leaf.data_ptr() - memory.data_ptr()) % unit
    elements = memory[start : start + reach * leaf.element_size()].view(leaf.dtype)
    return elements.as_strided(leaf.shape, leaf.stride())


def _buffer_like(leaf: torch.Tensor, contiguous: bool) -> torch.Tensor:
    """An uninitialised tensor of the same shape, strides and dtype, with memory of its own."""
    buffer = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) if contiguous else _empty_aligned_like(leaf)
    if isinstance(leaf, torch.nn.Parameter):
        return torch.nn.Parameter(buffer, requires_grad=leaf.requires_grad)
    return buffer.requires_grad_(leaf.requires_grad)
