"""Random modules, random calls and random changes in between are what they are in eager, to the last bit.

``tests/soak.py`` draws and runs them; a failing seed is replayed with ``python -m tests.soak --sequences 1
--seed N -v`` and made small with ``python -m tests.soak --shrink N``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import soak

SEQUENCES, WORKERS = 2000, 2


def test_random_sequences() -> None:
    """Each worker looks for residue itself, since no fixture reaches it."""
    share = SEQUENCES // WORKERS
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.soak", "--seed", str(first), "--sequences", str(share)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for first in range(0, SEQUENCES, share)
    ]
    outputs = [worker.communicate()[0].splitlines() for worker in workers]
    failures = [line for lines in outputs for line in lines[:-1]]
    assert not failures, "make one small with: python -m tests.soak --shrink SEED\n" + "\n".join(failures)
    totals = [json.loads(lines[-1]) for lines in outputs]
    assert sum(total["sequences"] for total in totals) == SEQUENCES
    assert all(total["replays"] > total["sequences"] for total in totals), "too few replays to prove anything"


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
