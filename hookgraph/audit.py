"""The watched warm-up: what a forward reads, writes, draws, and asks of the host.

The first calls of a signature are real eager calls under a ``TorchDispatchMode``.  What it sees
decides whether a capture is tried at all, so that most captures that would fail never start, and
the reason names a line of the model's source.

Cost: about one extra eager call, for each watched call.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hookgraph import containers
from hookgraph.constants import HostConstants, host_copy, makers
from hookgraph.dispatch import OperatorMode
from hookgraph.operators import Operator, about, draws, reads_back, tensors, written_tensors
from hookgraph.private_torch import (
    ThreadPatch,
    autocast_noted,
    autocast_weights_uncached,
    call_as_outside,
    storage_key,
)
from hookgraph.reasons import Fallback, FallbackReason

_SKIPPED_FOLDERS = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, __file__))
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")  # may lie in its folder
_LARGEST_CONSTANTS = 256 << 20  # bytes; a forward that moves more from the host each call moves weights

# What a forward asks of the host, in the words of who writes a forward, not in the dispatcher's.
_ITEM = "takes a value by .item(), float(), int(), bool() or if"
_MASK = "indexes by a mask, as x[mask] or masked_select: the result has as many elements as are true"
_NONZERO = "nonzero, argwhere or torch.where(condition): the result has as many rows as are true"
_UNIQUE = "torch.unique: the result has as many elements as differ"
_PRINT = "shows values (print, repr, an f-string or a log line)"
_ARRAY = "hands values to numpy or another library on the host"
_WORDS = {
    "_local_scalar_dense": _ITEM, "item": _ITEM, "is_nonzero": _ITEM, "equal": "compares by torch.equal, whose answer is a bool",
    "index": _MASK, "_unsafe_index": _MASK, "masked_select": _MASK,
    "index_put": "writes by a mask, as x[mask] = values", "index_put_": "writes by a mask, as x[mask] = values",
    "_index_put_impl_": "writes by a mask, as x[mask] = values",
    "nonzero": _NONZERO, "nonzero_numpy": _NONZERO, "argwhere": _NONZERO,
    "_unique": _UNIQUE, "_unique2": _UNIQUE, "unique_dim": _UNIQUE, "unique_consecutive": _UNIQUE,
    "repeat_interleave": "repeat_interleave by a tensor without output_size",
    "_pack_padded_sequence": "pack_padded_sequence reads the lengths", "_pad_packed_sequence": "pad_packed_sequence reads the lengths",
    "tensor_split": "tensor_split by a tensor", "tolist": "takes all values by .tolist()",
    "numpy": _ARRAY, "__array__": _ARRAY, "__dlpack__": _ARRAY, "__repr__": _PRINT, "__format__": _PRINT,
    "_to_copy": "moves a tensor by .cpu() or .to()", "copy_": "copies a tensor by copy_()",
}  # fmt: skip


Weak = weakref.WeakValueDictionary[int, torch.Tensor]


@dataclass(slots=True)
class Findings:
    """What the watched calls of one signature showed."""

    blocker: Fallback | None = None
    draws_random_numbers: bool = False
    written_arguments: set[int] = field(default_factory=set)
    # By storage, and not kept alive: a signature that never comes back must hold no memory.
    side: Weak = field(default_factory=weakref.WeakValueDictionary)  # neither argument, module's nor made inside
    # Other objects that look at side tensors or at the module's own, by identity: what was read may be a view that somebody
    # keeps and replaces by itself.  Most die with the forward.
    views: Weak = field(default_factory=weakref.WeakValueDictionary)
    side_lines: dict[int, str] = field(default_factory=dict)
    written_outside: Weak = field(default_factory=weakref.WeakValueDictionary)  # module's and side tensors
    kept: str | None = None  # a tensor that the forward made and that somebody outside keeps
    outside: int = 0  # how many both had when the forward ended
    constants: HostConstants = field(default_factory=HostConstants)
    operators: int = 0
    custom: bool = False  # whether one of them is not PyTorch's own, whose tags may not say what it draws

    def complete(self) -> bool:
        """Whether every tensor that the forward used from outside is still there."""
        return len(self.side) + len(self.written_outside) == self.outside

    def block(self, reason: FallbackReason, what: str) -> None:
        """Remember the first thing that forbids a graph, with the line that does it."""
        if self.blocker is None:
            self.blocker = Fallback(reason, f"{source_line()}: {what}")


_auditing = threading.local()


def _told(
    reason: FallbackReason, what: str, when: Callable[..., bool] = lambda *args, **kwargs: True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function tell the audit of this thread that the forward calls it."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def tell(*args: Any, **kwargs: Any) -> Any:
            if when(*args, **kwargs):
                _auditing.findings.block(reason, what)
            return original(*args, **kwargs)

        return tell

    return replace


# What no dispatch mode sees: values of CPU tensors read in C++, and a generator that is set.
_READERS = ("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__")
_readers = ThreadPatch(torch.Tensor, {name: _told(FallbackReason.READ_BACK, _WORDS[name]) for name in _READERS})


def _splits_by_tensor(*args: Any, **kwargs: Any) -> bool:
    return any(isinstance(value, torch.Tensor) for value in (*args[1:], *kwargs.values()))


_splitters = [
    ThreadPatch(owner, {"tensor_split": _told(FallbackReason.READ_BACK, _WORDS["tensor_split"], _splits_by_tensor)})
    for owner in (torch, torch.Tensor)
]
_SEEDERS = {torch: ("manual_seed", "seed", "set_rng_state"), torch.cuda: ("manual_seed", "set_rng_state")}
_seeders = [
    ThreadPatch(owner, {name: _told(FallbackReason.GENERATOR, f"torch.{name}") for name in names})
    for owner, names in _SEEDERS.items()
]


@contextmanager
def watch(audit: Audit) -> Iterator[None]:
    """Run the block, an eager forward, under an audit.

    Restores: the functions that tell, once no thread audits any more.
    """
    before = getattr(_auditing, "findings", None)
    _auditing.findings = audit.findings
    with ExitStack() as stack:
        stack.callback(setattr, _auditing, "findings", before)
        # Reading a tensor on the host is a read-back only where the host is the device.
        for patch in ([_readers] if audit.device.type == "cpu" else []) + _seeders + _splitters:
            stack.enter_context(patch.active())
        stack.enter_context(makers.active())
        stack.enter_context(autocast_weights_uncached())
        stack.enter_context(autocast_noted())
        stack.enter_context(audit)
        yield


class Audit(OperatorMode):
    """Watch the operators of one eager forward.

    Args:
        device: The device that the call works on.
        arguments: The leaf position of each argument tensor, by storage.
        own: The module's parameters and buffers, by storage.
        compiled: Whether some of the forward is compiled, and allocates memory unseen.
    """

    def __init__(
        self, device: torch.device, arguments: dict[int, int], own: dict[int, torch.Tensor], compiled: bool
    ) -> None:
        super().__init__()
        self._compiled = compiled
        self._passing: dict[int, StorageWeakRef] = {}
        self._written_passing: set[int] = set()
        self.findings = Findings()
        self.device, self._arguments, self._own = device, arguments, own
        self._made: set[int] = set()
        self._held: list[torch.Tensor] = []
        self._alive: dict[int, StorageWeakRef] = {}
        self._random_on_host = False

    def meet_higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.findings.block(FallbackReason.HIGHER_ORDER, func.name())
        return func(*args, **kwargs)

    def meet(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        operator: Operator | None = None
        keys: list[int] = []
        try:
            operator = about(func)
            keys = [storage_key(tensor) for tensor in given]
            self._look_before(func, operator, args, kwargs, given, keys)
        except Exception as error:
            self._fail(error)
        out = call_as_outside(func, args, kwargs)
        try:
            if operator is None or operator.written:  # it may have given them other memory
                keys = [storage_key(tensor) for tensor in given]
            self._look_at_results(keys, out)
            copy = host_copy(func, args, kwargs) if operator is not None and operator.is_copy else None
            if copy is not None:
                self._keep_constant(copy[0], out)
        except Exception as error:
            self._fail(error)
        return out

    def _fail(self, error: Exception) -> None:
        """Watch to no avail: an error of the audit's own, out of memory say, is none of the forward's."""
        self.findings.blocker = self.findings.blocker or Fallback(FallbackReason.INTERNAL_ERROR, told(error))

    def _look_before(
        self, func: Any, operator: Operator, args: Any, kwargs: Any, given: list[torch.Tensor], keys: list[int]
    ) -> None:
        self.findings.operators += 1
        self.findings.custom |= operator.is_custom
        if operator.is_collective:
            self.findings.block(FallbackReason.COLLECTIVE, str(func))
        self._look_at_reads(operator, given, keys)
        self._look_at_host(func, operator, args, kwargs, given)
        self._look_at_random(func, operator, args, kwargs, given)
        if operator.written or operator.is_batch_norm:
            self._look_at_writes(func, args, kwargs)

    def _keep_constant(self, source: torch.Tensor, arrived: torch.Tensor) -> None:
        """What the forward copied from the host; a capture will be served the same value."""
        self.findings.constants.record(source, arrived)
        if self._random_on_host:
            self.findings.block(FallbackReason.HOST_COPY, "random numbers are drawn on the CPU and copied over")
        if self.findings.constants.nbytes > _LARGEST_CONSTANTS:
            self.findings.block(FallbackReason.HOST_COPY, f"{self.findings.constants.nbytes >> 20} MiB on each call")

    def _look_at_reads(self, operator: Operator, given: list[torch.Tensor], keys: list[int]) -> None:
        for tensor, key in zip(given, keys, strict=True):
            if key in self._made or key in self._arguments or key in self._passing:
                continue
            if key in self.findings.side:
                self.findings.views[id(tensor)] = tensor
                continue
            if key in self._own and tensor.device == self.device:
                if tensor is not self._own[key]:
                    self.findings.views[id(tensor)] = tensor
                continue  # guarded by address; one on the host goes into the graph by its values
            if operator.name in ("lift_fresh", "lift_fresh_copy"):
                self._made.add(key)  # torch.tensor(...): a constant, made just now
                continue
            self.findings.side_lines[key] = source_line()
            if self._compiled:
                self._passing[key] = StorageWeakRef(tensor.untyped_storage())
            else:
                self.findings.views[id(tensor)] = tensor
                self._hold(self.findings.side, key, tensor)

    def _hold(self, where: Weak, key: int, tensor: torch.Tensor) -> None:
        """Keep a tensor until the forward has ended, so that its memory serves no other meanwhile."""
        # A view may live for this operator alone.  One whose ``data`` was exchanged still names its base.
        while tensor._base is not None and storage_key(tensor._base) == storage_key(tensor):
            tensor = tensor._base
        where[key] = tensor
        self._held.append(tensor)

    def finish(self, result: Any) -> None:
        """Tell side tensors from what compiled code allocated, which no mode sees it do.

        What dies with the forward, or comes out of it, was made in it.

        Args:
            result: The output of the forward, and the arguments as it left them.
        """
        came_out = {storage_key(tensor) for tensor in containers.tensors_in(result)}
        held = len(self.findings.side) + len(self.findings.written_outside)
        self._held.clear()
        self._look_at_kept(came_out, result[0])
        if self._passing:
            self._sort_out_passing(came_out)
            held = len(self.findings.side) + len(self.findings.written_outside)
        self.findings.outside = held
        self._held.clear()

    def _look_at_kept(self, came_out: set[int], output: Any) -> None:
        """Notice a table that the forward has just put into a cache of a function or a global.

        The graph would read its memory without keeping it alive; the next warm-up finds it there, and
        then it is a side tensor like any other.
        """

        def survivors() -> list[int]:
            return [key for key, ref in self._alive.items() if key not in came_out and not ref.expired()]

        if survivors():
            gc.collect()  # a cycle of the forward may still hold some
            left = survivors()
            opaque = containers.opaque_in(output)
            if left and opaque is not None:
                self.findings.blocker = self.findings.blocker or Fallback(
                    FallbackReason.OUTPUT_KIND, f"output holds {opaque}"
                )
            elif left:
                self.findings.kept = f"{len(left)} of the tensors that it makes are kept outside the module"

    def _sort_out_passing(self, came_out: set[int]) -> None:
        gc.collect()  # a cycle of the forward may still hold some
        left = {key for key, storage in self._passing.items() if not storage.expired() and key not in came_out}
        # Compiled code reads through views of its own: look for who holds the memory.
        holders = (thing for thing in (gc.get_objects() if left else ()) if isinstance(thing, torch.Tensor))
        for tensor in holders:
            if not left:
                break
            key = storage_key(tensor)
            if key in left:
                left.discard(key)
                self._hold(self.findings.side, key, tensor)
                if key in self._written_passing:
                    self.findings.written_outside[key] = tensor
        if left and self.findings.blocker is None:
            lines = self.findings.side_lines
            self.findings.blocker = Fallback(FallbackReason.SIDE_TENSOR, lines[next(iter(left))])

    def _look_at_host(self, func: Any, operator: Operator, args: Any, kwargs: Any, given: list[torch.Tensor]) -> None:
        if reads_back(func, args, kwargs, self.device):
            self.findings.block(FallbackReason.READ_BACK, _in_words(operator))
            return
        if self.device.type == "cpu":
            return
        if operator.is_copy:
            self._look_at_copy(operator, kwargs, given)
        elif any(t.device != self.device for t in given) and any(t.device == self.device for t in given):
            for tensor in given:
                if tensor.device != self.device and not self._is_constant(tensor):
                    what = f"{operator.name} takes a value from a tensor on {tensor.device}"
                    self.findings.block(FallbackReason.HOST_TENSOR, what)

    def _look_at_copy(self, operator: Operator, kwargs: Any, given: list[torch.Tensor]) -> None:
        """A copy from the device to the CPU is a read-back."""
        source = given[1] if len(given) > 1 else given[0]
        wanted = kwargs.get("device")
        target = given[0].device if len(given) > 1 else source.device if wanted is None else torch.device(wanted)
        if source.device.type != "cpu" and target.type == "cpu" and source.numel():
            self.findings.block(FallbackReason.READ_BACK, f"{_in_words(operator)} to {target}")

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        """Made from Python numbers inside the forward, or an argument that is keyed by value."""
        key = storage_key(tensor)
        return key in self._made or key in self._arguments

    def _look_at_random(self, func: Any, operator: Operator, args: Any, kwargs: Any, given: list[torch.Tensor]) -> None:
        if operator.may_draw and draws(func, args, kwargs):
            self.findings.draws_random_numbers = True
            devices = {tensor.device.type for tensor in given}
            wanted = torch.device(kwargs.get("device") or "cpu").type
            self._random_on_host |= "cpu" in (devices or {wanted})
        if isinstance(kwargs.get("generator"), torch.Generator):
            self.findings.block(FallbackReason.GENERATOR, operator.name)

    def _look_at_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in written_tensors(func, args, kwargs):
            key = storage_key(tensor)
            if key in self._arguments:
                self.findings.written_arguments.add(self._arguments[key])
            elif key in self._passing:
                self._written_passing.add(key)
            elif key not in self._made:
                self._hold(self.findings.written_outside, key, self._own.get(key, tensor))

    def _look_at_results(self, known: Sequence[int], out: Any) -> None:
        for tensor in tensors(out):
            key = storage_key(tensor)
            if key not in known:
                self._made.add(key)
                if tensor.layout is torch.strided:
                    self._alive[key] = StorageWeakRef(tensor.untyped_storage())
                # The memory of a dead tensor may serve a new one: then it is no side tensor any more.
                self.findings.side.pop(key, None)
                self._passing.pop(key, None)


def _in_words(operator: Operator) -> str:
    return _WORDS.get(operator.name, operator.name)


def told(error: BaseException) -> str:
    """An exception in one line, with the innermost line of the model's source that it passed."""
    place, text = place_of(error), said(error)
    return f"{place}: {text}" if place else text


def said(error: BaseException) -> str:
    """The class of an exception and the first line of its message."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def place_of(error: BaseException) -> str | None:
    """The innermost line of the model's source that an exception passed, as ``file.py:12 in forward``."""
    if isinstance(error, SyntaxError) and error.filename:  # it has run nothing of that file
        return f"{_short(error.filename)}:{error.lineno}"
    found = None
    trace = error.__traceback__
    while trace is not None:
        if _is_model(trace.tb_frame.f_code.co_filename):
            found = _place(trace.tb_frame.f_code, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _is_model(filename: str) -> bool:
    """Whether a file is neither of torch, nor ours, nor of Python itself, such as its ``logging``."""
    if filename.startswith((*_SKIPPED_FOLDERS, "<frozen ")):
        return False
    return not filename.startswith(_STANDARD_LIBRARY) or any(folder in filename for folder in _INSTALLED)


def _place(code: types.CodeType, line: int) -> str:
    return f"{_short(code.co_filename)}:{line} in {code.co_qualname}"


def _short(filename: str) -> str:
    return "/".join(Path(filename).parts[-2:])


def first_line(code: types.CodeType) -> str:
    """Where a function begins, as ``file.py:12``."""
    return f"{_short(code.co_filename)}:{code.co_firstlineno}"


def source_line() -> str:
    """The innermost line of the model's own source that is running, as ``file.py:12 in forward``."""
    frame: types.FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        code = frame.f_code
        if code.co_filename == logging.__file__:
            found = None  # a handler of another library shows the value, and the line that logs it lies further out
        elif found is None and _is_model(code.co_filename):
            found = _place(code, frame.f_lineno)
        frame = frame.f_back
    return found or "unknown line"
