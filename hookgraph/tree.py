"""Flatten and rebuild what goes into and comes out of a forward, with optree.

Containers keep their insertion order: a forward may iterate over a dict, and then the order is
part of what it computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import optree

_NAMESPACE = "hookgraph"
# Never left: the namespace is ours alone.  The reference keeps the context from being collected.
_insertion_order = optree.dict_insertion_ordered(True, namespace=_NAMESPACE)
_insertion_order.__enter__()

TreeSpec = optree.PyTreeSpec


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeSpec]:
    """The leaves of ``tree`` in order, and its structure.  None is structure, not a leaf."""
    return optree.tree_flatten(tree, is_leaf, namespace=_NAMESPACE)


def rebuild(spec: TreeSpec, leaves: Iterable[Any]) -> Any:
    """A new tree of the same classes with other leaves."""
    return spec.unflatten(leaves)


def paths(spec: TreeSpec) -> list[str]:
    """Where each leaf of a flattened ``(args, kwargs)`` lies, in words: ``kwargs['x'][0].keys``."""
    return [_words(path) for path in spec.paths()]


def classes(spec: TreeSpec) -> dict[str, str]:
    """What lies where in a flattened ``(args, kwargs)``: the class of each container, ``value`` for a leaf."""
    found: dict[str, str] = {}

    def visit(node: TreeSpec, where: str) -> None:
        found[where] = "value" if node.is_leaf() else getattr(node.type, "__name__", str(node.type))
        for entry, child in zip(node.entries(), node.children(), strict=True):
            visit(child, where + _step(entry))

    for root, child in zip(("args", "kwargs"), spec.children(), strict=True):
        visit(child, root)
    return found


def output_paths(spec: TreeSpec) -> list[str]:
    """Where each leaf of an output lies: ``output[0]['x']``."""
    return ["output" + "".join(_step(entry) for entry in path) for path in spec.paths()]


def _words(path: tuple[Any, ...]) -> str:
    root, *rest = path
    return ("args", "kwargs")[root] + "".join(_step(entry) for entry in rest)


def _step(entry: Any) -> str:
    return f".{entry.name}" if isinstance(entry, Attribute) else f"[{entry!r}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Attribute:
    """A step of a path that is an attribute, not a key."""

    name: str
    of_cache: bool = False


def register(
    cls: type,
    take_apart: Callable[[Any], tuple[Iterable[Any], Any, Iterable[Any]]],
    put_together: Callable[[Any, Iterable[Any]], Any],
) -> None:
    """Make a class a container: how to take an instance apart, and how to make a new one."""
    optree.register_pytree_node(cls, take_apart, put_together, namespace=_NAMESPACE)
