"""The soak: it finds what is wrong, ends well, and leaves the module as it was."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from hookgraph import cli, soak
from hookgraph.graphs import CapturedForward
from tests.modules import Does, mlp

CALLS = [((torch.randn(rows, 4),), {}) for rows in (1, 2, 3)]


def small() -> tuple[nn.Module, list[Any]]:
    return mlp(), CALLS


@pytest.fixture
def eventful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events so often that a second sees all of them."""
    monkeypatch.setattr(soak, "_EVENT_EVERY", 10)


def test_a_second_of_everything(eventful: None) -> None:
    module = mlp()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    report = soak.run(module, CALLS, seconds=2.0, threads=3)
    assert report.passed, report.examples
    assert report.calls == sum(report.outcomes.values())
    assert report.compared + report.failures == report.calls
    assert report.failures == report.outcomes["errors"]
    assert report.failures > 0
    assert report.outcomes["replays"] > 0
    assert len(report.events) == 5
    assert not hookgraph.is_attached(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert report.memory["process"][0] > 0


def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CapturedForward.replay

    def wrong(self: CapturedForward, *args: Any, **kwargs: Any) -> Any:
        return right(self, *args, **kwargs) + 1

    monkeypatch.setattr(CapturedForward, "replay", wrong)
    report = soak.run(mlp(), CALLS[:1], seconds=0.5, threads=1)
    assert report.mismatches > 0
    assert not report.passed
    assert "differs by 1" in report.examples[0]
    assert "WRONG" in str(report)


def test_a_forward_that_never_agrees_with_itself_is_no_mismatch(eventful: None) -> None:
    """Random numbers: eager gives another value each time it is asked, so nothing can be said of a replay."""
    module = Does(lambda m, x: m.linear(x) + torch.rand_like(x))
    report = soak.run(module, CALLS, seconds=0.5, threads=2)
    assert report.mismatches == 0
    assert report.undecided > 0


def test_an_error_of_the_attached_module_alone_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("in a replay")

    monkeypatch.setattr(CapturedForward, "replay", broken)
    report = soak.run(mlp(), CALLS[:1], seconds=0.3, threads=1, verify=0, compare_every=2)
    assert report.compared < report.calls
    assert report.errors == report.outcomes["errors"] - report.failures > 0
    assert not report.passed
    assert "ZeroDivisionError: in a replay" in report.examples[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"seconds": 0}, "0 seconds"), ({"threads": 0}, "0 threads"), ({"compare_every": 0}, "one of 0")],
)
def test_nothing_to_do_is_an_error(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        soak.run(mlp(), CALLS, **changes)
    with pytest.raises(ValueError, match="0 calls"):
        soak.run(mlp(), [])


def test_an_attachment_of_the_user_s_own_is_left_alone() -> None:
    module = mlp()
    with hookgraph.attach(module), pytest.raises(hookgraph.HookgraphError, match="attached to this module already"):
        soak.run(module, CALLS)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["soak", "tests.test_soak:small", "--minutes", "0.005", "--threads", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["passed"] is True
    assert data["mismatches"] == 0
    assert cli.main(["soak", "tests.test_soak:small", "--minutes", "0.005"]) == 0
    assert "as in eager, all of it" in capsys.readouterr().out


@pytest.mark.parametrize("minutes", ["0", "-1", "soon", "inf"])
def test_bad_minutes_are_named(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["soak", "--minutes", minutes])
    assert f"{minutes!r} is not a positive number of minutes" in capsys.readouterr().err


class TakesAnything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.linear(x)


def test_a_forward_that_refuses_nothing_is_not_made_to_fail(eventful: None) -> None:
    report = soak.run(TakesAnything().eval(), CALLS, seconds=0.5, threads=2)
    assert report.passed, report.examples
    assert report.failures == 0


def test_calls_that_fail_by_themselves_are_the_caller_s_mistake() -> None:
    with pytest.raises(
        hookgraph.HookgraphError, match=r"calls\[0\]: the model itself raises RuntimeError: mat1 and mat2"
    ):
        soak.run(mlp(), [((torch.ones(2, 5),), {})], seconds=0.1)


def test_a_soak_without_a_replay_says_so() -> None:
    module = Does(lambda m, x: m.linear(x) * x.sum().item())
    report = soak.run(module, CALLS, seconds=0.3, threads=1)
    assert "nothing was replayed: read_back; ask the doctor" in str(report)


def test_an_interruption_ends_the_threads_before_the_module_is_given_back(
    eventful: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(soak.time, "sleep", interrupted)
    threads = threading.active_count()
    module = mlp()
    with pytest.raises(KeyboardInterrupt):
        soak.run(module, CALLS, seconds=60.0, threads=3)
    assert threading.active_count() == threads
    assert not hookgraph.is_attached(module)
    assert "forward" not in vars(module)
