"""One module's graphs by signature: decide, act, mark the outcome."""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hookgraph import ambient, foreign, graphs, guards, policy, signature, switch
from hookgraph.audit import Audit, Findings, watch
from hookgraph.backends import Backends
from hookgraph.churn import ScalarChurn
from hookgraph.counters import Counters, Outcome
from hookgraph.errors import CaptureError, FallbackError, HookgraphWarning
from hookgraph.graphs import CapturedForward, Stale
from hookgraph.options import Options
from hookgraph.policy import Plan, Situation, Stage
from hookgraph.private_torch import compiled_part, storage_key
from hookgraph.reasons import Fallback, FallbackReason
from hookgraph.signature import Call, Signature
from hookgraph.state import ModuleState, attribute_tensors
from hookgraph.stats import ModuleStats, SignatureStats

_log = logging.getLogger("hookgraph")
_MOST_BLOCKED = 256  # signatures remembered as blocked; they hold no tensors
_LOUD = {FallbackReason.LIMIT, FallbackReason.PARITY}

Forward = Callable[..., Any]


@dataclass(slots=True, eq=False)
class Entry:
    """What is known about one signature."""

    signature: Signature
    stage: Stage = Stage.NEW
    steady_warmups: int = 0
    changing_warmups: int = 0
    invalidations: int = 0
    rested: int = 0  # eager calls since the module was found unstable
    proofs_left: int = 0
    replays: int = 0
    blocked: Fallback | None = None
    findings: Findings | None = None
    seen: guards.Guards | None = None  # the module as the last warm-up left it
    graph: CapturedForward | None = None
    counters: Counters = field(default_factory=Counters)

    def drop_graph(self, stage: Stage) -> None:
        if self.graph is not None:
            self.graph.release()
        self.graph, self.findings, self.seen, self.stage = None, None, None, stage
        self.steady_warmups = self.changing_warmups = 0


_REPLAY = policy.Decision(Plan.REPLAY)


class Runner:
    """Serves the calls of one module.

    Args:
        module: The attached module; it is not kept alive.
        name: Its qualified name; empty for the model itself.
        options: How it was attached.
        backends: What captures; shared by the modules of one attachment.
    """

    def __init__(self, module: nn.Module, name: str, options: Options, backends: Backends) -> None:
        self._module = weakref.ref(module)
        self.name, self.class_name, self.options = name, type(module).__name__, options
        self.label = name or self.class_name
        self.counters = Counters()
        self.invalidations = 0
        self._pauses = 0
        self._anchor: weakref.ref[torch.Tensor] | None = None
        self._entries: OrderedDict[Signature, Entry] = OrderedDict()
        self._blocked: OrderedDict[Signature, Entry] = OrderedDict()
        self._churn = ScalarChurn(patience=max(options.max_graphs, 4))
        self._backends = backends
        self._habit = policy.Habit()
        self._blocked_seen: guards.Guards | None = None
        self._lock = threading.RLock()
        self._told: set[FallbackReason] = set()

    # -- one call --------------------------------------------------------------------------------

    def run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve one call: from a graph where that is certain to be right, eager otherwise."""
        module = self._module()
        if module is None:
            raise RuntimeError(f"{self.label}: the attached module no longer exists")
        fallback = self._aside(module)
        if fallback is not None:
            return self.eager(fallback, forward, args, kwargs)
        call = signature.read(args, kwargs, self._home(module))
        if isinstance(call, Fallback):
            self._anchor = None  # should the module have moved by other parameters, look again
            return self.eager(call, forward, args, kwargs)
        fallback = self._refusal(module, call)
        if fallback is not None:
            return self.eager(fallback, forward, args, kwargs)
        return self._serve(module, call, signature.of(call, ambient.read(call.device)), forward, args, kwargs)

    def _home(self, module: nn.Module) -> torch.device | None:
        """The device of the module's own tensors."""
        anchor = self._anchor() if self._anchor is not None else None
        if anchor is None:
            anchor = next(module.parameters(), None)
            anchor = next(module.buffers(), None) if anchor is None else anchor
            self._anchor = weakref.ref(anchor) if anchor is not None else None
        return None if anchor is None else anchor.device

    def _aside(self, module: nn.Module) -> Fallback | None:
        if self._pauses:
            return Fallback(FallbackReason.PAUSED)
        if switch.is_disabled():
            return Fallback(FallbackReason.DISABLED)
        if module.training:
            return Fallback(FallbackReason.TRAINING)
        return ambient.standing_aside()

    def _refusal(self, module: nn.Module, call: Call) -> Fallback | None:
        """Why this call is not for a graph, whatever was captured."""
        limit = self.options.max_batch_size
        if limit is not None and call.batch is not None and call.batch > limit:
            return Fallback(FallbackReason.BATCH_SIZE, f"{call.batch} > {limit}")
        if torch.is_grad_enabled():
            for tensor in (*(leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)), *module.parameters()):
                if tensor.requires_grad:
                    return Fallback(FallbackReason.NEEDS_GRAD)
        elif torch.is_inference_mode_enabled() and any(key[0] == "tensor" and key[4] for key in call.keys):
            # Watched by a dispatch mode, a view of such a tensor would lose the flag.
            return Fallback(FallbackReason.NEEDS_GRAD, "an argument requires gradients, in inference mode")
        if not self._backends.serves(call.device):
            what = f"backend={self.options.backend!r} cannot serve {call.device}"
            return Fallback(FallbackReason.NO_DEVICE, what)
        return None

    def _serve(self, module: nn.Module, call: Call, key: Signature, forward: Forward, args: Any, kwargs: Any) -> Any:
        with self._lock:
            entry, decision = self._decide(key)
            if decision.plan is Plan.REPLAY:
                decision = self._check(entry, call)
            if decision.plan is Plan.REPLAY and not entry.proofs_left and not self._is_due(entry):
                try:
                    return self._replay(entry, call, args, kwargs)
                except Stale as stale:
                    self._invalidate_stale(str(stale))
                    decision = policy.decide(self._situation(entry))
                except CaptureError as error:
                    decision = policy.Decision(Plan.EAGER, self._give_up(entry, error))
            if decision.plan is Plan.CAPTURE and not self._is_as_seen(entry):
                decision = policy.decide(self._situation(entry))
            if decision.plan in (Plan.CAPTURE, Plan.WARM_UP):
                entry.stage = Stage.BUSY
        if decision.plan is Plan.WARM_UP:
            return self._warm_up(module, entry, call, forward, args, kwargs)
        if decision.plan is Plan.CAPTURE:
            return self._capture(module, entry, call, forward, args, kwargs)
        if decision.plan is Plan.REPLAY:
            return self._replay_on_probation(entry, call, forward, args, kwargs)
        assert decision.fallback is not None
        return self.eager(decision.fallback, forward, args, kwargs, entry)

    def _is_as_seen(self, entry: Entry) -> bool:
        """Whether the module is still as the warm-up found it; if not, what was learned is void."""
        if entry.findings is None or entry.seen is None or not entry.findings.complete():
            change: str | None = "a tensor that the forward uses is gone"
        else:
            change = entry.seen.difference()
        if change is None:
            return True
        _log.info("%s: warms up again: %s", self.label, change)
        entry.drop_graph(Stage.WARM)
        entry.invalidations += 1
        return False

    def _is_due(self, entry: Entry) -> bool:
        """Whether this replay is one that ``verify_every`` compares with eager."""
        every = self.options.verify_every
        return every is not None and (entry.replays + 1) % every == 0

    def _decide(self, key: Signature) -> tuple[Entry, policy.Decision]:
        entry = self._entries.get(key) or self._blocked.get(key)
        if entry is not None and entry.graph is not None:
            return entry, _REPLAY
        if entry is not None:
            self._churn.repeated(key)
            return entry, self._decide_known(entry)
        entry = Entry(key)
        leaf = self._churn.changing_leaf(key)
        if leaf is not None:
            return entry, policy.Decision(Plan.EAGER, Fallback(FallbackReason.SCALAR_CHURN, leaf))
        habitual = self._habit.expected()
        if habitual is not None:
            return entry, policy.Decision(Plan.EAGER, habitual)
        decision = policy.decide(self._situation(entry))
        if decision.plan is Plan.EAGER:
            decision = self._make_room(key) or decision
        if decision.plan is Plan.WARM_UP:
            self._entries[key] = entry
        return entry, decision

    def _decide_known(self, entry: Entry) -> policy.Decision:
        decision = policy.decide(self._situation(entry))
        unstable = decision.fallback is not None and decision.fallback.reason is FallbackReason.UNSTABLE
        if not unstable and entry.stage is not Stage.BLOCKED:
            return decision
        entry.rested += 1
        if entry.rested < policy.REST:
            return decision
        entry.rested = 0
        if unstable:
            entry.invalidations = policy.MOST_INVALIDATIONS - 1
        elif self._blocked_seen is not None and self._blocked_seen.difference() is not None:
            # The module is not what it was when signatures were blocked: what blocked them may be gone.
            self._blocked.clear()
            self._habit = policy.Habit()
            if len(self._entries) < self.options.max_graphs:
                entry.blocked, entry.stage, self._entries[entry.signature] = None, Stage.WARM, entry
        return policy.decide(self._situation(entry))

    def _situation(self, entry: Entry) -> Situation:
        return Situation(
            entry.stage, entry.steady_warmups, entry.changing_warmups, entry.invalidations, entry.blocked,
            len(self._entries), self.options.max_graphs, self.options.warmup,
        )  # fmt: skip

    def _make_room(self, key: Signature) -> policy.Decision | None:
        """Let a signature replace one that differs only in numbers and never came back."""
        if not key.scalars:
            return None
        skeleton = key.skeleton
        rivals = [e for e in self._entries.values() if e.stage is Stage.WARM and e.signature.skeleton == skeleton]
        if not rivals:
            return None
        if self._churn.replace(key):
            for rival in rivals:
                del self._entries[rival.signature]
            leaf = self._churn.changing_leaf(rivals[-1].signature) or ""
            return policy.Decision(Plan.EAGER, Fallback(FallbackReason.SCALAR_CHURN, leaf))
        del self._entries[rivals[0].signature]
        return policy.Decision(Plan.WARM_UP)

    def _check(self, entry: Entry, call: Call) -> policy.Decision:
        """Whether a graph still fits its module and these arguments."""
        assert entry.graph is not None
        aliased = entry.graph.aliasing(call)
        if aliased is not None:
            return policy.Decision(Plan.EAGER, aliased)
        change = entry.graph.guards.difference() if entry.proofs_left else entry.graph.before_launch()
        if change is None:
            return _REPLAY
        self._invalidate_stale(change)
        return policy.decide(self._situation(entry))

    # -- acts --------------------------------------------------------------------------------------

    def eager(self, fallback: Fallback, forward: Forward, args: Any, kwargs: Any, entry: Entry | None = None) -> Any:
        """The only way out to eager: run the forward and count why."""
        if self.options.on_fallback == "raise":
            self._mark(Outcome.ERROR, entry)
            raise FallbackError(f"{self.label}: {fallback}")
        output = self._call(forward, args, kwargs, entry)
        self._mark(Outcome.EAGER, entry, fallback)
        self._tell(fallback)
        return output

    def _call(self, forward: Forward, args: Any, kwargs: Any, entry: Entry | None) -> Any:
        try:
            return forward(*args, **kwargs)
        except BaseException:
            self._mark(Outcome.ERROR, entry)
            raise

    def _mark(self, outcome: Outcome, entry: Entry | None, fallback: Fallback | None = None) -> None:
        self.counters.mark(outcome, fallback)
        if entry is not None:
            entry.counters.mark(outcome, fallback)

    def _warm_up(self, module: nn.Module, entry: Entry, call: Call, forward: Forward, args: Any, kwargs: Any) -> Any:
        """A real eager call under the audit."""
        blocker = self._forbidden(module, call.device)
        if blocker is not None:  # not a property of the signature: the next call may find it gone
            self._forget(entry)
            return self.eager(blocker, forward, args, kwargs, entry)
        state, weights = ModuleState(module, tensors=True), guards.Guards(module, [], "weights")
        compiled = compiled_part(module) is not None
        audit = Audit(call.device, _argument_storages(call), guards.own_tensors(module), compiled)
        try:
            with watch(audit):
                output = self._call(forward, args, kwargs, entry)
        except BaseException:  # as if it had not been tried
            self._forget(entry)
            raise
        audit.finish((output, args, kwargs))
        with self._backends.on(call.device).turn():
            pass  # later turns come after what this call left on its stream: tables, constants
        change = state.difference() or weights.difference() or audit.findings.kept
        verdict = self._judge(module, entry, audit.findings, call, change)
        self._mark(Outcome.WARMUP if verdict.blocker is None else Outcome.EAGER, entry, verdict.blocker)
        if verdict.blocker is not None:
            self._tell(verdict.blocker)
        return output

    def _judge(
        self, module: nn.Module, entry: Entry, findings: Findings, call: Call, change: str | None
    ) -> policy.Verdict:
        with self._lock:
            before = len(entry.findings.constants.on_host) if entry.findings is not None else None
            seen = findings.blocker or _unlike_arguments(findings, call)
            copies = len(findings.constants.on_host)
            verdict = policy.judge_warmup(self._situation(entry), change, copies, before, seen)
            entry.findings, entry.stage = findings, Stage.WARM
            entry.seen = guards.Guards(module, [], self.options.guards)
            if verdict.steady:
                entry.steady_warmups += 1
            else:
                entry.steady_warmups, entry.changing_warmups = 0, entry.changing_warmups + 1
            if verdict.blocker is not None:
                self._set_blocked(entry, verdict.blocker)
            self._habit.learn(verdict.blocker)
        return verdict

    def _forbidden(self, module: nn.Module, device: torch.device) -> Fallback | None:
        """What forbids a graph of this module before any forward has been watched."""
        if self.options.child_hooks == "refuse":
            hook = guards.child_hooks(module)
            if hook is not None:
                return Fallback(FallbackReason.CHILD_HOOKS, hook)
        feature = foreign.recognise(module)
        if feature is not None:
            return Fallback(FallbackReason.FOREIGN_HOOK, feature)
        refused = self._backends.on(device).refuses(module)
        if refused is not None:
            return refused
        devices = {tensor.device for tensor in guards.own_tensors(module).values() if tensor.device.type != "cpu"}
        if len(devices) > 1:
            return Fallback(FallbackReason.MIXED_DEVICES, "weights on " + ", ".join(sorted(map(str, devices))))
        return None

    def _capture(self, module: nn.Module, entry: Entry, call: Call, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Record the forward; the replay that follows gives this call its result."""
        forbidden = self._forbidden(module, call.device)
        if forbidden is not None:  # not a property of the signature: the next call may find it gone
            entry.stage = Stage.WARM
            return self.eager(forbidden, forward, args, kwargs, entry)
        try:
            made = self._try_capture(module, entry, call, forward)
        except BaseException:
            self._forget(entry)
            self._mark(Outcome.ERROR, entry)
            raise
        if isinstance(made, Fallback):
            return self._block(entry, made, forward, args, kwargs)
        with self._lock:
            entry.graph, entry.stage = made, Stage.CAPTURED
            entry.proofs_left = self.options.verify + 1 if self.options.verify else 0
            if not entry.proofs_left:
                entry.stage = Stage.TRUSTED
                return self._replay_or_eager(entry, call, forward, args, kwargs, Outcome.CAPTURE)
        return self._prove(entry, call, forward, args, kwargs, Outcome.CAPTURE)

    def _try_capture(self, module: nn.Module, entry: Entry, call: Call, forward: Forward) -> CapturedForward | Fallback:
        findings = entry.findings
        assert findings is not None
        aliased = _aliased_arguments(module, findings, call)
        if aliased is not None:
            return aliased
        side = guards.locate(module, findings, call.device)
        if isinstance(side, Fallback):
            return side
        taken = guards.Guards(module, side, self.options.guards)
        made = graphs.capture(module, forward, call, findings, taken, self._backends.on(call.device))
        limit = self.options.max_bytes
        if isinstance(made, CapturedForward) and limit is not None:
            retained = self.retained_bytes() + made.input_bytes + made.graph_bytes + self._backends.pool_bytes
            if retained > limit:
                made.release()
                return Fallback(FallbackReason.MEMORY, f"{retained} bytes > {limit}")
        return made

    def _replay(self, entry: Entry, call: Call, args: Any, kwargs: Any, outcome: Outcome = Outcome.REPLAY) -> Any:
        assert entry.graph is not None
        try:
            output = entry.graph.replay(call, args, kwargs, self.options.outputs == "clone")
        except (Stale, CaptureError):
            raise
        except BaseException:
            self._mark(Outcome.ERROR, entry)
            raise
        entry.replays += 1
        entry.invalidations = 0
        self._mark(outcome, entry)
        return output

    def _replay_or_eager(
        self, entry: Entry, call: Call, forward: Forward, args: Any, kwargs: Any, outcome: Outcome
    ) -> Any:
        """Replay a graph that was checked just now; another thread may change the module meanwhile."""
        try:
            return self._replay(entry, call, args, kwargs, outcome)
        except Stale as stale:
            self._invalidate_stale(str(stale))
            return self.eager(Fallback(FallbackReason.UNSTABLE, str(stale)), forward, args, kwargs, entry)
        except CaptureError as error:
            return self.eager(self._give_up(entry, error), forward, args, kwargs, entry)

    def _give_up(self, entry: Entry, error: Exception) -> Fallback:
        """Block a signature whose graph could not be launched."""
        fallback = Fallback(FallbackReason.CAPTURE_FAILED, f"at a replay: {error}")
        self._set_blocked(entry, fallback)
        return fallback

    def _replay_on_probation(self, entry: Entry, call: Call, forward: Forward, args: Any, kwargs: Any) -> Any:
        with self._lock:
            graph = entry.graph
            if graph is not None and entry.proofs_left and not graph.sees_new_values(call):
                return self._replay_or_eager(entry, call, forward, args, kwargs, Outcome.REPLAY)
        if graph is None:  # another thread dropped it meanwhile
            return self.eager(Fallback(FallbackReason.BUSY), forward, args, kwargs, entry)
        return self._prove(entry, call, forward, args, kwargs, Outcome.REPLAY)

    def _prove(self, entry: Entry, call: Call, forward: Forward, args: Any, kwargs: Any, outcome: Outcome) -> Any:
        """Replay, take its effects back, run eager, compare; the caller gets the eager value."""
        with self._lock:
            graph = entry.graph
            if graph is None:
                return self.eager(Fallback(FallbackReason.BUSY), forward, args, kwargs, entry)
            try:
                replayed = graph.rehearse(call, args, kwargs)
            except Exception as error:  # its effects are taken back: the call can still run eager
                return self.eager(self._give_up(entry, error), forward, args, kwargs, entry)
        output = self._call(forward, args, kwargs, entry)
        found = graph.difference(replayed, output)
        if found is not None and graph.differs_within_reason(replayed, output, lambda: forward(*args, **kwargs)):
            _log.info("%s: eager differs from eager, too, and a replay is as close: %s", self.label, found)
            found = None
        fallback = None
        with self._lock:
            if found is None:
                entry.replays += outcome is Outcome.REPLAY
                entry.proofs_left = max(entry.proofs_left - 1, 0)
                entry.invalidations = 0
                if not entry.proofs_left and entry.stage is Stage.CAPTURED:
                    entry.stage = Stage.TRUSTED
            else:
                fallback = Fallback(FallbackReason.PARITY, found)
                self._set_blocked(entry, fallback)
        self._mark(outcome if fallback is None else Outcome.EAGER, entry, fallback)
        if fallback is not None:
            self._tell(fallback)
        return output

    def _block(self, entry: Entry, fallback: Fallback, forward: Forward, args: Any, kwargs: Any) -> Any:
        with self._lock:
            self._set_blocked(entry, fallback)
        return self.eager(fallback, forward, args, kwargs, entry)

    def _set_blocked(self, entry: Entry, fallback: Fallback) -> None:
        entry.drop_graph(Stage.BLOCKED)
        entry.blocked = fallback
        self._entries.pop(entry.signature, None)
        self._blocked[entry.signature] = entry
        module = self._module()
        self._blocked_seen = guards.Guards(module, [], self.options.guards) if module is not None else None
        while len(self._blocked) > _MOST_BLOCKED:
            self._blocked.popitem(last=False)
        _log.info("%s: eager from now on for %s: %s", self.label, entry.signature.summary(), fallback)

    def _forget(self, entry: Entry) -> None:
        with self._lock:
            entry.drop_graph(Stage.NEW)
            self._entries.pop(entry.signature, None)

    def _tell(self, fallback: Fallback) -> None:
        """Say it once for each reason, where nobody would notice otherwise or the user asked."""
        reason = fallback.reason
        if reason in self._told or (self.options.on_fallback == "ignore" and reason not in _LOUD):
            return
        self._told.add(reason)
        warnings.warn(f"{self.label} runs eager: {fallback}", HookgraphWarning, stacklevel=2)

    # -- the whole ---------------------------------------------------------------------------------

    def invalidate(self, reason: str) -> None:
        """Drop every graph and every verdict; the next calls warm up again."""
        with self._lock:
            for entry in [*self._entries.values(), *self._blocked.values()]:
                entry.drop_graph(Stage.NEW)
            self.invalidations += bool(self._entries or self._blocked)
            self._habit = policy.Habit()
            self._entries.clear()
            self._blocked.clear()
        _log.info("%s: invalidated: %s", self.label, reason)

    def _invalidate_stale(self, change: str) -> None:
        """Drop the graphs that no longer fit, so that they keep no memory of what was replaced."""
        for entry in self._entries.values():
            if entry.graph is not None and entry.graph.guards.difference() is not None:
                entry.drop_graph(Stage.WARM)
                entry.invalidations += 1
                self.invalidations += 1
        _log.info("%s: invalidated: %s", self.label, change)

    def pause(self, change: int) -> None:
        """Enter (1) or leave (-1) a block in which every call runs eager."""
        with self._lock:
            self._pauses += change

    def reset_counters(self) -> None:
        with self._lock:
            self.counters.reset()
            self.invalidations = 0
            for entry in self.entries():
                entry.counters.reset()

    def release(self) -> None:
        """Give back all memory; the runner may not be used afterwards."""
        with self._lock:
            for entry in self._entries.values():
                entry.drop_graph(Stage.NEW)
            self._entries.clear()
            self._blocked.clear()

    def retained_bytes(self) -> int:
        """Static inputs, and what graphs hold beside the pool."""
        graphs_ = [entry.graph for entry in self.entries()]
        return sum(graph.input_bytes + graph.graph_bytes for graph in graphs_ if graph is not None)

    def describe(self) -> ModuleStats:
        """The counts and the retained memory of this module, and of each of its signatures."""
        with self._lock:
            entries, counts = self.entries(), self.counters.read()
            signatures = tuple(_describe(entry) for entry in entries)
            held = self.retained_bytes()
        return ModuleStats(
            name=self.name, class_name=self.class_name, backend=self._backend_name(), calls=counts.calls,
            **counts.outcomes, reasons=counts.reasons, details=counts.details, invalidations=self.invalidations,
            bytes=held, signatures=signatures,
        )  # fmt: skip

    def _backend_name(self) -> str:
        if self.options.backend != "auto":
            return self.options.backend
        module = self._module()
        home = self._home(module) if module is not None else None
        return "cuda" if home is not None and home.type == "cuda" else "tape"

    def entries(self) -> list[Entry]:
        """The signatures that are retained, then the blocked ones."""
        with self._lock:
            return [*self._entries.values(), *self._blocked.values()]


def _describe(entry: Entry) -> SignatureStats:
    counts, graph = entry.counters.read(), entry.graph
    return SignatureStats(
        summary=entry.signature.summary(), state=entry.stage.value, calls=counts.calls, **counts.outcomes,
        detail=str(entry.blocked) if entry.blocked is not None else "",
        input_bytes=graph.input_bytes if graph is not None else 0,
        output_bytes=graph.output_bytes if graph is not None else 0,
        capture_ns=graph.capture_ns if graph is not None else None,
        nodes=graph.operators if graph is not None else None,
    )  # fmt: skip


def _argument_storages(call: Call) -> dict[int, int]:
    found: dict[int, int] = {}
    for position, leaf in enumerate(call.leaves):
        if isinstance(leaf, torch.Tensor):
            found.setdefault(storage_key(leaf), position)
    return found


def _unlike_arguments(findings: Findings, call: Call) -> Fallback | None:
    """A tensor on the host that is keyed by value cannot be written by a replay."""
    host = findings.written_arguments - set(call.tensors)
    leaves = [call.leaves[position] for position in host]
    if any(leaf.device != call.device for leaf in leaves):
        return Fallback(FallbackReason.HOST_TENSOR, "the forward writes to a tensor argument on the CPU")
    return None


def _aliased_arguments(module: nn.Module, findings: Findings, call: Call) -> Fallback | None:
    """Why copies of the arguments would not behave like the arguments."""
    storages = [storage_key(call.leaves[position]) for position in call.tensors]
    written = [storage_key(call.leaves[position]) for position in findings.written_arguments]
    if call.shares_containers:
        return Fallback(FallbackReason.ALIASED_ARGUMENTS, "one container is given twice")
    if any(storages.count(key) > 1 for key in written) or not set(findings.written_outside).isdisjoint(storages):
        return Fallback(FallbackReason.ALIASED_ARGUMENTS)
    tensors = (*module.parameters(), *module.buffers(), *(tensor for _, _, tensor in attribute_tensors(module)))
    if not {storage_key(tensor) for tensor in tensors}.isdisjoint(storages):
        return Fallback(FallbackReason.ALIASED_ARGUMENTS, "with a tensor of the module")
    return None
