"""A long run of mixed calls, threads, weight swaps and failures: every result is what eager gives, and memory stays flat."""

from __future__ import annotations

import copy
import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hookgraph import ahead, containers, proof
from hookgraph.attach import Attachment, attach, is_attached
from hookgraph.errors import HookgraphError
from hookgraph.results import Rebuilt
from hookgraph.soak_report import SoakReport
from hookgraph.stats import Stats

_EVENT_EVERY = 200  # calls, on the average
_SETTLED = 0.2  # of the time: what memory is kept by then is compared with the end
_EAGER_AGAIN = 4  # calls at most to find out whether eager agrees with itself, after a difference only
_MOST_EXAMPLES = 5


def run(
    module: nn.Module,
    calls: Iterable[Any],
    *,
    seconds: float = 60.0,
    threads: int = 4,
    compare_every: int = 1,
    seed: int = 0,
    **options: Any,
) -> SoakReport:
    """Make calls from several threads for a while, change the module in between, and compare with a plain copy.

    Every call is one of ``calls`` with other values in its floating-point tensors.  Now and then all threads
    wait while weights are replaced, written in place or moved, graphs are invalidated, or detached and
    attached anew; and some calls get arguments that the module itself refuses.  The module and its copy go through the same.

    Args:
        module: Where it is to run, in ``eval()``, with nothing attached.  A forward that advances buffers
            or draws random numbers needs ``threads=1``.
        calls: Each ``(args, kwargs)``, or a dict of keyword arguments.
        seconds: How long.
        threads: How many threads make calls; on a GPU each has a stream of its own.
        compare_every: Compare one of so many calls with eager, which takes its time.
        seed: For the order of calls, values and events of each thread.
        options: As for ``attach``.

    Raises:
        HookgraphError: The module is attached already, or a call has another form or raises.
        ValueError: There is no call, or a number is not positive.

    Restores: the values of the weights; their memory may be another.

    Example:
        >>> import torch
        >>> from hookgraph import soak
        >>> report = soak.run(torch.nn.Linear(4, 4).eval(), [((torch.ones(2, 4),), {})], seconds=0.2, threads=2)
        >>> report.passed, report.mismatches
        (True, 0)
    """
    if is_attached(module):
        raise HookgraphError("soak: graphs are attached to this module already; detach() it first")
    pairs = ahead.largest_first(calls)
    if not pairs or seconds <= 0 or threads < 1 or compare_every < 1:
        raise ValueError(
            f"soak: {len(pairs)} calls, {seconds} seconds, {threads} threads, comparing one of {compare_every}, "
            "leave nothing to do"
        )
    ahead.check(module, pairs)
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    soak = _Soak(module, pairs, {"max_graphs": max(4, len(pairs))} | options, compare_every)
    try:
        soak.endure(seconds, threads, seed)
    finally:
        soak.end()
        module.load_state_dict(before)
    return soak.report(seconds, threads)


@dataclass(slots=True)
class _Tally:
    """What one thread counted."""

    calls: int = 0
    compared: int = 0
    mismatches: int = 0
    undecided: int = 0
    failures: int = 0
    errors: int = 0
    examples: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        if len(self.examples) < _MOST_EXAMPLES:
            self.examples.append(what)


class _Gate:
    """Many threads inside at once, or one alone."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._waiting)
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._condition:
            self._waiting += 1
            try:
                self._condition.wait_for(lambda: not self._inside)
                yield
            finally:
                self._waiting -= 1
                self._condition.notify_all()


class _Soak:
    def __init__(self, module: nn.Module, pairs: list[ahead.Arguments], options: dict[str, Any], every: int) -> None:
        self._module, self._twin = module, copy.deepcopy(module)
        self._pairs, self._options, self._every = pairs, options, every
        self._first = [parameter.detach().clone() for parameter in module.parameters()]
        self._gate = _Gate()
        self._tallies: list[_Tally] = []
        self._events: Counter[str] = Counter()
        self._counted: list[Stats] = []
        tensors = [*module.parameters(), *module.buffers(), *containers.tensors_in(pairs)]
        self._device = next((t.device for t in tensors if t.device.type == "cuda"), torch.device("cpu"))
        self._before: dict[str, int] = {}
        self._after: dict[str, int] = {}
        self._ended = threading.Event()  # at the end of the time, or when the soak is interrupted
        self._handle: Attachment = attach(module, **options)  # last: from here on there is something to end

    def endure(self, seconds: float, threads: int, seed: int) -> None:
        until = time.monotonic() + seconds
        self._tallies = [_Tally() for _ in range(threads)]
        workers = [
            threading.Thread(target=self._work, args=(tally, random.Random(seed * threads + index), until), daemon=True)
            for index, tally in enumerate(self._tallies)
        ]
        for worker in workers:
            worker.start()
        try:
            time.sleep(_SETTLED * seconds)
            with self._gate.alone():
                self._before = self._memory()
            for worker in workers:
                worker.join()
        finally:  # Ctrl-C, too: nobody may call or attach once the module is given back
            self._ended.set()
            for worker in workers:
                worker.join()
        self._after = self._memory()

    def end(self) -> None:
        self._counted.append(self._handle.stats)
        self._handle.detach()

    def report(self, seconds: float, threads: int) -> SoakReport:
        def total(name: str) -> int:
            return sum(getattr(tally, name) for tally in self._tallies)

        reasons: Counter[str] = Counter()
        for stats in self._counted:
            reasons.update(stats.reasons)
        names = ("warmups", "captures", "replays", "eager", "errors")
        outcomes = {name: sum(getattr(stats, name) for stats in self._counted) for name in names}
        balanced = all(stats.balanced for stats in self._counted) and sum(outcomes.values()) == total("calls")
        cuda = self._device.type == "cuda"
        return SoakReport(
            device=str(self._device), device_name=torch.cuda.get_device_name(self._device) if cuda else "CPU",
            seconds=seconds, threads=threads, calls=total("calls"), compared=total("compared"),
            mismatches=total("mismatches"), undecided=total("undecided"), failures=total("failures"),
            errors=total("errors"), events=dict(self._events.most_common()), outcomes=outcomes,
            reasons=dict(reasons.most_common()), balanced=balanced,
            memory={name: (self._before[name], self._after[name]) for name in self._before},
            examples=tuple(text for tally in self._tallies for text in tally.examples)[:_MOST_EXAMPLES],
        )  # fmt: skip

    # -- what one thread does ----------------------------------------------------------------------

    def _work(self, tally: _Tally, rng: random.Random, until: float) -> None:
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        with torch.no_grad(), torch.cuda.stream(stream) if stream is not None else nullcontext():
            while time.monotonic() < until and not self._ended.is_set():
                try:
                    if rng.random() < 1 / _EVENT_EVERY:
                        self._change(rng)
                    with self._gate.shared():
                        self._call(tally, rng)
                except Exception as error:  # of the soak's own, or an event that failed
                    tally.errors += 1
                    tally.note(f"{type(error).__name__}: {error}")

    def _call(self, tally: _Tally, rng: random.Random) -> None:
        pair = _varied(rng.choice(self._pairs), 0.5 + rng.random())
        if rng.random() < 1 / _EVENT_EVERY and self._fail(tally, pair):
            return
        tally.calls += 1
        compares = tally.calls % self._every == 0
        mine, theirs = (ahead.copy_of(pair), ahead.copy_of(pair)) if compares else (pair, None)
        output = self._module(*mine[0], **mine[1])
        if theirs is not None:
            self._compare(tally, (output, mine), theirs, pair)

    def _compare(self, tally: _Tally, found: Any, theirs: ahead.Arguments, pair: ahead.Arguments) -> None:
        expected = (self._twin(*theirs[0], **theirs[1]), theirs)
        tally.compared += 1
        difference = proof.difference(Rebuilt(found, [], []), expected, [])
        if difference is None:
            return
        for _ in range(_EAGER_AGAIN):
            again = ahead.copy_of(pair)
            other = (self._twin(*again[0], **again[1]), again)
            if proof.difference(Rebuilt(other, [], []), expected, []) is not None:
                tally.undecided += 1
                return
        tally.mismatches += 1
        tally.note(f"call {tally.calls} of a thread: {difference}")

    def _fail(self, tally: _Tally, pair: ahead.Arguments) -> bool:
        """Give an argument that the forward does not take: what eager raises has to come out; whether it refuses any."""
        expected = _raised_by(self._twin, pair)
        if expected is None:
            return False
        tally.calls += 1
        found = _raised_by(self._module, pair)
        if found == expected:
            tally.failures += 1
        else:
            tally.errors += 1
            tally.note(f"eager raises {expected}; attached: {found}")
        return True

    # -- what happens between calls ----------------------------------------------------------------

    def _change(self, rng: random.Random) -> None:
        events: dict[str, Callable[[float], None]] = {
            "weights replaced": self._replace_weights, "weights written in place": self._write_weights,
            "moved away and back": self._move, "invalidated": self._invalidate, "attached anew": self._attach_anew,
        }  # fmt: skip
        name = rng.choice(list(events))
        with self._gate.alone():
            events[name](0.9 + 0.2 * rng.random())
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # each thread has a stream, and the next call another one
            self._events[name] += 1

    def _weights(self, factor: float) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Every parameter of both, and a value for it; of the first one, so that a long run does not drift."""
        for module in (self._module, self._twin):
            for parameter, first in zip(module.parameters(), self._first, strict=True):
                yield parameter, first * factor if first.is_floating_point() else first.clone()

    def _replace_weights(self, factor: float) -> None:
        for parameter, value in self._weights(factor):
            parameter.data = value

    def _write_weights(self, factor: float) -> None:
        for parameter, value in self._weights(factor):
            parameter.data.copy_(value)

    def _move(self, _: float) -> None:
        for module in (self._module, self._twin):
            module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)

    def _invalidate(self, _: float) -> None:
        self._handle.invalidate("a soak")

    def _attach_anew(self, _: float) -> None:
        self.end()
        self._handle = attach(self._module, **self._options)

    def _memory(self) -> dict[str, int]:
        gc.collect()
        found = {"process": _resident_bytes()}
        if self._device.type == "cuda":
            found["allocated on the device"] = torch.cuda.memory_allocated(self._device)
            found["reserved on the device"] = torch.cuda.memory_reserved(self._device)
        return found


def _raised_by(module: nn.Module, pair: ahead.Arguments) -> str | None:
    args, kwargs = ahead.copy_of(pair)
    try:
        module(*args, **kwargs, hookgraph_soak=None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _varied(pair: ahead.Arguments, factor: float) -> ahead.Arguments:
    """The same call with other values in its floating-point tensors."""
    args, kwargs = ahead.copy_of(pair)
    for tensor in containers.tensors_in((args, kwargs)):
        if tensor.is_floating_point():
            tensor.mul_(factor)
    return args, kwargs


def _resident_bytes() -> int:
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0  # not Linux
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
