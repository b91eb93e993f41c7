"""What a replay gives back: the output, and what the forward did to the caller's containers.

Learned once from the captured call, then rebuilt after each replay: tensors that the graph made
are cloned, tensors that came in are the caller's own, and so are containers.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hookgraph import containers, tree
from hookgraph.containers import Contents
from hookgraph.inputs import StaticInputs
from hookgraph.private_torch import storage_key
from hookgraph.read_only import ReadOnly
from hookgraph.reasons import Fallback, FallbackReason
from hookgraph.signature import Call, is_numpy_scalar

_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, enum.Enum, type)


class Unrepeatable(Exception):
    """Something in the result cannot be rebuilt after a replay."""


# -- where each tensor of a result comes from ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromArgument:
    """An argument itself (``geometry`` None), or a view of it."""

    position: int
    geometry: tuple[torch.Size, tuple[int, ...], int] | None  # shape, strides, elements after the argument's start
    requires_grad: bool = False  # of the view: one that was detached does not, though its argument does


@dataclass(frozen=True, slots=True)
class FromModule:
    """A parameter, a buffer or a side tensor itself (``geometry`` None), or a view of it."""

    tensor: torch.Tensor
    geometry: tuple[torch.Size, tuple[int, ...], int] | None  # shape, strides, storage offset
    requires_grad: bool = False  # of the view


@dataclass(frozen=True, slots=True)
class FromGraph:
    """Made by the graph: a view of the clone of one static output's memory."""

    group: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    whole: bool  # the clone has this shape and these strides already


Origin = FromArgument | FromModule | FromGraph


class SlotKind(enum.Enum):
    """What fills one leaf of a rebuilt structure."""

    CONSTANT = "constant"
    TENSOR = "tensor"
    LEAF = "leaf"  # a leaf of the call that is no tensor
    CONTAINER = "container"


@dataclass(frozen=True, slots=True)
class Template:
    """A structure with a recipe for each leaf."""

    spec: tree.TreeSpec
    slots: tuple[tuple[SlotKind, Any], ...]
    order: list[int] | None = None  # the tensors in the order of the slots, where these are all there is

    @classmethod
    def of(cls, spec: tree.TreeSpec, slots: Sequence[tuple[SlotKind, Any]]) -> Template:
        only_tensors = all(kind is SlotKind.TENSOR for kind, _ in slots)
        return cls(spec, tuple(slots), [index for _, index in slots] if only_tensors else None)

    def rebuild(self, tensors: list[torch.Tensor], leaves: Sequence[Any], found: Sequence[Any]) -> Any:
        if self.order is not None:
            return tree.rebuild(self.spec, [tensors[index] for index in self.order])
        sources = {SlotKind.TENSOR: tensors, SlotKind.LEAF: leaves, SlotKind.CONTAINER: found}
        return tree.rebuild(
            self.spec,
            [value if kind is SlotKind.CONSTANT else sources[kind][value] for kind, value in self.slots],
        )


@dataclass(slots=True)
class Rebuilt:
    """What one replay gives back, before any of it reaches the caller's objects."""

    output: Any
    contents: list[tuple[Any, Contents]]  # the caller's container, what it will hold
    arguments: list[tuple[torch.Tensor, torch.Tensor]]  # the caller's tensor, its new value

    def write_back(self) -> None:
        """Leave the caller's arguments as the forward would have left them."""
        if self.arguments:
            with torch.no_grad():
                for theirs, value in self.arguments:
                    # Outside inference mode, eager too can write to an inference tensor only by way of ``data``.
                    target = theirs.data if theirs.is_inference() else theirs
                    target.copy_(value)
        for container, contents in self.contents:
            contents.put_into(container)


@dataclass
class Recipe:
    """How to rebuild everything that one captured forward gave back."""

    output: Template
    origins: list[Origin]
    groups: list[torch.Tensor]  # static outputs; a clone of each is made for every replay
    writes: list[tuple[int, Contents, Template]]  # container, its keys, its values
    written: list[tuple[int, torch.Tensor]]  # argument position, static input that holds its new value
    containers: int  # how many mutable containers the arguments have
    notes: list[str] = field(default_factory=list)

    @functools.cached_property
    def whole(self) -> bool:
        """Whether each tensor of the result is the clone of one static output, in order."""
        made = [origin.group if isinstance(origin, FromGraph) and origin.whole else None for origin in self.origins]
        return made == list(range(len(self.groups)))

    @property
    def nbytes(self) -> int:
        return sum(group.untyped_storage().nbytes() for group in self.groups)

    @property
    def touches_arguments(self) -> bool:
        return bool(self.written or self.writes)

    def rebuild(self, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], clone: bool) -> Rebuilt:
        """Read the static outputs of the replay that was launched last.

        Args:
            leaves: The leaves of the caller's arguments.
            clone: Whether outputs get memory of their own (else they are the static ones).

        Aliasing: with ``clone``, nothing returned shares memory with the graph.
        """
        copies = [group.clone() for group in self.groups] if clone else self.groups
        tensors = copies if self.whole else [_materialise(origin, leaves, copies) for origin in self.origins]
        found = containers.mutable_containers((args, kwargs)) if self.containers else []
        output = self.output.rebuild(tensors, leaves, found)
        contents = [
            (found[index], keys.with_values(values.rebuild(tensors, leaves, found)))
            for index, keys, values in self.writes
        ]
        arguments = [(leaves[position], static) for position, static in self.written]
        return Rebuilt(output, contents, arguments)


def _materialise(origin: Origin, leaves: Sequence[Any], copies: Sequence[torch.Tensor]) -> torch.Tensor:
    if isinstance(origin, FromGraph):
        copy = copies[origin.group]
        return copy if origin.whole else copy.as_strided(origin.shape, origin.strides, origin.offset)
    if isinstance(origin, FromModule):
        if origin.geometry is None:
            return origin.tensor
        return _view(origin.tensor, *origin.geometry, origin.requires_grad)
    leaf: torch.Tensor = leaves[origin.position]
    if origin.geometry is None:
        return leaf
    shape, strides, after = origin.geometry
    return _view(leaf, shape, strides, int(leaf.storage_offset() + after), origin.requires_grad)


def _view(
    tensor: torch.Tensor, shape: torch.Size, strides: tuple[int, ...], offset: int, requires_grad: bool
) -> torch.Tensor:
    view = tensor.as_strided(shape, strides, offset)
    return view if view.requires_grad == requires_grad else view.detach()


# -- learning --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Shadow:
    """The arguments that a capture works on: fresh containers that hold the static inputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: StaticInputs
    containers: list[Any]
    before: list[Contents]
    versions: list[int]
    geometry: list[tuple[Any, ...]]
    dropped: set[int]  # the identities of containers whose changes nobody wants

    @classmethod
    def of(cls, spec: tree.TreeSpec, inputs: StaticInputs, read_only: ReadOnly) -> Shadow:
        args, kwargs = tree.rebuild(spec, inputs.leaves)
        found = containers.mutable_containers((args, kwargs))
        dropped = containers.mutable_containers(read_only.values(args, kwargs))
        return cls(
            args, kwargs, inputs, found, [Contents.of(container) for container in found],
            [tensor._version for tensor in inputs.tensors], [_geometry(tensor) for tensor in inputs.tensors],
            {id(container) for container in dropped},
        )  # fmt: skip


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.data_ptr())


def learn(
    output: Any,
    shadow: Shadow,
    call: Call,
    written: set[int],
    module_tensor: Callable[[torch.Tensor], torch.Tensor | None],
    owns: Callable[[torch.Tensor], bool],
    module_containers: set[int],
) -> Recipe | Fallback:
    """Find out how to rebuild what a captured forward gave back.

    Args:
        output: What the forward returned for ``shadow``.
        call: The call that was captured.
        written: Leaf positions of arguments that the warm-up saw written.
        module_tensor: For a tensor, the one of the module's own with the same memory, if any.
        owns: Whether a launch of the graph writes a tensor.
        module_containers: The identities of containers that hang on the module.
    """
    learner = _Learner(shadow, call, module_tensor, owns, module_containers)
    try:
        return learner.recipe(output, written)
    except Unrepeatable as error:
        return Fallback(FallbackReason.OUTPUT_KIND, str(error))


class _Learner:
    def __init__(
        self,
        shadow: Shadow,
        call: Call,
        module_tensor: Callable[[torch.Tensor], torch.Tensor | None],
        owns: Callable[[torch.Tensor], bool],
        module_containers: set[int],
    ) -> None:
        self.module_containers = module_containers
        self.shadow, self.module_tensor, self.owns = shadow, module_tensor, owns
        self.positions, self.any_strides = call.tensors, call.any_strides
        self.static = dict(zip((storage_key(t) for t in shadow.inputs.tensors), call.tensors, strict=True))
        self.own_containers = {id(container): index for index, container in enumerate(shadow.containers)}
        self.made_containers: set[int] = set()
        self.kept_containers: list[Any] = []
        self.tensors: dict[int, int] = {}
        self.kept: list[torch.Tensor] = []
        self.members: dict[int, list[int]] = {}  # storage -> indices into ``kept``

    def recipe(self, output: Any, written: set[int]) -> Recipe:
        self._check_inputs()
        template = self._template(output, "output", [output])
        writes = []
        pairs = zip(self.shadow.containers, self.shadow.before, strict=True)
        for index, (container, before) in enumerate(pairs):
            after = Contents.of(container)
            if not after.same_as(before) and id(container) not in self.shadow.dropped:
                writes.append(
                    (index, after, self._template(after.values(), f"argument {type(container).__name__}", []))
                )
        origins, groups = self._origins()
        uses_containers = bool(writes) or any(kind is SlotKind.CONTAINER for kind, _ in template.slots)
        return Recipe(
            template, origins, groups, writes, self._written(written), len(self.own_containers) * uses_containers
        )

    def _check_inputs(self) -> None:
        for position, tensor, before in zip(
            self.positions, self.shadow.inputs.tensors, self.shadow.geometry, strict=True
        ):
            if _attributes(tensor):
                raise Unrepeatable(
                    f"the forward sets {', '.join(_attributes(tensor))} on the tensor at leaf {position}"
                )
            if _geometry(tensor) != before:
                raise Unrepeatable(f"the forward resizes or re-points the tensor at leaf {position} in place")

    def _written(self, seen: set[int]) -> list[tuple[int, torch.Tensor]]:
        found = []
        for position, tensor, version in zip(
            self.positions, self.shadow.inputs.tensors, self.shadow.versions, strict=True
        ):
            if tensor._version != version or position in seen:
                found.append((position, tensor))
        return found

    def _template(self, value: Any, where: str, root: list[Any]) -> Template:
        leaves, spec = self._flatten(value, root)
        strange = containers.strange_key(value)
        if strange is not None:
            raise Unrepeatable(f"{where} holds {strange}")
        slots = [self._slot(leaf, where) for leaf in leaves]
        return Template.of(spec, slots)

    def _flatten(self, value: Any, root: list[Any]) -> tuple[list[Any], tree.TreeSpec]:
        made: list[Any] = []

        def visit(node: Any) -> bool:
            if id(node) in self.own_containers:
                return True
            if containers.is_mutable(node) and (root or node is not value):
                made.append(node)
            return False

        leaves, spec = tree.flatten(value, visit)
        openable = [leaf for leaf in leaves if self._is_opaque(leaf) and containers.open_class(type(leaf))]
        if openable:
            return self._flatten(value, root)
        for node in made:
            if id(node) in self.module_containers:
                raise Unrepeatable(f"the result holds a {type(node).__name__} of the module's own")
            if id(node) in self.made_containers:
                raise Unrepeatable(f"one {type(node).__name__} appears twice in the result")
            self.made_containers.add(id(node))
        self.kept_containers += made  # alive, so that an id is not used twice
        return leaves, spec

    def _is_opaque(self, leaf: Any) -> bool:
        return not (isinstance(leaf, (torch.Tensor, *_CONSTANTS)) or id(leaf) in self.own_containers)

    def _slot(self, leaf: Any, where: str) -> tuple[SlotKind, Any]:
        if id(leaf) in self.own_containers:
            return SlotKind.CONTAINER, self.own_containers[id(leaf)]
        if isinstance(leaf, torch.Tensor):
            return SlotKind.TENSOR, self._tensor(leaf, where)
        if isinstance(leaf, _CONSTANTS) or is_numpy_scalar(leaf):
            return SlotKind.CONSTANT, leaf
        for position, given in enumerate(self.shadow.inputs.leaves):
            if given is leaf:
                return SlotKind.LEAF, position
        raise Unrepeatable(f"{where} holds a {type(leaf).__module__}.{type(leaf).__qualname__}")

    def _tensor(self, tensor: torch.Tensor, where: str) -> int:
        index = self.tensors.get(id(tensor))
        if index is not None:
            return index
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise Unrepeatable(f"{where} holds a {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise Unrepeatable(f"{where} holds a tensor that is sparse, quantized, conjugated or negated lazily")
        if _attributes(tensor):
            raise Unrepeatable(f"{where} holds a tensor with Python attributes: {', '.join(_attributes(tensor))}")
        index = self.tensors[id(tensor)] = len(self.kept)
        self.kept.append(tensor)
        self.members.setdefault(storage_key(tensor), []).append(index)
        return index

    def _origins(self) -> tuple[list[Origin], list[torch.Tensor]]:
        origins: list[Origin | None] = [None] * len(self.kept)
        groups: list[torch.Tensor] = []
        for key, indices in self.members.items():
            if key in self.static:
                for index in indices:
                    origins[index] = self._from_argument(self.kept[index], self.static[key])
                continue
            for index in list(indices):
                own = self.module_tensor(self.kept[index])
                if own is not None:
                    origins[index] = self._from_module(self.kept[index], own)
            made = [index for index in indices if origins[index] is None]
            if made:
                for index, origin in zip(made, self._from_graph(made, groups), strict=True):
                    origins[index] = origin
        return [origin for origin in origins if origin is not None], groups

    def _from_argument(self, tensor: torch.Tensor, position: int) -> FromArgument:
        static = self.shadow.inputs.leaves[position]
        if tensor is static:
            return FromArgument(position, None)
        if tensor.dtype != static.dtype:
            raise Unrepeatable("the output views an argument under another dtype")
        if position in self.any_strides:
            raise Unrepeatable("the output views a tensor of a cache argument")
        after = int(tensor.storage_offset() - static.storage_offset())
        return FromArgument(position, (tensor.shape, tensor.stride(), after), _gradient(tensor, static))

    def _from_module(self, tensor: torch.Tensor, own: torch.Tensor) -> FromModule:
        if tensor is own:
            return FromModule(own, None)
        if tensor.dtype != own.dtype:
            raise Unrepeatable("the output views a tensor of the module under another dtype")
        geometry = (tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return FromModule(own, geometry, _gradient(tensor, own))

    def _from_graph(self, made: list[int], groups: list[torch.Tensor]) -> list[FromGraph]:
        """One clone for all tensors that share memory, so that they go on sharing it."""
        tensors = [self.kept[index] for index in made]
        if any(tensor.requires_grad or isinstance(tensor, torch.nn.Parameter) for tensor in tensors):
            raise Unrepeatable("the output requires gradients although the call does not")
        if not all(tensor.is_meta or self.owns(tensor) for tensor in tensors):
            raise Unrepeatable("the output holds a tensor that no recorded operator made")
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise Unrepeatable("outputs share memory under different dtypes")
        group = len(groups)
        if len(tensors) == 1 and _is_dense(tensors[0]):
            groups.append(tensors[0])
            return [FromGraph(group, tensors[0].shape, tensors[0].stride(), 0, True)]
        start = min(tensor.storage_offset() for tensor in tensors)
        end = max(tensor.storage_offset() + _span(tensor) for tensor in tensors)
        groups.append(tensors[0].detach().as_strided((end - start,), (1,), start))
        return [
            FromGraph(group, tensor.shape, tensor.stride(), int(tensor.storage_offset() - start), False)
            for tensor in tensors
        ]


def _gradient(view: torch.Tensor, base: torch.Tensor) -> bool:
    if view.requires_grad and not base.requires_grad:
        raise Unrepeatable("the output is a view that requires gradients, and what it views does not")
    return bool(view.requires_grad)


def _attributes(tensor: torch.Tensor) -> list[str]:
    """Python attributes that somebody has set on a tensor, torch.compile's own marks aside."""
    return [name for name in getattr(tensor, "__dict__", ()) if not name.startswith("_dynamo")]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether ``clone()`` keeps the strides: no gaps and no overlap."""
    return tensor.numel() > 0 and torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _span(tensor: torch.Tensor) -> int:
    """How many elements of memory a tensor reaches over."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
