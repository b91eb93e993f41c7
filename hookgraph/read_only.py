"""Arguments that a forward may change but whose changes nobody wants: the prompt cache of a sampling loop."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from hookgraph import containers, tree
from hookgraph.containers import Contents
from hookgraph.errors import AttachError


@dataclass(frozen=True, slots=True)
class ReadOnly:
    """Which arguments of a module are read only: by name, and by position where the forward has one for it."""

    names: frozenset[str]
    indices: frozenset[int]

    @classmethod
    def of(cls, module: nn.Module, names: tuple[str, ...]) -> ReadOnly:
        """Look the names up in the module's forward.

        Raises:
            AttachError: The forward takes no argument of that name.
        """
        parameters = list(inspect.signature(module.forward).parameters.values())
        known = {parameter.name for parameter in parameters}
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        for name in names:
            if name not in known and not takes_any:
                near = ", ".join(map(repr, difflib.get_close_matches(name, known, n=3, cutoff=0.0)))
                raise AttachError(f"read_only={name!r}: {type(module).__qualname__}.forward takes {near}")
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        indices = frozenset(index for index, name in enumerate(positional) if name in names)
        return cls(frozenset(names), indices)

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments of one call that are read only."""
        by_place = [args[index] for index in sorted(self.indices) if index < len(args)]
        return by_place + [value for name, value in kwargs.items() if name in self.names]

    def positions(self, spec: tree.TreeSpec) -> frozenset[int]:
        """The positions of their leaves in a flattened ``(args, kwargs)``."""
        return _positions(spec, self) if self.names else frozenset()

    @contextmanager
    def untouched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Restores: what their containers hold, also after an error."""
        try:
            found = [box for value in self.values(args, kwargs) for box in containers.mutable_containers(value)]
        except RecursionError:  # a container that contains itself is left to the forward
            found = []
        before = [Contents.of(box) for box in found]
        try:
            yield
        finally:
            for box, contents in zip(found, before, strict=True):
                if not Contents.of(box).same_as(contents):
                    contents.put_into(box)


NONE = ReadOnly(frozenset(), frozenset())


@functools.lru_cache(maxsize=1024)
def _positions(spec: tree.TreeSpec, read_only: ReadOnly) -> frozenset[int]:
    wanted = {0: read_only.indices, 1: read_only.names}
    return frozenset(position for position, (root, entry, *_) in enumerate(spec.paths()) if entry in wanted[root])
