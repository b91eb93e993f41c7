"""One attached module under many threads and many tasks: right values, one capture a signature, no lock in the way."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from hookgraph.runner import Runner
from tests.modules import Does, Fragile, mlp
from tests.parity import check_balance
from tests.residue import Watch

LONG = 30.0  # seconds; nothing here takes so long unless it hangs
X = torch.arange(8.0).reshape(2, 4) / 8


class Shifted(nn.Module):
    """One operator and one weight: the least that a graph can be wrong about."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


class Workers:
    """Threads that start together; the first thing that goes wrong in one of them is raised by ``join``."""

    def __init__(self, count: int, work: Callable[[int], Any]) -> None:
        self._barrier = threading.Barrier(count)
        self._errors: list[BaseException] = []
        self._work = work
        self._threads = [threading.Thread(target=self._run, args=(index,), daemon=True) for index in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int) -> None:
        try:
            self._barrier.wait()
            with torch.no_grad():  # grad mode is a thread's own
                self._work(index)
        except BaseException as error:
            self._errors.append(error)

    @property
    def alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self, seconds: float = LONG) -> None:
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))
        assert not self.alive, "a thread hangs"
        if self._errors:
            raise self._errors[0]


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns far more often than Python lets them by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def known_calls(module: nn.Module, shapes: tuple[tuple[int, ...], ...], count: int) -> list[tuple[Any, Any]]:
    """Inputs and what eager gives for them, all different."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shapes[i % len(shapes)], generator=generator) for i in range(count)]
    with torch.no_grad():
        return [(x, module(x)) for x in inputs]


# -- right values ----------------------------------------------------------------------------------


def test_eight_threads_of_ten_thousand_calls() -> None:
    """They start together on a cold module, while another thread reads its stats."""
    threads, count = 8, 10_000
    module = Shifted().eval()
    known = known_calls(module, ((2, 4), (3, 4)), 62)  # no multiple of 8: each thread meets all of them
    handle = hookgraph.attach(module)
    wrong: list[tuple[int, int]] = []

    def work(index: int) -> None:
        for step in range(count):
            x, expected = known[(index * 7 + step) % len(known)]
            if not torch.equal(module(x), expected):
                wrong.append((index, step))

    workers = Workers(threads, work)
    seen = [handle.stats]
    while workers.alive:
        time.sleep(0.02)
        seen.append(handle.stats)
    workers.join()

    assert not wrong
    stats = handle.stats
    for earlier in (*seen, stats):
        check_balance(earlier)
    assert [earlier.calls for earlier in seen] == sorted(earlier.calls for earlier in seen)
    assert (stats.calls, stats.warmups, stats.captures, stats.errors) == (threads * count, 2, 2, 0)
    assert set(stats.reasons) <= {"busy"}
    assert stats.replays > 0.9 * stats.calls
    signatures = stats.modules[0].signatures
    assert [(one.state, one.captures) for one in signatures] == [("trusted", 1), ("trusted", 1)]
    assert sum(one.calls for one in signatures) == stats.calls


@pytest.mark.usefixtures("hasty")
@pytest.mark.filterwarnings("ignore:.* runs eager. limit")
def test_more_signatures_than_graphs() -> None:
    module = mlp()
    known = known_calls(module, ((1, 4), (2, 4), (3, 4), (4, 4)), 64)
    handle = hookgraph.attach(module, max_graphs=3)

    def work(index: int) -> None:
        for step in range(60):
            x, expected = known[(index + step) % len(known)]
            assert torch.equal(module(x), expected), (index, step)

    Workers(8, work).join()
    stats = handle.stats
    check_balance(stats)
    assert (stats.calls, stats.captures, stats.errors) == (480, 3, 0)
    assert set(stats.reasons) <= {"busy", "limit"}


@pytest.mark.usefixtures("hasty")
def test_surroundings_are_each_thread_s_own() -> None:
    """Inference mode, autocast and gradients in one thread are no business of the others."""
    module = mlp()
    surroundings: list[Callable[[], Any]] = [
        contextlib.nullcontext, torch.inference_mode, functools.partial(torch.autocast, "cpu", torch.bfloat16),
        torch.enable_grad,
    ]  # fmt: skip
    expected = []
    for surrounding in surroundings:
        with torch.no_grad(), surrounding():
            expected.append(module(X))
    handle = hookgraph.attach(module)

    def work(index: int) -> None:
        with surroundings[index % 4]():
            for _ in range(60):
                got = module(X)
                assert torch.equal(got, expected[index % 4])
                assert got.dtype == expected[index % 4].dtype
                assert got.requires_grad is expected[index % 4].requires_grad

    Workers(8, work).join()
    stats = handle.stats
    check_balance(stats)
    assert (stats.captures, stats.errors) == (3, 0)
    assert set(stats.reasons) <= {"busy", "needs_grad"}


@pytest.mark.usefixtures("hasty")
def test_a_buffer_that_each_call_advances_is_advanced_once_by_each() -> None:
    """Only adding one commutes, so the order of the threads does not matter; warmed up before they start.

    Until it is trusted a graph is compared with eager, and another thread's write would show as a difference.
    """
    module = Does(lambda m, x: (m.count.add_(1), m.linear(x))[1], count=torch.zeros(1, dtype=torch.int64))
    handle = hookgraph.attach(module)
    with torch.no_grad():
        expected = module.linear(X)
        for step in range(4):
            module(X + step)
    assert handle.stats.modules[0].signatures[0].state == "trusted"

    def work(_: int) -> None:
        for _ in range(100):
            assert torch.equal(module(X), expected)

    Workers(6, work).join()
    assert int(module.count) == 604
    assert handle.stats.replays == 602


def test_two_modules_are_no_obstacle_to_each_other() -> None:
    """Each has its own graphs, its own counts, and its own lock."""
    modules = [mlp() for _ in range(4)]
    known = [known_calls(module, ((2, 4),), 8) for module in modules]
    handles = [hookgraph.attach(module) for module in modules]

    def work(index: int) -> None:
        for step in range(200):
            x, expected = known[index][step % 8]
            assert torch.equal(modules[index](x), expected)

    Workers(4, work).join()
    for handle in handles:
        assert (handle.stats.calls, handle.stats.replays) == (200, 198)


# -- no lock while the model's Python runs ---------------------------------------------------------------


class Gate:
    """A forward that stops in one thread at one of its runs, until it is told to go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None
        self.at = 0
        self._runs = 0

    def pass_through(self) -> None:
        if threading.current_thread() is not self.thread:
            return
        self._runs += 1
        if self._runs == self.at:
            self.reached.set()
            assert self.go_on.wait(LONG)


gate = Gate()  # not on the module, whose state it would be


@pytest.fixture(autouse=True)
def closed_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "gate", Gate())


def _gated(m: Any, x: torch.Tensor) -> torch.Tensor:
    gate.pass_through()
    return m.linear(x)


def _reading(m: Any, x: torch.Tensor) -> torch.Tensor:
    gate.pass_through()
    return m.linear(x) * x.sum().item()


def _never_fits(*_: Any) -> Any:
    raise hookgraph.errors.CaptureError("cannot be launched")


# what is under way: calls before it, forward runs of the stopping thread before it stops, options
MOMENTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "a warm-up": (0, 1, {}),
    "a capture": (1, 1, {}),
    "the proof of a capture": (1, 2, {}),
    "the proof of a replay": (2, 1, {}),
    "eager beyond the limit": (0, 1, {"max_graphs": 1}),
    "eager where a value is read back": (3, 1, {}),
    "eager after a launch that failed": (4, 1, {}),
    "eager after a capture whose launch failed": (1, 2, {"verify": 0}),
    "eager in training mode": (0, 1, {}),
}


@pytest.mark.filterwarnings("ignore:.* runs eager. limit")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_forward_that_stops_stops_nobody_else(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread hangs in the model's own Python, all others are served."""
    calls_before, at, options = MOMENTS[moment]
    module = Does(_reading if "read back" in moment else _gated)
    plain, other = copy.copy(module), torch.randn(3, 4)
    module.train("training" in moment)
    handle = hookgraph.attach(module, **options)
    with torch.no_grad():
        for _ in range(4):
            module(other)
        for step in range(calls_before):
            module(X + step)
        expected, for_other = plain(X), plain(other)
    if "failed" in moment:
        monkeypatch.setattr(hookgraph.backends.tape.Tape, "launch", _never_fits)
    got: list[torch.Tensor] = []

    def stop(_: int) -> None:
        gate.thread, gate.at = threading.current_thread(), at
        got.append(module(X))

    def go_by(_: int) -> None:
        before = handle.stats
        assert torch.equal(module(other), for_other)
        assert handle.stats.calls == before.calls + 1
        handle.explain(other)
        assert torch.equal(module(X + 1), plain(X + 1))  # busy, blocked or another value: eager at worst
        with handle.paused():
            module(other)
        handle.reset_counters()
        repr(hookgraph.stats(module))
        handle.invalidate()
        assert torch.equal(module(other), for_other)

    stopping = Workers(1, stop)
    assert gate.reached.wait(LONG), "the forward was not run where it was expected"
    try:
        Workers(1, go_by).join()
    finally:
        gate.go_on.set()
    stopping.join()
    assert torch.equal(got[0], expected)
    check_balance(handle.stats)


def test_a_warm_up_that_ends_while_another_thread_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first thread does last must not undo what the second has begun."""
    module = Does(_gated)
    handle = hookgraph.attach(module)
    warmed_up, ended = threading.Event(), threading.Event()
    mark = Runner._mark

    def slow(served: Runner, *rest: Any) -> None:
        mark(served, *rest)
        if rest[0] == "warmups":
            warmed_up.set()
            assert gate.reached.wait(LONG)

    monkeypatch.setattr(Runner, "_mark", slow)

    def work(index: int) -> None:
        if index == 0:
            module(X)
            ended.set()
            return
        assert warmed_up.wait(LONG)
        gate.thread, gate.at = threading.current_thread(), 1
        module(X)

    workers = Workers(2, work)
    assert gate.reached.wait(LONG)
    assert ended.wait(LONG)
    gate.go_on.set()
    workers.join()
    with torch.no_grad():
        module(X)
    stats = handle.stats
    assert (stats.warmups, stats.captures, stats.replays, stats.reasons) == (1, 1, 1, {})


def test_a_capture_lets_other_modules_replay() -> None:
    """Captures take turns in the whole process; nothing else waits for one."""
    module, other = Does(_gated), mlp()
    hookgraph.attach(module), hookgraph.attach(other)
    with torch.no_grad():
        module(X)
        for _ in range(3):
            expected = other(X)

    def stop(_: int) -> None:
        gate.thread, gate.at = threading.current_thread(), 1
        module(X)

    stopping = Workers(1, stop)
    assert gate.reached.wait(LONG)
    try:
        Workers(2, lambda _: [module.eval(), torch.equal(other(X), expected) or pytest.fail("wrong")]).join()
    finally:
        gate.go_on.set()
    stopping.join()


# -- handles in use by other threads meanwhile ----------------------------------------------------------


def _paused(handle: hookgraph.Attachment, module: nn.Module) -> None:
    with handle.paused():
        module(X)


def _attach_and_detach(handle: hookgraph.Attachment, module: nn.Module) -> None:
    handle.detach()
    hookgraph.attach(module)


def _record(handle: hookgraph.Attachment, module: nn.Module) -> None:
    with handle.recording() as recording:
        module(X)
    assert recording.calls >= 1


MEANWHILE: dict[str, Callable[[hookgraph.Attachment, nn.Module], Any]] = {
    "stats": lambda handle, module: check_balance(handle.stats),
    "stats of everything": lambda handle, module: check_balance(hookgraph.stats()),
    "explain": lambda handle, module: handle.explain(X),
    "paused": _paused,
    "recording": _record,
    "invalidate": lambda handle, module: handle.invalidate("again"),
    "reset_counters": lambda handle, module: handle.reset_counters(),
    "attach once more": lambda handle, module: hookgraph.attach(module),
    "detach and attach": _attach_and_detach,
    "copies": lambda handle, module: torch.equal(copy.deepcopy(module)(X), module(X)) or pytest.fail("copy"),
}


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("what", MEANWHILE)
def test_meanwhile(what: str) -> None:
    """Four threads call, a fifth does this again and again: no value changes and nothing breaks."""
    module = mlp()
    known = known_calls(module, ((2, 4), (3, 4)), 30)
    handle = hookgraph.attach(module)
    done = threading.Event()

    def work(index: int) -> None:
        if index == 4:
            try:
                for _ in range(40):
                    MEANWHILE[what](handle, module)
                    time.sleep(0.001)
            finally:
                done.set()
            return
        step = index
        while not done.is_set():
            x, expected = known[step % len(known)]
            assert torch.equal(module(x), expected), (index, step)
            step += 1

    Workers(5, work).join()
    for stats in (handle.stats, hookgraph.stats(module)):
        check_balance(stats)
        assert stats.errors == 0
    with torch.no_grad():
        for x, expected in known * 2:
            assert torch.equal(module(x), expected)
    if what != "detach and attach":
        assert handle.stats.replays > 0


@pytest.mark.usefixtures("hasty")
def test_nothing_is_retained_when_a_detach_meets_calls() -> None:
    """Calls that were under way at the detach end with their value, and leave no graph behind."""
    for _ in range(10):
        module = mlp()
        known = known_calls(module, ((2, 4), (3, 4)), 16)
        handle = hookgraph.attach(module)

        def work(index: int, module: nn.Module = module, known: Any = known, handle: Any = handle) -> None:
            if index == 3:
                while not handle.stats.calls:
                    time.sleep(0)
                handle.detach()
                return
            for step in range(12):
                x, expected = known[(index + step) % len(known)]
                assert torch.equal(module(x), expected)

        Workers(4, work).join()
        assert handle.stats.bytes == 0
        assert not handle.stats.modules[0].signatures
        check_balance(handle.stats)


@pytest.mark.parametrize("change", ["in place", "replaced", "a flag"])
@pytest.mark.usefixtures("hasty")
def test_weights_that_another_thread_changes_between_calls(change: str, no_residue: Watch) -> None:
    """No call that starts after a change has ended may see what was before it."""
    module = Does(lambda m, x: x * m.scale + m.factor, scale=torch.ones(4), factor=0)
    handle = hookgraph.attach(module)
    no_residue.allow(
        module, "changed: <root>.factor", "changed: <root>._buffers[*", "changed: <root>._buffers['scale']"
    )
    turn = threading.Barrier(4)  # the changes are made between calls, as in eager they would have to be

    def work(index: int) -> None:
        for step in range(1, 30):
            if index == 0:
                if change == "in place":
                    module.scale.fill_(step)
                elif change == "replaced":
                    module.scale = torch.full((4,), float(step))
                else:
                    module.factor = step
            turn.wait(LONG)
            expected = X + step if change == "a flag" else X * step
            for _ in range(3):
                assert torch.equal(module(X), expected), (index, step)
            turn.wait(LONG)

    Workers(4, work).join()
    check_balance(handle.stats)
    assert handle.stats.errors == 0


# -- others' work ------------------------------------------------------------------------------------------


def test_random_numbers_of_other_threads_are_not_drawn_twice() -> None:
    """A capture of a forward that draws none leaves the generator alone, which all threads share on a CPU."""
    drawn: list[float] = []
    stop = threading.Event()

    def draw(_: int) -> None:
        while not stop.is_set():
            drawn.append(float(torch.rand((), dtype=torch.float64)))

    drawing = Workers(1, draw)
    try:
        with torch.no_grad():
            for _ in range(60):
                module = mlp()
                with hookgraph.attach(module) as handle:
                    for _ in range(3):
                        module(X)
                    assert handle.stats.captures == 1
    finally:
        stop.set()
    drawing.join()
    assert len(drawn) > 1000
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("fails", [False, True], ids=["captures", "failed captures"])
def test_others_may_allocate_multiply_and_collect_during_captures(fails: bool) -> None:
    stop = threading.Event()
    a = torch.randn(16, 16)
    product = a @ a

    def others(index: int) -> None:
        while not stop.is_set():
            if index == 0:
                assert torch.equal(a @ a, product)
            elif index == 1:
                assert float(torch.ones(257).sum()) == 257.0
            else:
                batches = torch.utils.data.DataLoader(torch.arange(6.0), batch_size=2)
                assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]

    working = Workers(3, others)
    try:
        with torch.no_grad():
            for round_ in range(20):
                module = Fragile(f"others {round_}", fail_at=(2,) if fails else ())
                expected = module.linear(X).relu()
                with hookgraph.attach(module) as handle:
                    for _ in range(4):
                        assert torch.equal(module(X), expected)
                    assert handle.stats.captures == (not fails)
    finally:
        stop.set()
    working.join()


def test_a_signal_handler_may_ask_for_stats() -> None:
    """And call the module: it runs between any two steps of the main thread, a replay's included.

    A replay inside another one of the same graph would overwrite its inputs.  Warmed up before: operators of
    a handler that comes in the middle of a capture would be recorded.
    """
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread only; run pytest without a plugin that moves tests to another one")
    module = mlp()
    known = known_calls(module, ((2, 4),), 7)
    handle = hookgraph.attach(module)
    seen: list[bool] = []
    errors: list[Exception] = []
    ended: list[bool] = []

    def ask(*_: Any) -> None:
        try:
            check_balance(handle.stats)
            with torch.no_grad():
                x, expected = known[len(seen) % len(known)]
                seen.append(torch.equal(module(x), expected))
        except Exception as error:  # it would be raised in whatever the main thread is doing
            seen.append(False)
            errors.append(error)
        if not ended:
            signal.setitimer(signal.ITIMER_REAL, 0.0007)

    with torch.no_grad():
        for x, _ in known:
            module(x)
    handle.reset_counters()
    before = signal.signal(signal.SIGALRM, ask)
    signal.setitimer(signal.ITIMER_REAL, 0.0007)
    wrong = 0
    try:
        with torch.no_grad():
            for step in range(3000):
                x, expected = known[step % len(known)]
                wrong += not torch.equal(module(x), expected)
    finally:
        ended.append(True)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not errors
    assert not wrong
    assert len(seen) > 100
    assert all(seen)
    check_balance(handle.stats)
    assert handle.stats.calls == 3000 + len(seen)


# -- asyncio -----------------------------------------------------------------------------------------------


def test_tasks_that_share_a_module() -> None:
    """Calls run to their end between two awaits, so tasks take turns as in eager."""
    module = mlp()
    known = known_calls(module, ((2, 4), (3, 4)), 30)
    handle = hookgraph.attach(module)

    async def serve(index: int) -> None:
        for step in range(20):
            x, expected = known[(index + step) % len(known)]
            await asyncio.sleep(0)
            assert torch.equal(module(x), expected)

    async def main() -> None:
        with torch.no_grad():
            await asyncio.gather(*(serve(index) for index in range(8)))

    asyncio.run(main())
    stats = handle.stats
    check_balance(stats)
    assert (stats.calls, stats.warmups, stats.captures, stats.replays) == (160, 2, 2, 156)


@pytest.mark.usefixtures("hasty")
def test_tasks_that_call_in_threads() -> None:
    """``asyncio.to_thread`` keeps the loop free; grad mode belongs to the thread and is set in the call."""
    module = mlp()
    known = known_calls(module, ((2, 4), (3, 4)), 30)
    handle = hookgraph.attach(module)

    @torch.no_grad()
    def call(x: torch.Tensor) -> torch.Tensor:
        return module(x)

    async def serve(index: int) -> None:
        for step in range(20):
            x, expected = known[(index + step) % len(known)]
            assert torch.equal(await asyncio.to_thread(call, x), expected)

    async def main() -> None:
        await asyncio.gather(*(serve(index) for index in range(8)))

    asyncio.run(main())
    stats = handle.stats
    check_balance(stats)
    assert (stats.calls, stats.captures, stats.errors) == (160, 2, 0)
    assert set(stats.reasons) <= {"busy"}


def test_disabled_is_a_task_s_own() -> None:
    """Not that of a task that runs while this one waits inside the block; threads that it starts inherit it."""
    module = mlp()
    with torch.no_grad():
        expected = module(X)
    handle = hookgraph.attach(module)
    inside = asyncio.Event()
    outcomes: dict[str, tuple[int, int]] = {}

    @torch.no_grad()
    def call(who: str) -> None:
        before = handle.stats
        assert torch.equal(module(X), expected)
        after = handle.stats
        outcomes[who] = (
            after.replays - before.replays,
            after.reasons.get("disabled", 0) - before.reasons.get("disabled", 0),
        )

    async def switched_off() -> None:
        with hookgraph.disabled():
            call("the task")
            inside.set()
            await asyncio.sleep(0.01)
            call("the task, after a wait")
            await asyncio.create_task(asyncio.to_thread(call, "its thread"))
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                await asyncio.get_running_loop().run_in_executor(pool, call, "a thread of an executor")
        call("the task, behind the block")

    async def other() -> None:
        await inside.wait()
        call("another task")

    async def main() -> None:
        await asyncio.gather(switched_off(), other())

    with torch.no_grad():
        for _ in range(3):
            module(X)
    asyncio.run(main())
    off, on = (0, 1), (1, 0)
    assert outcomes == {
        "the task": off, "another task": on, "the task, after a wait": off, "its thread": off,
        "a thread of an executor": on, "the task, behind the block": on,
    }  # fmt: skip


def test_a_cancelled_task_leaves_nothing_behind(no_residue: Watch) -> None:
    """A call cannot be cancelled half-way: it has no await; the task ends at the next one."""
    module = mlp()
    handle = hookgraph.attach(module)
    started = asyncio.Event()

    async def serve() -> None:
        with hookgraph.disabled():
            while True:
                with torch.no_grad():
                    module(X)
                started.set()
                await asyncio.sleep(0)

    async def main() -> None:
        task = asyncio.create_task(serve())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    with torch.no_grad():
        for _ in range(3):
            module(X)
    check_balance(handle.stats)
    assert handle.stats.replays == 1
