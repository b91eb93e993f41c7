"""``explain`` foretells what the next call does, changes nothing, and says in words why."""

from __future__ import annotations

import contextlib
import io
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rich.console
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import hookgraph
from hookgraph import ambient, explain, signature
from hookgraph.errors import HookgraphError
from hookgraph.explain import Explanation
from hookgraph.foretell import check_arguments
from hookgraph.policy import Plan
from hookgraph.runner import Runner
from hookgraph.signature import Signature
from tests import parity, soak
from tests.modules import Blocks, Does, Sample, Scaled, mlp
from tests.parity import check_balance

X = torch.arange(8.0).reshape(2, 4) / 8

pytestmark = pytest.mark.filterwarnings("ignore:.* runs eager. (limit|parity|scalar_churn|unstable)")


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


# -- what was foretold comes ------------------------------------------------------------------------

OUTCOMES = {Plan.WARM_UP: "warmups", Plan.CAPTURE: "captures", Plan.REPLAY: "replays", Plan.EAGER: "eager"}
# A warm-up or a capture is where a forward is found to forbid a graph.
FOUND_LATER: dict[Plan, set[str]] = {
    Plan.WARM_UP: {"read_back", "changes_state", "output_kind", "generator", "side_tensor"},
    Plan.CAPTURE: {"capture_failed", "changes_state", "output_kind", "memory"},
    Plan.REPLAY: {"parity"},
    Plan.EAGER: set(),
}


class Foretold:
    """Explains every call of every attached module before it is made, and compares with what came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, int] = {}
        self.last: Explanation | None = None
        serve = Runner.run

        def run(served: Runner, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            before = served.describe()
            self.last = told = served.explain(args, kwargs)
            assert served.describe() == before, "explain counted or forgot something"
            try:
                return serve(served, forward, args, kwargs)
            finally:
                self._compare(told, before, served.describe())

        monkeypatch.setattr(Runner, "run", run)

    def _compare(self, told: Explanation, before: hookgraph.ModuleStats, after: hookgraph.ModuleStats) -> None:
        came = [name for name in (*OUTCOMES.values(), "errors") if getattr(after, name) > getattr(before, name)]
        reasons = [name for name, count in after.reasons.items() if count > before.reasons.get(name, 0)]
        if came == ["errors"]:  # the forward raised
            return
        self.calls[told.plan.value] = self.calls.get(told.plan.value, 0) + 1
        if reasons and reasons[0] in FOUND_LATER[told.plan]:
            return
        assert came == [OUTCOMES[told.plan]], f"{told}\n{after.details}"
        if told.fallback is None:
            return
        assert reasons == [told.fallback.reason.value], f"{told}\n{after.details}"
        details = after.details[reasons[0]]
        assert told.fallback.detail in details or len(details) == 4, f"{told}\n{details}"


@pytest.fixture
def foretold(monkeypatch: pytest.MonkeyPatch) -> Foretold:
    return Foretold(monkeypatch)


@pytest.fixture
def watched_by_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random sequences change their modules for good reason; they look for residue themselves."""
    monkeypatch.setattr(hookgraph, "attach", hookgraph.attach.__wrapped__)
    monkeypatch.setattr(parity, "WATCH", None)


@pytest.mark.usefixtures("watched_by_soak")
@pytest.mark.parametrize("first", range(0, 100, 50), ids=lambda first: f"seeds {first} to {first + 49}")
def test_random_sequences_do_what_was_foretold(foretold: Foretold, first: int) -> None:
    """Random forwards, arguments, settings and changes of the module; a seed is shown with its failure."""
    with soak.quick_referrers():
        for seed in range(first, first + 50):
            wrong = soak.failure(soak.draw_plan(seed))
            assert wrong is None, f"seed {seed}: {wrong}"
    assert set(foretold.calls) == {plan.value for plan in Plan}
    assert min(foretold.calls.values()) > 20, foretold.calls


@pytest.mark.usefixtures("watched_by_soak")
@pytest.mark.parametrize("seed", range(20))
def test_explaining_changes_nothing_that_follows(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The same sequence without a single question goes the same way."""
    plan = soak.draw_plan(1000 + seed)
    plain, asked = soak.Tally(), soak.Tally()
    soak.run_plan(plan, plain)
    Foretold(monkeypatch)
    soak.run_plan(plan, asked)
    assert vars(plain) == vars(asked)


def new_shapes(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Blocked whatever the shape: watched three times, then every sixty-fourth."""
    for rows in range(1, 140):
        yield (torch.ones(rows, 4),)


def a_flag_that_is_cleared(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Blocked, and given another chance after a rest, once the module is not what it was."""
    for step in range(60):
        module.reads = step < 20
        yield (X,)
    module.reads = True


def numbers_that_change_and_stop(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Two equal ones in a row end the state in which a number is not tried."""
    module.reads = False
    for step in range(30):
        yield X, float(min(step, 20))
    module.reads = True


@pytest.mark.parametrize("script", [new_shapes, a_flag_that_is_cleared, numbers_that_change_and_stop])
def test_questions_do_not_count_towards_rests_and_habits(script: Callable[[nn.Module], Any]) -> None:
    def outcomes(questions: int) -> list[tuple[dict[str, int], dict[str, int], int]]:
        module = Does(lambda m, x, s=2.0: m.linear(x) * (x.sum().item() if m.reads else s), reads=True)
        found = []
        with hookgraph.attach(module) as handle:
            for args in script(module):
                for _ in range(questions):
                    handle.explain(*args)
                module(*args)
                (stats,) = handle.stats.modules
                counts = {name: getattr(stats, name) for name in OUTCOMES.values()}
                found.append((counts, stats.reasons, len(stats.signatures)))
        return found

    assert outcomes(0) == outcomes(3)


# -- every reason is foretold ------------------------------------------------------------------------


@contextlib.contextmanager
def training(module: nn.Module, handle: hookgraph.Attachment) -> Iterator[None]:
    module.train()
    yield
    module.eval()


@contextlib.contextmanager
def child_hook(module: nn.Module, handle: hookgraph.Attachment) -> Iterator[None]:
    handle.invalidate()
    hook = module[0].register_forward_hook(lambda m, args, out: None)
    yield
    hook.remove()


STANDS_ASIDE: dict[str, Callable[[nn.Module, hookgraph.Attachment], Any]] = {
    "paused": lambda module, handle: handle.paused(),
    "disabled": lambda module, handle: hookgraph.disabled(),
    "training": training,
    "needs_grad": lambda module, handle: torch.enable_grad(),
    "mode_active": lambda module, handle: FlopCounterMode(display=False),
    "child_hooks": child_hook,
}


@pytest.mark.parametrize("reason", STANDS_ASIDE)
def test_a_call_that_is_not_for_a_graph(foretold: Foretold, reason: str) -> None:
    module = mlp()
    handle = hookgraph.attach(module)
    for _ in range(4):
        module(X)
    with STANDS_ASIDE[reason](module, handle):
        told = handle.explain(X)
        module(X)
    assert told == foretold.last
    assert (told.plan, told.fallback and told.fallback.reason) == (Plan.EAGER, reason)
    assert handle.stats.reasons == {reason: 1}


def test_the_life_of_a_signature(foretold: Foretold) -> None:
    module = mlp()
    handle = hookgraph.attach(module, max_batch_size=2)
    plans = []
    for _ in range(4):
        plans.append(handle.explain(X).plan)
        module(X)
    assert plans == [Plan.WARM_UP, Plan.CAPTURE, Plan.REPLAY, Plan.REPLAY]
    assert handle.explain(X).would_replay
    told = handle.explain(X.repeat(2, 1))
    assert (told.plan, told.fallback and told.fallback.reason) == (Plan.EAGER, "batch_size")
    assert [one.words() for one in told.differences] == ["args[0] dim 0: 4 here, 2 captured"]


def test_a_blocked_signature_tells_the_stored_reason(foretold: Foretold) -> None:
    module = Does(lambda m, x: m.linear(x) * x.sum().item())
    handle = hookgraph.attach(module)
    module(X)
    told = handle.explain(X)
    assert told.fallback is not None
    assert told.fallback.reason == "read_back"
    assert "test_explain.py:" in told.fallback.detail
    assert "test_explain.py:" in str(told)
    module(X)


def test_a_change_of_the_module_is_named_and_nothing_is_dropped(foretold: Foretold) -> None:
    module = mlp()
    handle = hookgraph.attach(module)
    for _ in range(3):
        module(X)
    memory = module[0].weight.data
    module[0].weight.data = memory.clone()
    told = handle.explain(X)
    assert (told.plan, told.change) == (Plan.WARM_UP, "0.weight was replaced or moved")
    assert "The module changed: 0.weight was replaced or moved." in str(told)
    module[0].weight.data = memory
    assert handle.explain(X).would_replay
    module(X)
    assert handle.stats.replays == 2


def test_a_change_between_warm_up_and_capture_is_named() -> None:
    module = Does(lambda m, x: m.linear(x) * m.factor, factor=2.0)
    handle = hookgraph.attach(module)
    module(X)
    module.factor = 3.0
    told = handle.explain(X)
    assert (told.plan, told.change) == (Plan.WARM_UP, "factor: 2.0 -> 3.0")
    module.factor = 2.0
    assert handle.explain(X).plan is Plan.CAPTURE


def test_a_number_that_keeps_changing(foretold: Foretold) -> None:
    module = Scaled()
    handle = hookgraph.attach(module)
    for step in range(10):
        module(X, scale=float(step))
    told = handle.explain(X, scale=0.5)
    assert told.fallback is not None
    assert (told.fallback.reason, told.fallback.detail) == ("scalar_churn", "kwargs['scale']")
    assert [one.words(told.against) for one in told.differences] == [
        "kwargs['scale']: 0.5 here, 9.0 in the call before "
        "(changed in 9 of 10 calls without a graph; pass it as a tensor)"
    ]
    check_balance(handle.stats)


def test_the_last_call_of_a_loop_whose_number_changes(foretold: Foretold) -> None:
    """It would be watched, since two equal calls in a row end the state; that it is one more signature is told."""
    module = Scaled()
    handle = hookgraph.attach(module)
    for step in range(10):
        module(X, scale=float(step))
    told = handle.explain(X, scale=9.0)
    assert told.plan is Plan.WARM_UP
    assert told.changing == ("kwargs['scale'] changed in 9 of 10 calls without a graph",)
    assert str(told) == (
        "Scaled: this call would warm up, a watched eager call.\n"
        "These values would be one more signature; pass as a tensor what changes:\n"
        "  kwargs['scale'] changed in 9 of 10 calls without a graph"
    )
    assert told.to_dict()["changing"] == list(told.changing)


def test_all_numbers_that_change_are_named(foretold: Foretold) -> None:
    module = Does(lambda m, x, *numbers, scale=1.0: m.linear(x) * sum(numbers) * scale)
    handle = hookgraph.attach(module)
    for step in range(20):
        module(X, 1.0, *(step / number for number in (3, 5, 7)), scale=float(step))
    told = handle.explain(X, 1.0, 0.1, 0.2, 0.3, scale=0.4)
    assert told.fallback is not None
    assert told.fallback.detail == "args[2], args[3], args[4] and 1 more"
    (stats,) = handle.stats.modules
    assert set(stats.varied) == {"args[2]", "args[3]", "args[4]"}
    assert set(stats.varied.values()) == {stats.reasons["scalar_churn"]}


def test_a_number_that_changed_once_is_not_one_that_changes() -> None:
    module = Scaled()
    handle = hookgraph.attach(module)
    for step in range(20):
        module(X, 2.0 if step < 2 else 3.0, scale=float(step))
    assert set(handle.stats.modules[0].details["scalar_churn"]) == {"kwargs['scale']"}


@pytest.mark.parametrize(
    ("args", "kwargs", "match"),
    [
        pytest.param(
            (X,), {"scal": 1.0}, r"an unexpected keyword argument 'scal'; did you mean 'scale'\?", id="misspelt"
        ),
        pytest.param((), {"scale": 1.0}, "missing a required argument: 'x'", id="one missing"),
        pytest.param((X, 1.0, 2.0, 3.0), {}, "too many positional arguments", id="one too many"),
    ],
)
def test_arguments_that_the_forward_does_not_take(args: Any, kwargs: Any, match: str) -> None:
    module = Scaled()
    handle = hookgraph.attach(module)
    with pytest.raises(TypeError, match=rf"explain\(\): Scaled.forward\(\) .*{match}"):
        handle.explain(*args, **kwargs)
    with pytest.raises(TypeError):
        module(*args, **kwargs)
    assert handle.stats.calls == 1  # the real one


def test_arguments_that_a_pre_hook_makes_fit() -> None:
    module = Scaled()
    module.register_forward_pre_hook(lambda m, args, kwargs: (args, {}), with_kwargs=True)
    handle = hookgraph.attach(module)
    assert handle.explain(X, any_name=1.0).plan is Plan.WARM_UP


def test_a_forward_whose_signature_cannot_be_read() -> None:
    module = mlp()
    module.forward = dict  # type: ignore[method-assign,assignment]
    check_arguments(module, (X,), {"nothing": 1})


def test_the_signature_compared_with_is_the_one_that_takes_the_least_padding() -> None:
    module = mlp()
    handle = hookgraph.attach(module, max_graphs=3)
    for rows in (2, 100, 400):
        module(torch.ones(rows, 4)), module(torch.ones(rows, 4))
    told = handle.explain(torch.ones(77, 4))
    assert told.fallback is not None
    assert told.fallback.reason == "limit"
    assert [one.words(told.against) for one in told.differences] == [
        "args[0] dim 0: 77 here, 100 captured (pad to 100?)"
    ]


# -- asking -----------------------------------------------------------------------------------------


def test_one_of_several_modules_is_named() -> None:
    model = Blocks()
    handle = hookgraph.attach(model, "blocks.*")
    model(X)
    assert handle.explain(X, module="blocks.1").plan is Plan.CAPTURE
    assert handle.explain(X, module="blocks.1").module == "blocks.1"
    for name in (None, "blocks.7"):
        with pytest.raises(HookgraphError, match=r"explain\(module=.*blocks\.[01]"):
            handle.explain(X, module=name)


def test_a_detached_handle_has_nothing_to_tell() -> None:
    handle = hookgraph.attach(mlp())
    handle.detach()
    with pytest.raises(HookgraphError, match="nothing is attached"):
        handle.explain(X)


def test_an_explanation_is_text_a_renderable_and_data() -> None:
    module = mlp()
    handle = hookgraph.attach(module, max_graphs=1)
    module(X)
    told = handle.explain(input=X.double())
    data = told.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["plan"] == "eager"
    assert data["fallback"]["reason"] == "limit"
    assert {one["path"] for one in data["differences"]} == {"args[0]", "kwargs['input']"}
    console = rich.console.Console(width=400, record=True, file=io.StringIO())
    console.print(told)
    assert " ".join(console.export_text().split()) == " ".join(str(told).split())
    assert told._repr_mimebundle_()["text/plain"].startswith("Sequential: this call would run eager. limit:")


# -- comparing two signatures ----------------------------------------------------------------------


def of(*args: Any, **kwargs: Any) -> Signature:
    call = signature.read(args, kwargs, torch.device("cpu"))
    assert isinstance(call, signature.Call)
    return signature.of(call, ambient.read(call.device))


IMAGE = torch.ones(2, 3, 4, 4)
DIFFERENT: dict[str, tuple[Callable[[], Signature], Callable[[], Signature], list[str]]] = {
    "a smaller dimension": (
        lambda: of(t=torch.ones(1, 77, 4)),
        lambda: of(t=torch.ones(1, 100, 4)),
        ["kwargs['t'] dim 1: 77 here, 100 captured (pad to 100?)"],
    ),
    "a larger dimension": (lambda: of(torch.ones(3)), lambda: of(torch.ones(2)), ["args[0] dim 0: 3 here, 2 captured"]),
    "more dimensions": (
        lambda: of(torch.ones(2, 1)),
        lambda: of(torch.ones(2)),
        ["args[0] shape: [2, 1] here, [2] captured"],
    ),
    "dtype": (
        lambda: of(X.half()),
        lambda: of(X),
        ["args[0] dtype: float16 here, float32 captured (cast it to float32)"],
    ),
    "strides": (
        lambda: of(torch.ones(4, 2).t()),
        lambda: of(torch.ones(2, 4)),
        ["args[0] strides: (1, 2) here, contiguous captured (contiguous()?)"],
    ),
    "channels last": (
        lambda: of(IMAGE.to(memory_format=torch.channels_last)),
        lambda: of(IMAGE),
        ["args[0] strides: (48, 1, 12, 3) here, contiguous captured (contiguous()?)"],
    ),
    "requires_grad": (
        lambda: of(torch.ones(2, requires_grad=True)),
        lambda: of(torch.ones(2)),
        ["args[0] requires_grad: True here, False captured (detach() it)"],
    ),
    "class": (lambda: of(nn.Parameter(X, False)), lambda: of(X), ["args[0] class: Parameter here, Tensor captured"]),
    "a memory address": (
        lambda: of(torch.ones(9)[1:].view(2, 4)),
        lambda: of(torch.ones(2, 4)),
        ["args[0] offset from aligned memory in bytes: 4 here, 0 captured (clone()?)"],
    ),
    "a number": (lambda: of(s=0.0), lambda: of(s=0.7), ["kwargs['s']: 0.0 here, 0.7 captured"]),
    "minus zero": (lambda: of(s=-0.0), lambda: of(s=0.0), ["kwargs['s']: -0.0 here, 0.0 captured"]),
    "the class of a number": (lambda: of(1), lambda: of(1.0), ["args[0]: int 1 here, float 1.0 captured"]),
    "a complex number": (lambda: of(1j), lambda: of(2j), ["args[0]: 1j here, 2j captured"]),
    "a word": (lambda: of(m="a"), lambda: of(m="b"), ["kwargs['m']: 'a' here, 'b' captured"]),
    "a number for a tensor": (
        lambda: of(0.5),
        lambda: of(X),
        ["args[0]: float 0.5 here, a float32 tensor [2, 4] captured"],
    ),
    "None for a tensor": (
        lambda: of(X, None),
        lambda: of(X, X + 1),
        ["args[1] structure: NoneType here, value captured"],
    ),
    "another argument": (
        lambda: of(X, mask=[X + 1]),
        lambda: of(X),
        ["kwargs['mask'] structure: list here, absent captured"],
    ),
    "one argument less": (lambda: of(X), lambda: of(X, y=1), ["kwargs['y'] structure: absent here, value captured"]),
    "another container": (lambda: of([X]), lambda: of((X,)), ["args[0] structure: list here, tuple captured"]),
    "keys in another order": (
        lambda: of(a=1, b=2),
        lambda: of(b=2, a=1),
        ["the keys of a dict structure: in this order here, in another order captured"],
    ),
    "one tensor twice": (
        lambda: of(X, X),
        lambda: of(X, X.clone()),
        ["args[1]: a tensor that is given twice here, a float32 tensor [2, 4] captured"],
    ),
    "one list twice": (
        lambda: (lambda same: of(same, same))([]),
        lambda: of([], []),
        ["the arguments identity: other containers are one and the same here, not so captured"],
    ),
    "inside a dataclass": (
        lambda: of(Sample(X, 2.0)),
        lambda: of(Sample(X, 1.0)),
        ["args[0].scale: 2.0 here, 1.0 captured"],
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_in_words(name: str) -> None:
    here, there, words = DIFFERENT[name]
    assert [one.words() for one in explain.differences(here(), there())] == words
    assert explain.differences(here(), here()) == ()


def test_surroundings_in_words() -> None:
    plain = of(X)
    with torch.inference_mode():
        assert [one.words() for one in explain.differences(of(X), plain)] == ["inference mode: on here, off captured"]
    with torch.enable_grad():
        assert [one.words() for one in explain.differences(of(X), plain)] == ["grad mode: on here, off captured"]
    with torch.autocast("cpu", torch.bfloat16):
        assert [one.words() for one in explain.differences(of(X), plain)] == ["autocast: bfloat16 here, off captured"]
    with torch.device("meta"):
        assert [one.words() for one in explain.differences(of(X), plain)] == [
            "default device: meta here, none captured"
        ]
    torch.use_deterministic_algorithms(True)
    try:
        assert [one.words() for one in explain.differences(of(X), plain)] == [
            "deterministic algorithms: True here, False captured"
        ]
    finally:
        torch.use_deterministic_algorithms(False)


def test_all_differences_are_told_and_the_outermost_of_a_structure_only() -> None:
    found = explain.differences(of(X.double(), {"a": [1, 2]}, s=1), of(X[:1], (3,), s=2))
    assert [one.words() for one in found] == [
        "args[1] structure: dict here, tuple captured",
        "args[0] dim 0: 2 here, 1 captured",
        "args[0] dtype: float64 here, float32 captured (cast it to float32)",
        "kwargs['s']: 1 here, 2 captured",
    ]


# -- what max_graphs kept out ------------------------------------------------------------------------


def test_what_was_not_retained_is_counted_and_named() -> None:
    module = mlp()
    handle = hookgraph.attach(module, max_graphs=2)
    for rows in (2, 3, 5, 5, 6, 2, 3):
        module(torch.ones(rows, 4))
    (stats,) = handle.stats.modules
    assert stats.unretained == (("args[0] float32[5, 4]", 2), ("args[0] float32[6, 4]", 1))
    assert stats.varied == {"args[0]": 3}
    assert sum(calls for _, calls in stats.unretained) == stats.reasons["limit"]
    assert "2 other signatures in 3 calls: max_graphs=4 would retain them. They differ in args[0] (3 calls)." in str(
        stats
    )
    assert hookgraph.Stats.from_json(handle.stats.to_json()) == handle.stats
    handle.reset_counters()
    assert (handle.stats.modules[0].unretained, handle.stats.modules[0].varied) == ((), {})


def test_max_graphs_of_that_sentence_retains_them() -> None:
    module = mlp()
    with hookgraph.attach(module, max_graphs=4) as handle:
        for rows in (2, 3, 5, 5, 6, 2, 3) * 2:
            module(torch.ones(rows, 4))
        assert (handle.stats.modules[0].unretained, handle.stats.reasons) == ((), {})


def test_a_number_that_changes_is_what_varied() -> None:
    module = Scaled()
    handle = hookgraph.attach(module)
    for step in range(20):
        module(X, 100.0 + step)
    (stats,) = handle.stats.modules
    assert stats.varied == {"args[1]": stats.reasons["scalar_churn"]}
    assert stats.unretained == ()


def test_shapes_that_never_come_back_are_bounded_and_hold_no_tensor() -> None:
    module = mlp()
    handle = hookgraph.attach(module, max_graphs=1)
    for rows in range(1, 60):
        x = torch.ones(rows, 4)
        alive = weakref.ref(x)
        module(x)
        del x
        assert alive() is None
    (stats,) = handle.stats.modules
    assert len(stats.unretained) == 33
    assert stats.unretained[-1] == ("(further signatures)", 26)
    assert sum(calls for _, calls in stats.unretained) == stats.reasons["limit"] == 58
    assert "More than 32 other signatures in 58 calls." in str(stats)
