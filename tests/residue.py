"""What ``attach`` may leave behind: nothing.

``Snapshot`` writes down everything that a library could change on a module tree;
``Watch`` takes one before each attach, detaches at the end, and compares.
"""

from __future__ import annotations

import functools
import gc
import inspect
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import _get_current_dispatch_mode

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_GLOBAL_HOOKS = [
    name for name, value in vars(nn_module).items() if name.startswith("_global_") and isinstance(value, dict)
]


class Snapshot:
    """A flat dict of everything that identifies the state of a module tree.

    Values are compared by identity, plain numbers and strings by value.
    """

    def __init__(self, model: nn.Module) -> None:
        self.facts: dict[str, Any] = {}
        self._alive: list[Any] = []  # an id means something only while its object lives
        for name, module in model.named_modules(remove_duplicate=False):
            self._read(name or "<root>", module)
        self.facts["state_dict keys"] = tuple(model.state_dict())
        self.facts["repr"] = repr(model)

    def _read(self, name: str, module: nn.Module) -> None:
        for key, value in vars(module).items():
            path = f"{name}.{key}"
            self.facts[path] = self._identity(value)
            if isinstance(value, dict) and key.startswith("_"):  # hooks, parameters, buffers, children
                for entry, item in value.items():
                    self.facts[f"{path}[{entry!r}]"] = self._identity(item)
                self.facts[f"{path} order"] = tuple(value)
        kind = type(module)
        self.facts[f"{name} class"] = self._identity(kind)
        self.facts[f"{name} class body"] = tuple(vars(kind))
        self.facts[f"{name} class forward"] = self._identity(kind.forward)
        self.facts[f"{name} class call"] = self._identity(kind.__call__)
        self.facts[f"{name} signature"] = str(inspect.signature(module.forward))

    def _identity(self, value: Any) -> Any:
        if isinstance(value, _SCALARS):
            return type(value).__name__, repr(value)
        if isinstance(value, torch.Tensor):
            return type(value).__name__, _SameTensor(value)
        self._alive.append(value)
        return type(value).__name__, id(value)

    def changes(self, later: Snapshot) -> set[str]:
        """The facts that came, went or changed, in words; a hook is ``[*]``, since its number means nothing."""
        notes = set()
        for key in self.facts.keys() | later.facts.keys():
            if key not in self.facts:
                notes.add(f"new: {key}")
            elif key not in later.facts:
                notes.add(f"gone: {key}")
            elif self.facts[key] != later.facts[key]:
                notes.add(f"changed: {key}")
        return {re.sub(r"(hooks\w*)\[\d+\]", r"\1[*]", note) for note in notes}


class _SameTensor:
    """The identity of a tensor, without keeping it alive: a test must not hide that memory was freed."""

    __slots__ = ("_tensor",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)

    def __eq__(self, other: object) -> bool:
        tensor = self._tensor()
        return tensor is not None and isinstance(other, _SameTensor) and other._tensor() is tensor


def process_state() -> dict[str, Any]:
    """What a capture or a failure could leave changed in the process."""
    state: dict[str, Any] = {
        "garbage collector enabled": gc.isenabled(),
        "dispatch mode": _get_current_dispatch_mode(),
        "function modes": torch._C._len_torch_function_stack(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "default dtype": torch.get_default_dtype(),
        "torch.tensor": id(torch.tensor),
        "torch.as_tensor": id(torch.as_tensor),
        "capture query": id(torch.cuda.is_current_stream_capturing),
    }
    state |= {name: tuple(getattr(nn_module, name)) for name in _GLOBAL_HOOKS}
    if torch.cuda.is_available():
        state["stream"] = torch.cuda.current_stream()
        state["device"] = torch.cuda.current_device()
        state["capturing"] = torch.cuda.is_current_stream_capturing()
    return state


@dataclass
class _Watched:
    model: nn.Module
    before: Snapshot
    allowed: set[str]
    stale: bool = False


class Watch:
    """Every module attached in one test, as it was before."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._process = process_state()

    def observe(self, attach: Callable[..., Any]) -> Callable[..., Any]:
        """``attach``, with a snapshot of the module before it; ``__wrapped__`` is the plain one."""

        @functools.wraps(attach)
        def observed(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(model, nn.Module):
                return attach(model, *args, **kwargs)
            before = Snapshot(model)
            entry = self._watched.get(id(model))
            if entry is None or entry.stale:
                self._watched[id(model)] = entry = _Watched(model, before, set())
            try:
                return attach(model, *args, **kwargs)
            except BaseException:
                left = before.changes(Snapshot(model))
                assert not left, f"a refused attach left something: {sorted(left)}"
                raise

        return observed

    def allow(self, model: nn.Module, *changes: str) -> None:
        """The test or the forward makes these changes itself, as ``Snapshot.changes`` words them.

        ``*`` at the end stands for anything.
        """
        self._watched[id(model)].allowed.update(changes)

    def check(self, model: nn.Module) -> None:
        """Compare a detached model with what it was before its first attach in this test."""
        entry = self._watched[id(model)]
        left = {
            change
            for change in entry.before.changes(Snapshot(model))
            if not any(_matches(change, pattern) for pattern in entry.allowed)
        }
        assert not left, f"{type(model).__name__}: detach() left: {sorted(left)}"
        entry.stale = True

    def check_all(self, detach: Callable[[nn.Module], Any]) -> None:
        """Detach whatever is attached still, then compare everything."""
        for entry in list(self._watched.values()):
            detach(entry.model)
        for entry in list(self._watched.values()):
            if not entry.stale:
                self.check(entry.model)
        changed = _different(self._process, process_state())
        assert not changed, f"the process is not as it was: {changed}"


def _matches(change: str, pattern: str) -> bool:
    return change.startswith(pattern[:-1]) if pattern.endswith("*") else change == pattern


def _different(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    keys: Iterable[str] = before.keys() | after.keys()
    return sorted(f"{k}: {before.get(k)!r} -> {after.get(k)!r}" for k in keys if before.get(k) != after.get(k))
