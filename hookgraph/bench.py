"""Eager against attached, and compiled where asked: the same calls in turn."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hookgraph import ahead, containers, proof
from hookgraph.attach import attach, is_attached
from hookgraph.audit import said
from hookgraph.benchmark import Benchmark, Timing
from hookgraph.errors import HookgraphError
from hookgraph.results import Rebuilt


def measure(
    module: nn.Module, calls: Iterable[Any], *, rounds: int = 20, compiled: str | None = None, **options: Any
) -> Benchmark:
    """Time a module eager and attached on the same calls, in turn, under ``no_grad``.

    Args:
        module: Where it is to run, in ``eval()``.  Nothing is left on it.
        calls: Each ``(args, kwargs)``, or a dict of keyword arguments.
        rounds: Passes through all calls for each variant, after the warm-up.
        compiled: Also time ``torch.compile(backend=compiled)`` of a copy that shares the weights.
        options: As for ``attach``; ``max_graphs`` is the number of calls, at least 4, if you give none, so that each
            is timed as it runs once it is captured.

    Raises:
        HookgraphError: The module is attached already, a call has another form or raises, or there is no such compiler.
        ValueError: There is no call, or no round.

    Restores: the default random generators and the module's buffers.

    Example:
        >>> import torch
        >>> from hookgraph import bench
        >>> result = bench.measure(torch.nn.Linear(4, 4).eval(), [((torch.ones(2, 4),), {})], rounds=2)
        >>> result.replayed, result.time_of("attached").parity
        (1.0, 'bitwise')
    """
    if is_attached(module):
        raise HookgraphError("measure: graphs are attached to this module already; detach() it first")
    pairs = ahead.largest_first(calls)
    if not pairs or rounds < 1:
        raise ValueError(f"measure: {len(pairs)} calls in {rounds} rounds leave nothing to time")
    ahead.check(module, pairs)
    attached = attach(module, **{"max_graphs": max(4, len(pairs))} | options)
    with torch.no_grad(), ahead.random_numbers_kept(module), _buffers_kept(module), attached as handle:
        device = _device(module, pairs)
        # A copy of an attached module is a plain one; it shares the submodules with their weights.
        variants: dict[str, nn.Module] = {"eager": copy.copy(module), "attached": module}
        if compiled is not None:
            variants["compiled"] = _compiled(copy.copy(module), compiled)
        handle.warmup(pairs, progress=False)
        parity = {name: _parity(variants["eager"], variant, pairs) for name, variant in variants.items()}
        handle.reset_counters()
        times = _in_turn({name: _passes(variant, pairs, device) for name, variant in variants.items()}, rounds)
        stats = handle.stats
    return Benchmark(
        device=str(device), device_name=_name(device), calls=len(pairs), rounds=rounds,
        timings=tuple(_timing(name, times[name], parity[name]) for name in variants),
        replayed=stats.replays / stats.calls if stats.calls else 0.0, reasons=dict(stats.reasons),
        retained_bytes=stats.bytes,
    )  # fmt: skip


def _compiled(module: nn.Module, backend: str) -> nn.Module:
    try:
        return torch.compile(module, backend=backend)  # type: ignore[return-value]
    except RuntimeError as error:  # no such backend
        raise HookgraphError(f"compiled={backend!r}: {said(error)}") from error


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restores: the values of the buffers, which a forward may advance."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


_Times = tuple[float, float]  # host and wall of one pass, in milliseconds per call


def _device(module: nn.Module, pairs: list[ahead.Arguments]) -> torch.device:
    tensors = [*module.parameters(), *module.buffers(), *containers.tensors_in(pairs)]
    return next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), torch.device("cpu"))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _passes(variant: nn.Module, pairs: list[ahead.Arguments], device: torch.device) -> Callable[[], _Times]:
    def one() -> _Times:
        copies = [ahead.copy_of(pair) for pair in pairs]  # a forward may write to its arguments
        _wait(device)
        started = time.perf_counter()
        kept = [variant(*args, **kwargs) for args, kwargs in copies]
        issued = time.perf_counter()
        _wait(device)
        done = time.perf_counter()
        del kept
        return 1e3 * (issued - started) / len(pairs), 1e3 * (done - started) / len(pairs)

    return one


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _in_turn(passes: dict[str, Callable[[], _Times]], rounds: int) -> dict[str, list[_Times]]:
    """Every variant once a round, beginning with another one each time, so that a drift meets all alike."""
    names = list(passes)
    for name in names:
        passes[name]()
    times: dict[str, list[_Times]] = {name: [] for name in names}
    for index in range(rounds):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(passes[name]())
    return times


def _timing(name: str, times: list[_Times], parity: str) -> Timing:
    walls = sorted(wall for _, wall in times)
    return Timing(
        name=name, wall_ms=statistics.median(walls), wall_low_ms=walls[len(walls) // 10],
        wall_high_ms=walls[-1 - len(walls) // 10], host_ms=statistics.median(host for host, _ in times), parity=parity,
    )  # fmt: skip


def _parity(eager: nn.Module, other: nn.Module, pairs: list[ahead.Arguments]) -> str:
    """Whether the outputs and the arguments afterwards are eager's."""
    worst = "bitwise"
    for pair in pairs:
        mine, theirs = ahead.copy_of(pair), ahead.copy_of(pair)
        with torch.random.fork_rng(), _buffers_kept(eager):
            expected = (eager(*theirs[0], **theirs[1]), theirs)
        found = (other(*mine[0], **mine[1]), mine)
        difference = proof.difference(Rebuilt(found, [], []), expected, [])
        if difference is not None and not proof.is_close(found, expected):
            return difference
        if difference is not None:
            worst = "within tolerance"
    return worst
