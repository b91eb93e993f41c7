"""The plain Python state of a module tree at one moment, and what has changed since.

Adapter switches, attention backends and flags live in attributes of submodules, in small dicts
and lists, and in plain objects that modules share (configurations, attention processors): nothing
that an argument, an address or a version shows.
"""

from __future__ import annotations

import array
import functools
import itertools
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

# Parameters, buffers and submodules are guarded apart from this, hook dictionaries too.
_STANDARD = set(vars(nn.Module())) - {"training"}
# Ours in a module's ``__dict__``: never restored, since another thread may attach or detach meanwhile.
_ATTACHMENT = {"forward", "_old_forward", "__reduce_ex__", "_replicate_for_data_parallel"}
_LARGEST_CONTAINER = 4096  # a longer list or dict is data; its length alone is compared
_DEEPEST = 8  # diffusers keeps the counters of its step caches seven steps below a module
_MOST_CELLS = 50_000  # beyond that it is a data set that hangs on the module
_OBJECTS_LEFT_ALONE = (
    torch.Tensor, torch.Generator, type, types.FunctionType, types.BuiltinFunctionType,
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
        self._cells: list[Any] = []
        self._looked_into = 0  # values that hang on the modules
        members = list(module.named_modules())
        self._members = {id(child) for _, child in members}
        for name, child in members:
            self._add_module(name, child)
        self._quick = _quick([cell for cell in self._cells if isinstance(cell, _Cell) and not cell.has_tensors])
        self._rest = [cell for cell in self._cells if not isinstance(cell, _Cell) or cell.has_tensors]

    def difference(self) -> str | None:
        """The first thing that changed since, as ``blocks.3.scale: 1.0 -> 0.5``; None when nothing did."""
        if self._is_untouched():
            return None
        for cell in self._cells:
            if cell.changed():
                return str(cell.describe())
        return None

    def _is_untouched(self) -> bool:
        """Whether everything is the very same object: the common case, decided mostly in C."""
        try:
            for states, lengths, get, saved in self._quick:
                if list(map(len, states)) != lengths or not all(map(is_, _chained(map(get, states)), saved)):
                    return False
        except KeyError:  # an attribute is gone
            return False
        return not any(cell.changed() for cell in self._rest)

    def containers(self) -> set[int]:
        """The identities of lists, dicts and objects that hang on the module."""
        return self._seen

    def restore(self) -> None:
        """Put attributes, items and lists back as they were; needs ``tensors=True``."""
        for cell in self._cells:
            if cell.changed():
                cell.restore()

    def _add_module(self, name: str, child: nn.Module) -> None:
        state = vars(child)
        where = f"{name}." if name else ""
        self._add_cell(state, where, [key for key in state if key not in _STANDARD], depth=0)
        for own in (child._parameters, child._buffers):
            for key, tensor in own.items():  # quantised weights carry their scale as an attribute
                if tensor is not None and vars(tensor):
                    self._add_cell(vars(tensor), f"{where}{key}.", list(vars(tensor)), depth=1)
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
        if id(value) in self._members:
            return
        if self._looked_into > _MOST_CELLS:
            return
        self._looked_into += 1
        self._seen.add(id(value))
        if isinstance(value, dict):
            small = list(value) if len(value) <= _LARGEST_CONTAINER else []
            self._add_cell(value, f"{where}.", small, depth)
            self._cells.append(_OrderCell(value, where))
            self._add_own_state(value, where, depth)
        elif isinstance(value, (bytearray, array.array, *array_types())):
            self._cells.append(_BytesCell(value, where))
        elif isinstance(value, functools.partial):
            for inner in (value.func, value.keywords, value.args):
                self._descend(inner, f"{where} arguments", depth + 1)
        elif isinstance(value, types.MethodType):
            self._descend(value.__self__, f"the owner of {where}", depth + 1)
        elif isinstance(value, nn.Module):
            for name, child in value.named_modules():
                if id(child) not in self._members:
                    self._members.add(id(child))
                    self._add_module(f"{where}.{name}".rstrip("."), child)
                    self._cells += [_Cell(child._forward_hooks, where, [], False)]
                    self._cells += [_Cell(child._forward_pre_hooks, where, [], False)]
        elif isinstance(value, (list, set, tuple, deque)):
            if type(value) is not tuple or any(map(_holds_tensor, value)):  # what a tuple holds cannot change
                self._cells.append(_SequenceCell(value, where, self._tensors))
            if len(value) <= _LARGEST_CONTAINER:
                for index, item in enumerate(value):
                    self._descend(item, f"{where}[{index}]", depth + 1)
            self._add_own_state(value, where, depth)
        elif not _is_foreign(value):
            self._cells += _position_cell(value, where)
            self._add_own_state(value, where, depth)
        else:
            self._cells += _position_cell(value, where)

    def _add_own_state(self, value: Any, where: str, depth: int) -> None:
        """What an object keeps beside the items that it may hold."""
        if isinstance(getattr(value, "__dict__", None), dict) and type(value).__module__ != "builtins":
            self._add_cell(vars(value), f"{where}.", list(vars(value)), depth)
            self._cells.append(_SpaceCell(value, where))
        self._add_slots(value, where, depth)

    def _add_slots(self, value: Any, where: str, depth: int) -> None:
        """Attributes that a class keeps in slots: a snapshot of them is compared as a whole."""
        names = [name for base in type(value).__mro__ for name in slots_of(base) if hasattr(value, name)]
        if names:
            self._cells.append(_SlotsCell(value, where, names, self._tensors))
            for name in names:
                self._descend(getattr(value, name), f"{where}.{name}", depth + 1)


_Getter = Callable[[Any], tuple[Any, ...]]
_chained = itertools.chain.from_iterable


def _quick(cells: list[_Cell]) -> list[tuple[list[dict[Any, Any]], list[int], _Getter, list[Any]]]:
    """What a check for identity needs, put together for all cells with the same keys.

    Modules of one class have the same attributes: all of them are then looked at in C at once.
    """
    groups: dict[tuple[Any, ...], list[_Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.keys, []).append(cell)
    return [
        (
            [cell.state for cell in group], [cell.length for cell in group], group[0].get,
            list(_chained(cell.saved for cell in group)),
        )
        for group in groups.values()
    ]  # fmt: skip


def _is_foreign(value: Any) -> bool:
    """Objects of PyTorch and the standard library manage their own state; hookgraph's are ours."""
    return type(value).__module__.partition(".")[0] in (
        "torch",
        "builtins",
        "functools",
        "hookgraph",
        "threading",
        "_thread",
    )


class _Cell:
    """The attributes of one object, or the items of one dict."""

    __slots__ = ("_tensor_tokens", "_tensors", "_where", "get", "keys", "length", "saved", "state")

    def __init__(self, state: dict[Any, Any], where: str, keys: list[Any], tensors: bool) -> None:
        self.state, self._where, self.length, self._tensors = state, where, len(state), tensors
        self._tensor_tokens = {key: _token(state[key], tensors) for key in keys if _holds_tensor(state[key])}
        self.keys = tuple([key for key in keys if key not in self._tensor_tokens])
        # Twice the one key: for a single one, itemgetter would not return a tuple.
        names = self.keys * 2 if len(self.keys) == 1 else self.keys
        self.get: _Getter = itemgetter(*names) if names else _nothing
        self.saved = self.get(state)

    @property
    def has_tensors(self) -> bool:
        return bool(self._tensor_tokens)

    def changed(self) -> bool:
        state = self.state
        if len(state) != self.length:
            return True
        try:
            now = self.get(state)
            if not all(map(_equal, now, self.saved)):
                return True
            return not all(mark.fits(state[key]) for key, mark in self._tensor_tokens.items())
        except KeyError:  # an attribute is gone
            return True

    def _plain(self) -> dict[Any, Any]:
        return dict(zip(self.keys, self.saved, strict=False))

    def describe(self) -> str:
        known = {**self._plain(), **self._tensor_tokens}
        for key in known:
            if key not in self.state:
                return f"{self._where}{key} was removed"
        if len(self.state) != self.length:
            new = [str(key) for key in self.state if key not in known and key not in _STANDARD]
            return f"{self._where}{new[-1] if new else ''} is new"
        for key, old in self._plain().items():
            if not _equal(self.state[key], old):
                return f"{self._where}{key}: {_short(old)} -> {_short(self.state[key])}"
        changed = [key for key, mark in self._tensor_tokens.items() if not mark.fits(self.state[key])]
        return f"{self._where}{changed[0] if changed else ''} holds another tensor"

    def restore(self) -> None:
        """Put back what was here; only for a snapshot that keeps tensors."""
        before = {**self._plain(), **{key: mark.restored() for key, mark in self._tensor_tokens.items()}}
        ours = _ATTACHMENT if "_forward_hooks" in self.state else set()
        for key in [key for key in self.state if key not in before and key not in _STANDARD | ours]:
            del self.state[key]
        self.state.update({key: value for key, value in before.items() if key not in ours})


class _OrderCell:
    """The order of the keys of a dict."""

    def __init__(self, value: dict[Any, Any], where: str) -> None:
        self._value, self._where, self._saved = value, where, tuple(value)

    def changed(self) -> bool:
        now = tuple(self._value)
        return len(now) != len(self._saved) or (not all(map(is_, now, self._saved)) and now != self._saved)

    def describe(self) -> str:
        return f"{self._where} has its keys in another order"

    def restore(self) -> None:
        """The contents are put back key by key, elsewhere."""


class _SpaceCell:
    """The ``__dict__`` of an object, which may be replaced as a whole, and the order of what is in it."""

    def __init__(self, value: Any, where: str) -> None:
        self._value, self._where = value, where
        self._space, self._order = vars(value), tuple(vars(value))

    def changed(self) -> bool:
        return vars(self._value) is not self._space or tuple(self._space) != self._order

    def describe(self) -> str:
        return f"{self._where} has another __dict__, or its attributes in another order"

    def restore(self) -> None:
        """The attributes are put back one by one, elsewhere."""


class _PositionCell:
    """How far a source of numbers has been read: a random generator or a counter."""

    def __init__(self, value: Any, where: str, read: Callable[[Any], str | None]) -> None:
        self._value, self._where, self._read = value, where, read
        self._saved = read(value)

    def changed(self) -> bool:
        return self._saved is None or self._read(self._value) != self._saved

    def describe(self) -> str:
        if self._saved is None:
            return f"{self._where} is an iterator: how far it has been read cannot be seen"
        return f"{self._where} has been read further"

    def restore(self) -> None:
        """Left as it is: a forward that reads one is blocked, not repaired."""


def random_positions() -> tuple[int, ...]:
    """How far the generators of Python and numpy that everyone shares have been read."""
    numpy = sys.modules.get("numpy")
    states = [random.getstate()] + ([numpy.random.get_state(legacy=False)] if numpy is not None else [])
    return tuple([hash(repr(state)) for state in states])


def _position_cell(value: Any, where: str) -> list[_PositionCell]:
    if isinstance(value, random.Random):
        return [_PositionCell(value, where, lambda source: repr(hash(source.getstate())))]
    if isinstance(value, itertools.count):
        return [_PositionCell(value, where, repr)]
    bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
    if bits is not None and type(value).__module__.startswith("numpy"):
        return [_PositionCell(value, where, lambda source: repr(bits.state))]
    if hasattr(type(value), "__next__"):
        return [_PositionCell(value, where, lambda source: None)]
    return []


class _BytesCell:
    """The contents of an array on the host."""

    def __init__(self, value: Any, where: str) -> None:
        self._value, self._where, self._saved = value, where, bytes(value)

    def changed(self) -> bool:
        return bytes(self._value) != self._saved

    def describe(self) -> str:
        return f"{self._where} changed"

    def restore(self) -> None:
        """Left as it is: a forward that writes arrays is blocked, not repaired."""


class _SlotsCell:
    """The slots of one object."""

    def __init__(self, value: Any, where: str, names: list[str], tensors: bool) -> None:
        self._value, self._where, self._names = value, where, names
        self._saved = [_token(getattr(value, name), tensors) for name in names]

    def changed(self) -> bool:
        for name, old in zip(self._names, self._saved, strict=True):
            new = getattr(self._value, name, _nothing)
            if not (old.fits(new) if isinstance(old, TensorMark) else _equal(new, old)):
                return True
        return False

    def describe(self) -> str:
        return f"{self._where} changed"

    def restore(self) -> None:
        for name, old in zip(self._names, self._saved, strict=True):
            object.__setattr__(self._value, name, old.restored() if isinstance(old, TensorMark) else old)


def array_types() -> tuple[type, ...]:
    """The arrays of numpy, where somebody uses it."""
    numpy = sys.modules.get("numpy")
    return (numpy.ndarray,) if numpy is not None else ()


def slots_of(base: type) -> tuple[str, ...]:
    """The names that a class keeps in slots."""
    slots = base.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


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
        if len(self._value) > _LARGEST_CONTAINER or len(self._value) != len(self._saved):
            return (len(self._value),) != self._saved
        pairs = zip(self._value, self._saved, strict=True)
        return not all(old.fits(new) if isinstance(old, TensorMark) else _equal(new, old) for new, old in pairs)

    def describe(self) -> str:
        return f"{self._where} changed"

    def restore(self) -> None:
        if isinstance(self._value, list) and len(self._value) <= _LARGEST_CONTAINER:
            self._value[:] = [old.restored() if isinstance(old, TensorMark) else old for old in self._saved]


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class TensorMark:
    """A tensor as it was: the object, its memory, and how it looks at that.

    Args:
        tensor: The tensor.
        keep: Whether to be able to put it back, which keeps its memory alive.  A guard must not: it
            would hold what the module has dropped.
    """

    __slots__ = ("_looks", "_memory", "_reference")

    def __init__(self, tensor: torch.Tensor, keep: bool) -> None:
        self._reference: Callable[[], torch.Tensor | None] = (lambda: tensor) if keep else weakref.ref(tensor)
        self._looks = looks(tensor)
        self._memory = tensor.data if keep else None

    def fits(self, tensor: Any) -> bool:
        """Whether ``tensor`` is the same object with the same memory and the same geometry."""
        return isinstance(tensor, torch.Tensor) and self._reference() is tensor and looks(tensor) == self._looks

    def restored(self) -> torch.Tensor | None:
        """The tensor, with the memory and geometry that it had."""
        tensor = self._reference()
        if tensor is not None and self._memory is not None and looks(tensor) != self._looks:
            tensor.data = self._memory
        return tensor


def looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor looks at which memory."""
    address = 0 if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__") else tensor.data_ptr()
    return address, tensor.shape, tensor.stride() if tensor.layout is torch.strided else (), tensor.dtype


def _token(value: Any, tensors: bool) -> Any:
    """What stands for a value in a comparison."""
    return TensorMark(value, tensors) if _holds_tensor(value) else value


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
    return bool(a == b) and (type(a) not in (float, complex) or repr(a) == repr(b))


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
