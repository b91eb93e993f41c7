"""Static inputs: the buffers at fixed addresses that a graph reads, and how a call fills them."""

from __future__ import annotations

import weakref
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
        self._groups = _by_dtype([plan for plan in self._plans if plan.position not in call.read_only])
        self._read_only = [_Kept(plan) for plan in self._plans if plan.position in call.read_only]
        self.positions = call.tensors

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The buffers, in the order of the call's tensor positions."""
        return [self.leaves[plan.position] for plan in self._plans]

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def fill(self, leaves: list[Any], loop: object | None = None) -> None:
        """Copy the tensors of a call of the same signature into the buffers.

        Args:
            loop: The sampling loop that the call belongs to, if any; see ``Attachment.loop``.

        Cost: one ``_foreach_copy_`` for each dtype; nothing for read-only tensors that have not changed.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._copy(leaves, loop)
        else:
            self._copy(leaves, loop)

    def _copy(self, leaves: list[Any], loop: object | None) -> None:
        for plans, targets in self._groups:
            torch._foreach_copy_(targets, [plan.source(leaves) for plan in plans])
        if self._read_only:
            self._fill_read_only(leaves, loop)

    def _fill_read_only(self, leaves: list[Any], loop: object | None) -> None:
        changed = [kept for kept in self._read_only if not kept.holds(leaves, loop)]
        for kept in changed:
            kept.mark = None  # until the copy has been made
        for plans, targets in _by_dtype([kept.plan for kept in changed]):
            torch._foreach_copy_(targets, [plan.source(leaves) for plan in plans])
        for kept in changed:
            kept.mark, kept.loop = Mark(leaves[kept.plan.position]), loop


class _Kept:
    """What the buffer of a read-only argument holds a copy of."""

    __slots__ = ("loop", "mark", "plan")

    def __init__(self, plan: _CopyPlan) -> None:
        self.plan = plan
        self.mark: Mark | None = None
        self.loop: object | None = None

    def holds(self, leaves: list[Any], loop: object | None) -> bool:
        """Whether the buffer holds a call's tensor as it is now."""
        if self.mark is None:
            return False
        tensor = leaves[self.plan.position]
        return self.mark.fits(tensor) or (loop is not None and self.loop is loop and self.mark.is_of(tensor))


class Mark:
    """One tensor at one moment; inference tensors have no version and never fit again."""

    __slots__ = ("_address", "_reference", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference, self._address = weakref.ref(tensor), tensor.data_ptr()
        self._version = None if tensor.is_inference() else tensor._version

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether it is the same tensor, not written since as far as PyTorch counts."""
        if self._version is None or self._reference() is not tensor:
            return False
        return tensor._version == self._version and tensor.data_ptr() == self._address

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it is the same inference tensor, written since or not; other kinds count their versions."""
        return self._version is None and self._reference() is tensor and tensor.data_ptr() == self._address


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


def replica(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor of the same looks and values with memory of its own; kinds that cannot be inputs are given back."""
    if leaf.layout is not torch.strided or type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.is_conj():
        return leaf
    with torch.inference_mode(leaf.is_inference()), torch.no_grad():
        buffer = _buffer_like(leaf, contiguous=False)
        plan = _CopyPlan.of(0, buffer.detach())
        plan.target.copy_(plan.source([leaf.detach()]))
    return buffer


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
