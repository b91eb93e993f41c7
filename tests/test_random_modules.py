"""Random modules, random calls and random changes in between are what they are in eager, to the last bit.

``tests/soak.py`` draws and runs them; a failing seed is replayed with ``python -m tests.soak --sequences 1
--seed N -v`` and made small with ``python -m tests.soak --shrink N``.
"""

from __future__ import annotations

import pytest

import hookgraph
from tests import parity, soak

SEQUENCES, CHUNK = 2000, 100


@pytest.mark.parametrize("first", range(0, SEQUENCES, CHUNK))
def test_random_sequences(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every sequence checks for residue itself, at its end; the fixture would hold all its modules.
    monkeypatch.setattr(hookgraph, "attach", hookgraph.attach.__wrapped__)  # type: ignore[attr-defined]
    monkeypatch.setattr(parity, "WATCH", None)
    with soak.quick_referrers():
        tally = soak.run(range(first, first + CHUNK), soak.Tally())
    notes = "\n".join(f"seed {seed} (python -m tests.soak --shrink {seed}): {note}" for seed, note in tally.mismatches)
    assert not tally.mismatches, notes
    assert tally.replays > tally.sequences, "too few replays to prove anything"


def test_a_plan_depends_on_its_seed_alone() -> None:
    assert str(soak.draw_plan(7)) == str(soak.draw_plan(7)) != str(soak.draw_plan(8))


def test_shrinking_keeps_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(plan: soak.Plan) -> str | None:
        kinds = {act.kind for act in plan.acts if isinstance(act, soak.Event)}
        return "so be it" if kinds and plan.steps else None

    monkeypatch.setattr(soak, "failure", fails)
    seed = next(seed for seed in range(100) if fails(soak.draw_plan(seed)))
    small = soak.shrink(soak.draw_plan(seed))
    assert (len(small.acts), len(small.steps), small.build) == (1, 1, frozenset())
