"""``python -m hookgraph demo``: its report, its exit status, its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hookgraph.cli
from hookgraph.cli import demo, main
from hookgraph.cli.sameness import Snapshot, same_bits
from hookgraph.stats import ModuleStats, Stats

ROOT = Path(__file__).parent.parent


@pytest.fixture
def qwen_image() -> Any:
    """The denoising loop; where diffusers is missing, the tests that need it are skipped."""
    pytest.importorskip("diffusers", reason="needs diffusers: pip install 'hookgraph[models]'")
    from hookgraph.cli import qwen_image

    return qwen_image


@pytest.mark.usefixtures("qwen_image")
def test_json_is_one_object_and_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hookgraph", "demo", "--json", "--steps", "6", "--device", "cpu"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    stats = Stats.from_dict(report["stats"])

    assert report["parity"] is True
    assert report["untouched"] is True
    assert (report["steps"], report["device"], report["backend"]) == (6, "cpu", "tape")
    assert report["versions"].keys() == {"torch", "diffusers", "hookgraph"}
    assert report["eager_ms_per_step"] > 0
    assert report["attached_ms_per_step"] > 0
    assert 1 <= report["timed_steps"] <= 4  # two signatures, which warm up in step 0 and are captured in step 1
    assert stats.calls == 12
    assert stats.replays > 0
    assert stats.balanced


@pytest.mark.usefixtures("qwen_image")
def test_report_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "4", "--device", "cpu"]) == 0
    shown = capsys.readouterr()

    assert "4 steps with two prompts: 8 calls of two signatures" in shown.out
    assert "all 8 bitwise equal to eager" in shown.out
    assert "the module is as it was" in shown.out
    assert "does not promise speed" in shown.out
    assert "that warmed up or captured left out" in shown.out
    assert "4/4" in shown.err
    assert max(map(len, shown.out.splitlines())) <= 115


@pytest.mark.usefixtures("qwen_image")
def test_a_bound_of_one_graph_shows_why_the_other_prompt_is_eager(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(hookgraph.HookgraphWarning, match="runs eager: limit"):
        assert main(["demo", "--steps", "4", "--device", "cpu", "--max-graphs", "1", "--json"]) == 0
    stats = Stats.from_dict(json.loads(capsys.readouterr().out)["stats"])
    assert stats.reasons == {"limit": stats.eager}
    assert stats.eager > 0
    assert stats.replays > 0


@pytest.mark.usefixtures("qwen_image")
def test_too_few_steps_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "1", "--device", "cpu"]) == 0
    assert "try more --steps" in capsys.readouterr().out


def test_one_different_bit_is_found(
    qwen_image: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []

    def denoise(*args: Any) -> Any:
        runs.append(plain(*args))
        if len(runs) == 2:  # the attached one
            runs[1].outputs[3].view(torch.int32)[0, 0, 0] ^= 1
        return runs[-1]

    plain = qwen_image.denoise
    monkeypatch.setattr(qwen_image, "denoise", denoise)
    assert main(["demo", "--steps", "2", "--device", "cpu"]) == 1
    assert "DIFFERENT from eager" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "good"),
    [
        pytest.param({}, True, id="all is well"),
        pytest.param({"parity": False}, False, id="outputs differ"),
        pytest.param({"untouched": False}, False, id="something is left on the module"),
        pytest.param({"stats": "unbalanced"}, False, id="the counts do not balance"),
    ],
)
def test_exit_status_follows_the_report(change: dict[str, Any], good: bool) -> None:
    counts = {"calls": 1, "warmups": 1, "captures": 0, "replays": 0, "eager": 0, "errors": 0}
    module = ModuleStats(name="", class_name="Model", backend="tape", **counts)
    report = demo.Report(
        job=None,
        stats=Stats.of([module]),
        parity=True,
        untouched=True,
        timed_steps=0,
        eager_ms_per_step=None,
        attached_ms_per_step=None,
    )
    if "stats" in change:
        change = {"stats": Stats.of([replace(module, calls=2)])}
    assert replace(report, **change).good is good


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(["--backend", "cuda"], "torch sees no CUDA device", id="cuda backend without a GPU"),
        pytest.param(["--device", "cuda"], "torch sees no CUDA device", id="cuda device without a GPU"),
        pytest.param(["--device", "cuda", "--backend", "tape"], "tape backend serves the CPU only", id="tape on cuda"),
        pytest.param(["--device", "cpu", "--backend", "cuda"], "cuda backend needs a GPU", id="cuda on cpu"),
    ],
)
def test_options_that_cannot_work_are_one_error(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("hookgraph demo: error: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["demo", "--steps", "0"], "'0' is not a positive whole number", id="no steps"),
        pytest.param(["demo", "--steps", "ten"], "'ten' is not a positive whole number", id="steps in words"),
        pytest.param(["demo", "--max-graphs", "-1"], "'-1' is not a positive whole number", id="a negative bound"),
        pytest.param(["demo", "--device", "tpu"], "invalid choice: 'tpu'", id="an unknown device"),
        pytest.param([], "required: COMMAND", id="no command"),
    ],
)
def test_a_wrong_command_line_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_without_diffusers_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)  # what an import of a missing package meets
    monkeypatch.delitem(sys.modules, "hookgraph.cli.qwen_image", raising=False)
    monkeypatch.delattr(hookgraph.cli, "qwen_image", raising=False)
    assert main(["demo", "--device", "cpu"]) == 2
    assert "pip install 'hookgraph[models]'" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"hookgraph {hookgraph.__version__}\n"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        pytest.param(torch.tensor([float("nan")]), torch.tensor([float("nan")]), True, id="the same NaN"),
        pytest.param(torch.tensor([0.0]), torch.tensor([-0.0]), False, id="zeros of different sign"),
        pytest.param(torch.ones(2), torch.ones(2, dtype=torch.float64), False, id="dtype"),
        pytest.param(torch.ones(2, 1), torch.ones(2), False, id="shape"),
        pytest.param(torch.ones(2, 3).T, torch.ones(3, 2), True, id="other strides"),
        pytest.param(torch.ones(()), torch.ones(()), True, id="no dimension"),
        pytest.param(torch.ones(0), torch.ones(0), True, id="no element"),
    ],
)
def test_same_bits(one: torch.Tensor, other: torch.Tensor, same: bool) -> None:
    assert same_bits(one, other) is same


class _Changes:
    """Ways to leave a trace on a module."""

    @staticmethod
    def attribute(module: torch.nn.Module) -> None:
        module[0].left_over = 1

    @staticmethod
    def forward(module: torch.nn.Module) -> None:
        module.forward = module.forward

    @staticmethod
    def hook(module: torch.nn.Module) -> None:
        module[0].register_forward_pre_hook(lambda *_: None)

    @staticmethod
    def weight(module: torch.nn.Module) -> None:
        module[0].weight.data[0, 0] += 1

    @staticmethod
    def child(module: torch.nn.Module) -> None:
        module.append(torch.nn.ReLU())


@pytest.mark.parametrize("change", ["attribute", "forward", "hook", "weight", "child"])
def test_snapshot_notices_what_is_left_behind(change: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    before = Snapshot(module)
    assert before.matches(module)
    getattr(_Changes, change)(module)
    assert not before.matches(module)
