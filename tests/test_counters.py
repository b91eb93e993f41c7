"""Counters: one outcome a call, from any number of threads."""

from __future__ import annotations

import random
import threading

import pytest

from hookgraph.counters import Counters, Counts, Outcome
from hookgraph.reasons import Fallback, FallbackReason

THREADS, CALLS = 8, 2_000


def balances(counts: Counts) -> bool:
    return counts.calls == sum(counts.outcomes.values()) and counts.outcomes["eager"] == sum(counts.reasons.values())


def mark_many(counters: Counters, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(CALLS):
        outcome = rng.choice(list(Outcome))
        reason = rng.choice([FallbackReason.LIMIT, FallbackReason.TRAINING])
        counters.mark(outcome, Fallback(reason) if outcome is Outcome.EAGER else None)


def test_counts_of_many_threads_balance_at_every_moment() -> None:
    counters = Counters()
    threads = [threading.Thread(target=mark_many, args=(counters, seed)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    seen = [counters.read()]
    while any(thread.is_alive() for thread in threads):
        seen.append(counters.read())
    for thread in threads:
        thread.join()
    seen.append(counters.read())

    assert all(map(balances, seen))
    assert [counts.calls for counts in seen] == sorted(counts.calls for counts in seen)
    assert seen[-1].calls == THREADS * CALLS
    assert set(seen[-1].reasons) == {"limit", "training"}


def test_eager_without_a_reason_is_refused() -> None:
    counters = Counters()
    with pytest.raises(ValueError, match=r"outcome 'eager' with fallback None"):
        counters.mark(Outcome.EAGER)
    assert counters.read().calls == 0


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.EAGER])
def test_a_reason_without_eager_is_refused(outcome: Outcome) -> None:
    counters = Counters()
    with pytest.raises(ValueError, match=f"outcome '{outcome.value}' with fallback"):
        counters.mark(outcome, Fallback(FallbackReason.LIMIT))
    assert counters.read().calls == 0


def test_examples_are_bounded_and_counts_are_not() -> None:
    counters = Counters()
    for size in range(100):
        counters.mark(Outcome.EAGER, Fallback(FallbackReason.LIMIT, f"x f32 ({size},)"))
    counters.mark(Outcome.EAGER, Fallback(FallbackReason.LIMIT, "x f32 (0,)"))

    counts = counters.read()
    assert counts.reasons == {"limit": 101}
    assert counts.details["limit"] == {"x f32 (0,)": 2, "x f32 (1,)": 1, "x f32 (2,)": 1, "x f32 (3,)": 1}


def test_read_gives_a_copy() -> None:
    counters = Counters()
    counters.mark(Outcome.EAGER, Fallback(FallbackReason.LIMIT, "x"))
    before = counters.read()
    counters.mark(Outcome.EAGER, Fallback(FallbackReason.LIMIT, "x"))

    assert (before.calls, before.reasons, before.details) == (1, {"limit": 1}, {"limit": {"x": 1}})
    assert counters.read().calls == 2


def test_reset_sets_every_count_to_zero() -> None:
    counters = Counters()
    counters.mark(Outcome.REPLAY)
    counters.mark(Outcome.EAGER, Fallback(FallbackReason.LIMIT, "x"))
    counters.reset()

    counts = counters.read()
    assert (counts.calls, set(counts.outcomes.values()), counts.reasons, counts.details) == (0, {0}, {}, {})
