"""What to do with one call: a pure function from the state of its signature to a plan."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hookgraph.reasons import Fallback, FallbackReason
from hookgraph.worth import Worth

MOST_CHANGING_WARMUPS = 3  # a forward that still changes attributes after so many calls always will
REST = 32  # eager calls before an unstable or blocked signature may get another chance
MOST_SHORTAGES = 3  # replays in a row that found no memory for their outputs
MOST_INVALIDATIONS = 4  # in a row, without a replay in between: the module never stands still


class Stage(StrEnum):
    """Where a signature is in its life."""

    NEW = "new"
    WARM = "warm"
    BUSY = "busy"  # a thread is warming it up or capturing it
    CAPTURED = "captured"  # on probation
    TRUSTED = "trusted"
    BLOCKED = "blocked"


class Plan(StrEnum):
    """What to do with one call."""

    WARM_UP = "warm up"
    CAPTURE = "capture"
    REPLAY = "replay"
    EAGER = "eager"


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a decision depends on."""

    stage: Stage
    steady_warmups: int = 0  # calls in a row that left the module's Python state as it was
    changing_warmups: int = 0
    invalidations: int = 0  # in a row
    change: str = ""  # what the last one was for
    blocked: Fallback | None = None
    retained: int = 0  # signatures that have a graph, or are on the way to one
    max_graphs: int = 4
    warmup: int = 1


@dataclass(frozen=True, slots=True)
class Decision:
    plan: Plan
    fallback: Fallback | None = None


def decide(now: Situation) -> Decision:
    """Choose what to do with one call of a signature.

    Example:
        >>> decide(Situation(Stage.NEW)).plan
        <Plan.WARM_UP: 'warm up'>
        >>> decide(Situation(Stage.WARM, steady_warmups=1)).plan
        <Plan.CAPTURE: 'capture'>
        >>> decide(Situation(Stage.NEW, retained=4)).fallback.reason.value
        'limit'
    """
    if now.stage is Stage.BLOCKED:
        if now.blocked is None:
            raise ValueError("a blocked signature needs its reason")
        return Decision(Plan.EAGER, now.blocked)
    if now.stage is Stage.BUSY:
        return Decision(Plan.EAGER, Fallback(FallbackReason.BUSY))
    if now.stage in (Stage.CAPTURED, Stage.TRUSTED):
        return Decision(Plan.REPLAY)
    if now.stage is Stage.NEW:
        if now.retained >= now.max_graphs:
            return Decision(Plan.EAGER, Fallback(FallbackReason.LIMIT, f"max_graphs={now.max_graphs}"))
        return Decision(Plan.WARM_UP)
    if now.invalidations >= MOST_INVALIDATIONS:
        told = f", the last one since {now.change}" if now.change else ""
        return Decision(
            Plan.EAGER, Fallback(FallbackReason.UNSTABLE, f"{now.invalidations} invalidations in a row{told}")
        )
    if now.steady_warmups >= now.warmup:
        return Decision(Plan.CAPTURE)
    return Decision(Plan.WARM_UP)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one watched warm-up says about its signature."""

    steady: bool  # the next call may be expected to do just the same
    blocker: Fallback | None = None


def judge_warmup(
    now: Situation, change: str | None, host_copies: int, host_copies_before: int | None, seen: Fallback | None
) -> Verdict:
    """Judge a warm-up call; a forward that fills a cache on its first call gets another one.

    Args:
        now: The situation, this call included in ``changing_warmups`` if it turns out to be one.
        change: What the call changed in the module's Python state, if anything.
        host_copies: How often it copied from the host, and how often the warm-up before it did.
        seen: What the audit saw that forbids a graph.
    """
    first_copies = bool(host_copies) and host_copies != host_copies_before
    if change is None and not first_copies:
        return Verdict(seen is None, seen)
    if now.changing_warmups + 1 < MOST_CHANGING_WARMUPS:
        return Verdict(False)
    if change is not None:
        return Verdict(False, Fallback(FallbackReason.CHANGES_STATE, change))
    return Verdict(False, seen or Fallback(FallbackReason.HOST_COPY, f"{host_copies} copies, not the same each call"))


def judge_worth(worth: Worth | None, min_speedup: float | None) -> Fallback | None:
    """Why a graph that was timed is given up; None where it may stay.

    Example:
        >>> judge_worth(Worth(eager_ns=1_020, replay_ns=1_000), min_speedup=1.1).detail
        '1.02 times as fast as eager, min_speedup=1.1'
    """
    if worth is None or min_speedup is None or worth.speedup >= min_speedup:
        return None
    return Fallback(
        FallbackReason.NOT_WORTH_IT, f"{worth.speedup:.2f} times as fast as eager, min_speedup={min_speedup:g}"
    )


_HABIT_AFTER = 3
_ASK_AGAIN_EVERY = 64


class Habit:
    """A forward that is blocked for the same reason whatever its signature.

    A decoder whose cache grows has a new signature at every token; watching each call of a forward
    that always reads a value back would double its cost for nothing.
    """

    def __init__(self) -> None:
        self._last: Fallback | None = None
        self._count = 0
        self._skipped = 0

    def learn(self, blocker: Fallback | None) -> None:
        """Note what a new signature was blocked for; None for one that was not."""
        self._count = self._count + 1 if blocker is not None and blocker == self._last else 1
        self._last = blocker

    def expected(self) -> Fallback | None:
        """What a new signature will be blocked for; asked again every now and then."""
        if self._last is None or self._count < _HABIT_AFTER:
            return None
        self._skipped = (self._skipped + 1) % _ASK_AGAIN_EVERY
        return self._last if self._skipped else None
