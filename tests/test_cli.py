"""Every command writes to any output: a pipe that is closed early, and an encoding without its characters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hookgraph
from hookgraph.cli import EXIT_BROKEN_PIPE

CASES = """
import torch
def small():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()).eval()
    return model, [((torch.ones(2, 4),), {})]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a module of cases, and a file of stats."""
    (tmp_path / "mine.py").write_text(CASES)
    model = torch.nn.Linear(4, 4).eval()
    with torch.no_grad(), hookgraph.attach(model) as handle:
        for _ in range(4):
            model(torch.ones(2, 4))
        (tmp_path / "stats.json").write_text(handle.stats.to_json())
    return tmp_path


COMMANDS = [
    ["doctor", "mine:small"],
    ["bench", "mine:small", "--rounds", "1"],
    ["report", "stats.json"],
]
each_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])


def run(command: list[str], folder: Path, **options: object) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"PYTHONPATH": str(Path(hookgraph.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    environment |= options.pop("environment", {})  # type: ignore[arg-type]
    return subprocess.run(
        [sys.executable, "-m", "hookgraph", *command], cwd=folder, env=environment, stderr=subprocess.PIPE, **options
    )  # type: ignore[call-overload,no-any-return]


@each_command
def test_whoever_reads_may_stop(command: list[str], folder: Path) -> None:
    """As with ``| head``: no traceback, and none at exit either."""
    reader, writer = os.pipe()
    os.close(reader)
    done = run(command, folder, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (EXIT_BROKEN_PIPE, b"")


@each_command
def test_an_encoding_without_the_lines_of_a_table(command: list[str], folder: Path) -> None:
    done = run(command, folder, stdout=subprocess.PIPE, environment={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("ascii")
