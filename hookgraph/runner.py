"""One module's graphs by signature: decide, act, mark the outcome."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hookgraph import ambient, graphs, guards, policy, refusals, signature, switch
from hookgraph.audit import Audit, Findings, told, watch
from hookgraph.backends import Backends, Clock
from hookgraph.counters import Counters, Outcome
from hookgraph.errors import CaptureError, FallbackError, HookgraphError, warn
from hookgraph.explain import Explanation
from hookgraph.foretell import check_arguments, foretell
from hookgraph.graphs import CapturedForward, Replayed, Stale
from hookgraph.ledger import Entry, Ledger
from hookgraph.options import Options
from hookgraph.policy import Plan, Stage
from hookgraph.private_torch import compiled_part
from hookgraph.read_only import ReadOnly
from hookgraph.reasons import Fallback, FallbackReason
from hookgraph.signature import Call, Signature
from hookgraph.state import ModuleState, random_positions
from hookgraph.stats import ModuleStats
from hookgraph.unretained import Unretained

_log = logging.getLogger("hookgraph")
_MISS = object()
_REPLAY = policy.Decision(Plan.REPLAY)
_LOUD = {FallbackReason.LIMIT, FallbackReason.PARITY}
_OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
_NO_PLACE = {FallbackReason.LIMIT, FallbackReason.SCALAR_CHURN}

_UNTIMED = contextlib.nullcontext()

Forward = Callable[..., Any]


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
        self._anchor = _NO_ANCHOR
        self._read_only = ReadOnly.of(module, options.read_only)
        self._loop: object | None = None  # the sampling loop that is under way
        self._ledger = Ledger(options)
        self._backends = backends
        self._lock = threading.RLock()
        self._told: set[FallbackReason] = set()
        self._failed = False  # whether an error of our own was logged

    # -- one call --------------------------------------------------------------------------------

    def run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve one call: from a graph where that is certain to be right, eager otherwise."""
        module = self._module()
        if module is None:
            raise RuntimeError(f"{self.label}: the attached module no longer exists")
        try:
            fallback = self._aside(module)
            known = self._ledger.recall(args, kwargs) if fallback is None else None
        except Exception as error:
            fallback, known = self._own_fault(error), None
        except BaseException:  # an interruption; each part of a call counts its own
            self._mark(Outcome.ERROR, None)
            raise
        if known is not None:
            output = self._hit(module, *known, args, kwargs)
            if output is not _MISS:
                return output
        read = self._read(module, args, kwargs) if fallback is None else fallback
        if isinstance(read, Fallback):
            return self.eager(read, forward, args, kwargs)
        return self._serve(module, *read, forward, args, kwargs)

    def _read(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Call, Signature] | Fallback:
        """What a call is, or why it is not for a graph whatever was captured."""
        try:
            home = self._home(module)
            call = refusals.of_weights(module, home) or signature.read(args, kwargs, home)
            if isinstance(call, Fallback):
                self._anchor = _NO_ANCHOR  # should the module have moved by other parameters, look again
                return call
            call.read_only = self._read_only.positions(call.spec)
            refused = refusals.of_call(module, call, self.options, self._backends)
            return refused or (call, signature.of(call, ambient.read(call.device)))
        except Exception as error:
            return self._own_fault(error)
        except BaseException:
            self._mark(Outcome.ERROR, None)
            raise

    def _hit(self, module: nn.Module, entry: Entry, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        """Replay for a call that looks like one before; ``_MISS`` on any doubt, for the long way to resolve."""
        with self._lock:
            graph = entry.graph
            try:
                if graph is None or ambient.read(graph.inputs.device) != entry.signature.ambient:
                    return _MISS
                if self._home(module) not in (None, graph.inputs.device):
                    return _MISS
                if entry.proofs_left or self._is_due(entry) or graph.at_work:
                    return _MISS
                if graph.aliasing(leaves) is not None or graph.before_launch() is not None:
                    return _MISS
            except Exception:  # the long way meets it again, and says so
                return _MISS
            except BaseException:
                self._mark(Outcome.ERROR, entry)
                raise
            try:
                output = self._replay(entry, leaves, args, kwargs)
            except (Stale, CaptureError):
                return _MISS
            self._ledger.prefer(entry)
            return output

    def _home(self, module: nn.Module) -> torch.device | None:
        """The device of the module's own tensors."""
        holder, name = self._anchor
        anchor = holder.get(name)
        if anchor is None:
            holder, name = self._anchor = _first_tensor(module)
            anchor = holder.get(name)
        return None if anchor is None else anchor.device

    def _aside(self, module: nn.Module) -> Fallback | None:
        if self._pauses:
            return Fallback(FallbackReason.PAUSED)
        if switch.is_disabled():
            return Fallback(FallbackReason.DISABLED)
        if module.training:
            return Fallback(FallbackReason.TRAINING)
        return ambient.standing_aside()

    def _serve(self, module: nn.Module, call: Call, key: Signature, forward: Forward, args: Any, kwargs: Any) -> Any:
        ours: object | None = None
        try:
            with self._lock:
                entry, decision = self._plan(key, call)
                if decision.plan is Plan.REPLAY and not entry.proofs_left and not self._is_due(entry):
                    try:
                        output = self._replay(entry, call.leaves, args, kwargs)
                    except Stale as stale:
                        decision = self._give_way(entry, stale)
                    except CaptureError as error:
                        decision = policy.Decision(Plan.EAGER, self._give_up(entry, error))
                    else:
                        if not torch.is_grad_enabled():  # there, parameters decide, too
                            self._ledger.remember(entry, call, args, kwargs)
                        return output
                if decision.plan in (Plan.CAPTURE, Plan.WARM_UP):
                    ours = entry.owner = object()
                    entry.stage = Stage.BUSY
            if decision.plan is Plan.WARM_UP:
                return self._warm_up(module, entry, call, forward, args, kwargs)
            if decision.plan is Plan.CAPTURE:
                return self._capture(module, entry, call, forward, args, kwargs)
            if decision.plan is Plan.REPLAY:
                return self._replay_on_probation(entry, call, forward, args, kwargs)
            assert decision.fallback is not None
            return self.eager(decision.fallback, forward, args, kwargs, entry)
        finally:
            # Whatever happened: nobody else would ever take it up again, unless somebody has already.
            if ours is not None and entry.owner is ours and entry.stage is Stage.BUSY:
                with self._lock:
                    self._ledger.forget(entry)

    def _plan(self, key: Signature, call: Call) -> tuple[Entry, policy.Decision]:
        """Decide, and look whether what was learned and captured still fits."""
        try:
            entry, decision = self._ledger.decide(key)
            if decision.plan is Plan.REPLAY:
                decision = self._check(entry, call)
            if decision.plan is Plan.CAPTURE and not self._is_as_seen(entry):
                decision = self._ledger.decide_again(entry)
            return entry, decision
        except Exception as error:
            return Entry(key), policy.Decision(Plan.EAGER, self._own_fault(error))
        except BaseException:
            self._mark(Outcome.ERROR, None)
            raise

    def _give_way(self, entry: Entry, stale: Stale) -> policy.Decision:
        """Drop what no longer fits, and decide anew."""
        self._invalidate_stale(str(stale))
        return self._ledger.decide_again(entry)

    def _is_as_seen(self, entry: Entry) -> bool:
        """Whether the module is still as the warm-up found it; if not, what was learned is void."""
        change = entry.change_since_warmup()
        if change is None:
            return True
        _log.info("%s: warms up again: %s", self.label, change)
        entry.invalidate(change)
        return False

    def _is_due(self, entry: Entry) -> bool:
        """Whether this replay is one that ``verify_every`` compares with eager."""
        every = self.options.verify_every
        return every is not None and (entry.replays + 1) % every == 0

    def _check(self, entry: Entry, call: Call) -> policy.Decision:
        """Whether a graph still fits its module and these arguments."""
        assert entry.graph is not None
        unfit = refusals.of_replay(entry.graph, call)
        if unfit is not None:
            return policy.Decision(Plan.EAGER, unfit)
        change = entry.graph.guards.difference() if entry.proofs_left else entry.graph.before_launch()
        if change is None:
            return _REPLAY
        self._invalidate_stale(change)
        return self._ledger.decide_again(entry)

    # -- foretelling -------------------------------------------------------------------------------

    def explain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        """What would become of a call if it were made now; changes nothing."""
        module = self._module()
        if module is None:
            raise HookgraphError(f"{self.label}: the attached module no longer exists")
        check_arguments(module, args, kwargs)
        fallback = self._aside(module)
        if fallback is not None:
            return Explanation(module=self.label, plan=Plan.EAGER, fallback=fallback)
        anchor = self._anchor
        home = self._home(module)
        call = refusals.of_weights(module, home) or signature.read(args, kwargs, home)
        self._anchor = anchor
        if isinstance(call, Fallback):
            return Explanation(module=self.label, plan=Plan.EAGER, fallback=call)
        fallback = refusals.of_call(module, call, self.options, self._backends)
        key = signature.of(call, ambient.read(call.device))
        with self._lock:
            decision, change = policy.Decision(Plan.EAGER, fallback), None
            if fallback is None:
                trial = self._ledger.trial()
                decision, change = foretell(trial, module, call, key, self.options, self._backends)
            against, nearest = self._ledger.nearest(key, decision.fallback)
            changing = self._ledger.changing(key)
        return Explanation(
            module=self.label, plan=decision.plan, fallback=decision.fallback, change=change, signature=key.summary(),
            nearest=nearest[0].summary() if nearest is not None else "", against=against,
            differences=nearest[1] if nearest is not None else (), changing=changing,
        )  # fmt: skip

    # -- acts --------------------------------------------------------------------------------------

    def eager(self, fallback: Fallback, forward: Forward, args: Any, kwargs: Any, entry: Entry | None = None) -> Any:
        """The only way out to eager: run the forward and count why."""
        if self.options.on_fallback == "raise":
            self._mark(Outcome.ERROR, entry)
            raise FallbackError(f"{self.label}: {fallback}")
        output = self._call(forward, args, kwargs, entry)
        self._mark(Outcome.EAGER, entry, fallback)
        if entry is not None and fallback.reason in _NO_PLACE:
            self._note_unretained(entry, fallback)
        self._tell(fallback)
        return output

    def _note_unretained(self, entry: Entry, fallback: Fallback) -> None:
        try:
            with self._lock:
                self._ledger.note_unretained(entry, fallback)
        except Exception as error:  # the call has its result, and keeps it
            self._own_fault(error)

    def _own_fault(self, error: Exception) -> Fallback:
        """What to say when hookgraph itself failed; the forward has not run, or has run to its end."""
        if not self._failed:  # once, since it may come on every call
            _log.warning("%s: hookgraph failed, and the call runs eager", self.label, exc_info=error)
        self._failed = True
        return Fallback(FallbackReason.INTERNAL_ERROR, told(error))

    def _call(self, forward: Forward, args: Any, kwargs: Any, entry: Entry | None, clock: Clock | None = None) -> Any:
        try:
            with clock or _UNTIMED:
                return self._run_forward(forward, args, kwargs)
        except BaseException:
            self._mark(Outcome.ERROR, entry)
            raise

    def _run_forward(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        if not self._read_only.names:
            return forward(*args, **kwargs)
        with self._read_only.untouched(args, kwargs):
            return forward(*args, **kwargs)

    def _mark(self, outcome: Outcome, entry: Entry | None, fallback: Fallback | None = None) -> None:
        self.counters.mark(outcome, fallback)
        if entry is not None:
            entry.counters.mark(outcome, fallback)

    def _warm_up(self, module: nn.Module, entry: Entry, call: Call, forward: Forward, args: Any, kwargs: Any) -> Any:
        """A real eager call under the audit."""
        try:
            blocker = refusals.of_module(module, call.device, self.options, self._backends)
            if blocker is None:
                state, weights = ModuleState(module, tensors=True), guards.Guards(module, [], "weights")
                drawn, compiled = random_positions(), compiled_part(module) is not None
                generator = graphs.RandomState(call.device)
                audit = Audit(call.device, call.storages(), guards.own_tensors(module), compiled)
        except Exception as error:
            return self._block(entry, self._own_fault(error), forward, args, kwargs)
        except BaseException:
            self._mark(Outcome.ERROR, entry)
            raise
        if blocker is not None:  # not a property of the signature: the next call may find it gone
            with self._lock:
                self._ledger.forget(entry)
            return self.eager(blocker, forward, args, kwargs, entry)
        with watch(audit):
            output = self._call(forward, args, kwargs, entry)
        try:
            audit.finish((output, args, kwargs))
            with self._backends.on(call.device).turn:
                pass  # later turns come after what this call left on its stream: tables, constants
            change = state.difference() or weights.difference() or audit.findings.kept
            if change is None and random_positions() != drawn:
                change = "random numbers of Python or numpy are drawn"
            found = audit.findings
            if change is None and found.custom and not found.draws_random_numbers and generator.moved():
                change = "an operator draws random numbers without the tag that says so"
            del state, weights  # they hold tensors, and who does is asked next
            change = guards.beside_hooks(module, change)
            blocker = self._judge(module, entry, audit.findings, call, change).blocker
        except Exception as error:
            blocker = self._own_fault(error)
            with self._lock:
                self._set_blocked(entry, blocker)
        except BaseException:
            self._mark(Outcome.ERROR, entry)
            raise
        self._mark(Outcome.WARMUP if blocker is None else Outcome.EAGER, entry, blocker)
        if blocker is not None:
            self._tell(blocker)
        return output

    def _judge(
        self, module: nn.Module, entry: Entry, findings: Findings, call: Call, change: str | None
    ) -> policy.Verdict:
        with self._lock:
            before = len(entry.findings.constants.on_host) if entry.findings is not None else None
            seen = findings.blocker or refusals.of_findings(findings, call)
            copies = len(findings.constants.on_host)
            verdict = policy.judge_warmup(self._ledger.situation(entry), change, copies, before, seen)
            known = [side for other in self._ledger.entries() for side in other.sides()]
            places = guards.locate(module, findings, call.device, known) if verdict.blocker is None else []
            findings.views.clear()  # even a weak reference to a parameter would forbid torch.utils.swap_tensors
            entry.warmed_up(findings, guards.Guards(module, [], self.options.guards), places, verdict.steady)
            if verdict.blocker is not None:
                self._set_blocked(entry, verdict.blocker)
            self._ledger.learn(verdict.blocker)
        return verdict

    def _capture(self, module: nn.Module, entry: Entry, call: Call, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Record the forward; the replay that follows gives this call its result."""
        try:
            forbidden = refusals.of_module(module, call.device, self.options, self._backends)
            made = forbidden or self._try_capture(module, entry, call, forward)
        except Exception as error:
            forbidden, made = None, Fallback(FallbackReason.CAPTURE_FAILED, told(error))
        except BaseException:
            self._mark(Outcome.ERROR, entry)
            raise
        if forbidden is not None:  # not a property of the signature: the next call may find it gone
            entry.stage = Stage.WARM
            return self.eager(forbidden, forward, args, kwargs, entry)
        if isinstance(made, Fallback):
            return self._block(entry, made, forward, args, kwargs)
        with self._lock:
            entry.graph, entry.stage = made, Stage.CAPTURED if self.options.verify else Stage.TRUSTED
            entry.proofs_left = self.options.verify + 1 if self.options.verify else 0
        if not entry.proofs_left:
            return self._replay_or_eager(entry, call, forward, args, kwargs, Outcome.CAPTURE)
        return self._prove(entry, call, forward, args, kwargs, Outcome.CAPTURE)

    def _try_capture(self, module: nn.Module, entry: Entry, call: Call, forward: Forward) -> CapturedForward | Fallback:
        findings = entry.findings
        assert findings is not None
        aliased = refusals.of_capture(module, findings, call)
        if aliased is not None:
            return aliased
        side = entry.places  # where the warm-up found them, unmoved since
        assert side is not None
        if isinstance(side, Fallback):
            return side
        taken = guards.Guards(module, side, self.options.guards)
        backend = self._backends.on(call.device)
        made = graphs.capture(module, forward, call, findings, taken, backend, self._read_only)
        limit = self.options.max_bytes
        if isinstance(made, CapturedForward) and limit is not None:
            retained = self.retained_bytes() + made.input_bytes + made.graph_bytes + self._backends.pool_bytes
            if retained > limit:
                made.release()
                return Fallback(FallbackReason.MEMORY, f"{retained} bytes > {limit}")
        return made

    def _replay(
        self, entry: Entry, leaves: list[Any], args: Any, kwargs: Any, outcome: Outcome = Outcome.REPLAY
    ) -> Any:
        assert entry.graph is not None
        try:
            output = entry.graph.replay(leaves, args, kwargs, self.options.outputs == "clone", self._loop)
        except (Stale, CaptureError):
            raise
        except BaseException:
            self._mark(Outcome.ERROR, entry)
            raise
        entry.replays += 1
        entry.served()
        self._mark(outcome, entry)
        return output

    def _replay_or_eager(
        self, entry: Entry, call: Call, forward: Forward, args: Any, kwargs: Any, outcome: Outcome
    ) -> Any:
        """Replay a graph that was checked just now; another thread may change the module or drop it meanwhile."""
        with self._lock:
            try:
                if entry.graph is not None and not entry.graph.at_work:
                    return self._replay(entry, call.leaves, args, kwargs, outcome)
                fallback = Fallback(FallbackReason.BUSY)
            except Stale as stale:
                self._invalidate_stale(str(stale))
                fallback = Fallback(FallbackReason.UNSTABLE, str(stale))
            except CaptureError as error:
                fallback = self._give_up(entry, error)
        return self.eager(fallback, forward, args, kwargs, entry)

    def _give_up(self, entry: Entry, error: Exception) -> Fallback:
        """Block a signature whose graph could not be replayed; one that found no memory may try again."""
        fallback = Fallback(FallbackReason.CAPTURE_FAILED, f"at a replay: {error}")
        entry.shortages += 1
        cause = error.__cause__ if isinstance(error, CaptureError) else error
        if not isinstance(cause, _OUT_OF_MEMORY) or entry.shortages >= policy.MOST_SHORTAGES:
            self._set_blocked(entry, fallback)
        return fallback

    def _replay_on_probation(self, entry: Entry, call: Call, forward: Forward, args: Any, kwargs: Any) -> Any:
        with self._lock:
            graph = entry.graph
            seen = graph is not None and entry.proofs_left and not graph.sees_new_values(call)
        if seen:
            return self._replay_or_eager(entry, call, forward, args, kwargs, Outcome.REPLAY)
        return self._prove(entry, call, forward, args, kwargs, Outcome.REPLAY)

    def _prove(self, entry: Entry, call: Call, forward: Forward, args: Any, kwargs: Any, outcome: Outcome) -> Any:
        """Replay, take its effects back, run eager, compare; the caller gets the eager value."""
        fallback = None
        with self._lock:
            graph = entry.graph  # another thread may have dropped it meanwhile
            try:
                replayed = graph.rehearse(call, args, kwargs) if graph is not None else None
            except Exception as error:  # its effects are taken back: the call can still run eager
                fallback = self._give_up(entry, error)
            except BaseException:
                self._mark(Outcome.ERROR, entry)
                raise
        if fallback is not None or graph is None or replayed is None:
            return self.eager(fallback or Fallback(FallbackReason.BUSY), forward, args, kwargs, entry)
        output = self._call(forward, args, kwargs, entry, replayed.eager_clock)
        try:
            fallback = self._compare(graph, replayed, output, lambda: self._run_forward(forward, args, kwargs))
            worth = replayed.worth()
        except Exception as error:
            fallback = self._own_fault(error)
        except BaseException:
            self._mark(Outcome.ERROR, entry)
            raise
        with self._lock:
            if fallback is None:
                entry.replays += outcome is Outcome.REPLAY
                entry.proofs_left = max(entry.proofs_left - 1, 0)
                entry.served()
                entry.worth = worth.best(entry.worth)
                if not entry.proofs_left and entry.stage is Stage.CAPTURED:
                    self._trust(entry)
            else:
                self._set_blocked(entry, fallback)
        self._mark(outcome if fallback is None else Outcome.EAGER, entry, fallback)
        if fallback is not None:
            self._tell(fallback)
        return output

    def _trust(self, entry: Entry) -> None:
        """Let a graph that is proved serve alone, if it is worth it."""
        entry.stage = Stage.TRUSTED
        assert entry.graph is not None
        if entry.graph.backend.promises_speed:
            unworthy = policy.judge_worth(entry.worth, self.options.min_speedup)
            if unworthy is not None:
                self._set_blocked(entry, unworthy)

    def _compare(
        self, graph: CapturedForward, replayed: Replayed, output: Any, again: Callable[[], Any]
    ) -> Fallback | None:
        """Why a graph whose replay was compared with eager may not be used."""
        found = graph.difference(replayed, output)
        if found is None:
            return None
        if graph.differs_within_reason(replayed, output, again):
            _log.info("%s: eager differs from eager, too, and a replay is as close: %s", self.label, found)
            return None
        return Fallback(FallbackReason.PARITY, found)

    def _block(self, entry: Entry, fallback: Fallback, forward: Forward, args: Any, kwargs: Any) -> Any:
        with self._lock:
            self._set_blocked(entry, fallback)
        return self.eager(fallback, forward, args, kwargs, entry)

    def _set_blocked(self, entry: Entry, fallback: Fallback) -> None:
        module, seen = self._module(), None
        if module is not None:
            # Where it is the guards that fail, there is nothing to compare a later state with.
            with contextlib.suppress(Exception):
                seen = guards.Guards(module, [], self.options.guards)
        self._ledger.block(entry, fallback, seen)
        _log.info("%s: eager from now on for %s: %s", self.label, entry.signature.summary(), fallback)

    def _tell(self, fallback: Fallback) -> None:
        """Say it once for each reason, where nobody would notice otherwise or the user asked."""
        reason = fallback.reason
        if reason in self._told or (self.options.on_fallback == "ignore" and reason not in _LOUD):
            return
        self._told.add(reason)
        warn(f"{self.label} runs eager: {fallback}")

    # -- the whole ---------------------------------------------------------------------------------

    def invalidate(self, reason: str) -> None:
        """Drop every graph and every verdict; the next calls warm up again."""
        with self._lock:
            self.invalidations += self._ledger.clear()
        _log.info("%s: invalidated: %s", self.label, reason)

    def _invalidate_stale(self, change: str) -> None:
        """Drop the graphs that no longer fit, so that they keep no memory of what was replaced."""
        self.invalidations += self._ledger.drop_stale()
        _log.info("%s: invalidated: %s", self.label, change)

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Serve this thread alone, and take the tensors of read-only arguments for unchanged while they are the same."""
        with self._lock:
            outer, self._loop = self._loop, object()
            try:
                yield
            finally:
                self._loop = outer

    def pause(self, change: int) -> None:
        """Enter (1) or leave (-1) a block in which every call runs eager."""
        with self._lock:
            self._pauses += change

    def reset_counters(self) -> None:
        with self._lock:
            self.counters.reset()
            self.invalidations = 0
            self._ledger.unretained = Unretained()
            for entry in self._ledger.entries():
                entry.counters.reset()

    def release(self) -> None:
        """Give back all memory; the runner may not be used afterwards."""
        with self._lock:
            self._ledger.close()
            self._anchor = _NO_ANCHOR  # it holds parameters

    def entries(self) -> list[Entry]:
        """The signatures that are retained, then the blocked ones."""
        with self._lock:
            return self._ledger.entries()

    @property
    def on_probation(self) -> bool:
        """Whether a graph has yet to be compared with eager."""
        return any(entry.proofs_left and entry.graph is not None for entry in self.entries())

    def retained_bytes(self) -> int:
        """Static inputs, and what graphs hold beside the pool."""
        with self._lock:
            return sum(graph.input_bytes + graph.graph_bytes for graph in self._ledger.graphs())

    def describe(self) -> ModuleStats:
        """The counts and the retained memory of this module, and of each of its signatures."""
        with self._lock:
            counts, held, unretained = self.counters.read(), self.retained_bytes(), self._ledger.unretained
            signatures = tuple(entry.describe() for entry in self._ledger.entries())
        return ModuleStats(
            name=self.name, class_name=self.class_name, backend=self._backend_name(), calls=counts.calls,
            **counts.outcomes, reasons=counts.reasons, details=counts.details, invalidations=self.invalidations,
            bytes=held, signatures=signatures, unretained=unretained.signatures(), varied=unretained.varied(),
        )  # fmt: skip

    def _backend_name(self) -> str:
        if self.options.backend != "auto":
            return self.options.backend
        module = self._module()
        holder, name = _first_tensor(module) if module is not None else _NO_ANCHOR  # not kept, once detached
        tensor = holder.get(name)
        return "cuda" if tensor is not None and tensor.device.type == "cuda" else "tape"


# Where the first tensor of a module lies.  Not a reference to the tensor: even a weak one would forbid
# ``torch.utils.swap_tensors``, with which ``to`` may move a module.
_Anchor = tuple[dict[str, torch.Tensor | None], str]
_NO_ANCHOR: _Anchor = ({}, "")


def _first_tensor(module: nn.Module) -> _Anchor:
    for kind in ("_parameters", "_buffers"):
        for child in module.modules():
            holder = getattr(child, kind)
            for name, tensor in holder.items():
                if tensor is not None:
                    return holder, name
    return _NO_ANCHOR
