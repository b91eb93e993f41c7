"""``record_calls`` keeps each call as it was when it was made, changes nothing, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from hookgraph import bench
from hookgraph.errors import HookgraphError
from tests.modules import Blocks, Does, Scaled, mlp
from tests.residue import Snapshot

X = torch.arange(8.0).reshape(2, 4) / 8


def test_each_call_is_kept_as_it_was_when_it_was_made() -> None:
    """Not as the forward, or the loop, has left its arguments since."""

    def forward(m: Any, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["steps"] += 1
        state["sum"].add_(1)
        return m.linear(x)

    model, state, x = Does(forward), {"steps": 0, "sum": torch.zeros(())}, X.clone()
    with hookgraph.record_calls(model) as calls, torch.no_grad():
        for _ in range(3):
            model(x, state=state)
            x.add_(1)
    assert [kwargs["state"]["steps"] for _, kwargs in calls] == [0, 1, 2]
    assert [float(kwargs["state"]["sum"]) for _, kwargs in calls] == [0.0, 1.0, 2.0]
    assert all(torch.equal(args[0], X + step) for step, (args, _) in enumerate(calls))


def test_the_first_calls_are_kept() -> None:
    model = mlp()
    with hookgraph.record_calls(model, most=2) as calls:
        for step in range(5):
            model(X + step)
            assert len(calls) == min(step + 1, 2)
    model(X)
    assert [float(args[0][0, 0]) for args, _ in calls] == [0.0, 1.0]


def test_what_a_call_shares_its_copy_shares() -> None:
    model = Does(lambda m, x, y, weight: m.linear(x) + y)
    with hookgraph.record_calls(model) as calls:
        model(X, X[:1], weight=model.linear.weight)
    (((x, y), kwargs),) = calls
    assert x.data_ptr() == y.data_ptr() != X.data_ptr()
    assert kwargs["weight"] is model.linear.weight


def test_nothing_is_left_and_nothing_is_changed() -> None:
    model, plain = Blocks(), Blocks()
    plain.load_state_dict(model.state_dict())
    before = Snapshot(model).facts
    with hookgraph.record_calls(model):
        assert torch.equal(model(X), plain(X))
    with pytest.raises(ZeroDivisionError), hookgraph.record_calls(model):
        1 / 0  # noqa: B018 (a loop that fails)
    assert Snapshot(model).facts == before


def test_arguments_that_cannot_be_copied_do_not_end_the_call() -> None:
    class Odd:
        def __deepcopy__(self, memo: Any) -> Any:
            raise ValueError("there is only one of me")

    odd, generator = Odd(), torch.Generator()
    weights = torch.ones(4, requires_grad=True)
    model = Does(lambda m, *given: m.linear(given[0]))
    with hookgraph.record_calls(model) as calls:
        model(X, odd, generator, weights * 2)
    ((kept, kept_odd, kept_generator, product), _), *_ = calls
    assert kept.data_ptr() != X.data_ptr()
    assert (kept_odd, kept_generator) == (odd, generator)
    assert torch.equal(product, torch.full((4,), 2.0))


def test_arguments_come_before_other_hooks_change_them() -> None:
    """The hooks run again when the call is made again."""
    model = mlp()
    doubling = model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with hookgraph.record_calls(model) as calls:
        model(X)
    assert torch.equal(calls[0][0][0], X)
    doubling.remove()


def test_a_call_of_inference_mode_can_be_made_outside_of_it() -> None:
    model = Does(lambda m, x, out: out.copy_(m.linear(x)))
    with torch.inference_mode(), hookgraph.record_calls(model) as calls:
        model(torch.ones(2, 4), out=torch.zeros(2, 4))
    found = hookgraph.diagnose(model, calls)
    assert found.can_capture_whole


def test_it_serves_the_doctor_a_warm_up_and_a_benchmark() -> None:
    model = Scaled()
    with torch.no_grad():
        with hookgraph.record_calls(model) as calls:
            for scale in (1.0, 2.0):
                model(X, scale=scale)
        assert hookgraph.diagnose(model, calls).can_capture_whole
        assert bench.measure(model, calls, rounds=1).agrees
        with hookgraph.attach(model) as handle:
            handle.warmup(calls, progress=False)
            assert [one.state for one in handle.stats.modules[0].signatures] == ["trusted", "trusted"]


def test_an_attached_module_may_be_recorded() -> None:
    model = mlp()
    with torch.no_grad(), hookgraph.attach(model) as handle:
        with hookgraph.record_calls(model) as calls:
            for _ in range(4):
                model(X)
        assert (handle.stats.replays, len(calls)) == (2, 4)


@pytest.mark.parametrize(
    ("module", "most", "match"),
    [
        pytest.param(3, 8, r"record_calls\(\) needs a torch.nn.Module, got int", id="no module"),
        pytest.param(nn.Identity(), 0, "most=0", id="none"),
        pytest.param(nn.Identity(), True, "most=True", id="a bool"),
    ],
)
def test_wrong_use(module: Any, most: Any, match: str) -> None:
    with pytest.raises(HookgraphError, match=match), hookgraph.record_calls(module, most=most):
        pass
