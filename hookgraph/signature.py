"""One call, as the value that decides whether a graph fits it."""

from __future__ import annotations

import enum
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch

from hookgraph import containers, tree
from hookgraph.private_torch import storage_key
from hookgraph.reasons import Fallback, FallbackReason
from hookgraph.words import with_article

_TENSORS = (torch.Tensor, torch.nn.Parameter)
# Compared by value together with their type: 1, 1.0 and True are three signatures.
_BY_VALUE = frozenset(
    {int, bool, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
     type(Ellipsis), type(NotImplemented)}
)  # fmt: skip
_COMMON = _BY_VALUE | {range, torch.Tensor, torch.nn.Parameter, float, complex}
_MAXIMUM_LEAVES = 100_000  # a call with more is a data set, not a forward


@dataclass(frozen=True, slots=True)
class Signature:
    """What a call looks like: structure, tensors, scalars, and what surrounds it.

    Equal signatures may be served by the same graph; anything a forward could see and that is
    not a tensor's contents is in here by value.
    """

    spec: tree.TreeSpec
    leaves: tuple[Any, ...]
    ambient: tuple[Any, ...]
    hash: int

    def __hash__(self) -> int:
        return self.hash

    @property
    def scalars(self) -> tuple[tuple[int, Any], ...]:
        """The leaves that are Python values, with their positions."""
        return tuple((i, leaf) for i, leaf in enumerate(self.leaves) if leaf[0] in (_SCALAR, _HOST))

    @property
    def skeleton(self) -> tuple[Any, ...]:
        """The signature without the values of its scalars."""
        kept = tuple((leaf[0], leaf[1]) if leaf[0] in (_SCALAR, _HOST) else leaf for leaf in self.leaves)
        return (self.spec, kept, self.ambient)

    def summary(self) -> str:
        """One line for people: each tensor argument with dtype and shape, then the scalars."""
        words = []
        for path, leaf in zip(tree.paths(self.spec), self.leaves, strict=False):
            name = path.removeprefix("kwargs").replace("['", ".").replace("']", "").lstrip(".")
            if leaf[0] == _TENSOR:
                words.append(f"{name} {str(leaf[3]).removeprefix('torch.')}{list(leaf[1])}")
            elif leaf[0] == _SCALAR and leaf[1] in (int, float):
                words.append(f"{name}={float.fromhex(leaf[2]) if leaf[1] is float else leaf[2]}")
        return ", ".join(words)


@dataclass(slots=True)
class Call:
    """One call, taken apart."""

    leaves: list[Any]
    spec: tree.TreeSpec
    tensors: list[int]  # positions of the tensor leaves that become static inputs
    device: torch.device
    batch: int | None  # dimension 0 of the first floating-point tensor
    keys: tuple[Any, ...]
    any_strides: frozenset[int]  # tensors that are keyed without their strides
    shares_containers: bool  # one list or dict is given in two places
    read_only: frozenset[int] = frozenset()  # positions in arguments whose changes are dropped

    def storages(self) -> dict[int, int]:
        """The position of the first tensor in each memory, by storage."""
        found: dict[int, int] = {}
        for position, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                found.setdefault(storage_key(leaf), position)
        return found


_TENSOR, _SCALAR, _HOST, _SAME = "tensor", "scalar", "host", "same"


def read(args: tuple[Any, ...], kwargs: dict[str, Any], home: torch.device | None) -> Call | Fallback:
    """Take a call apart.

    Args:
        home: The device of the module's own tensors, where it has any.

    Returns:
        The parts, or why this call cannot be served from a graph.
    """
    try:
        leaves, spec = tree.flatten((args, kwargs))
    except RecursionError:
        return Fallback(FallbackReason.UNSUPPORTED_ARGUMENT, "a container that contains itself")
    unknown = [leaf for leaf in leaves if type(leaf) not in _COMMON and not _is_scalar(leaf)]
    if unknown:
        if not [leaf for leaf in unknown if not containers.open_class(type(leaf))]:
            return read(args, kwargs, home)
        return _unsupported(leaves, spec)
    if len(leaves) > _MAXIMUM_LEAVES:
        return Fallback(FallbackReason.UNSUPPORTED_ARGUMENT, f"{len(leaves)} leaves")
    return _take_apart((args, kwargs), leaves, spec, home)


def _is_scalar(leaf: Any) -> bool:
    """Immutable values beyond the common ones: enums, classes, numpy scalars, slices of numbers."""
    if isinstance(leaf, slice):
        return all(part is None or type(part) in (int, bool) for part in (leaf.start, leaf.stop, leaf.step))
    return isinstance(leaf, (enum.Enum, type)) or is_numpy_scalar(leaf)


def is_numpy_scalar(leaf: Any) -> bool:
    """Whether a value is one number of numpy's."""
    numpy = sys.modules.get("numpy")  # nobody can hold one of its scalars without having imported it
    return numpy is not None and isinstance(leaf, numpy.generic) and not isinstance(leaf, numpy.void)


def _unsupported(leaves: list[Any], spec: tree.TreeSpec) -> Fallback:
    for path, leaf in zip(tree.paths(spec), leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and type(leaf) not in _TENSORS:
            return Fallback(FallbackReason.TENSOR_KIND, f"{path} is {with_article(type(leaf).__name__)}")
        if isinstance(leaf, torch.Generator):
            return Fallback(FallbackReason.GENERATOR, f"{path} is a torch.Generator")
        if type(leaf) not in _COMMON and not _is_scalar(leaf) and not containers.open_class(type(leaf)):
            return Fallback(FallbackReason.UNSUPPORTED_ARGUMENT, f"{path} is {with_article(_class_name(leaf))}")
    raise AssertionError("an unknown leaf is of no kind at all")


def _class_name(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return f"function {value.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _take_apart(root: Any, leaves: list[Any], spec: tree.TreeSpec, home: torch.device | None) -> Call | Fallback:
    device = _device(leaves, home)
    if isinstance(device, Fallback):
        return device
    keys: list[Any] = []
    tensors: list[int] = []
    batch: int | None = None
    first_seen: dict[int, int] = {}
    free, several, has_dicts = containers.shape_of(spec)
    shares = repeats = False
    for position, leaf in enumerate(leaves):
        if type(leaf) not in _TENSORS:
            keys.append((_SCALAR, type(leaf), value_key(leaf)))
            continue
        if batch is None and leaf.dim() and leaf.dtype.is_floating_point:
            batch = leaf.shape[0]
        first = first_seen.setdefault(id(leaf), position)
        if first != position:
            keys.append((_SAME, first))
            repeats = True
            continue
        key = _tensor_key(leaf, device, position in free)
        if key is None:
            return _refuse_tensor(leaf, tree.paths(spec)[position], device)
        keys.append(key)
        if key[0] == _TENSOR:
            tensors.append(position)
    if repeats or several:
        pattern = containers.alias_pattern(root)
        keys.append((_SAME, pattern))
        shares = len(set(pattern)) != len(pattern)
    if has_dicts and containers.has_odd_keys(root):
        keys.append((_SAME, containers.key_types(root)))
    return Call(leaves, spec, tensors, device, batch, tuple(keys), free, shares)


def _device(leaves: list[Any], home: torch.device | None) -> torch.device | Fallback:
    """The one device that the call works on."""
    found: set[torch.device] = {leaf.device for leaf in leaves if type(leaf) in _TENSORS}
    if home is not None:
        found.add(home)
    if len(found) == 1:
        return found.pop()
    devices = {device for device in found if device.type != "cpu"}
    if len(devices) > 1 or (devices and home is not None and home.type == "cpu"):
        devices |= found
        return Fallback(FallbackReason.MIXED_DEVICES, ", ".join(sorted(map(str, devices))))
    if devices:
        return devices.pop()
    return Fallback(FallbackReason.NO_DEVICE, "no tensor in the module or its arguments")


def value_key(leaf: Any) -> Any:
    """A hashable stand-in for a Python value: equal exactly when the values are indistinguishable."""
    kind = type(leaf)
    if kind in _BY_VALUE:
        return leaf
    if kind is float:
        return leaf.hex()  # tells -0.0 from 0.0, and NaN equals itself
    if kind is complex:
        return (leaf.real.hex(), leaf.imag.hex())
    if is_numpy_scalar(leaf):
        return (leaf.dtype.str, leaf.tobytes())  # one day and one hour have the same bytes
    if kind is range:
        return (leaf.start, leaf.stop, leaf.step)  # equal ranges may end elsewhere
    if kind is slice:
        return tuple((type(part), part) for part in (leaf.start, leaf.stop, leaf.step))
    return leaf


def _tensor_key(leaf: torch.Tensor, device: torch.device, any_strides: bool) -> Any:
    """None for a tensor that cannot become a static input.

    Args:
        any_strides: The tensor lies in a cache, whose layout changes when its driver crops it
            without any meaning for the model: it is keyed, and kept, as contiguous.
    """
    if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_conj() or leaf.is_neg():
        return None
    shape = leaf.shape
    if leaf.device != device:
        # One value on the host: part of the signature, since kernels take it as a number.
        if leaf.numel() != 1:
            return None
        return (_HOST, (shape, leaf.dtype, leaf.requires_grad), value_key(leaf.item()))
    strides: Any = None if any_strides or leaf.is_contiguous() else _strides(leaf)
    if strides is not None and _overlaps_itself(shape, strides):
        return None
    if len(shape) > 3 and 1 in shape and strides is None and not any_strides and _is_channels_last(leaf):
        strides = "channels_last"  # as PyTorch tells it from contiguous, by strides that mean nothing else
    aligned = 0 if any_strides or len(shape) < 2 else alignment(leaf)
    return (_TENSOR, shape, strides, leaf.dtype, leaf.requires_grad, type(leaf), aligned)


def _is_channels_last(leaf: torch.Tensor) -> bool:
    """How PyTorch decides on the layout of a convolution's output (c10's ``is_channels_last_strides``)."""
    sizes, strides, least = leaf.shape, leaf.stride(), 0
    if strides[1] == 0 or leaf.dim() > 5:
        return False
    for dim in (1, *range(leaf.dim() - 1, 1, -1), 0):
        if sizes[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(sizes[dim], 1)
    return True


def alignment(leaf: torch.Tensor) -> int:
    """What of a tensor's address may decide which kernel a library takes, and so the last bits.

    Seen: a linear layer on the CPU gives other bits for an input that does not start at a multiple
    of 16 bytes.  cuBLASLt looks at powers of two up to 256.

    Returns:
        0 for an address as fresh memory has it.
    """
    address = leaf.data_ptr() % fresh_alignment(leaf.device)
    return address % 16 or address & -address


def fresh_alignment(device: torch.device) -> int:
    """How far alignment is looked at, in bytes; fresh memory is aligned at least so."""
    return 16 if device.type == "cpu" else 256


def _strides(leaf: torch.Tensor) -> tuple[int, ...]:
    """Strides with those of dimensions of size one left out, since they mean nothing."""
    return tuple(stride if size != 1 else 0 for size, stride in zip(leaf.shape, leaf.stride(), strict=True))


def _overlaps_itself(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether two elements share memory otherwise than by a stride of zero (an expanded view)."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1 and s):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _refuse_tensor(leaf: torch.Tensor, path: str, device: torch.device) -> Fallback:
    if leaf.device != device:
        return Fallback(FallbackReason.HOST_TENSOR, f"{path} is {list(leaf.shape)} on {leaf.device}, not on {device}")
    lazy = "a lazy conjugate or negative" if leaf.layout is torch.strided and (leaf.is_conj() or leaf.is_neg()) else ""
    kind = lazy or ("quantized" if leaf.is_quantized else str(leaf.layout).removeprefix("torch."))
    what = f"is {kind}" if kind != "strided" else "overlaps itself"
    return Fallback(FallbackReason.TENSOR_KIND, f"{path} {what}")


def of(call: Call, ambient: tuple[Any, ...]) -> Signature:
    """The signature of a call in its surroundings."""
    return Signature(call.spec, call.keys, ambient, hash((call.spec, call.keys, ambient)))
