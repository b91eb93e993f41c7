"""Calls of one list held against each other: what they share, which numbers differ, what grows."""

from __future__ import annotations

import enum
import numbers
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hookgraph import containers, tree
from hookgraph.ahead import Arguments
from hookgraph.signature import Signature
from hookgraph.words import first_few

_STEPS = 3  # sizes of a tensor before a row of them is called growth
_ARGUMENT = re.compile(r"args\[\d+\]|kwargs\['[^']*'\]")


_STATIC_CACHE = "use a static cache (transformers: cache_implementation='static')"


@dataclass(frozen=True, slots=True)
class Contrast:
    """What a list of calls tells by itself, before any of them is made.

    Args:
        churning: Numbers with more values than graphs may be retained, although nothing else differs.
        changes: What to change in the calls, each as an imperative.
        notes: What to know of the calls, each as a sentence without its full stop.
        grows: Whether there is no end to the signatures, since something grows from call to call.
    """

    churning: tuple[Number, ...]
    changes: tuple[str, ...]
    notes: tuple[str, ...]
    grows: bool


def contrast(
    calls: Sequence[Arguments], signatures: Sequence[Signature], lengthened: Sequence[str], max_graphs: int,
    known: Sequence[str] = (),
) -> Contrast:  # fmt: skip
    """Hold calls against each other.

    Args:
        signatures: Of those calls that have one.
        lengthened: The arguments in which the forward itself makes a tensor longer.
        known: Paths of numbers that a rehearsal found to change from call to call.
    """
    numbers = numbers_in(signatures)
    churning = tuple(number for number in numbers if number.values > max_graphs and number.path not in known)
    churn = [*known, *(number.path for number in churning)]
    others = [number for number in numbers if number.path not in churn]
    together = shared(calls)
    grown = growing(signatures, lengthened)
    held = [path for path in lengthened if len(calls) == 1 or path in map(argument_of, together)]
    notes = [*shared_notes(together), *_growth_notes(grown, held), *_number_notes(others, len(signatures))]
    changes = [f"pass {first_few(churn)} as {'a tensor' if len(churn) == 1 else 'tensors'}"] if churn else []
    return Contrast(churning, (*changes, *_growth_remedies(grown, held)), tuple(notes), bool(grown))


def shared_notes(together: dict[str, list[int]]) -> Iterator[str]:
    """Say of each container that ``shared`` found what that means."""
    for path, indices in together.items():
        which = first_few([f"calls[{index}]" for index in indices])
        yield (
            f"{which} share {path}: as it is now, not as it was in each call; record them with hookgraph.record_calls"
        )


def _growth_notes(grown: Sequence[str], held: Sequence[str]) -> Iterator[str]:
    every = "every length is a signature of its own"
    arguments = list(dict.fromkeys(map(argument_of, grown)))
    if arguments:
        verb = "grows" if len(arguments) == 1 else "grow"
        remedy = _growth_remedies(grown, held)[0]
        yield f"{first_few(arguments)} {verb} from call to call: {every}; {remedy}"
    for argument in held:
        if argument not in arguments:
            yield f"The forward makes {argument} longer: unless the loop cuts it back, {every}; {_STATIC_CACHE}"


def _growth_remedies(grown: Sequence[str], held: Sequence[str]) -> list[str]:
    """A cache holds its tensors deeper down; what is an argument itself can be padded, where there is no cache."""
    if not grown:
        return []
    in_a_cache = bool(held) or any(path != argument_of(path) for path in grown)
    return [_STATIC_CACHE if in_a_cache else f"pad {first_few(grown)} to a fixed length"]


def _number_notes(numbers: Sequence[Number], calls: int) -> Iterator[str]:
    if calls == 1 and numbers:
        are = "is a number" if len(numbers) == 1 else "are numbers"
        named = first_few([number.path for number in numbers])
        yield f"{named} {are} and part of the signature: what changes from call to call should be a tensor"
    differ = [number.path for number in numbers if number.values > 1]
    if differ:
        one = len(differ) == 1
        yield (
            f"{first_few(differ)} {'is a number that differs' if one else 'are numbers that differ'} between calls, and "
            f"each value is a signature of its own: pass {'it as a tensor' if one else 'them as tensors'}"
        )


@dataclass(frozen=True, slots=True)
class Number:
    """A number among the arguments that is not a tensor.

    Args:
        path: Where it is.
        is_whole: Whether it may be a size rather than a value.
        values: How many different values it has in calls that are alike but for their numbers.
        calls: How many of the calls have it.
    """

    path: str
    is_whole: bool
    values: int
    calls: int


def numbers_in(signatures: Iterable[Signature]) -> list[Number]:
    """The numbers among the arguments of some calls, those that are no whole numbers first.

    Example:
        >>> from hookgraph import signature
        >>> import torch
        >>> def of(*args): return signature.of(signature.read(args, {}, torch.device("cpu")), ())
        >>> [(one.path, one.values) for one in numbers_in([of(1, 0.5), of(1, 0.7)])]
        [('args[1]', 2), ('args[0]', 1)]
    """
    found: dict[str, list[tuple[Any, Any]]] = {}
    for signature in signatures:
        paths, alike = tree.paths(signature.spec), signature.skeleton
        for position, leaf in signature.scalars:
            if leaf[0] == "host" or _is_number(leaf[1]):
                found.setdefault(paths[position], []).append((alike, leaf))
    told = [
        Number(path, _is_whole(seen[0][1][1]), max(Counter(alike for alike, _ in set(seen)).values()), len(seen))
        for path, seen in found.items()
    ]
    return sorted(told, key=lambda number: number.is_whole)


def _is_number(kind: Any) -> bool:
    return issubclass(kind, numbers.Number) and not issubclass(kind, (bool, enum.Enum))


def _is_whole(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, numbers.Integral)


def argument_of(path: str) -> str:
    """The argument that a path leads into: ``kwargs['cache']`` for ``kwargs['cache'].layers[0]``."""
    found = _ARGUMENT.match(path)
    return found[0] if found is not None else path


def growing(signatures: Iterable[Signature], lengthened: Iterable[str]) -> list[str]:
    """The paths of tensors that are longer from call to call, and not only of different sizes; those in caches first.

    A tensor grows if it is one longer each time, as tokens are that are kept; or if the sizes differ and the
    forward itself makes it longer.  A batch, dimension 0, may have any size.

    Args:
        lengthened: The arguments that the forward makes longer.
    """
    sizes: dict[tuple[str, int], list[int]] = {}
    for signature in signatures:
        for path, leaf in zip(tree.paths(signature.spec), signature.leaves, strict=False):
            for dim, size in enumerate(leaf[1] if leaf[0] == "tensor" else ()):
                sizes.setdefault((path, dim), []).append(size)
    found = [
        path
        for (path, dim), seen in sizes.items()
        if len(set(seen)) >= _STEPS and (argument_of(path) in lengthened or (dim > 0 and _by_one(seen)))
    ]
    return sorted(dict.fromkeys(found), key=lambda path: path == argument_of(path))


def _by_one(sizes: Sequence[int]) -> bool:
    different = list(dict.fromkeys(sizes))
    return different == list(range(different[0], different[0] + len(different)))


def lengthened(before: Signature, after: Signature) -> list[str]:
    """The arguments in which a tensor is longer after a call than it was before."""
    shapes = {
        path: leaf[1] for path, leaf in zip(tree.paths(before.spec), before.leaves, strict=False) if leaf[0] == "tensor"
    }
    found = [
        argument_of(path)
        for path, leaf in zip(tree.paths(after.spec), after.leaves, strict=False)
        if leaf[0] == "tensor" and path in shapes and leaf[1].numel() > shapes[path].numel()
    ]
    return list(dict.fromkeys(found))


def shared(calls: Sequence[Arguments]) -> dict[str, list[int]]:
    """Containers that several calls hold and that may have been another's state, by path: in which calls.

    A cache, a dict or a list that holds a tensor; the outermost only.
    """
    holders: dict[int, dict[int, str]] = {}  # by container: in which calls it is, and where there
    kept = {}
    for index, call in enumerate(calls):
        containers.tensors_in(call)  # opens what can be opened
        for path, container in _containers(call):
            kept[id(container)] = container
            holders.setdefault(id(container), {}).setdefault(index, path)
    found: dict[str, list[int]] = {}
    for identity, places in holders.items():
        path = next(iter(places.values()))
        inside = any(path.startswith((f"{outer}[", f"{outer}.")) for outer in found)
        if len(places) > 1 and not inside and _holds_state(kept[identity]):
            found[path] = list(places)
    return found


def _holds_state(container: Any) -> bool:
    """Whether a loop would change it between calls; not so a list of sizes, or options that are empty."""
    if containers.tensors_in(container):
        return True
    return not isinstance(container, (list, deque)) and bool(containers.Contents.of(container).values())


def _containers(call: Arguments) -> Iterator[tuple[str, Any]]:
    """Each mutable container in a call with its path, the outer before the inner."""
    seen: set[int] = set()

    def visit(path: str, value: Any) -> Iterator[tuple[str, Any]]:
        steps: list[tuple[str, Any]] = []
        if containers.is_mutable(value):
            if id(value) in seen:
                return
            seen.add(id(value))
            yield path, value
            contents = containers.Contents.of(value)
            steps = [(f".{name}", item) for name, item in contents.attributes.items()]
            steps += [(f"[{key!r}]", item) for key, item in contents.items.items()]
        elif isinstance(value, tuple):
            steps = [(f"[{index}]", item) for index, item in enumerate(value)]
        for step, item in steps:
            yield from visit(path + step, item)

    args, kwargs = call
    yield from visit("args", args)
    for key, value in kwargs.items():  # the dict itself is one of each call's own
        yield from visit(f"kwargs[{key!r}]", value)
