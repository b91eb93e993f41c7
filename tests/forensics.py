"""Where a tape and eager part: operator by operator, for a mismatch that one machine shows and another does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hookgraph import tree
from hookgraph.backends import tape
from hookgraph.proof import same_bits


class _Kept(tape.Tape):
    """A tape that keeps what each operator gave while it was recorded."""

    def __init__(self) -> None:
        super().__init__([])
        self.first: list[tuple[str, list[torch.Tensor], list[torch.Tensor]]] = []

    def add(self, function: Any, args: Any, kwargs: Any, out: Any, given: set[int]) -> None:
        before = len(self._steps)
        super().add(function, args, kwargs, out, given)
        if len(self._steps) > before:
            results = [leaf for leaf in tree.flatten(out)[0] if isinstance(leaf, torch.Tensor)]
            inputs = [leaf for leaf in tree.flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
            self.first.append((str(function), inputs + results, [result.clone() for result in results]))


def parting(forward: Callable[..., Any], args: Any, kwargs: Any, launches: int = 8) -> list[str]:
    """What differs between eager, the recording of a call and launches of its tape, in words.

    Args:
        forward: What writes to nothing outside.
        launches: How often the tape is run.
    """
    said = [f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"]
    eager = [_tensors(forward(*args, **kwargs)) for _ in range(launches)]
    for index, again in enumerate(eager[1:], 1):
        if not _same(eager[0], again):
            said.append(f"eager {index} differs from eager 0")
    kept = _Kept()
    with tape._Recorder(kept):
        recorded = _tensors(forward(*args, **kwargs))
    if not _same(eager[0], [tensor.clone() for tensor in recorded]):
        said.append("the recording differs from eager")
    for launch in range(launches):
        with torch.no_grad():
            for step, (name, tensors, first) in zip(kept._steps, kept.first, strict=True):
                step.run()
                results = tensors[len(tensors) - len(first) :]
                if not _same(first, results):
                    said.append(f"launch {launch}: {name} differs: {[_look(tensor) for tensor in tensors]}")
                    break
        if not _same(eager[0], recorded):
            said.append(f"launch {launch} differs from eager")
    return said


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree.flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _same(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(mine, theirs, strict=True))


def _look(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} {list(tensor.stride())} at {tensor.data_ptr() % 4096} of a page"
