"""``python -m hookgraph report``: saved stats as tables, and as JSON again."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hookgraph
from hookgraph.cli import main
from hookgraph.stats import STATS_SCHEMA, Stats
from tests import modules


@pytest.fixture
def stats() -> Stats:
    model = modules.mlp()
    handle = hookgraph.attach(model)
    with torch.no_grad():
        for _ in range(4):
            model(torch.ones(2, 4))
    model(torch.ones(2, 4))
    return handle.stats


@pytest.fixture
def saved(tmp_path: Path, stats: Stats) -> Path:
    path = tmp_path / "stats.json"
    path.write_text(stats.to_json())
    return path


def test_the_tables_are_those_of_the_stats(saved: Path, stats: Stats, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(saved)]) == 0
    assert capsys.readouterr().out == f"{stats}\n"


def test_from_standard_input(stats: Stats, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(stats.to_json()))
    assert main(["report", "-"]) == 0
    assert capsys.readouterr().out == f"{stats}\n"


def test_as_a_program(saved: Path, stats: Stats) -> None:
    command = [sys.executable, "-m", "hookgraph", "report", "-", "--json"]
    done = subprocess.run(command, input=saved.read_text(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert Stats.from_json(done.stdout) == stats
    assert done.stdout == stats.to_json(indent=2) + "\n"


def test_counts_that_do_not_balance_are_a_finding(
    tmp_path: Path, stats: Stats, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stats.json"
    path.write_text(replace(stats, calls=stats.calls + 1).to_json())
    assert main(["report", str(path)]) == 1
    assert "do not balance" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "match"),
    [
        pytest.param("{", "stats: not JSON", id="cut off"),
        pytest.param("[1]", "a JSON object is expected, not a list", id="a list"),
        pytest.param("{}", f"cannot read schema None, this version reads {STATS_SCHEMA}", id="something else"),
        pytest.param(
            json.dumps({"schema": STATS_SCHEMA + 1}),
            f"cannot read schema {STATS_SCHEMA + 1}, this version reads {STATS_SCHEMA}. Upgrade hookgraph",
            id="of a later version",
        ),
        pytest.param(
            json.dumps({"schema": STATS_SCHEMA - 1}), "Read it with the hookgraph that wrote it", id="of an older one"
        ),
        pytest.param(json.dumps({"schema": STATS_SCHEMA}), "not what to_dict() gives", id="without its fields"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, match: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main(["report", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("hookgraph report: error: ")
    assert str(path) in shown.err
    assert match in shown.err


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_a_file_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\xff\xfe")
    assert main(["report", str(path)]) == 2
    assert "cannot read" in capsys.readouterr().err
