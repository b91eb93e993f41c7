"""Which library moves, casts or caches inside a module, so that a graph of it could not be right.

Recognised by the attributes and class names that accelerate, diffusers and PyTorch use; none of
them is imported.  What only runs around a replay, or computes nothing but the forward, is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# Class name (or its beginning) of a diffusers hook, and the feature that a user switched on.
_FEATURES = {
    "GroupOffloading": "group offloading", "LazyPrefetchGroupOffloading": "group offloading",
    "LayerExecutionTracker": "group offloading", "LayerwiseCasting": "layerwise casting", "FBC": "first-block cache",
    "PyramidAttentionBroadcast": "pyramid attention broadcast", "FasterCache": "faster cache", "MagCache": "MagCache",
    "SeaCache": "SeaCache", "TaylorSeer": "TaylorSeer cache", "TextKVCache": "text key-value cache",
    "ContextParallel": "context parallelism",
}  # fmt: skip
_MOVERS = ("Offload", "LayerwiseCasting")  # in a class name of the hook, or of one that it derives from
_SHARDED = ("FullyShardedDataParallel", "FSDPModule")
_OURS = __name__.partition(".")[0]


def recognise(module: nn.Module) -> str | None:
    """The feature of another library that forbids a graph of a module, and where it is.

    Returns:
        Such as ``layerwise casting by diffusers on blocks.0.attn``; None when nothing does.

    Cost: about 1.3 µs for each submodule.
    """
    for name, child in module.named_modules():
        where = name or "the module itself"
        state = child.__dict__
        if "_hf_hook" in state:
            for hook in _flat(state["_hf_hook"]):
                found = _of_accelerate(hook, child, is_around=_is_ours(state.get("_old_forward")))
                if found is not None:
                    return f"{found} on {where}"
        if "_diffusers_hook" in state:
            for hook, is_around in _registered(state["_diffusers_hook"]):
                found = _of_diffusers(hook, is_around)
                if found is not None:
                    return f"{found} by diffusers on {where}"
        if any(base.__name__ in _SHARDED for base in type(child).__mro__):
            return f"sharded weights (FSDP) on {where}"
    return None


def _is_ours(forward: Any) -> bool:
    """Whether a wrapper calls our seam next: then it runs around a replay, as in eager."""
    return type(forward).__module__.partition(".")[0] == _OURS


def _flat(hook: Any) -> Iterator[Any]:
    """A hook of accelerate, or those that a SequentialHook holds."""
    if isinstance(getattr(hook, "hooks", None), (list, tuple)):
        for inner in hook.hooks:
            yield from _flat(inner)
    else:
        yield hook


def _of_accelerate(hook: Any, module: nn.Module, is_around: bool) -> str | None:
    kind = type(hook).__name__
    kinds = [base.__name__ for base in type(hook).__mro__]
    if getattr(hook, "offload", False) is True:
        return f"{kind} offloading weights"
    if any("LayerwiseCasting" in base for base in kinds):
        return f"{kind} casting weights"
    if is_around:
        return None
    if any("Offload" in base for base in kinds):
        return f"{kind} moving weights"
    device = getattr(hook, "execution_device", None)
    if device is not None and not _is_home(device, module):
        return f"{kind} moving arguments to {device}"
    return None


def _is_home(device: Any, module: nn.Module) -> bool:
    """Whether a device, as accelerate writes one, is where the module's own tensors are."""
    wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    own = next(module.parameters(), next(module.buffers(), None))
    if own is None or own.device.type != wanted.type:
        return own is None
    return None in (wanted.index, own.device.index) or wanted.index == own.device.index


def _registered(registry: Any) -> Iterator[tuple[Any, bool]]:
    """The hooks of a diffusers registry, each with whether it runs around our seam."""
    hooks: dict[str, Any] = getattr(registry, "hooks", {})
    references = getattr(registry, "_fn_refs", [])
    is_around = False
    for position, name in enumerate(getattr(registry, "_hook_order", hooks)):  # the innermost comes first
        if position < len(references):
            reference = references[position]
            is_around = is_around or _is_ours(reference.forward) or _is_ours(reference.original_forward)
        yield hooks[name], is_around


def _of_diffusers(hook: Any, is_around: bool) -> str | None:
    kinds = [base.__name__ for base in type(hook).__mro__]
    if not is_around or any(mover in kind for kind in kinds for mover in _MOVERS):
        for start, feature in _FEATURES.items():
            if any(kind.startswith(start) for kind in kinds):
                return feature
    if not is_around and getattr(hook, "_is_stateful", False):
        return f"{kinds[0]}, which keeps state from call to call,"
    return None
