"""What an eager call depends on beside its arguments and its module."""

from __future__ import annotations

import sys
from typing import Any

import torch

from hookgraph import private_torch
from hookgraph.reasons import Fallback, FallbackReason

# What ``read`` gives, in its order.
PARTS = (
    "grad mode", "inference mode", "autocast", "default dtype", "default device", "current CUDA device",
    "numerics flags", "attention backend of diffusers",
)  # fmt: skip


def standing_aside() -> Fallback | None:
    """The reason why this thread must not be served from a graph right now, if any."""
    if private_torch.tracer_at_work():
        return Fallback(FallbackReason.TRACING)
    if private_torch.dispatch_mode_active():
        return Fallback(FallbackReason.MODE_ACTIVE, "a TorchDispatchMode")
    if private_torch.function_modes() is None:
        return Fallback(FallbackReason.MODE_ACTIVE, "a TorchFunctionMode")
    if private_torch.stream_is_capturing():
        return Fallback(FallbackReason.CAPTURING)
    return None


def read(device: torch.device) -> tuple[Any, ...]:
    """Everything outside the arguments that decides what an eager call on ``device`` computes.

    Returns:
        Grad and inference mode, autocast (enabled, dtype, cache), default dtype and device, the
        global numerics flags of the device's libraries, and the attention backend that is active in diffusers.
    """
    kind = device.type
    # A CPU call never asks for the current CUDA device, which would initialise CUDA.
    index = torch.cuda.current_device() if kind == "cuda" else None
    autocast = torch.is_autocast_enabled(kind)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        (torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) if autocast else None,
        torch.get_default_dtype(),
        private_torch.function_modes(),
        index,
        private_torch.numerics_flags(kind),
        _attention_backend(),
    )


def _attention_backend() -> Any:
    """What ``diffusers.attention_backend(...)`` switches for all models of the process: a class attribute."""
    library = sys.modules.get("diffusers.models.attention_dispatch")  # not imported for this
    return getattr(getattr(library, "_AttentionBackendRegistry", None), "_active_backend", None)
