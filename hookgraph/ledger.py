"""The signatures of one module: what is known about each, and what to do with the next call of one."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from hookgraph import explain, policy
from hookgraph.audit import Findings
from hookgraph.churn import ScalarChurn
from hookgraph.counters import Counters
from hookgraph.explain import Difference
from hookgraph.graphs import CapturedForward
from hookgraph.guards import Guards, SideTensor
from hookgraph.likeness import Likeness
from hookgraph.options import Options
from hookgraph.policy import Decision, Plan, Situation, Stage
from hookgraph.reasons import Fallback, FallbackReason
from hookgraph.signature import Call, Signature
from hookgraph.stats import SignatureStats
from hookgraph.unretained import Unretained
from hookgraph.worth import WORTH_IT, Verdict, Worth

_MOST_BLOCKED = 256  # signatures remembered as blocked; they hold no tensors
_MOST_RECENT = 4  # calls whose looks are kept, one a signature: guidance alternates between two
_MOST_UNLIKE = 16  # replays in a row that looked unlike the one before: then looks say nothing here


@dataclass(slots=True, eq=False)
class Entry:
    """What is known about one signature."""

    signature: Signature
    stage: Stage = Stage.NEW
    owner: object | None = None  # the call that warms it up or captures it, or did so last
    steady_warmups: int = 0
    changing_warmups: int = 0
    invalidations: int = 0
    change: str = ""  # what it was invalidated for, the last time
    rested: int = 0  # eager calls since the module was found unstable
    proofs_left: int = 0
    replays: int = 0
    shortages: int = 0  # replays in a row that found no memory
    unlike: int = 0  # replays in a row that were not recognised by their looks
    blocked: Fallback | None = None
    findings: Findings | None = None
    seen: Guards | None = None  # the module as the last warm-up left it
    places: list[SideTensor] | Fallback | None = None  # where that found the side tensors, or why one cannot be watched
    graph: CapturedForward | None = None
    worth: Worth | None = None  # of the graph, once it was timed
    counters: Counters = field(default_factory=Counters)

    def change_since_warmup(self) -> str | None:
        """Why what the last warm-up learned is void."""
        if self.findings is None or self.seen is None or not self.findings.complete():
            return "a tensor that the forward uses is gone"
        for side in self.sides():
            if side.moved():
                return f"{side.where} was replaced"
        return self.seen.difference()

    def sides(self) -> list[SideTensor]:
        """The side tensors that the last warm-up found."""
        return self.places if isinstance(self.places, list) else []

    def drop_graph(self, stage: Stage) -> None:
        """Give the graph's memory back, and forget what was learned for it."""
        if self.graph is not None:
            self.graph.release()
        self.graph, self.findings, self.seen, self.places, self.stage = None, None, None, None, stage
        self.steady_warmups = self.changing_warmups = 0
        self.worth = None

    def invalidate(self, change: str) -> None:
        """Let a change of the module have its way: warm up anew."""
        self.drop_graph(Stage.WARM)
        self.invalidations += 1
        self.change = change

    def served(self) -> None:
        """Note that a replay was right."""
        self.invalidations = self.shortages = 0

    def warmed_up(self, findings: Findings, seen: Guards, places: list[SideTensor] | Fallback, steady: bool) -> None:
        """Note what a warm-up call found."""
        self.findings, self.seen, self.places, self.stage = findings, seen, places, Stage.WARM
        if steady:
            self.steady_warmups += 1
        else:
            self.steady_warmups, self.changing_warmups = 0, self.changing_warmups + 1

    def describe(self) -> SignatureStats:
        """Its counts and the memory of its graph."""
        counts, graph, worth = self.counters.read(), self.graph, self.worth
        return SignatureStats(
            summary=self.signature.summary(), state=self.stage.value, calls=counts.calls, **counts.outcomes,
            detail=str(self.blocked) if self.blocked is not None else "",
            input_bytes=graph.input_bytes if graph is not None else 0,
            output_bytes=graph.output_bytes if graph is not None else 0,
            capture_ns=graph.capture_ns if graph is not None else None,
            nodes=graph.operators if graph is not None else None,
            eager_ms=worth.eager_ns / 1e6 if worth is not None else None,
            replay_ms=worth.replay_ns / 1e6 if worth is not None else None, verdict=self._verdict().value,
        )  # fmt: skip

    def _verdict(self) -> Verdict:
        if self.graph is None or self.worth is None or self.stage is not Stage.TRUSTED:
            return Verdict.UNKNOWN
        if not self.graph.backend.promises_speed:
            return Verdict.REHEARSAL
        return Verdict.WORTH_IT if self.worth.speedup >= WORTH_IT else Verdict.NOT_WORTH_IT


class Ledger:
    """All entries of one module.  Whoever uses it holds the runner's lock, but for ``recall``."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._retained: OrderedDict[Signature, Entry] = OrderedDict()
        self._blocked: OrderedDict[Signature, Entry] = OrderedDict()
        self._recent: tuple[tuple[Likeness, Entry], ...] = ()
        self._churn = ScalarChurn(patience=max(options.max_graphs, 4))
        self._habit = policy.Habit()
        self._seen_blocked: Guards | None = None  # the module when a signature was blocked last
        self._closed = False
        self.unretained = Unretained()

    # -- looking up --------------------------------------------------------------------------------

    def recall(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Entry, list[Any]] | None:
        """The entry whose last call looked like this one, and the leaves of this one."""
        for likeness, entry in self._recent:
            leaves = likeness.leaves(args, kwargs)
            if leaves is not None:
                return entry, leaves
        return None

    def prefer(self, entry: Entry) -> None:
        """Look for calls of this entry first."""
        entry.unlike = 0
        if self._recent and self._recent[0][1] is not entry:
            self._recent = tuple(sorted(self._recent, key=lambda pair: pair[1] is not entry))

    def remember(self, entry: Entry, call: Call, args: Any, kwargs: Any) -> None:
        """Keep the looks of a call that was replayed."""
        if entry.unlike >= _MOST_UNLIKE:
            return
        entry.unlike += 1
        try:
            likeness = Likeness.of(call, args, kwargs)
        except Exception:  # the call has its output, and the next one does without
            return
        if likeness is not None:
            others = [pair for pair in self._recent if pair[1] is not entry]
            self._recent = ((likeness, entry), *others[: _MOST_RECENT - 1])

    def entries(self) -> list[Entry]:
        """The signatures that are retained, then the blocked ones."""
        return [*self._retained.values(), *self._blocked.values()]

    def graphs(self) -> list[CapturedForward]:
        """The graphs that are retained."""
        return [entry.graph for entry in self._retained.values() if entry.graph is not None]

    # -- deciding ----------------------------------------------------------------------------------

    def decide(self, key: Signature) -> tuple[Entry, Decision]:
        """The entry of a signature, made where it may have one, and what to do with a call."""
        entry = self._retained.get(key) or self._blocked.get(key)
        if entry is not None and entry.graph is not None:
            return entry, Decision(Plan.REPLAY)
        if entry is not None:
            self._churn.repeated(key)
            return entry, self._decide_known(entry)
        entry = Entry(key)
        leaf = self._churn.changing_leaf(key)
        if leaf is not None:
            return entry, Decision(Plan.EAGER, Fallback(FallbackReason.SCALAR_CHURN, leaf))
        habitual = self._habit.expected()
        if habitual is not None:
            return entry, Decision(Plan.EAGER, habitual)
        decision = self.decide_again(entry)
        if decision.plan is Plan.EAGER:
            decision = self._make_room(key) or decision
        if decision.plan is Plan.WARM_UP and not self._closed:
            self._retained[key] = entry
        return entry, decision

    def decide_again(self, entry: Entry) -> Decision:
        """What to do with a call, now that something about its entry has changed."""
        return policy.decide(self.situation(entry))

    def situation(self, entry: Entry) -> Situation:
        """All that a decision depends on."""
        return Situation(
            stage=entry.stage, steady_warmups=entry.steady_warmups, changing_warmups=entry.changing_warmups,
            invalidations=entry.invalidations, change=entry.change, blocked=entry.blocked,
            retained=len(self._retained), max_graphs=self._options.max_graphs, warmup=self._options.warmup,
        )  # fmt: skip

    def _decide_known(self, entry: Entry) -> Decision:
        decision = self.decide_again(entry)
        unstable = decision.fallback is not None and decision.fallback.reason is FallbackReason.UNSTABLE
        if not unstable and entry.stage is not Stage.BLOCKED:
            return decision
        entry.rested += 1
        if entry.rested < policy.REST:
            return decision
        entry.rested = 0
        if unstable:
            entry.invalidations = policy.MOST_INVALIDATIONS - 1
        elif self._seen_blocked is not None and self._seen_blocked.difference() is not None:
            # The module is not what it was when signatures were blocked: what blocked them may be gone.
            self._blocked.clear()
            self._habit = policy.Habit()
            if len(self._retained) < self._options.max_graphs:
                entry.blocked, entry.stage, self._retained[entry.signature] = None, Stage.WARM, entry
        return self.decide_again(entry)

    def _make_room(self, key: Signature) -> Decision | None:
        """Let a signature replace one that differs only in numbers and never came back."""
        if not key.scalars:
            return None
        skeleton = key.skeleton
        rivals = [e for e in self._retained.values() if e.stage is Stage.WARM and e.signature.skeleton == skeleton]
        if not rivals:
            return None
        leaf = self._churn.replace(key, rivals[-1].signature)
        if leaf is not None:
            for rival in rivals:
                del self._retained[rival.signature]
            return Decision(Plan.EAGER, Fallback(FallbackReason.SCALAR_CHURN, leaf))
        del self._retained[rivals[0].signature]
        return Decision(Plan.WARM_UP)

    # -- learning ----------------------------------------------------------------------------------

    def learn(self, blocker: Fallback | None) -> None:
        """Note what a watched warm-up was blocked for, if it was."""
        self._habit.learn(blocker)

    def note_unretained(self, entry: Entry, fallback: Fallback) -> None:
        """Note a call whose signature found no place."""
        self.unretained.note(fallback, entry.signature, self._retained)

    def block(self, entry: Entry, fallback: Fallback, seen: Guards | None) -> None:
        """Let a signature be eager from now on.

        Args:
            seen: The module as it is, to notice a change that may lift what blocks.
        """
        entry.drop_graph(Stage.BLOCKED)
        entry.blocked = fallback
        self._remove(entry)
        if self._closed:
            return
        self._blocked[entry.signature] = entry
        self._seen_blocked = seen
        while len(self._blocked) > _MOST_BLOCKED:
            self._blocked.popitem(last=False)

    def forget(self, entry: Entry) -> None:
        """Know nothing about a signature any more."""
        entry.drop_graph(Stage.NEW)
        self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        if self._retained.get(entry.signature) is entry:  # another one may have taken its place meanwhile
            del self._retained[entry.signature]

    # -- dropping ----------------------------------------------------------------------------------

    def drop_stale(self) -> int:
        """Drop the graphs that no longer fit, so that they keep no memory of what was replaced; how many."""
        self._recent = ()
        changes = [(entry, entry.graph.guards.difference()) for entry in self._retained.values() if entry.graph]
        stale = [(entry, change) for entry, change in changes if change is not None]
        for entry, change in stale:
            entry.invalidate(change)
        return len(stale)

    def clear(self) -> bool:
        """Drop every graph and every verdict; whether there was any."""
        known = self.entries()
        for entry in known:
            entry.drop_graph(Stage.NEW)
        self._habit = policy.Habit()
        self._retained.clear()
        self._blocked.clear()
        self._recent = ()
        return bool(known)

    def close(self) -> None:
        """Drop everything and retain nothing from now on."""
        self._closed = True
        self.clear()
        self._seen_blocked = None  # it holds parameters

    # -- foretelling -------------------------------------------------------------------------------

    def trial(self) -> Ledger:
        """A copy on which decisions can be tried: it shares the graphs, and nothing that a decision writes."""
        other = copy.copy(self)
        other._retained = OrderedDict((key, replace(entry)) for key, entry in self._retained.items())
        other._blocked = OrderedDict((key, replace(entry)) for key, entry in self._blocked.items())
        other._churn, other._habit = self._churn.copy(), copy.copy(self._habit)
        return other

    def changing(self, key: Signature) -> tuple[str, ...]:
        """The numbers among the arguments of a call that keep changing, in words."""
        return explain.changing(*self._churn.history(key))

    def nearest(
        self, key: Signature, fallback: Fallback | None
    ) -> tuple[str, tuple[Signature, tuple[Difference, ...]] | None]:
        """What to compare a call with, and the differences; the call before, where nothing like it is retained."""
        if key in self._retained:
            return "", None
        before = self._churn.before(key)
        if fallback is not None and fallback.reason is FallbackReason.SCALAR_CHURN and before is not None:
            against, found = "in the call before", explain.nearest(key, [before])
        else:
            against, found = "retained", explain.nearest(key, self._retained)
        if found is None:
            return "", None
        if against == "retained":
            against = "captured" if self._retained[found[0]].graph is not None else "warmed up"
        return against, (found[0], explain.with_history(found[1], *self._churn.history(key)))
