"""Is what was captured still what the module is?

A graph reads parameters, buffers and side tensors at the addresses of its capture, and follows
the path that Python took then.  A guard is taken at the capture and checked before each replay.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn

from hookgraph.audit import Findings, first_line
from hookgraph.private_torch import storage_key, tensors_alike
from hookgraph.reasons import Fallback, FallbackReason
from hookgraph.state import ModuleState, attribute_tensors, looks

_DEEPEST_HOLDER = 3  # between a tensor and a global: a list in the dict of an object
_MOST_HOLDERS = 2_000  # in one step; what so much refers to is found some other way, or not at all
_LOOKS = attrgetter("shape", "dtype", "requires_grad")
_VALUES = methodcaller("values")
_HOLDERS = attrgetter("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def own_tensors(module: nn.Module) -> dict[int, torch.Tensor]:
    """The parameters and buffers of a module tree, by storage."""
    found: dict[int, torch.Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        for inner in _plain_tensors(tensor):
            found.setdefault(storage_key(inner), inner)
    return found


def _plain_tensors(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """A tensor itself; and for a wrapper subclass (quantised weights) what it wraps, too."""
    yield tensor
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # a DTensor names its mesh, too
                yield from _plain_tensors(inner)


def child_hooks(module: nn.Module) -> str | None:
    """The first forward hook below a module, which a replay would not run, with its line; and how many more there are."""
    found = [
        f"{name} has {_hook_name(hook)}"
        for name, child in module.named_modules()
        if child is not module
        for kind in _HOOKS
        for hook in getattr(child, kind).values()
    ]
    everywhere = torch.nn.modules.module
    if not found and (everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks):
        return "a hook registered for all modules"
    return None if not found else found[0] if len(found) == 1 else f"{found[0]}, and {len(found) - 1} more"


def _hook_name(hook: Any) -> str:
    """A hook's name, and the line where it is written, if that is Python."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f"{name} ({first_line(code)})" if code is not None else name


def beside_hooks(module: nn.Module, change: str | None) -> str | None:
    """What a watched call changed; where hooks below the module ran beside it, with the first of them."""
    hook = child_hooks(module) if change is not None else None
    return change if hook is None else f"{change}; maybe by a child hook that is ignored (then remove it): {hook}"


class Guards:
    """What a graph relies on, as it was when the graph was captured.

    Checked in two parts.  A launch is safe while the memory that it reads is where it was:
    ``moved`` has to be asked before.  Whether its result may be used is for ``changed`` to say,
    which can be asked while the device works.

    Args:
        module: The attached module.
        side: Where each side tensor that the graph reads is held.
        extent: ``"full"``; ``"weights"`` leaves out hooks and plain Python state; ``"off"``
            checks nothing.

    Cost: ``moved`` 0.1 µs for each parameter and buffer, ``changed`` about 0.7 µs for each module.
    """

    def __init__(self, module: nn.Module, side: list[SideTensor], extent: str) -> None:
        self._extent = extent
        self._side = side
        modules = list(module.named_modules())
        # The root is not held: it holds us, and has to die at once when its user drops it.
        self._modules = [child for _, child in modules[1:]]
        self._classes = [type(child) for child in self._modules]
        self._holders = list(itertools.chain.from_iterable(map(_HOLDERS, (module, *self._modules))))
        self._trees = _Holders([child._modules for _, child in modules])
        named = [(name, holder) for name, child in modules for holder in (child._parameters, child._buffers)]
        self._names = [name for name, _ in named]
        self._own = _Holders([holder for _, holder in named])
        # Moving a module frees its memory though we hold its parameters, whose ``data`` is exchanged;
        # a replaced one is let go when ``changed`` has noticed.  Buffers are replaced as a whole.
        self._parameters = [p for _, child in modules for p in child._parameters.values() if p is not None]
        # No weak references: they would forbid ``torch.utils.swap_tensors``, with which ``to`` may move a module.
        self._buffers = [
            (child._buffers, key)
            for _, child in modules
            for key, buffer in child._buffers.items()
            if buffer is not None
        ]
        self._wrapped = any(map(_is_odd, self._own_tensors()))
        self._addresses = self._own_addresses()
        self._looks = self._own_looks()
        self._alike: Callable[[Sequence[torch.Tensor]], bool] = _never
        self._root, self._root_class = weakref.ref(module), type(module)
        everywhere = torch.nn.modules.module
        self._hooks = [getattr(child, kind) for child in self._modules for kind in _HOOKS]
        self._hooks += [everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks]
        self._hook_keys = [tuple(hooks) for hooks in self._hooks]
        self._no_hooks = not any(self._hooks)
        self._state = ModuleState(module, tensors=False)

    def side_tensors(self) -> list[torch.Tensor]:
        """The side tensors that the graph reads."""
        return [side.tensor for side in self._side]

    def storages(self) -> set[int]:
        """The memory that the module's own tensors and the side tensors lie in."""
        return {storage_key(tensor) for tensor in (*self._parameters, *self.buffers(), *self.side_tensors())}

    def buffers(self) -> list[torch.Tensor]:
        """The module's buffers, as far as they are alive."""
        return [buffer for buffer in self._now_buffers() if buffer is not None and not buffer.is_meta]

    def _now_buffers(self) -> list[torch.Tensor | None]:
        return [holder.get(key) for holder, key in self._buffers]

    def moved(self) -> str | None:
        """The tensor whose memory is no longer where the graph reads it, by name."""
        if self._extent == "off":
            return None
        if self._own_addresses() != self._addresses:
            return self._replaced_tensor()
        for side in self._side:
            if side.moved():
                return f"{side.where} was replaced"
        return None

    def changed(self) -> str | None:
        """The first other thing that is not as it was, by name."""
        if self._extent == "off":
            return None
        if list(map(type, self._modules)) != self._classes or self._trees.changed():
            return "the module tree changed"
        root = self._root()
        if root is None or type(root) is not self._root_class:
            return "the module tree changed"
        if not all(map(is_, itertools.chain.from_iterable(map(_HOLDERS, (root, *self._modules))), self._holders)):
            return "a module's dict of parameters, buffers or submodules was replaced"
        if self._own.changed():
            return self._replaced_tensor()
        if not self._look_the_same():
            return "a parameter or buffer has another shape, other strides, dtype or requires_grad"
        if self._extent == "weights":
            return None
        if any(self._hooks) if self._no_hooks else [tuple(hooks) for hooks in self._hooks] != self._hook_keys:
            return "forward hooks below the module changed"
        return self._state.difference()

    def difference(self) -> str | None:
        """The first thing that is not as it was; None when the graph still fits."""
        return self.moved() or self.changed()

    def _own_addresses(self) -> list[Any]:
        address = _address if self._wrapped else torch.Tensor.data_ptr
        parameters: list[Any] = list(map(address, self._parameters))
        return parameters + [None if buffer is None else address(buffer) for buffer in self._now_buffers()]

    def _own_tensors(self) -> list[torch.Tensor]:
        return [*self._parameters, *(buffer for buffer in self._now_buffers() if buffer is not None)]

    def _own_looks(self) -> list[Any]:
        tensors = self._own_tensors()
        return [*map(_LOOKS, tensors), *map(torch.Tensor.stride, tensors)] if not self._wrapped else []

    def _look_the_same(self) -> bool:
        """Whether shapes, strides, dtypes and ``requires_grad`` are what they were."""
        if self._wrapped:
            return True
        tensors = self._own_tensors()
        if self._alike(tensors):
            return True
        if self._own_looks() != self._looks:
            return False
        # The quick test depends on the thread's modes, too, and is made for those of the last call.
        self._alike = tensors_alike(tensors)
        return True

    def _replaced_tensor(self) -> str:
        now = [
            (f"{name}.{key}".lstrip("."), tensor)
            for name, holder in zip(self._names, self._own.all, strict=True)
            for key, tensor in holder.items()
        ]
        if len(now) != len(self._own.identities):
            return "parameters or buffers were added or removed"
        known = set(self._addresses)
        for (name, tensor), identity in zip(now, self._own.identities, strict=True):
            if id(tensor) != identity or (tensor is not None and _address(tensor) not in known):
                return f"{name} was replaced or moved"
        return "a parameter or buffer was replaced or renamed"


class _Holders:
    """Dicts of a module tree, and which objects are in them; the objects are not kept alive.

    Those that are empty are looked at, too, since something may be registered in them.
    """

    def __init__(self, holders: list[dict[str, Any]]) -> None:
        self.all = holders
        self.filled = [holder for holder in holders if holder]
        self._empty = [holder for holder in holders if not holder]
        self.identities = self._now()
        self._names = list(map(tuple, self.filled))

    def _now(self) -> list[int]:
        return list(map(id, itertools.chain.from_iterable(map(_VALUES, self.filled))))

    def changed(self) -> bool:
        """Whether another object is in one of them, one more or less, or one under another name."""
        return any(self._empty) or self._now() != self.identities or list(map(tuple, self.filled)) != self._names


def _is_odd(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no address of its own: one that wraps others, or is sparse."""
    return tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__")


def _never(_: Sequence[torch.Tensor]) -> bool:
    return False


def _address(tensor: torch.Tensor) -> Any:
    if hasattr(tensor, "__tensor_flatten__"):
        return tuple(_address(inner) for inner in _plain_tensors(tensor) if inner is not tensor)
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)


# -- tensors that arrive by the side ------------------------------------------------------------


class SideTensor:
    """A tensor that the graph reads and that is neither argument nor parameter nor buffer.

    It is kept alive as long as the graph, since the graph reads its address.

    Args:
        where: Its place in words.
        current: What is in that place now; None for a place whose contents cannot change.
        tensor: The tensor.
        frozen: It lies on the host and its values went into the graph, so they may not change.
    """

    __slots__ = ("_current", "_looks", "_version", "tensor", "where")

    def __init__(self, where: str, current: Callable[[], Any] | None, tensor: torch.Tensor, frozen: bool) -> None:
        self.where, self._current, self.tensor = where, current, tensor
        self._looks = looks(tensor)
        self._version = tensor._version if frozen and not tensor.is_inference() else None

    def moved(self) -> bool:
        """Whether another tensor is in its place now, or it has other memory or, if frozen, values."""
        if self._current is not None:
            try:
                if self._current() is not self.tensor:
                    return True
            except Exception:  # the way there is gone: a step is None now, an attribute or a key is missing
                return True
        if self._version is not None and self.tensor._version != self._version:
            return True
        return looks(self.tensor) != self._looks


def locate(
    module: nn.Module, findings: Findings, device: torch.device, known: Iterable[SideTensor] = ()
) -> list[SideTensor] | Fallback:
    """Find who holds each side tensor, so that a replacement is noticed.

    Args:
        findings: What the warm-up saw; ``side`` and ``side_lines`` matter here.
        device: The device that the graph works on.
        known: What was located before, and holds side tensors, too.

    Returns:
        Where each is held, or the reason why one cannot be relied on.
    """
    tensors, memory, places = _seen_from_module(module, findings.side)
    views = _kept_views(module, findings, tensors)
    passed_over = {id(vars(child)) for child in module.modules()} | {id(tensors), id(views)}
    # Who else holds one, too: the forward may read it by any of these ways, and any may be replaced.
    elsewhere, attributes = _holders([*_held_elsewhere(tensors, places, known), *views.values()], passed_over)
    found: dict[int, list[SideTensor]] = {key: [] for key in findings.side}
    for identity, tensor in (tensors | views).items():
        sides = found.setdefault(memory.get(identity, storage_key(tensor)), [])
        for where, current in (*places.get(identity, ()), *elsewhere.get(identity, ())):
            sides.append(SideTensor(where, current, tensor, tensor.device != device))
    for key, tensor in findings.side.items():
        if not found[key]:
            kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
            return Fallback(FallbackReason.SIDE_TENSOR, f"{findings.side_lines[key]}: {kind}")
    loose = [
        (place, tensors[identity]) for identity, some in attributes.items() if identity in tensors for place in some
    ]
    return [
        *(side for sides in found.values() for side in sides),
        *(SideTensor(*place, tensor, tensor.device != device) for place, tensor in loose),
    ]


_Place = tuple[str, Callable[[], Any] | None]
_Tensors = dict[int, torch.Tensor]  # by identity


def _seen_from_module(
    module: nn.Module, side: Mapping[int, torch.Tensor]
) -> tuple[_Tensors, dict[int, int], dict[int, list[_Place]]]:
    """The side tensors, and all others that a module holds of the same memory, since each may be replaced by itself.

    Returns:
        By identity: the tensors, their memory, and where the module holds them.
    """
    tensors = {id(tensor): tensor for tensor in side.values()}
    memory = {id(tensor): key for key, tensor in side.items()}
    places: dict[int, list[_Place]] = {identity: [] for identity in tensors}
    hanging = ((where, trail.follow, tensor) for where, trail, tensor in attribute_tensors(module))
    own = ((name, None, tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers()))
    for where, current, tensor in (*hanging, *own):
        key = storage_key(tensor)
        if key in side:
            tensors[id(tensor)], memory[id(tensor)] = tensor, key
            places.setdefault(id(tensor), []).append((where, current))
    return tensors, memory, places


def _kept_views(module: nn.Module, findings: Findings, tensors: _Tensors) -> _Tensors:
    """What the forward read of the memory of others and that outlives it, beside the tensors known already."""
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return {id(view): view for view in findings.views.values() if id(view) not in tensors and id(view) not in own}


def _held_elsewhere(
    tensors: _Tensors, places: dict[int, list[_Place]], known: Iterable[SideTensor]
) -> list[torch.Tensor]:
    """The tensors that have more references than the places where the module was seen to hold them, and ours.

    To ask who holds the others, which are most, would take the collector through the whole heap for nothing.
    """
    ours = Counter(id(side.tensor) for side in {id(side): side for side in known}.values())
    control = object()
    both = {**tensors, 0: control}
    del control
    references = {identity: sys.getrefcount(both[identity]) for identity in both}
    once = references.pop(0)  # of what only ``both`` holds; a tensor is in ``tensors`` as well
    return [
        tensors[identity]
        for identity, count in references.items()
        if count - once - 1 > len(places[identity]) + ours[identity]
    ]


def _holders(
    tensors: list[torch.Tensor], passed_over: set[int]
) -> tuple[dict[int, list[_Place]], dict[int, list[_Place]]]:
    """Who holds each tensor, itself or in a container: globals, closures, class attributes, caches.

    The collector goes through the heap for each step away from the tensors, and for all of them at once.

    Args:
        passed_over: Containers, by identity, that are watched otherwise.

    Returns:
        The places for each tensor, by its identity; and attributes of objects that nobody can be seen to reach:
        that one is replaced can be seen, that the object is cannot.
    """
    found: dict[int, list[_Place]] = {id(tensor): [] for tensor in tensors}
    attributes: dict[int, list[_Place]] = {id(tensor): [] for tensor in tensors}
    passed_over = passed_over | {id(tensors)}
    things: list[Any] = list(tensors)
    ways: list[tuple[int, tuple[_Step, ...]]] = [(id(tensor), ()) for tensor in tensors]  # and the steps from there
    for depth in range(_DEEPEST_HOLDER + 1):
        referrers = _referrers(things)
        closures = _closures([r for some in referrers.values() for r in some if isinstance(r, types.CellType)])
        containers: list[Any] = []
        onwards: list[tuple[int, tuple[_Step, ...]]] = []
        for thing, (tensor, steps) in zip(things, ways, strict=True):
            for referrer in referrers[id(thing)]:
                place = _place(referrer, thing, closures)
                if place is not None:
                    found[tensor].append((place[0], _further(place[1], steps)))
                    continue
                step = _step_from(referrer, thing) if id(referrer) not in passed_over | {id(things)} else None
                if step is None:
                    continue
                key = _key_of(referrer, thing) if not depth and isinstance(referrer, dict) else None
                if type(key) is str:
                    attributes[tensor].append((f"an attribute {key}", functools.partial(referrer.get, key)))
                containers.append(referrer)
                onwards.append((tensor, (step, *steps)))
        things, ways = containers[:_MOST_HOLDERS], onwards[:_MOST_HOLDERS]
    return found, attributes


def _referrers(things: list[Any]) -> dict[int, list[Any]]:
    """Who refers to each of some objects, by its identity."""
    found: dict[int, list[Any]] = {id(thing): [] for thing in things}
    for referrer in gc.get_referrers(*things) if things else ():
        for referent in gc.get_referents(referrer):
            if id(referent) in found:
                found[id(referent)].append(referrer)
    return found


def _closures(cells: list[types.CellType]) -> set[int]:
    """Which cells belong to a function that outlives the call, not to a running frame alone."""
    owners = {cell: [r for r in some if type(r) is tuple] for cell, some in _referrers(cells).items()}
    users = _referrers([owner for some in owners.values() for owner in some])
    return {
        cell
        for cell, some in owners.items()
        if any(isinstance(user, types.FunctionType) for owner in some for user in users[id(owner)])
    }


def _place(referrer: Any, thing: Any, closures: set[int]) -> _Place | None:
    """How something that outlives the call holds an object."""
    if id(referrer) in closures:
        return "a closure", functools.partial(getattr, referrer, "cell_contents")
    if isinstance(referrer, functools._lru_cache_wrapper):
        # Its entries depend on its arguments alone: kept alive as long as the graph, they fit.
        return f"the cache of {referrer.__qualname__}", None
    if isinstance(referrer, dict) and _is_namespace(referrer):
        key = _key_of(referrer, thing)
        return (f"the global {key}", functools.partial(referrer.__getitem__, key)) if key is not None else None
    return None


_Step = Callable[[Any], Any]  # from what holds a thing to the thing
_NO_HOLDERS = (
    type, types.ModuleType, types.FunctionType, types.MethodType, types.FrameType, types.CellType, types.GeneratorType,
    types.CoroutineType, types.TracebackType,
)  # fmt: skip


def _step_from(holder: Any, wanted: Any) -> _Step | None:
    """How to get from a container or an object to what it holds; None from what is neither, or is ours."""
    if isinstance(holder, (dict, list, tuple, deque)):
        key = _key_of(holder, wanted)
        return itemgetter(key) if key is not None else None
    if isinstance(holder, _NO_HOLDERS) or type(holder).__module__.partition(".")[0] == "hookgraph":
        return None
    space = getattr(holder, "__dict__", None)
    if space is wanted:
        return vars
    name = _key_of(space, wanted) if type(space) is dict else None
    return attrgetter(name) if name is not None else None


def _further(holder: Callable[[], Any] | None, steps: tuple[_Step, ...]) -> Callable[[], Any] | None:
    return holder if holder is None or not steps else functools.partial(_follow, holder, steps)


def _is_namespace(holder: dict[Any, Any]) -> bool:
    """Whether a dict is the globals of a module or the attributes of a class."""
    return "__name__" in holder or "__module__" in holder


def _follow(holder: Callable[[], Any], steps: tuple[_Step, ...]) -> Any:
    thing = holder()
    for step in steps:
        thing = step(thing)
    return thing


def _key_of(holder: Any, wanted: Any) -> Any:
    """Where in a dict or sequence an object is; None where it is not, but its key, say.

    A plain loop: a generator expression would keep ``wanted`` in a cell, and that cell would be
    found as a closure that holds the tensor.
    """
    for key, item in holder.items() if isinstance(holder, dict) else enumerate(holder):
        if item is wanted:
            return key
    return None
