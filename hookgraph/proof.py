"""Proof before trust: is what a replay gave what eager gives, to the last bit?"""

from __future__ import annotations

from typing import Any

import torch

from hookgraph import containers, tree
from hookgraph.results import Rebuilt


def difference(replayed: Rebuilt, output: Any, written: list[torch.Tensor]) -> str | None:
    """Where a replay and the eager call that followed it differ; None when nowhere.

    Args:
        replayed: What the replay gave back, not written back to the caller.
        output: What eager returned.
        written: The new values of the arguments in ``replayed.arguments``, kept before eager ran.
    """
    found = _tree_difference(replayed.output, output, "output")
    for (theirs, _), value in zip(replayed.arguments, written, strict=True):
        if found is None and not same_bits(value, theirs):
            found = f"an argument written in place differs by {_distance(value, theirs)}"
    for container, contents in replayed.contents:
        now = containers.Contents.of(container)
        if list(now.attributes) != list(contents.attributes) or list(now.items) != list(contents.items):
            return found or f"{type(container).__name__} holds other keys"
        found = found or _tree_difference(contents.values(), now.values(), f"argument {type(container).__name__}")
    return found


def is_close(mine: Any, theirs: Any) -> bool:
    """Whether two outputs agree within the tolerance that their dtypes warrant.

    For forwards that do not agree with themselves bit for bit, such as those with atomic additions.
    """
    pairs = zip(tree.flatten(mine)[0], tree.flatten(theirs)[0], strict=True)
    try:
        for a, b in pairs:
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b, equal_nan=True)
    except AssertionError:
        return False
    return True


def _tree_difference(mine: Any, theirs: Any, where: str) -> str | None:
    if mine is theirs:
        return None
    leaves, spec = tree.flatten(mine)
    others, other_spec = tree.flatten(theirs)
    if spec != other_spec:
        return f"{where} has another structure"
    for a, b in zip(leaves, others, strict=True):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            found = _tensor_difference(a, b, where)
            if found:
                return found
        elif type(a) is not type(b) or not _equal_values(a, b):
            return f"{where} holds {a!r} where eager gives {b!r}"
    return None


def _equal_values(a: Any, b: Any) -> bool:
    return bool(a is b or a == b or (a != a and b != b))


def _tensor_difference(mine: torch.Tensor, theirs: torch.Tensor, where: str) -> str | None:
    if mine is theirs:
        return None
    for what in ("shape", "dtype", "device", "requires_grad"):
        if getattr(mine, what) != getattr(theirs, what):
            return f"{where} has {what} {getattr(mine, what)} where eager gives {getattr(theirs, what)}"
    if _strides(mine) != _strides(theirs):
        return f"{where} has strides {mine.stride()} where eager gives {theirs.stride()}"
    return None if same_bits(mine, theirs) else f"{where} differs by {_distance(mine, theirs)}"


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits, NaN included."""
    if a.is_meta:
        return True
    with torch.no_grad():
        return torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # A clone, since one element may call itself contiguous with a stride of zero, which no view accepts.
    flat = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


def _distance(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return f"{(a.double() - b.double()).abs().max().item():.3g}"
