"""Objects that hold tensors: open them, see what a forward did to them, write that back."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections import OrderedDict, UserDict, deque
from collections.abc import Iterable
from typing import Any

import torch

from hookgraph import tree

_opened: set[type] = set()
_refused: set[type] = set()
_BUILT_IN = (list, dict, deque)
_CLOSED = (torch.Tensor, torch.nn.Module, enum.Enum, type)
_CACHE_BASES = {"Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "EncoderDecoderCache"}


def open_class(cls: type) -> bool:
    """Make instances of ``cls`` transparent, if they can be taken apart and rebuilt faithfully.

    Opened are transformers caches and their layers (by the names of their base classes, without
    importing transformers), dataclasses, and dicts with attributes such as ``ModelOutput``.

    Returns:
        Whether instances are containers from now on.
    """
    if cls in _opened:
        return True
    if cls in _refused or not _can_open(cls):
        _refused.add(cls)
        return False
    tree.register(cls, *_take_apart_and_rebuild(cls))
    _opened.add(cls)
    return True


def register_container(cls: type) -> None:
    """Let calls take instances of a class apart: its attributes become part of the signature.

    Tensors in its attributes become static inputs, other attributes are compared by value, and
    what a forward does to them reaches the caller's object.  All state has to lie in the
    instance's ``__dict__``.

    Raises:
        TypeError: The class keeps state elsewhere, or is a tensor, a module or an enum.

    Example:
        >>> import hookgraph
        >>> class Conditioning:
        ...     def __init__(self, embeds): self.embeds = embeds
        >>> hookgraph.register_container(Conditioning)
    """
    if cls in _opened:
        return
    if issubclass(cls, _CLOSED) or not cls.__dictoffset__ or _has_slots(cls):
        raise TypeError(f"{cls.__qualname__} cannot be opened: its state is not all in the instance's __dict__")
    tree.register(cls, *_take_apart_and_rebuild(cls))
    _opened.add(cls)
    _refused.discard(cls)


def _can_open(cls: type) -> bool:
    if issubclass(cls, _CLOSED):
        return False
    if not cls.__dictoffset__ or _has_slots(cls):
        return False
    if issubclass(cls, (dict, UserDict)) or dataclasses.is_dataclass(cls):
        return True
    return _is_cache(cls)


def _is_cache(cls: type) -> bool:
    return any(base.__name__ in _CACHE_BASES and base.__module__.startswith("transformers.") for base in cls.__mro__)


def _has_slots(cls: type) -> bool:
    """Whether some state of an instance lies outside its ``__dict__``."""
    return any(slot not in ("__dict__", "__weakref__") for base in cls.__mro__ for slot in _slots(base))


def _slots(base: type) -> tuple[str, ...]:
    slots = base.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _take_apart_and_rebuild(cls: Any) -> tuple[Any, Any]:
    has_items, is_cache = issubclass(cls, dict), _is_cache(cls)

    def take_apart(value: Any) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
        names, children = tuple(vars(value)), tuple(vars(value).values())
        entries: tuple[Any, ...] = tuple(tree.Attribute(name, is_cache) for name in names)
        keys: tuple[Any, ...] = ()
        if has_items:
            keys = tuple(dict.keys(value))
            children, entries = children + tuple(dict.values(value)), entries + keys
        return children, (names, keys), entries

    def put_together(structure: Any, children: Iterable[Any]) -> Any:
        names, keys = structure
        values = iter(children)
        new = cls.__new__(cls)
        # Not through the class's own setters, which may validate, register or move.
        new.__dict__.update({name: next(values) for name in names})
        for key in keys:
            _owner(new).__setitem__(new, key, next(values))
        return new

    return take_apart, put_together


def _owner(value: Any) -> Any:
    """The built-in class whose methods change ``value`` without its own overrides.

    OrderedDict keeps an order of its own, which plain dict methods would bypass.
    """
    return OrderedDict if isinstance(value, OrderedDict) else dict


@functools.lru_cache(maxsize=1024)
def shape_of(spec: tree.TreeSpec) -> tuple[frozenset[int], bool, bool]:
    """What matters of a call's structure; equal for equal structures, so nothing about the keys of dicts.

    Returns:
        The positions of the leaves that lie in a transformers cache; and whether there are several
        containers beside the call's own, two of which could be one and the same; and whether one
        of them is a dict.
    """
    in_caches = frozenset(
        position
        for position, path in enumerate(spec.paths())
        if any(isinstance(step, tree.Attribute) and step.of_cache for step in path)
    )
    nodes = [node for node in _below(spec) if is_mutable_class(node.type)]
    dicts = [node for node in nodes if isinstance(node.type, type) and issubclass(node.type, dict)]
    return in_caches, len(nodes) > 2, len(dicts) > 1  # the keyword arguments are one


def _below(spec: tree.TreeSpec) -> Iterable[tree.TreeSpec]:
    for child in spec.children():
        yield child
        yield from _below(child)


def has_odd_keys(root: Any) -> bool:
    """Whether a dict has a key that is no plain string: 1, 1.0 and True make equal structures, as do enums of strings."""
    return any(
        type(key) is not str for box in mutable_containers(root) if isinstance(box, dict) for key in dict.keys(box)
    )


def key_types(root: Any) -> tuple[Any, ...]:
    """What tells the keys of each dict in a call from keys that only equal them: 1 from True, 0.0 from -0.0."""
    dicts = [value for value in mutable_containers(root) if isinstance(value, dict)]
    return tuple([tuple([(type(key), repr(key)) for key in value]) for value in dicts])


def alias_pattern(root: Any) -> tuple[int, ...]:
    """For each mutable container of a call, the position of the first that is the same object."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(value), index) for index, value in enumerate(mutable_containers(root))])


def opaque_in(root: Any) -> str | None:
    """Something in ``root`` whose contents are not known, in words."""
    tensors_in(root)  # opens what can be opened
    for leaf in tree.flatten(root)[0]:
        if not isinstance(leaf, (torch.Tensor, bool, complex, float, int, torch.Size, range, *_KEYS)):
            return f"a {type(leaf).__module__}.{type(leaf).__qualname__}"
    return strange_key(root)


def tensors_in(root: Any) -> list[torch.Tensor]:
    """Every tensor in ``root``, objects that can be opened included."""
    leaves, _ = tree.flatten(root)
    unknown = [leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, int, float, str))]
    if any([type(leaf) not in _opened and open_class(type(leaf)) for leaf in unknown]):  # noqa: C419 (opens all)
        return tensors_in(root)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def is_mutable(value: Any) -> bool:
    """Whether a forward could change what ``value`` itself holds."""
    return is_mutable_class(type(value))


def is_mutable_class(cls: Any) -> bool:
    """Whether instances of a class are containers that a forward could change."""
    return isinstance(cls, type) and (issubclass(cls, _BUILT_IN) or cls in _opened)


def mutable_containers(root: Any) -> list[Any]:
    """Every container in ``root`` that a forward could change, in a fixed order.

    Two trees of one structure give lists that correspond.
    """
    found: list[Any] = []

    def visit(value: Any) -> bool:
        if is_mutable(value):
            found.append(value)
        return False

    tree.flatten(root, visit)
    return found


_KEYS = (str, int, float, bytes, type(None), enum.Enum, type, torch.dtype, torch.device)


def strange_key(root: Any) -> str | None:
    """A dict key whose own contents are not known, in words."""
    for value in mutable_containers(root):
        for key in value if isinstance(value, dict) else ():
            parts = key if isinstance(key, tuple) else (key,)
            if not all(isinstance(part, _KEYS) for part in parts):
                return f"a dict with a {type(key).__qualname__} as key"
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Contents:
    """What a container holds, one level deep and in order."""

    attributes: dict[str, Any]
    items: dict[Any, Any]

    @classmethod
    def of(cls, container: Any) -> Contents:
        attributes = dict(vars(container)) if type(container) in _opened else {}
        if isinstance(container, (list, deque)):
            return cls(attributes, dict(enumerate(container)))
        return cls(attributes, dict(dict.items(container)) if isinstance(container, dict) else {})

    def values(self) -> list[Any]:
        return [*self.attributes.values(), *self.items.values()]

    def with_values(self, values: list[Any]) -> Contents:
        """The same names and keys with other values."""
        split = len(self.attributes)
        return Contents(
            dict(zip(self.attributes, values[:split], strict=True)), dict(zip(self.items, values[split:], strict=True))
        )

    def same_as(self, other: Contents) -> bool:
        """Whether names, keys, their order and the objects are the same; scalars by value."""
        if list(self.attributes) != list(other.attributes) or list(self.items) != list(other.items):
            return False
        return all(_same(a, b) for a, b in zip(self.values(), other.values(), strict=True))

    def put_into(self, container: Any) -> None:
        """Make ``container`` hold exactly this; it stays the same object."""
        if type(container) in _opened:
            state = vars(container)
            if list(state) != list(self.attributes):
                state.clear()
            state.update(self.attributes)
        if isinstance(container, list):
            container[:] = self.items.values()
        elif isinstance(container, deque):
            container.clear()
            container.extend(self.items.values())
        elif isinstance(container, dict):
            owner = _owner(container)
            if list(dict.keys(container)) != list(self.items):
                owner.clear(container)
            for key, value in self.items.items():
                owner.__setitem__(container, key, value)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or not isinstance(a, (bool, int, float, complex, str, bytes)):
        return False
    return bool(a == b) and (type(a) is not float or a.hex() == b.hex())
