"""One signature's graph: capture it, replay it, prove it."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hookgraph import proof, results, tree
from hookgraph.audit import Findings, told
from hookgraph.backends import Backend, Clock, Graph
from hookgraph.constants import Serve, makers
from hookgraph.errors import CaptureError
from hookgraph.guards import Guards, own_tensors
from hookgraph.inputs import Mark, StaticInputs
from hookgraph.private_torch import storage_key
from hookgraph.read_only import NONE, ReadOnly
from hookgraph.reasons import Fallback, FallbackReason
from hookgraph.results import Rebuilt, Recipe, Shadow
from hookgraph.signature import Call
from hookgraph.state import ModuleState
from hookgraph.worth import Worth

_log = logging.getLogger("hookgraph")
_SMALL = 1 << 20  # bytes; counters and statistics are smaller, tables are not written
_EAGER_AGAIN = 4  # calls at most to find out whether eager agrees with itself, after a mismatch only

Forward = Callable[..., Any]


Memories = dict[int, torch.UntypedStorage]  # by storage: several tensors may lie in one


def _memories(tensors: list[torch.Tensor]) -> Memories:
    return {storage_key(tensor): tensor.untyped_storage() for tensor in tensors}


def _same_memory(a: torch.UntypedStorage, b: torch.UntypedStorage) -> bool:
    return proof.same_bits(*(torch.empty(0, dtype=torch.uint8, device=part.device).set_(part) for part in (a, b)))


@dataclass(slots=True)
class Replayed:
    """One replay whose effects have been taken back, to be compared with eager."""

    rebuilt: Rebuilt
    arguments: list[torch.Tensor]  # new values of the arguments written in place
    outside: Memories  # what the module's memory that it writes held afterwards
    unseen: str | None  # a write that the audit did not see
    marks: list[Mark]  # the values that it was made with
    clock: Clock  # has timed what a replay does
    eager_clock: Clock  # for the eager call that follows

    def worth(self) -> Worth:
        """How long both took, once eager has run."""
        return Worth(self.eager_clock.wall_ns(), self.clock.wall_ns())


def frozen_argument(written: list[torch.Tensor]) -> Fallback | None:
    """Why arguments cannot be written to here: eager raises for an inference tensor outside of that mode."""
    if not torch.is_inference_mode_enabled() and any(tensor.is_inference() for tensor in written):
        return Fallback(FallbackReason.TENSOR_KIND, "the forward writes to an inference tensor outside inference mode")
    return None


class Stale(Exception):
    """A graph no longer fits its module."""


class CapturedForward:
    """A graph with its static inputs, the recipe for its results, and its guards."""

    def __init__(
        self,
        backend: Backend,
        graph: Graph,
        inputs: StaticInputs,
        recipe: Recipe,
        guards: Guards,
        findings: Findings,
        capture_ns: int,
    ) -> None:
        self.backend, self._graph = backend, graph
        self.inputs, self._recipe, self.guards = inputs, recipe, guards
        self._random = findings.draws_random_numbers
        # Not kept alive: a module that is moved has to free what it was.
        self._written_outside = [weakref.ref(tensor) for tensor in findings.written_outside.values()]
        self._written_storages = set(findings.written_outside)
        self._module_storages = guards.storages()
        self._has_effects = self._random or bool(self._written_outside)
        self._constants = findings.constants  # the graph reads them at their addresses
        self._compared: list[Mark] = []
        self.at_work = False  # a signal handler or a finalizer may call the module in the middle of a replay
        self.capture_ns = capture_ns
        self._can_alias = bool(recipe.written or self._written_storages)

    @property
    def _outside(self) -> list[torch.Tensor]:
        """The module's tensors that the graph writes; all there are while the guards hold."""
        return [tensor for ref in self._written_outside if (tensor := ref()) is not None]

    @property
    def operators(self) -> int | None:
        return self._graph.operators

    @property
    def input_bytes(self) -> int:
        return self.inputs.nbytes + self._constants.nbytes

    @property
    def graph_bytes(self) -> int:
        return self._graph.nbytes

    @property
    def output_bytes(self) -> int:
        return self._recipe.nbytes

    def release(self) -> None:
        """Give back the graph's memory; it cannot be replayed afterwards."""
        self._graph.release()

    def aliasing(self, leaves: list[Any]) -> Fallback | None:
        """Why this call's arguments must not be copied: one that is written shares memory."""
        if not self._can_alias:
            return None
        frozen = frozen_argument([leaves[position] for position, _ in self._recipe.written])
        if frozen is not None:
            return frozen
        written = {storage_key(leaves[position]) for position, _ in self._recipe.written}
        storages = [storage_key(leaves[position]) for position in self.inputs.positions]
        if any(storages.count(key) > 1 for key in written):
            return Fallback(FallbackReason.ALIASED_ARGUMENTS)
        if not self._written_storages.isdisjoint(storages) or not self._module_storages.isdisjoint(written):
            return Fallback(FallbackReason.ALIASED_ARGUMENTS, "with a tensor of the module")
        return None

    def before_launch(self) -> str | None:
        """What must be known before the graph may run: a launch with effects cannot be taken back."""
        change = self.guards.moved()
        return self.guards.changed() if change is None and self._has_effects else change

    def replay(
        self, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], clone: bool, loop: object | None = None
    ) -> Any:
        """Run the graph on a call's arguments and return what the forward would return.

        Args:
            leaves: The leaves of ``(args, kwargs)``.
            loop: The sampling loop that the call belongs to, if any.

        Raises:
            Stale: The module has changed since the capture; nothing has been written.
            CaptureError: It failed and left no effect.  Any other error came after a launch that wrote to the
                module's memory or drew random numbers, which cannot be taken back, or from the arguments
                themselves when their new values were written back.

        Streams: the caller's current stream does all the work.
        Aliasing: the output shares no memory with the graph, where ``clone`` says so.
        """
        launched = False
        with self.backend.turn:
            try:
                self.at_work = True
                self.inputs.fill(leaves, loop)
                self._graph.launch()
                launched = True
                rebuilt = self._recipe.rebuild(leaves, args, kwargs, clone)
                # The device is at work: time to see whether its result may be used.
                change = None if self._has_effects else self.guards.changed()
            except CaptureError:
                raise
            except Exception as error:
                if launched and self._has_effects:
                    raise
                raise CaptureError(told(error)) from error
            finally:
                self.at_work = False
            if change is not None:
                raise Stale(change)
            rebuilt.write_back()
        return rebuilt.output

    def _small_buffers(self) -> list[torch.Tensor]:
        known = {storage_key(tensor) for tensor in self._outside}
        return [
            buffer
            for buffer in self.guards.buffers()
            if storage_key(buffer) not in known and buffer.untyped_storage().nbytes() <= _SMALL
        ]

    # -- proof ---------------------------------------------------------------------------------

    def sees_new_values(self, call: Call) -> bool:
        """Whether a call's tensors are not the very ones of the last comparison, unchanged since.

        By object and version: to compare the values themselves would wait for the device.
        """
        return len(self._compared) != len(call.tensors) or not all(
            mark.fits(call.leaves[position]) for mark, position in zip(self._compared, call.tensors, strict=True)
        )

    def rehearse(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Replayed:
        """Run the graph and take back every effect, so that eager can run the same call.

        Restores: the memory of the module that the graph writes, and random state; also on failure.
        """
        marks = [Mark(call.leaves[position]) for position in call.tensors]
        random, clock = RandomState(call.device) if self._random else None, self.backend.clock()
        written = _memories(self._outside)
        watched = {key: memory for key, memory in _memories(self._small_buffers()).items() if key not in written}
        with self.backend.turn, torch.no_grad():
            before = {key: memory.clone() for key, memory in (written | watched).items()}
            try:
                self.at_work = True
                with clock:  # with what else a replay does, though here it is known
                    tree.flatten((args, kwargs))
                    self.before_launch()
                    self.inputs.fill(call.leaves)
                    self._graph.launch()
                    rebuilt = self._recipe.rebuild(call.leaves, args, kwargs, clone=True)
                    self.guards.changed()
                arguments = [value.clone() for _, value in rebuilt.arguments]
                outside = {key: memory.clone() for key, memory in written.items()}
                unseen = self._unseen_writes(call, watched, before)
            finally:
                self.at_work = False
                for key, memory in (written | watched).items():
                    if not _same_memory(memory, before[key]):
                        memory.copy_(before[key])
                if random is not None:
                    random.restore()
        return Replayed(rebuilt, arguments, outside, unseen, marks, clock, self.backend.clock())

    def _unseen_writes(self, call: Call, watched: Memories, before: Memories) -> str | None:
        """What the graph wrote without the audit having seen it: a kernel that hides its writes."""
        written = {position for position, _ in self._recipe.written}
        for position, static in zip(call.tensors, self.inputs.tensors, strict=True):
            if position not in written and not proof.same_bits(static, call.leaves[position]):
                return f"the forward writes to the argument at leaf {position} unseen"
        if not all(_same_memory(memory, before[key]) for key, memory in watched.items()):
            return "the forward writes to a buffer unseen"
        return None

    def difference(self, replayed: Replayed, output: Any) -> str | None:
        """Where a rehearsal and the eager call that followed it differ."""
        self._compared = replayed.marks
        found = replayed.unseen or proof.difference(replayed.rebuilt, output, replayed.arguments)
        now = _memories(self._outside)
        for key, memory in replayed.outside.items():
            if found is None and not (key in now and _same_memory(now[key], memory)):
                found = "a tensor of the module that the forward writes"
        return found

    def differs_within_reason(self, replayed: Replayed, output: Any, again: Callable[[], Any]) -> bool:
        """Whether a difference is the forward's own: eager does not agree with eager either.

        Kernels that differ now and then may agree once by chance, so eager is asked several times.

        Args:
            again: Runs the same call eager once more; asked only of a forward without effects.
        """
        if self._has_effects or self._recipe.touches_arguments or replayed.unseen is not None:
            return False
        if not proof.is_close(replayed.rebuilt.output, output):
            return False
        others = (Rebuilt(again(), [], []) for _ in range(_EAGER_AGAIN))
        return any(proof.difference(other, output, []) is not None for other in others)


class RandomState:
    """The default random generator of a device, as it was."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state = self._now()

    def _now(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()

    def moved(self) -> bool:
        """Whether somebody has drawn from it since."""
        return not torch.equal(self._state, self._now())

    def restore(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._state, self._device)
        else:
            torch.set_rng_state(self._state)


def capture(
    module: nn.Module,
    forward: Forward,
    call: Call,
    findings: Findings,
    guards: Guards,
    backend: Backend,
    read_only: ReadOnly = NONE,
) -> CapturedForward | Fallback:
    """Capture a forward for all calls of one signature.

    Returns:
        The graph, or the reason why there is none.

    Restores: the module's Python state, whatever the forward assigned while it was recorded.
    """
    started = time.perf_counter_ns()
    inputs = StaticInputs(call)
    inputs.fill(call.leaves)  # a forward may branch on nothing but shapes, yet it should see sane values
    shadow = Shadow.of(call.spec, inputs, read_only)
    state = ModuleState(module, tensors=True)
    memory = [(parameter, parameter.data) for parameter in module.parameters()]

    def recorded() -> Any:
        if not findings.constants.on_host:
            return forward(*shadow.args, **shadow.kwargs)
        with Serve(findings.constants), makers.active():
            return forward(*shadow.args, **shadow.kwargs)

    try:
        graph, output = backend.capture(recorded, inputs.tensors, findings.draws_random_numbers)
    except CaptureError as error:
        return Fallback(FallbackReason.CAPTURE_FAILED, str(error))
    finally:
        change = state.difference() or guards.moved()
        if change is not None:
            state.restore()
            for parameter, data in memory:  # what a capture puts there is never computed
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
    if change is not None:
        graph.release()
        return Fallback(FallbackReason.CHANGES_STATE, f"while it was captured: {change}")
    known = [*module.parameters(), *module.buffers(), *guards.side_tensors()]
    watched = (*guards.side_tensors(), *findings.written_outside.values(), *findings.constants.on_device)
    beside = graph.reads_beside(own_tensors(module).keys() | {storage_key(tensor) for tensor in watched})
    if beside is not None:
        graph.release()
        return Fallback(FallbackReason.SIDE_TENSOR, f"{beside}, read otherwise than in the warm-up")
    by_identity = {id(tensor): tensor for tensor in known}
    by_memory = own_tensors(module) | {storage_key(tensor): tensor for tensor in guards.side_tensors()}
    recipe = results.learn(
        output,
        shadow,
        call,
        findings.written_arguments,
        lambda tensor: by_identity.get(id(tensor)) if id(tensor) in by_identity else by_memory.get(storage_key(tensor)),
        graph.owns,
        state.containers(),
    )
    if isinstance(recipe, Fallback):
        graph.release()
        return recipe
    capture_ns = time.perf_counter_ns() - started
    _log.info("%s: captured in %.1f ms", type(module).__name__, capture_ns / 1e6)
    return CapturedForward(backend, graph, inputs, recipe, guards, findings, capture_ns)
