"""Host constants inside a forward: recorded in the warm-up, served from the device in the capture.

``torch.tensor(7, device=x.device)`` or a table that is moved with ``.to(device)`` copies from the
host, which a capture forbids.  The value is the same on each call of a signature, though: it comes
from Python numbers and from tensors on the CPU that are guarded.  So the warm-up keeps what
arrived on the device, and the capture gets a clone of that, made inside the graph so that an
in-place edit cannot reach the next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hookgraph.dispatch import OperatorMode
from hookgraph.errors import CaptureError
from hookgraph.private_torch import ThreadPatch, call_as_outside
from hookgraph.proof import same_bits

_COPIES = ("_to_copy", "copy_")


@dataclass(slots=True)
class HostConstants:
    """The values that one forward copied from the host, in order."""

    on_host: list[torch.Tensor] = field(default_factory=list)
    on_device: list[torch.Tensor] = field(default_factory=list)

    def record(self, source: torch.Tensor, arrived: torch.Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.on_host.append(source.clone())
            self.on_device.append(arrived.clone())

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.on_device)


def host_copy(func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.device] | None:
    """The source and the target device of an operator that copies from the CPU to another device."""
    name = func._schema.name.removeprefix("aten::")
    if name not in _COPIES:
        return None
    source = args[1] if name == "copy_" else args[0]
    target = args[0].device if name == "copy_" else kwargs.get("device")
    if target is None or source.device.type != "cpu" or torch.device(target).type == "cpu":
        return None
    return source, torch.device(target)


class Serve(OperatorMode):
    """Give a capture the constants that the warm-up recorded.

    Raises:
        CaptureError: The forward copies something else, or in another order.
    """

    def __init__(self, constants: HostConstants) -> None:
        super().__init__()
        self._constants, self._next = constants, 0

    def meet(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        copy = host_copy(func, args, kwargs)
        if copy is None:
            return call_as_outside(func, args, kwargs)
        constant = self._take(copy[0])
        return args[0].copy_(constant) if func._schema.name == "aten::copy_" else constant.clone()

    def _take(self, source: torch.Tensor) -> torch.Tensor:
        index, self._next = self._next, self._next + 1
        if index >= len(self._constants.on_host):
            raise CaptureError("the forward copies more from the host than in its warm-up")
        expected = self._constants.on_host[index]
        if source.shape != expected.shape or source.dtype != expected.dtype or not same_bits(source, expected):
            raise CaptureError("a value that the forward copies from the host changes from call to call")
        return self._constants.on_device[index]


def _by_way_of_the_host(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or isinstance(data, torch.Tensor) or kwargs.get("pin_memory") or kwargs.get("requires_grad"):
            return original(data, *args, **kwargs)
        target = torch.device(device)
        if target.type == "cpu":
            return original(data, *args, **kwargs)
        return original(data, *args, **{**kwargs, "device": "cpu"}).to(target)

    return make


# torch.tensor and torch.as_tensor copy to the device below the dispatcher, where no mode sees it.  Inside
# ``makers.active()`` they build on the CPU and then move, which is an ordinary operator; the value is the same.
makers = ThreadPatch(torch, {"tensor": _by_way_of_the_host, "as_tensor": _by_way_of_the_host})
