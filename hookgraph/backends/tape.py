"""The semantics of a CUDA graph on the CPU: record the operators once, run them on the same memory.

A rehearsal: the same decisions, counters and most failures as on a GPU, without one.

* Python of the forward runs once, while recording; what it decided is fixed.
* Each replay runs the operators again on the same storages; static outputs are overwritten.
* Memory that the recording did not allocate is pointed at, not owned: once its owner dropped it,
  a replay raises, where a GPU would read freed memory.
* Reading a value back to the host while recording is an error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hookgraph import tree
from hookgraph.audit import source_line, told
from hookgraph.backends import Graph, capture_surroundings
from hookgraph.dispatch import OperatorMode
from hookgraph.errors import CaptureError
from hookgraph.operators import draws, reads_back, tensors, written_tensors
from hookgraph.private_torch import casts_inside, compiled_part, storage_key
from hookgraph.reasons import Fallback, FallbackReason

_CPU = torch.device("cpu")
_UNINITIALISED = ("empty", "new_empty")


class HostClock:
    """Times work that is done when the host is."""

    def __enter__(self) -> None:
        self._started = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self._taken = time.perf_counter_ns() - self._started

    def wall_ns(self) -> int:
        return self._taken


class TapeBackend:
    """Records on the CPU.  One lock stands for the one pool that graphs of a device share."""

    name = "tape"
    promises_speed = False

    def __init__(self) -> None:
        self.turn = threading.RLock()

    def clock(self) -> HostClock:
        return HostClock()

    @property
    def pool_bytes(self) -> int:
        return 0  # every tape owns its memory

    def refuses(self, module: torch.nn.Module) -> Fallback | None:
        compiled = compiled_part(module)
        return Fallback(FallbackReason.COMPILED_PART, compiled) if compiled is not None else None

    def capture(
        self, call: Callable[[], Any], static_inputs: Sequence[torch.Tensor], draws_random_numbers: bool
    ) -> tuple[Graph, Any]:
        tape = Tape(static_inputs)
        recorder = _Recorder(tape)
        random_state = torch.get_rng_state()
        try:
            with capture_surroundings(), recorder:
                output = call()
        except Exception as error:
            tape.release()
            raise error if isinstance(error, CaptureError) else CaptureError(told(error)) from error
        finally:
            recorder.put_back()
            if tape.draws:  # recording has to execute, a capture does not; other threads draw from it, too
                torch.set_rng_state(random_state)
        if not tape.operators:
            raise CaptureError("the forward ran no operator")
        return tape, output


# Of these, PyTorch wants the vectors as well where a dispatch mode is active, which is another algorithm on the CPU:
# ``svdvals`` and what is made of it would be repeated with other last bits than eager has.
_OTHERWISE_WATCHED = {"aten::_linalg_svd", "aten::_linalg_eigh"}

# They change how a tensor looks at its memory, and move no data.
_REPOINTS = {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::set_data"}
_RESHAPES_IN_PLACE = _REPOINTS | {
    f"aten::{name}_" for name in ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze", "as_strided", "detach")
}  # fmt: skip


# Structured operators: the functional overload and the one with ``out=`` are one kernel, so these can
# write their static output themselves (https://github.com/pytorch/rfcs/blob/rfc-0005/RFC-0005-structured-kernel-definitions.md).
_STRUCTURED = frozenset(
    f"aten::{name}"
    for name in (
        "_softmax", "add", "addmm", "bmm", "cat", "cos", "div", "exp", "gelu", "mm", "mul", "neg", "pow", "rsqrt",
        "sigmoid", "silu", "sin", "sub", "tanh",
    )
)  # fmt: skip


def _with_out(function: Any) -> Any:
    """The overload of a structured operator that writes to ``out``; None for any other."""
    if function._schema.name not in _STRUCTURED:
        return None
    known = function._schema.arguments
    for name in function.overloadpacket.overloads():
        other = getattr(function.overloadpacket, name)
        *rest, last = other._schema.arguments
        if last.name == "out" and [(a.name, str(a.type)) for a in rest] == [(a.name, str(a.type)) for a in known]:
            return other
    return None


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same memory that keeps its geometry when the tensor's own is changed in place."""
    if tensor.layout is not torch.strided:
        return tensor
    return tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _Pointer:
    """A tensor that the recording read but did not make: its address, not its ownership."""

    __slots__ = ("_dtype", "_offset", "_shape", "_storage", "_strides", "key", "note")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._shape, self._strides = tensor.shape, tensor.stride()
        self._offset, self._dtype = tensor.storage_offset(), tensor.dtype
        self.key = storage_key(tensor)
        self.note = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise CaptureError(f"memory that the graph reads has been freed: {self.note}")
        return torch.empty(0, dtype=self._dtype, device=_CPU).set_(storage, self._offset, self._shape, self._strides)


class _Step:
    """One recorded operator: how to run it again, and where its results go."""

    __slots__ = ("_args", "_function", "_kwargs", "_leaves", "_pointers", "_result", "_results", "_spec", "_top")

    def __init__(
        self, function: Any, leaves: list[Any], spec: tree.TreeSpec, results: list[tuple[int, torch.Tensor]]
    ) -> None:
        self._function, self._leaves, self._spec, self._results = function, leaves, spec, results
        self._args, self._kwargs = tree.rebuild(spec, leaves)
        self._pointers = [index for index, leaf in enumerate(leaves) if isinstance(leaf, _Pointer)]
        self._top = [index for index, value in enumerate(self._args) if isinstance(value, _Pointer)]
        # Nearly every operator has one result, and its pointers straight among its arguments.
        self._result = results[0][1] if len(results) == 1 and len(function._schema.returns) == 1 else None
        direct = _with_out(function) if self._result is not None else None
        if direct is not None:
            self._function, self._kwargs = direct, {**self._kwargs, "out": self._result}
            self._leaves, self._spec = tree.flatten((tuple(self._args), self._kwargs))
            self._pointers = [index for index, leaf in enumerate(self._leaves) if isinstance(leaf, _Pointer)]
            self._result, self._results = None, []

    def run(self) -> None:
        if not self._pointers:
            out = self._function(*self._args, **self._kwargs)
        elif len(self._pointers) == len(self._top) == 1:
            args = list(self._args)
            args[self._top[0]] = args[self._top[0]].tensor()
            out = self._function(*args, **self._kwargs)
        else:
            out = self._run_with_pointers()
        if isinstance(out, torch.Tensor) and self._result is not None:
            self._result.copy_(out)
        elif self._results:
            fresh, _ = tree.flatten(out)
            for index, static in self._results:
                static.copy_(fresh[index])

    def pointers(self) -> list[_Pointer]:
        """What it reads from outside."""
        return [self._leaves[index] for index in self._pointers]

    def _run_with_pointers(self) -> Any:
        leaves = list(self._leaves)
        # Kernels ask whether two arguments are one object: one pointer gives one tensor.
        tensors = {pointer: pointer.tensor() for pointer in {leaves[index] for index in self._pointers}}
        for index in self._pointers:
            leaves[index] = tensors[leaves[index]]
        args, kwargs = tree.rebuild(self._spec, leaves)
        return self._function(*args, **kwargs)


class Tape:
    """Operators in order, and the memory they work on."""

    def __init__(self, static_inputs: Sequence[torch.Tensor]) -> None:
        self._steps: list[_Step] = []
        self._owned: list[torch.Tensor] = list(static_inputs)
        self._made = {storage_key(tensor) for tensor in static_inputs}
        self._inputs = len(self._owned)
        self._written: dict[int, _Pointer] = {}
        self.draws = False  # whether an operator draws random numbers

    @property
    def operators(self) -> int | None:
        return len(self._steps)

    @property
    def nbytes(self) -> int:
        inputs = {storage_key(tensor) for tensor in self._owned[: self._inputs]}
        storages = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in self._owned}
        return sum(size for key, size in storages.items() if key not in inputs)

    def launch(self) -> None:
        storages = [pointer.tensor().untyped_storage() for pointer in self._written.values()]
        before = [storage.clone() for storage in storages]
        random_state = torch.get_rng_state() if self.draws else None
        try:
            # What autocast did is among the operators already; around fp32 parts it must not act again.
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                for step in self._steps:
                    step.run()
        except BaseException:  # a launch that fails on a GPU has done nothing
            for storage, saved in zip(storages, before, strict=True):
                storage.copy_(saved)
            if random_state is not None:
                torch.set_rng_state(random_state)
            raise

    def release(self) -> None:
        self._steps.clear()
        self._owned.clear()
        self._made.clear()

    def owns(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._made

    def reads_beside(self, known: Collection[int]) -> str | None:
        for step in self._steps:
            for pointer in step.pointers():
                if pointer.key not in known:
                    return pointer.note
        return None

    def own(self, tensor: torch.Tensor) -> None:
        self._made.add(storage_key(tensor))
        self._owned.append(tensor)

    def own_constant(self, tensor: torch.Tensor) -> None:
        """Own a tensor that holds a constant, and set it anew at each launch: a forward may write to it."""
        self.own(tensor)
        value = tensor.clone()
        leaves, spec = tree.flatten(((_as_it_is(tensor), value), {}))
        self._steps.append(_Step(torch.ops.aten.copy_.default, leaves, spec, []))
        self._owned.append(value)

    def will_write(self, tensor: torch.Tensor) -> None:
        """Note memory of others that a launch writes."""
        self._written.setdefault(storage_key(tensor), _Pointer(tensor))

    def add(self, function: Any, args: Any, kwargs: Any, out: Any, given: set[int]) -> None:
        """Append an operator that has just run."""
        results, _ = tree.flatten(out)
        fresh = [(i, t) for i, t in enumerate(results) if isinstance(t, torch.Tensor) and storage_key(t) not in given]
        if not fresh and not function._schema.is_mutable:
            return  # a view: the memory it looks at stays where it is
        leaves, spec = tree.flatten((args, kwargs))
        for _, tensor in fresh:
            self.own(tensor)
        if function._schema.name.partition("::")[2].startswith(_UNINITIALISED):
            return
        # Kernels ask whether two arguments are one object: equal leaves stay one.
        stand_ins = {id(leaf): self._stand_in(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        pointed = [stand_ins.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._steps.append(_Step(function, pointed, spec, [(index, _as_it_is(tensor)) for index, tensor in fresh]))

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor | _Pointer:
        if self.owns(tensor):
            return _as_it_is(tensor)
        if tensor.is_conj() or tensor.is_neg():
            raise CaptureError("a tensor from outside is a lazy conjugate or negative")
        return _Pointer(tensor)


class _Recorder(OperatorMode):
    """Writes a tape while a forward runs; what it does to memory of others is put back.

    What compiled code made is found out afterwards: the tape does not own it.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def put_back(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()

    def meet(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        if casts_inside(func):
            raise CaptureError(
                f"{source_line()}: autocast is at work inside {func._schema.name}, where the tape cannot look"
            )
        if func._schema.name in _OTHERWISE_WATCHED:
            raise CaptureError(f"{source_line()}: {func._schema.name} takes another algorithm while it is watched")
        if reads_back(func, args, kwargs, _CPU):
            raise CaptureError(f"{source_line()}: {func._schema.name} reads a value back to the host")
        keys = {storage_key(tensor) for tensor in given}
        if func._schema.name.startswith("aten::lift_fresh"):
            for leaf in tree.flatten(args)[0]:
                self._tape.own_constant(leaf)  # torch.tensor(...)
        if func._schema.name in _RESHAPES_IN_PLACE:
            out = func(*args, **kwargs)
            if func._schema.name in _REPOINTS or not all(self._tape.owns(leaf) for leaf in tensors(args[:1])):
                raise CaptureError(f"{source_line()}: {func._schema.name} changes what a tensor looks at")
            return out  # it moves no data, and recorded operators have views of their own
        for tensor in written_tensors(func, args, kwargs):
            if not self._tape.owns(tensor):
                storage = tensor.untyped_storage()
                self._before.setdefault(storage_key(tensor), (storage, storage.clone()))
                self._tape.will_write(tensor)
        self._tape.draws |= draws(func, args, kwargs)
        out = func(*args, **kwargs)
        self._tape.add(func, args, kwargs, out, keys)
        return out
