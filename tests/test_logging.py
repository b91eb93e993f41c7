"""What goes to the log and to warnings: the turns of a signature's life, each said where people look."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import hookgraph
from tests import modules
from tests.residue import Watch

ROOT = Path(__file__).parent.parent

TURNS = """
import hookgraph
import torch

model = torch.nn.Linear(4, 4).eval()
handle = hookgraph.attach(model)
with torch.no_grad():
    for _ in range(3):
        model(torch.ones(2, 4))
    handle.invalidate("as a test")
"""


def run_turns(torch_logs: str, first: str = "hookgraph") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("TORCH_LOGS", None)
    if torch_logs:
        environment["TORCH_LOGS"] = torch_logs
    return subprocess.run(
        [sys.executable, "-c", f"import {first}{TURNS}"], capture_output=True, text=True, cwd=ROOT, env=environment
    )


@pytest.mark.parametrize(
    ("torch_logs", "first"), [("hookgraph", "hookgraph"), ("+hookgraph", "hookgraph"), ("+hookgraph", "torch")]
)
def test_torch_logs_shows_our_messages(torch_logs: str, first: str) -> None:
    """PyTorch imports us for it, while it is itself being imported: by the program, or by us."""
    done = run_turns(torch_logs, first)
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ")[2] for line in done.stderr.splitlines() if "hookgraph/" in line]
    assert [line.partition(" in ")[0] for line in lines] == [
        "Linear: captured",
        "Linear: invalidated: as a test",
    ]


@pytest.mark.parametrize("torch_logs", ["", "-hookgraph"])
def test_nothing_is_said_unasked(torch_logs: str) -> None:
    done = run_turns(torch_logs)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_turn_is_said_once(caplog: pytest.LogCaptureFixture, no_residue: Watch) -> None:
    model = modules.Block().eval()
    handle = hookgraph.attach(model, max_graphs=1)
    with torch.no_grad(), caplog.at_level(logging.INFO, "hookgraph"):
        for _ in range(4):
            model(torch.ones(2, 4))
        model.norm.weight = torch.nn.Parameter(model.norm.weight * 2)
        for _ in range(4):
            model(torch.ones(2, 4))
        handle.invalidate("as a test")
    no_residue.allow(model, "changed: norm._parameters['weight']")
    said = [record.getMessage() for record in caplog.records if record.name == "hookgraph"]
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert [text.split(":")[1].split()[0] for text in said] == ["captured", "invalidated", "captured", "invalidated"]
    assert all(text.startswith("Block: ") for text in said)


def test_a_block_is_said_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item()

    model = Reads().eval()
    hookgraph.attach(model)
    with torch.no_grad(), caplog.at_level(logging.INFO, "hookgraph"):
        for _ in range(4):
            model(torch.ones(2, 4))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("Reads: eager from now on for args[0] float32[2, 4]: read_back: ")
    assert "test_logging.py" in said


def test_replays_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = modules.mlp()
    hookgraph.attach(model)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 4))
        with caplog.at_level(logging.DEBUG):
            for _ in range(5):
                model(torch.ones(2, 4))
    assert caplog.records == []


def test_a_warning_comes_once_for_each_module_and_reason() -> None:
    model = modules.Blocks()
    hookgraph.attach(model, "blocks.*", max_graphs=1, on_fallback="warn")
    with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for width in (2, 3, 4, 3, 4):
            model(torch.ones(width, 4))
        with hookgraph.disabled():
            model(torch.ones(2, 4))
            model(torch.ones(2, 4))
    assert {warning.filename for warning in seen} == {modules.__file__}, "a warning names the line that made the call"
    told = [str(warning.message).partition(":")[0] + str(warning.message).split(":")[1] for warning in seen]
    assert {warning.category for warning in seen} == {hookgraph.HookgraphWarning}
    assert sorted(told) == sorted(
        f"blocks.{index} runs eager {reason}" for index in range(2) for reason in ("limit", "disabled")
    )
