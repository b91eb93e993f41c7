"""Is a graph worth it: what is timed, what is said of it, and what min_speedup drops."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import hookgraph
from hookgraph import policy
from hookgraph.backends.tape import TapeBackend
from hookgraph.reasons import FallbackReason
from hookgraph.stats import SignatureStats, Stats
from hookgraph.worth import Worth
from tests.modules import Does, mlp
from tests.parity import Twins, check_balance

X = torch.ones(2, 4)
PAUSE = 0.02  # seconds of Python in the forward, which a replay does not run


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tape's times are real, and taken for what they are on a GPU: a promise."""
    monkeypatch.setattr(TapeBackend, "promises_speed", True)


def slow_python() -> nn.Module:
    def forward(module: Does, x: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE)
        return x + 1

    return Does(forward).eval()


def slow_operators() -> nn.Module:
    return nn.Sequential(*[nn.Linear(400, 400) for _ in range(6)]).eval()


def signature_of(handle: hookgraph.Attachment) -> SignatureStats:
    (module,) = handle.stats.modules
    (signature,) = module.signatures
    return signature


def test_a_slow_host_makes_a_graph_worth_it(as_a_gpu: None) -> None:
    with hookgraph.attach(module := slow_python()) as handle:
        for step in range(6):
            module(X + step)
        seen = signature_of(handle)
    assert seen.eager_ms is not None
    assert seen.replay_ms is not None
    assert 1e3 * PAUSE <= seen.eager_ms < 10e3 * PAUSE
    assert 0 < seen.replay_ms < 1e3 * PAUSE
    assert seen.speedup == seen.eager_ms / seen.replay_ms > 1.05
    assert seen.verdict == "worth it"
    assert seen.saved_ms == pytest.approx(seen.replays * (seen.eager_ms - seen.replay_ms))
    assert seen.bytes_per_ms_saved == pytest.approx(
        (seen.input_bytes + seen.output_bytes) / (seen.eager_ms - seen.replay_ms)
    )


def test_a_busy_device_makes_it_not_worth_it(as_a_gpu: None) -> None:
    """The tape runs the same operators; nothing but Python between them is saved."""
    with hookgraph.attach(module := slow_operators()) as handle:
        for _ in range(6):
            module(torch.randn(400, 400))
        seen = signature_of(handle)
    assert seen.speedup is not None
    assert 0.5 < seen.speedup < 1.5


def test_the_tape_promises_nothing() -> None:
    with hookgraph.attach(module := slow_python(), min_speedup=1e6) as handle:
        for step in range(6):
            module(X + step)
        seen = signature_of(handle)
        assert (seen.verdict, handle.stats.replays) == ("rehearsal", 4)


@pytest.mark.parametrize("options", [{"verify": 0}, {}], ids=["unproved", "on probation"])
def test_what_was_not_timed_has_no_verdict(options: dict[str, int], as_a_gpu: None) -> None:
    with hookgraph.attach(module := mlp(), **options) as handle:
        for _ in range(6):
            module(X)  # the same tensor: the second comparison waits for another one
        seen = signature_of(handle)
    assert seen.verdict == "not measured"
    if options:
        assert (seen.eager_ms, seen.replay_ms, seen.speedup, seen.saved_ms) == (None, None, None, 0.0)


def test_min_speedup_drops_the_graph_and_its_memory(as_a_gpu: None) -> None:
    with Twins.build(mlp, min_speedup=1e6) as twins:
        for _ in range(6):
            twins(torch.randn(2, 4))
        assert twins.outcomes == ["warmups", "captures", "replays", *["eager:not_worth_it"] * 3]
        stats = twins.handle.stats
        check_balance(stats)
        assert stats.bytes == 0
        seen = signature_of(twins.handle)
        assert seen.state == "blocked"
        assert "times as fast as eager, min_speedup=1e+06 (lower min_speedup" in seen.detail


def test_min_speedup_keeps_what_is_fast_enough(as_a_gpu: None) -> None:
    with hookgraph.attach(module := slow_python(), min_speedup=1.1) as handle:
        for step in range(6):
            module(X + step)
        assert handle.stats.replays == 4


def test_a_change_of_the_module_asks_again(as_a_gpu: None) -> None:
    """Blocked by one figure is not blocked for good, once the module is another one."""
    with hookgraph.attach(module := slow_python(), min_speedup=1e6) as handle:
        for step in range(6):
            module(X + step)
        assert handle.stats.reasons == {"not_worth_it": 3}
        handle.invalidate("another device, say")
        module(X)
        assert handle.stats.warmups == 2


def test_an_invalidated_graph_has_no_verdict(as_a_gpu: None, no_residue: object) -> None:
    with hookgraph.attach(module := mlp()) as handle:
        for step in range(4):
            module(X + step)
        assert signature_of(handle).verdict != "not measured"
        module[0].weight.data = module[0].weight.data.clone()
        module(X)
        assert signature_of(handle).verdict == "not measured"


def test_the_rule() -> None:
    assert policy.judge_worth(None, 1.1) is None
    assert policy.judge_worth(Worth(100, 200), None) is None
    assert policy.judge_worth(Worth(110, 100), 1.1) is None
    dropped = policy.judge_worth(Worth(109, 100), 1.1)
    assert dropped is not None
    assert dropped.reason is FallbackReason.NOT_WORTH_IT


def test_the_best_of_several_times_counts() -> None:
    assert Worth(100, 900).best(None) == Worth(100, 900)
    assert Worth(120, 50).best(Worth(100, 900)) == Worth(100, 50)


def test_times_go_through_a_file_and_a_frame() -> None:
    with hookgraph.attach(module := mlp()) as handle:
        for step in range(4):
            module(X + step)
        stats = handle.stats
    assert Stats.from_json(json.dumps(stats.to_dict())) == stats
    row = stats.to_frame().iloc[0]
    assert row["speedup"] == pytest.approx(stats.modules[0].signatures[0].speedup)
    assert row["verdict"] == "rehearsal"
