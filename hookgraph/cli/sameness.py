"""Whether two tensors, or a module now and before, are the same to the last bit."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape, device and bytes."""
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    # Compared as bytes: == says that NaN differs from itself, and that 0.0 equals -0.0.
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


class Snapshot:
    """Keep what ``attach`` could leave on a module or change: attributes, hooks, the forward, weights."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = {name: dict(vars(child)) for name, child in module.named_modules()}
        self._hooks = self._read_hooks(module)
        self._signature = inspect.signature(module.forward)
        self._weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def matches(self, module: nn.Module) -> bool:
        """Whether the module is still what it was."""
        now = Snapshot(module)
        return (
            self._hooks == now._hooks
            and self._signature == now._signature
            and self._attributes.keys() == now._attributes.keys()
            and all(_same_objects(old, now._attributes[name]) for name, old in self._attributes.items())
            and self._weights.keys() == now._weights.keys()
            and all(same_bits(old, now._weights[name]) for name, old in self._weights.items())
        )

    @staticmethod
    def _read_hooks(module: nn.Module) -> dict[str, list[int]]:
        return {
            f"{name}.{attribute}": list(value)
            for name, child in module.named_modules()
            for attribute, value in vars(child).items()
            if "hooks" in attribute and isinstance(value, dict)
        }


def _same_objects(old: dict[str, object], new: dict[str, object]) -> bool:
    return old.keys() == new.keys() and all(new[key] is value for key, value in old.items())
