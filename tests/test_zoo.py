"""Real models, tiny, driven as their own pipelines, policies and generate loops drive them, on the tape."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch

import hookgraph
from tests.gpu import zoo_h200
from tests.models.cases import CASES
from tests.models.driving import run_case

NAMES = [name for name, case in CASES.items() if "cpu" in case.devices]


@pytest.mark.filterwarnings("ignore:.* runs eager. (limit|scalar_churn)")
@pytest.mark.parametrize("name", NAMES)
def test_case(name: str) -> None:
    """Bitwise parity on every call, caller's arguments and caches included; graphs wherever they are possible."""
    case = CASES[name]
    if case.needs is not None:
        pytest.importorskip(case.needs, reason=f"an environment with {case.needs} beside this torch would run it")
    with torch.no_grad():
        twins = run_case(case, backend="auto")
    with twins:
        stats = twins.handle.stats
        seen = twins.outcomes
        assert stats.calls == len(seen), seen
        assert stats.errors == 0
        assert twins.count("replays") >= case.replays, seen
        assert set(stats.reasons) <= case.reasons, stats.modules[0].details
        if case.replays:
            assert not stats.eager, seen
            assert twins.count("captures") <= case.max_graphs
        else:
            assert stats.eager, seen
            assert stats.captures == 0, seen
        if case.detail:
            details = [text for examples in stats.modules[0].details.values() for text in examples]
            assert any(case.detail in text for text in details), details


def test_the_models_that_a_bare_runner_replays_do_replay() -> None:
    """Sixteen of the plain cases need nothing but static inputs, opened caches and clones."""
    plain = [name for name, case in CASES.items() if "-" not in name and case.needs is None]
    assert len(plain) == 20
    assert sum(CASES[name].replays > 0 for name in plain) >= 16


@pytest.mark.parametrize("name", ["flux", "alpamayo_expert"])
def test_inference_mode(name: str) -> None:
    with torch.inference_mode(), run_case(CASES[name]) as twins:
        assert twins.count("replays") >= 2, twins.outcomes


@pytest.mark.parametrize("name", ["flux", "alpamayo_expert_cfg"])
def test_bfloat16(name: str) -> None:
    with torch.no_grad(), run_case(CASES[name], dtype=torch.bfloat16) as twins:
        assert twins.count("replays") >= 2, twins.outcomes


def test_the_caller_s_cache_can_be_freed() -> None:
    """The graphs keep no tensor of a cache that the driver has dropped."""
    case = CASES["pi0_action_expert"].build()
    hookgraph.attach(case.module)
    alive = []
    with torch.no_grad():
        while case.calls:
            args, kwargs = case.calls.pop(0)
            alive += [weakref.ref(layer.keys) for layer in kwargs["past_key_values"].layers]
            case.run(*args, **kwargs)
            del args, kwargs
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


def test_the_gpu_script_rehearsed_on_the_tape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``tests/gpu/zoo_h200.py`` writes what ``docs/results`` keeps."""
    out = tmp_path / "results" / "zoo.json"
    names = ["wan-token"]
    arguments = ["--device", "cpu", "--dtypes", "float32", "--rounds", "1", "--only", *names, "--out", str(out)]
    assert zoo_h200.main(arguments) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    result = report["cases"]["wan-token_timesteps"]["float32"]
    assert result["parity"] is True
    assert result["outcomes"].count("replays") >= 3
    assert result["eager_ms"]["count"] == result["attached_ms"]["count"] == result["timed_outcomes"]["replays"] == 6
    assert {"date", "command", "machine", "versions", "cases"} <= report.keys()
    assert "1 of 1 equal to eager bit for bit" in capsys.readouterr().out
