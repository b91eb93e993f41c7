"""What an operator does beside computing its result: what it writes, reads back, draws; by its schema and its arguments."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

_COLLECTIVE_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
_COPIES = {"_to_copy", "copy_"}
# Their schemas do not say that they advance the running statistics.
_BATCH_NORMS = {
    "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index", "batch_norm", "instance_norm",
}  # fmt: skip
# They read the values of an argument below the dispatcher.
_READ_BELOW = {"_pack_padded_sequence", "_pad_packed_sequence"}
_INDEXED = {"index", "_unsafe_index"}
_PUT = {"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_NO_TENSORS = frozenset(
    {
        int,
        float,
        bool,
        complex,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
    }
)


class ReadsBack(Enum):
    """When an operator makes the host wait for a value that the device computes."""

    NEVER = "never"
    ALWAYS = "always"
    OF_ITS_DEVICE = "for arguments on the device"
    BY_MASK = "where it indexes with a mask"
    PUTS_BY_MASK = "where it puts several values at a mask"
    BY_REPEATS = "without output_size"


@dataclass(frozen=True, slots=True)
class Operator:
    """What the schema and the tags of one operator say; the same for all its calls."""

    name: str  # without "aten::"
    is_custom: bool  # not one of PyTorch's own
    is_collective: bool
    is_copy: bool
    is_batch_norm: bool
    written: tuple[tuple[int, str], ...]  # position and name of the arguments that it writes to
    reads_back: ReadsBack
    may_draw: bool
    dropout: tuple[int, Any] | None  # position and default of the probability without which nothing is drawn


@functools.cache
def about(func: Any) -> Operator:
    """Read an operator's schema, once."""
    schema = func._schema
    namespace, _, base = schema.name.partition("::")
    arguments = list(enumerate(schema.arguments))
    dropout = [(position, argument.default_value) for position, argument in arguments if argument.name == "dropout_p"]
    return Operator(
        name=base if namespace == "aten" else schema.name,
        is_custom=namespace not in ("aten", "prims", "prim"),
        is_collective=namespace in _COLLECTIVE_NAMESPACES,
        is_copy=base in _COPIES,
        is_batch_norm=base in _BATCH_NORMS,
        written=tuple(
            (position, argument.name)
            for position, argument in (arguments if schema.is_mutable else ())
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
        reads_back=_reads_back(base, func.tags),
        may_draw=torch.Tag.nondeterministic_seeded in func.tags,
        dropout=dropout[0] if dropout else None,
    )


def _reads_back(base: str, tags: Any) -> ReadsBack:
    """PyTorch tags such operators; indexing and ``repeat_interleave`` do so only for some arguments."""
    if base in _READ_BELOW:
        return ReadsBack.ALWAYS
    if torch.Tag.data_dependent_output not in tags and torch.Tag.dynamic_output_shape not in tags:
        return ReadsBack.PUTS_BY_MASK if base in _PUT else ReadsBack.NEVER
    if base in _INDEXED:
        return ReadsBack.BY_MASK
    return ReadsBack.BY_REPEATS if base == "repeat_interleave" else ReadsBack.OF_ITS_DEVICE


def tensors(*values: Any) -> list[torch.Tensor]:
    """The tensors among the arguments or results of an operator."""
    found: list[torch.Tensor] = []
    _collect(values, found)
    return found


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for value in values:
        kind = type(value)
        if kind in _PLAIN_TENSORS:
            found.append(value)
        elif kind in _NO_TENSORS:
            continue
        elif isinstance(value, (list, tuple)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
        elif isinstance(value, torch.Tensor):
            found.append(value)


def reads_back(func: Any, args: Any, kwargs: Any, device: torch.device) -> bool:
    """Whether a call makes the host wait for a value that the device computes."""
    when = about(func).reads_back
    if when is ReadsBack.NEVER or when is ReadsBack.ALWAYS:
        return when is ReadsBack.ALWAYS
    if when is ReadsBack.PUTS_BY_MASK:  # it asks for the number of true elements, unless there is one value
        return any(_is_mask(index) and index.device == device for index in args[1]) and args[2].numel() != 1
    given = tensors(args, kwargs)
    if given and all(tensor.device != device for tensor in given):
        return False  # a value of the host's own
    if when is ReadsBack.BY_MASK:
        return any(_is_mask(index) for index in args[1])
    return when is ReadsBack.OF_ITS_DEVICE or kwargs.get("output_size") is None


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call may draw random numbers; attention kernels do so only with dropout."""
    operator = about(func)
    if not operator.may_draw or operator.dropout is None:
        return operator.may_draw
    position, default = operator.dropout
    return bool((args[position] if position < len(args) else kwargs.get("dropout_p", default)) != 0.0)


def written_tensors(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that a call writes to."""
    operator = about(func)
    if operator.is_batch_norm:
        yield from _running_statistics(func, args, kwargs)
    for position, name in operator.written:
        yield from tensors(args[position] if position < len(args) else kwargs.get(name))


def _running_statistics(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if given.get("training", given.get("train", given.get("use_input_stats", True))):
        for name in ("running_mean", "running_var"):
            if given.get(name) is not None:
                yield given[name]
