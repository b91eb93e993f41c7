"""The plain Python state of a module tree at one moment, and what has changed since.

Adapter switches, attention backends and flags live in attributes of submodules, in small dicts
and lists, and in plain objects that modules share (configurations, attention processors): nothing
that an argument, an address or a version shows.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

# Parameters, buffers and submodules are guarded apart from this, hook dictionaries too.
_STANDARD = set(vars(nn.Module())) - {"training"}
_LARGEST_CONTAINER = 256  # a longer list or dict is data; its length alone is compared
_DEEPEST = 8  # diffusers keeps the counters of its step caches seven steps below a module
_MOST_CELLS = 50_000  # beyond that it is a data set that hangs on the module
_OBJECTS_LEFT_ALONE = (
    nn.Module, torch.Tensor, torch.Generator, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    types.ModuleType, torch.dtype, torch.device, torch.Size, str, bytes, int, float, complex, type(None),
)  # fmt: skip
_PLAIN = frozenset({bool, int, float, complex, str, bytes, tuple, torch.dtype, torch.device, torch.Size, type(None)})


class ModuleState:
    """A snapshot of attributes, one level for modules and a few for what hangs on them.

    Args:
        module: The root of the tree.
        tensors: Whether replacing a tensor attribute by another one counts as a change.  The
            warm-up asks so, to notice a forward that assigns attributes; a guard does not, since
            it checks the tensors that the graph reads by themselves.

    Cost: about 0.1 µs for each attribute, at creation ten times that.
    """

    def __init__(self, module: nn.Module, tensors: bool) -> None:
        self._tensors = tensors
        self._seen: set[int] = set()
        self._cells: list[_Cell | _SequenceCell] = []
        for name, child in module.named_modules():
            self._add_module(name, child)
        self._quick = [cell.quick() for cell in self._cells if isinstance(cell, _Cell) and not cell.has_tensors]
        self._rest = [cell for cell in self._cells if not isinstance(cell, _Cell) or cell.has_tensors]

    def difference(self) -> str | None:
        """The first thing that changed since, as ``blocks.3.scale: 1.0 -> 0.5``; None when nothing did."""
        if self._is_untouched():
            return None
        for cell in self._cells:
            if cell.changed():
                return cell.describe()
        return None

    def _is_untouched(self) -> bool:
        """Whether everything is the very same object: the common case, decided mostly in C."""
        try:
            for state, length, get, saved in self._quick:
                if len(state) != length or not all(map(is_, get(state), saved)):
                    return False
        except KeyError:  # an attribute is gone
            return False
        return not any(cell.changed() for cell in self._rest)

    def restore(self) -> None:
        """Put attributes, items and lists back as they were; needs ``tensors=True``."""
        for cell in self._cells:
            if cell.changed():
                cell.restore()

    def _add_module(self, name: str, child: nn.Module) -> None:
        state = vars(child)
        where = f"{name}." if name else ""
        self._add_cell(state, where, [key for key in state if key not in _STANDARD], depth=0)
        if self._tensors:
            for holder in (child._buffers, child._parameters, child._modules):
                self._cells.append(_Cell(holder, where, list(holder), True))

    def _add_cell(self, state: dict[Any, Any], where: str, keys: list[Any], depth: int) -> None:
        self._cells.append(_Cell(state, where, keys, self._tensors))
        for key in keys:
            self._descend(state[key], f"{where}{key}", depth + 1)

    def _descend(self, value: Any, where: str, depth: int) -> None:
        if isinstance(value, _OBJECTS_LEFT_ALONE) or depth > _DEEPEST or id(value) in self._seen:
            return
        if len(self._cells) > _MOST_CELLS:
            return
        self._seen.add(id(value))
        if isinstance(value, dict):
            small = list(value) if len(value) <= _LARGEST_CONTAINER else []
            self._add_cell(value, f"{where}.", small, depth)
        elif isinstance(value, (list, set, tuple)):
            self._cells.append(_SequenceCell(value, where, self._tensors))
            if len(value) <= _LARGEST_CONTAINER:
                for index, item in enumerate(value):
                    self._descend(item, f"{where}[{index}]", depth + 1)
        elif hasattr(value, "__dict__") and not _is_foreign(value):
            self._add_cell(vars(value), f"{where}.", list(vars(value)), depth)


def _is_foreign(value: Any) -> bool:
    """Objects of PyTorch and the standard library manage their own state; hookgraph's are ours."""
    return type(value).__module__.partition(".")[0] in ("torch", "builtins", "functools", "hookgraph", "threading")


class _Cell:
    """The attributes of one object, or the items of one dict."""

    __slots__ = ("_get", "_keys", "_length", "_saved", "_state", "_tensor_tokens", "_tensors", "_where")

    def __init__(self, state: dict[Any, Any], where: str, keys: list[Any], tensors: bool) -> None:
        self._state, self._where, self._length, self._tensors = state, where, len(state), tensors
        self._tensor_tokens = {key: _token(state[key], tensors) for key in keys if _holds_tensor(state[key])}
        self._keys = [key for key in keys if key not in self._tensor_tokens]
        # Twice the one key: for a single one, itemgetter would not return a tuple.
        names = self._keys * 2 if len(self._keys) == 1 else self._keys
        self._get: Callable[[Any], tuple[Any, ...]] = itemgetter(*names) if names else _nothing
        self._saved = self._get(state)

    @property
    def has_tensors(self) -> bool:
        return bool(self._tensor_tokens)

    def quick(self) -> tuple[dict[Any, Any], int, Callable[[Any], tuple[Any, ...]], tuple[Any, ...]]:
        """What a check for identity needs."""
        return self._state, self._length, self._get, self._saved

    def changed(self) -> bool:
        state = self._state
        if len(state) != self._length:
            return True
        try:
            now = self._get(state)
            if not all(map(_equal, now, self._saved)):
                return True
            return any(_token(state[key], self._tensors) is not token for key, token in self._tensor_tokens.items())
        except KeyError:  # an attribute is gone
            return True

    def _plain(self) -> dict[Any, Any]:
        return dict(zip(self._keys, self._saved, strict=False))

    def describe(self) -> str:
        known = {**self._plain(), **self._tensor_tokens}
        for key in known:
            if key not in self._state:
                return f"{self._where}{key} was removed"
        if len(self._state) != self._length:
            new = [str(key) for key in self._state if key not in known and key not in _STANDARD]
            return f"{self._where}{new[-1] if new else ''} is new"
        for key, old in self._plain().items():
            if not _equal(self._state[key], old):
                return f"{self._where}{key}: {_short(old)} -> {_short(self._state[key])}"
        changed = [
            key for key, token in self._tensor_tokens.items() if _token(self._state[key], self._tensors) is not token
        ]
        return f"{self._where}{changed[0] if changed else ''} holds another tensor"

    def restore(self) -> None:
        """Put back what was here; only for a snapshot that keeps tensors."""
        before = {**self._plain(), **self._tensor_tokens}
        for key in [key for key in self._state if key not in before and key not in _STANDARD]:
            del self._state[key]
        self._state.update(before)


class _SequenceCell:
    """The elements of one list, tuple or set."""

    __slots__ = ("_saved", "_tensors", "_value", "_where")

    def __init__(self, value: Any, where: str, tensors: bool) -> None:
        self._value, self._where, self._tensors = value, where, tensors
        self._saved = self._tokens()

    def _tokens(self) -> tuple[Any, ...]:
        if len(self._value) > _LARGEST_CONTAINER:
            return (len(self._value),)
        return tuple([_token(item, self._tensors) for item in self._value])

    def changed(self) -> bool:
        now = self._tokens()
        if len(now) != len(self._saved):
            return True
        return not all(map(_equal, now, self._saved))

    def describe(self) -> str:
        return f"{self._where} changed"

    def restore(self) -> None:
        if isinstance(self._value, list) and len(self._value) <= _LARGEST_CONTAINER:
            self._value[:] = self._saved


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _token(value: Any, tensors: bool) -> Any:
    """What is compared: a value itself, and for a tensor only its class unless ``tensors`` says so.

    A guard must not keep a tensor alive that the module has dropped.
    """
    return type(value) if _holds_tensor(value) and not tensors else value


def _equal(a: Any, b: Any) -> bool:
    """The same object, or a plain value that cannot be told from it: 1 is not True, and 0.0 not -0.0.

    An equal list is another list: what is watched is the one that was there.
    """
    if a is b:
        return True
    if type(a) is not type(b) or type(a) not in _PLAIN:
        return False
    if type(a) is tuple:
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b) and (type(a) is not float or a.hex() == b.hex())


def _nothing(_: Any) -> tuple[Any, ...]:
    return ()


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


@dataclass(frozen=True, slots=True)
class Trail:
    """How to get from an object to a tensor: attribute names and keys, step by step."""

    root: dict[str, Any]  # the ``__dict__`` of a module
    steps: tuple[tuple[bool, Any], ...]  # whether it is an attribute, and its name or key

    def follow(self) -> Any:
        """What is there now.

        Raises:
            LookupError, AttributeError: Nothing is.
        """
        value: Any = self.root
        for is_attribute, key in self.steps:
            value = getattr(value, key) if is_attribute else value[key]
        return value


def attribute_tensors(module: nn.Module) -> Iterator[tuple[str, Trail, torch.Tensor]]:
    """Every tensor that hangs on a module other than as a parameter or a buffer.

    Yields:
        Where it hangs in words, the way there, and the tensor.
    """
    seen: set[int] = set()
    for name, child in module.named_modules():
        root = vars(child)
        where = f"{name}." if name else ""
        for key in [key for key in root if key not in _STANDARD]:
            yield from _tensors_below(Trail(root, ((False, key),)), root[key], f"{where}{key}", seen)


def _tensors_below(trail: Trail, value: Any, where: str, seen: set[int]) -> Iterator[tuple[str, Trail, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield where, trail, value
        return
    if isinstance(value, _OBJECTS_LEFT_ALONE) or len(trail.steps) > _DEEPEST or id(value) in seen:
        return
    seen.add(id(value))
    for is_attribute, key, item in _steps_below(value):
        step = f".{key}" if is_attribute else f"[{key!r}]"
        yield from _tensors_below(Trail(trail.root, (*trail.steps, (is_attribute, key))), item, where + step, seen)


def _steps_below(value: Any) -> list[tuple[bool, Any, Any]]:
    if isinstance(value, (list, tuple)):
        return [(False, index, item) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return [(False, key, item) for key, item in value.items()]
    if hasattr(value, "__dict__") and not _is_foreign(value):
        return [(True, key, item) for key, item in vars(value).items()]
    return []
