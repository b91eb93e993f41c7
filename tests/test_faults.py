"""Faults at every step of a call: the caller gets what eager gives, and everything else goes on.

Most faults are injected by replacing one internal function, since memory does not run out at a
chosen line by itself; where a real module can provoke one, it does.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from hookgraph import ambient, audit, graphs, guards, hooks, inputs, likeness, policy, results, runner, signature
from hookgraph.backends import tape
from tests.modules import Does, Fragile, mlp
from tests.parity import Twins, check_balance
from tests.residue import process_state

X = torch.arange(8.0).reshape(2, 4) / 8
LONG = 30.0  # seconds; nothing here takes so long unless it hangs
ERRORS = [RuntimeError, MemoryError, torch.OutOfMemoryError]

each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
interruptions = pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit], ids=lambda error: error.__name__)


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


# -- the module, the fault, and what has to hold ---------------------------------------------------

RUNS: collections.Counter[int] = collections.Counter()  # of forward, by module; its own count would be state


def _forward(m: Any, x: torch.Tensor, c: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """Writes one argument in place and rebinds an entry of another."""
    RUNS[id(m)] += 1
    c.add_(m.linear(x))
    state["h"] = state["h"] * 2
    return c + state["h"]


def _with_effects(m: Any, x: torch.Tensor, c: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """Advances a buffer and the random generator, too."""
    m.count.add_(1)
    return _forward(m, x, c, state) + m.count + torch.rand(4)


def build(effects: bool) -> Does:
    return Does(_with_effects if effects else _forward, count=torch.zeros(4))


def arguments(rows: int = 2) -> tuple[Any, ...]:
    return torch.randn(rows, 4), torch.randn(rows, 4), {"h": torch.randn(rows, 4)}


class Fault:
    """Makes one internal function raise, at its next call or at all, inside the block."""

    def __init__(self, owner: Any, name: str, error: type[BaseException], after: bool = False, times: int = 1) -> None:
        self.left, self.fired, self._times = 0, 0, times
        self._patch = pytest.MonkeyPatch()
        original = getattr(owner, name)

        def broken(*args: Any, **kwargs: Any) -> Any:
            if not self.left:
                return original(*args, **kwargs)
            self.left -= 1
            self.fired += 1
            if after:
                original(*args, **kwargs)
            raise error(f"injected into {name}")

        if isinstance(owner.__dict__.get(name), classmethod):
            self._patch.setattr(owner, name, staticmethod(broken))
        else:
            self._patch.setattr(owner, name, broken)

    def __enter__(self) -> Fault:
        self.left = self._times
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


@dataclass(frozen=True)
class Step:
    """One step of the call path.

    Args:
        owner: What holds the function that fails.
        name: The function.
        calls: Calls of the signature before: 0 is its warm-up, 1 the capture, 2 the proof, then replays.
        outcome: What becomes of the call.
        after: Whether the function fails at its end.
    """

    owner: Any
    name: str
    calls: int
    outcome: str
    after: bool = False


OWN, FAILED = "eager:internal_error", "eager:capture_failed"
STEPS: dict[str, Step] = {
    "reading the signature": Step(signature, "read", 0, OWN),
    "building the signature": Step(signature, "of", 0, OWN),
    "reading the surroundings": Step(ambient, "read", 0, OWN),
    "deciding": Step(policy, "decide", 0, OWN),
    "snapshot before a warm-up": Step(runner, "ModuleState", 0, OWN),
    "guards before a warm-up": Step(guards, "Guards", 0, OWN),
    "the audit, before an operator": Step(audit.Audit, "_look_at_reads", 0, OWN),
    "the audit, after an operator": Step(audit.Audit, "_look_at_results", 0, OWN),
    "the audit's end": Step(audit.Audit, "finish", 0, OWN),
    "judging a warm-up": Step(policy, "judge_warmup", 0, OWN),
    "hooks looked for before a capture": Step(guards, "child_hooks", 1, FAILED),
    "side tensors located": Step(guards, "locate", 0, OWN),
    "guards taken for a capture": Step(guards, "Guards", 1, FAILED),
    "static inputs made": Step(graphs, "StaticInputs", 1, FAILED),
    "static inputs filled for a capture": Step(inputs.StaticInputs, "fill", 1, FAILED),
    "the backend, before the capture": Step(tape.TapeBackend, "capture", 1, FAILED),
    "the backend, while recording": Step(tape.Tape, "add", 1, FAILED),
    "the backend, after the capture": Step(tape.TapeBackend, "capture", 1, FAILED, after=True),
    "learning the recipe": Step(results, "learn", 1, FAILED),
    "the first launch": Step(tape.Tape, "launch", 1, FAILED),
    "the first rebuilding": Step(results.Recipe, "rebuild", 1, FAILED),
    "comparing with eager": Step(graphs.CapturedForward, "difference", 1, OWN),
    "the second launch": Step(tape.Tape, "launch", 2, FAILED),
    "guards checked on probation": Step(guards.Guards, "moved", 2, OWN),
    "recognising a call": Step(likeness.Likeness, "leaves", 5, OWN),
    "surroundings of a known call": Step(ambient, "read", 5, "replays"),
    "guards checked before a launch": Step(guards.Guards, "moved", 5, "replays"),
    "guards checked after a launch": Step(guards.Guards, "changed", 5, "replays"),
    "filling inputs": Step(inputs.StaticInputs, "fill", 5, "replays"),
    "launching": Step(tape.Tape, "launch", 5, "replays"),
    "launching, at its end": Step(tape._Step, "run", 5, "replays", after=True),
    "rebuilding": Step(results.Recipe, "rebuild", 5, "replays"),
    "rebuilding, at its end": Step(results.Recipe, "rebuild", 5, "replays", after=True),
    "remembering a call": Step(likeness.Likeness, "of", 3, "replays"),
    "our hook before": Step(hooks, "_Record", 5, "replays"),
    "our hook after": Step(hooks.ModuleHooks, "_after", 5, "replays"),
}
# Known calls go the long way when the short one fails, and meet a fault once more there.
PERSISTENT = {name: step for name, step in STEPS.items() if step.calls < 5} | {
    "surroundings of known calls": Step(ambient, "read", 5, OWN),
    "guards checked before each launch": Step(guards.Guards, "moved", 5, OWN),
    "guards checked after each launch": Step(guards.Guards, "changed", 5, FAILED),
    "filling inputs each time": Step(inputs.StaticInputs, "fill", 5, FAILED),
    "each launch": Step(tape.Tape, "launch", 5, FAILED),
    "each rebuilding": Step(results.Recipe, "rebuild", 5, FAILED),
    "our hook before each call": Step(hooks, "_Record", 5, "replays"),
    "our hook after each call": Step(hooks.ModuleHooks, "_after", 5, "replays"),
}
# Once it has run, a graph that wrote to the module or drew random numbers cannot give way to eager.
BEYOND_RECALL = ["rebuilding", "rebuilding, at its end"]


def warmed_up(effects: bool, calls: int) -> Twins:
    """Twins with one trusted signature of three rows, and some calls of the one with two."""
    twins = Twins.build(lambda: build(effects), max_graphs=4)
    for rows, count in ((3, 5), (2, calls)):
        for _ in range(count):
            twins(*arguments(rows))
    assert twins.outcomes[4] == "replays"
    return twins


def check_after(twins: Twins, before: dict[str, Any], calls: int) -> None:
    """What holds after any fault: the process is as it was, other threads and signatures are served."""
    assert process_state() == before
    stats = twins.handle.stats
    check_balance(stats)
    assert stats.calls == calls
    plain, attached = twins.modules.eager, twins.modules.attached
    got: list[bool] = []

    def other_thread() -> None:
        with torch.no_grad():
            state = torch.get_rng_state()
            x, c, d = arguments(3)
            kept = copy.deepcopy((x, c, d))
            random = torch.get_rng_state()
            expected = plain(*kept)
            torch.set_rng_state(random)
            got.append(torch.equal(attached(x, c, d), expected))
            torch.set_rng_state(state)

    replays = twins.handle.stats.replays
    thread = threading.Thread(target=other_thread, daemon=True)
    thread.start()
    thread.join(LONG)
    assert got == [True], "another thread cannot call, or gets another value"
    assert twins.handle.stats.replays == replays + 1, "another signature does not replay any more"


# -- errors -------------------------------------------------------------------------------------------


ONCE = [(where, effects) for where in STEPS for effects in (False, True) if not (effects and where in BEYOND_RECALL)]


@each_error
@pytest.mark.parametrize(("where", "effects"), ONCE, ids=lambda x: x if isinstance(x, str) else ("plain", "effects")[x])
def test_a_step_that_fails_once(where: str, effects: bool, error: type[Exception]) -> None:
    """That call has eager's value, arguments, buffers and random state; then all is as it was."""
    step = STEPS[where]
    prepared = Fault(step.owner, step.name, error, step.after)
    with warmed_up(effects, step.calls) as twins:
        before = process_state()
        with prepared as fault:
            twins(*arguments())
        assert fault.fired == 1
        assert twins.outcomes[-1] == step.outcome
        check_after(twins, before, 5 + step.calls + 1)
        for _ in range(3):
            twins(*arguments())
        twins.handle.invalidate("the fault is mended")
        for _ in range(5):
            twins(*arguments())
        assert twins.outcomes[-1] == "replays"


@each_error
@pytest.mark.parametrize("where", PERSISTENT)
def test_a_step_that_always_fails(where: str, error: type[Exception]) -> None:
    """Each call has eager's value, the forward does not run more often than that, and nothing is tried for ever."""
    step, calls = PERSISTENT[where], 12
    prepared = Fault(step.owner, step.name, error, step.after, times=10_000)
    with warmed_up(False, step.calls) as twins:
        before, runs = process_state(), RUNS.copy()
        with prepared as fault:
            for _ in range(calls):
                twins(*arguments())
        assert step.outcome in twins.outcomes[-calls:]
        assert fault.fired <= 2 * calls * (10 if step.owner is audit.Audit else 1)  # an audit looks at each operator
        own = RUNS[id(twins.modules.attached)] - runs[id(twins.modules.attached)]
        assert own <= calls + 1, "one forward a call, and one for a capture"
        assert process_state() == before
        check_balance(twins.handle.stats)
        assert twins.handle.stats.calls == 5 + step.calls + calls
        for _ in range(2):
            twins(*arguments(3))
        twins.handle.invalidate("the fault is mended")
        for _ in range(5):
            twins(*arguments())
        assert twins.outcomes[-1] == "replays"


@each_error
@pytest.mark.parametrize("where", BEYOND_RECALL)
def test_after_a_launch_with_effects_the_error_is_the_caller_s(where: str, error: type[Exception]) -> None:
    """The buffer and the generator have advanced once, as by an eager forward that fails at its end; never twice."""
    step = STEPS[where]
    twins = warmed_up(True, 5)
    module, plain = twins.modules.attached, twins.modules.eager
    x, c, state = arguments()
    given, held = c.clone(), state["h"].clone()
    count, random = module.count.clone(), torch.get_rng_state()
    before = process_state()
    with Fault(step.owner, step.name, error, step.after), pytest.raises(error, match="injected"):
        module(x, c, state)
    after = torch.get_rng_state()
    assert torch.equal(module.count, count + 1)
    assert torch.equal(c, given)
    assert torch.equal(state["h"], held)
    torch.set_rng_state(random)
    plain(x, c.clone(), dict(state))
    assert torch.equal(after, torch.get_rng_state())
    assert twins.handle.stats.errors == 1
    check_after(twins, before, 11)
    for _ in range(3):
        twins(*arguments())
    assert twins.outcomes[-1] == "replays"


@each_error
def test_arguments_that_cannot_be_written_back(error: type[Exception]) -> None:
    """The error is the caller's, as that of an eager write would be; the graph stays in use."""
    twins = warmed_up(False, 5)
    before = process_state()
    x, c, state = arguments()
    given = c.clone()
    with Fault(results.Rebuilt, "write_back", error), pytest.raises(error, match="injected"):
        twins.modules.attached(x, c, state)
    assert torch.equal(c, given)
    assert twins.handle.stats.errors == 1
    check_after(twins, before, 11)
    twins(*arguments())
    assert twins.outcomes[-1] == "replays"


class NoMemory:
    """Stands for a static output that cannot be cloned for a while."""

    def __init__(self, tensor: torch.Tensor, times: int) -> None:
        self._tensor, self._left = tensor, times

    def clone(self) -> torch.Tensor:
        if self._left:
            self._left -= 1
            raise torch.OutOfMemoryError("no memory for the output")
        return self._tensor.clone()

    def untyped_storage(self) -> Any:
        return self._tensor.untyped_storage()


@pytest.mark.parametrize(
    ("times", "outcomes"),
    [
        pytest.param(1, ["replays"] * 4, id="once"),
        pytest.param(2, [FAILED, "replays", "replays", "replays"], id="both times that one call asks"),
        pytest.param(4, [FAILED, FAILED, "replays", "replays"], id="in two calls"),
        pytest.param(1000, [FAILED] * 4, id="for good"),
    ],
)
def test_no_memory_for_an_output(times: int, outcomes: list[str]) -> None:
    """The call runs eager; the graph is kept for better times, and given up after a few in a row."""
    with Twins.build(mlp) as twins:
        for _ in range(5):
            twins(torch.randn(2, 4))
        (entry,) = twins.handle._hooks[0].runner.entries()
        groups = entry.graph._recipe.groups
        groups[0] = NoMemory(groups[0], times)
        for _ in range(4):
            twins(torch.randn(2, 4))
        assert twins.outcomes[-4:] == outcomes
        state = twins.handle.stats.modules[0].signatures[0].state
        assert state == ("blocked" if times == 1000 else "trusted")


# -- errors of the forward itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, ValueError, torch.OutOfMemoryError], ids=lambda e: e.__name__)
def test_hg_33_a_failed_capture_costs_one_eager_call(error: type[Exception]) -> None:
    """Run 1 is the warm-up, run 2 the capture; the same call gets its eager value from run 3."""
    module = Fragile("capture", fail_at=(2,), error=error)
    other = mlp()
    handle, second = hookgraph.attach(module), hookgraph.attach(other)
    module(X)
    expected = module.linear(X).relu()
    assert torch.equal(module(X), expected)
    assert Fragile.runs["capture"] == 3
    stats = handle.stats
    assert (stats.warmups, stats.captures, stats.eager, stats.errors) == (1, 0, 1, 0)
    assert stats.reasons == {"capture_failed": 1}
    (detail,) = stats.modules[0].details["capture_failed"]
    assert "run 2 fails" in detail
    for _ in range(4):  # not tried again and again
        assert torch.equal(module(X), expected)
    assert handle.stats.reasons == {"capture_failed": 5}
    assert Fragile.runs["capture"] == 7
    for rows in (3, 3, 3):  # the next signature captures
        module(torch.randn(rows, 4))
    assert handle.stats.replays == 1
    for _ in range(3):
        other(X)
    assert second.stats.replays == 1


def test_hg_33_an_error_in_both_the_capture_and_eager() -> None:
    module = Fragile("both", fail_at=(2, 3))
    handle = hookgraph.attach(module)
    module(X)
    with pytest.raises(RuntimeError, match="run 3 fails"):
        module(X)
    assert torch.equal(module(X), module.linear(X).relu())
    check_balance(handle.stats)
    assert handle.stats.errors == 1


@each_error
@pytest.mark.parametrize("run", [1, 3, 4], ids=["in the warm-up", "in the first proof", "in the second proof"])
def test_an_error_of_an_eager_run_is_the_caller_s(run: int, error: type[Exception]) -> None:
    """And what was not proved then is proved later: no graph is used that was never compared with eager."""
    module = Fragile("eager", fail_at=(run,), error=error)
    handle = hookgraph.attach(module)
    before = process_state()
    raised: list[Exception] = []
    for _ in range(7):  # the very same tensor each time
        x = X + 1 if run == 4 and handle.stats.captures else X
        try:
            assert torch.equal(module(x), module.linear(x).relu())
        except error as found:
            raised.append(found)
    assert [str(found) for found in raised] == [f"run {run} fails"]
    assert raised[0].__cause__ is None
    assert raised[0].__context__ is None
    assert process_state() == before
    stats = handle.stats
    check_balance(stats)
    assert (stats.calls, stats.errors) == (7, 1)
    assert stats.replays >= 2
    # Warm-up, capture, a comparison for each new value, and the run that failed.
    assert Fragile.runs["eager"] == (5 if run == 4 else 4)


@pytest.mark.parametrize("run", [1, 2, 3], ids=["in the warm-up", "in the capture", "in the proof"])
@interruptions
def test_hg_33_an_interruption(run: int, error: type[BaseException]) -> None:
    """KeyboardInterrupt is no failed capture: it is raised again, and all is as it was."""
    module = Fragile("interrupt", fail_at=(run,), error=error)
    handle = hookgraph.attach(module)
    before = process_state()
    for _ in range(min(run, 2) - 1):
        module(X)
    with pytest.raises(error, match="fails"):
        module(X)
    check_balance(handle.stats)
    assert process_state() == before
    expected = module.linear(X).relu()
    for _ in range(5):
        assert torch.equal(module(X), expected)
    assert handle.stats.replays >= 1
    check_balance(handle.stats)


# -- an operator that fails in the middle of a launch -------------------------------------------------------------

_failing: dict[str, Any] = {"left": 0}


@torch.library.custom_op("hookgraph_tests::sometimes", mutates_args=())
def sometimes(x: torch.Tensor) -> torch.Tensor:
    """Doubles, and fails as often as it was told to."""
    if _failing["left"]:
        _failing["left"] -= 1
        raise _failing["error"]("the operator fails")
    return x * 2


def _fails_half_way(m: Any, x: torch.Tensor, c: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    m.count.add_(1)
    c.add_(torch.rand(4))
    return sometimes(m.linear(x)) + m.count + state["h"]


@each_error
def test_a_launch_that_fails_half_way_has_done_nothing(error: type[Exception]) -> None:
    """By a real operator: buffers, arguments and random numbers advance once, by the eager run that follows."""
    with Twins.build(lambda: Does(_fails_half_way, count=torch.zeros(4))) as twins:
        for _ in range(5):
            twins(*arguments())
        before = process_state()
        plain = twins.modules.eager
        x, c, state = arguments()
        random = torch.get_rng_state()
        kept = c.clone()
        expected = plain(x, kept, dict(state))
        torch.set_rng_state(random)
        _failing.update(left=2, error=error)  # once on the short way, once on the long one
        got = twins.modules.attached(x, c, state)
        assert not _failing["left"]
        assert torch.equal(got, expected)
        assert torch.equal(c, kept)
        assert torch.equal(plain.count, twins.modules.attached.count)
        assert process_state() == before
        assert twins.handle.stats.reasons == {"capture_failed": 1}
        twins(*arguments())


# -- interruptions --------------------------------------------------------------------------------------------------


@interruptions
@pytest.mark.parametrize("effects", [False, True], ids=["plain", "with effects"])
@pytest.mark.parametrize("where", STEPS)
def test_an_interruption_at_a_step(where: str, effects: bool, error: type[BaseException]) -> None:
    """It reaches the caller at once; the next calls are right, and go on to replay."""
    step = STEPS[where]
    prepared = Fault(step.owner, step.name, error, step.after)
    twins = warmed_up(effects, step.calls)
    module, plain = twins.modules.attached, twins.modules.eager
    before = process_state()
    calls = twins.handle.stats.calls
    with prepared as fault, pytest.raises(error, match="injected"):
        module(*arguments())
    assert fault.fired == 1
    assert process_state() == before
    check_balance(twins.handle.stats)
    assert twins.handle.stats.calls - calls <= 1  # in between two steps, it may be counted nowhere
    plain.count.copy_(module.count)  # how far the call got is not said
    check_after(twins, before, twins.handle.stats.calls)
    for _ in range(6):
        twins(*arguments())
    assert twins.outcomes[-1] == "replays"


WATCHED_FILES = (
    "runner.py", "graphs.py", "hooks.py", "inputs.py", "counters.py", "private_torch.py", "backends/__init__.py",
    "backends/tape.py",
)  # fmt: skip
PACKAGE = os.path.dirname(os.path.abspath(hookgraph.__file__)) + os.sep


class Interrupter:
    """Raises at one line of hookgraph when it is reached; without one, notes which lines a call passes."""

    def __init__(self, target: tuple[str, int] | None = None) -> None:
        self.target, self.passed, self.fired = target, {}, False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        return self._line if name.startswith(PACKAGE) and name.endswith(WATCHED_FILES) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line":
            self.passed[place] = None
            if place == self.target and not self.fired:
                self.fired = True
                raise KeyboardInterrupt
        return self._line

    def run(self, call: Callable[[], Any]) -> None:
        sys.settrace(self)
        try:
            call()
        finally:
            sys.settrace(None)


def _can_be_interrupted(place: tuple[str, int]) -> bool:
    """Whether Python itself would deliver a signal here: after a call, at the start of a function, in a loop.

    To trace a line is coarser.  A ``try`` or ``pass`` has no call before it in its own block, nor has the first
    line of a ``finally``: what interrupted the last call of the block is raised in there.
    """
    with open(place[0], encoding="utf-8") as file:
        lines = [line.split("#")[0].strip() for line in file.read().splitlines()]
    line, above = lines[place[1] - 1], lines[place[1] - 2]
    return line not in {"try:", "pass", "gc.enable()"} and above != "finally:"


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 5], ids=["warm-up", "capture", "proof", "first replay", "replay"])
def test_an_interruption_at_any_line(calls: int) -> None:
    """A sample of all lines that a call passes, every thirty-first; each time the module works on afterwards."""

    def prepared() -> tuple[nn.Sequential, hookgraph.Attachment]:
        module = mlp()
        handle = hookgraph.attach.__wrapped__(module)
        for step in range(calls):
            module(X + min(step, 3))
        return module, handle

    module, handle = prepared()
    noting = Interrupter()
    noting.run(lambda: module(X))
    handle.detach()
    places = [place for place in noting.passed if _can_be_interrupted(place)]
    assert len(places) > 50
    before = process_state()
    for place in places[calls::31]:
        module, handle = prepared()
        interrupter = Interrupter(place)
        with contextlib.suppress(KeyboardInterrupt):
            interrupter.run(lambda module=module: module(X))
            pytest.fail(f"{place} was not reached")
        with handle:
            assert gc.isenabled()
            assert torch._C._len_torch_dispatch_stack() == 0
            check_balance(handle.stats)
            done: list[torch.Tensor] = []
            thread = threading.Thread(target=torch.no_grad()(lambda m=module, d=done: d.append(m(X))), daemon=True)
            thread.start()
            thread.join(LONG)
            assert done, f"{place}: a lock is held"
            replays = handle.stats.replays
            for _ in range(5):
                assert torch.equal(module(X), module[2](module[1](module[0](X)))), place
            assert handle.stats.replays > replays, place
            # Only now: a clean-up that was interrupted itself is finished by the next one.
            assert process_state() == before, place
        assert not module._forward_hooks
        assert "forward" not in vars(module)


# -- hooks around ------------------------------------------------------------------------------------------------------


def _raising_hook(error: type[BaseException], at: int) -> Callable[..., None]:
    count = iter(range(1_000))

    def hook(*_: Any) -> None:
        if next(count) == at:
            raise error("the hook fails")

    return hook


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt], ids=lambda e: e.__name__)
@pytest.mark.parametrize("at", [0, 1, 2, 4], ids=["warm-up", "capture", "proof", "replay"])
@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_forward_hook"])
@pytest.mark.parametrize("first", [True, False], ids=["before attach", "after attach"])
def test_a_hook_of_the_user_that_raises(kind: str, first: bool, at: int, error: type[BaseException]) -> None:
    """The error is the caller's; the next call is served as ever."""
    plain, module = mlp(), mlp()
    module.load_state_dict(plain.state_dict())

    def register() -> None:
        for side in (plain, module):
            handles.append(getattr(side, kind)(_raising_hook(error, at)))

    handles: list[Any] = []
    if first:
        register()
    with Twins(plain, module) as twins:
        if not first:
            register()
        for call in range(8):
            x = torch.randn(2, 4)
            if call == at:
                with pytest.raises(error, match="the hook fails"):
                    twins(x)
            else:
                twins(x)
        assert twins.outcomes[-1] == "replays"
        assert twins.handle.stats.calls in (7, 8)  # a hook that raises before ours leaves no call to count
        for handle in handles:
            handle.remove()


# -- the garbage collector -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("fails", [False, True], ids=["capture", "failed capture"])
def test_hg_53_the_garbage_collector_is_put_back_as_it_was(enabled: bool, fails: bool) -> None:
    module = Fragile("gc", fail_at=(2,) if fails else ())
    hookgraph.attach(module)
    try:
        if not enabled:
            gc.disable()
        for _ in range(4):
            module(X)
            assert gc.isenabled() is enabled
    finally:
        gc.enable()


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_the_autocast_cache_is_put_back_as_it_was(caching: bool) -> None:
    """Also by a capture that fails."""
    module = Fragile("autocast", fail_at=(2,))
    hookgraph.attach(module)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=caching):
        for _ in range(4):
            module(X)
            assert torch.is_autocast_cache_enabled() is caching


# -- errors are told ----------------------------------------------------------------------------------------------------


def test_an_error_of_hookgraph_is_logged_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    module = mlp()
    handle = hookgraph.attach(module)
    with Fault(signature, "read", ValueError, times=3):
        for _ in range(3):
            module(X)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.name == "hookgraph"
    assert record.exc_info is not None
    assert record.exc_info[0] is ValueError
    assert handle.stats.reasons == {"internal_error": 3}
    (detail,) = handle.stats.modules[0].details["internal_error"]
    assert detail.endswith("ValueError: injected into read")
