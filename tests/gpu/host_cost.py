"""What a replay costs the host on a CUDA device, against the loop that one would write by hand, in one run.

    python -m tests.gpu.host_cost --out docs/results/host_cost_h200.json

A stack of 1 and of 8 linear layers with four tensor inputs and one output, bf16.  Variants, in turn:
a bare launch; the hand-written ``_foreach_copy_`` / replay / clone; ``torch.cuda.make_graphed_callables``;
hookgraph with guards off, with addresses and with all guards; eager.  Host: time to issue one call without
waiting.  Wall: time per call in a stream of calls, synchronised at the end.  Medians with quartiles over rounds.
``--device cpu`` rehearses hookgraph and eager on the tape, where times mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hookgraph

WIDTH, ROWS = 256, 16


class Stack(nn.Module):
    """Layers that take all four inputs, so that each has to be copied."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        x = a + b + c + d
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def by_hand(module: nn.Module, inputs: list[torch.Tensor]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The loop that one would write, and the bare launch of its graph."""
    statics = [tensor.clone() for tensor in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            module(*statics)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(*statics)

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        torch._foreach_copy_(statics, list(tensors))
        graph.replay()
        return out.clone()

    return call, lambda *_: graph.replay()


def attached(module: nn.Module, inputs: list[torch.Tensor], guards: str) -> Callable[..., Any]:
    """A module of the same weights with graphs, warmed up."""
    twin = Stack(len(module.layers)).to(inputs[0].device, inputs[0].dtype).eval()  # type: ignore[arg-type]
    twin.load_state_dict(module.state_dict())
    handle = hookgraph.attach(twin, guards=guards)
    handle.warmup([(tuple(inputs), {})], progress=False)
    return twin


def measure(call: Callable[..., Any], inputs: list[torch.Tensor], calls: int) -> tuple[float, float]:
    """Host and wall time of one call, in microseconds."""
    wait = torch.cuda.synchronize if inputs[0].is_cuda else lambda: None
    wait()
    issued = 0
    started = time.perf_counter_ns()
    for _ in range(calls):
        before = time.perf_counter_ns()
        call(*inputs)
        issued += time.perf_counter_ns() - before
    wait()
    return issued / calls / 1e3, (time.perf_counter_ns() - started) / calls / 1e3


def run(layers: int, device: str, rounds: int, calls: int) -> dict[str, Any]:
    """Every variant once a round."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    module = Stack(layers).to(device, dtype).eval()
    inputs = [torch.randn(ROWS, WIDTH, device=device, dtype=dtype) for _ in range(4)]
    expected = module(*inputs)
    variants: dict[str, Callable[..., Any]] = {"eager": module}
    if device == "cuda":
        variants["by hand"], variants["bare launch"] = by_hand(module, inputs)
        samples = tuple(tensor.clone() for tensor in inputs)
        graphed = Stack(layers).to(device, dtype).eval()
        graphed.load_state_dict(module.state_dict())
        variants["make_graphed_callables"] = torch.cuda.make_graphed_callables(graphed, samples)
    for guards in ("off", "weights", "full"):
        variants[f"hookgraph, guards {guards}"] = attached(module, inputs, guards)
    parity = {
        name: bool(torch.equal(out, expected)) if isinstance(out := call(*inputs), torch.Tensor) else None
        for name, call in variants.items()
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for index in range(rounds):
        names = list(variants)
        start = index % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(measure(variants[name], inputs, calls))
    return {
        name: {
            "host_us": _spread([host for host, _ in found]), "wall_us": _spread([wall for _, wall in found]),
            "parity": parity[name],
        }
        for name, found in times.items()
    }  # fmt: skip


def _spread(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": round(median, 2), "q1": round(low, 2), "q3": round(high, 2)}


def main() -> int:
    """Measure, write the file, and fail when a variant that replays does not give eager's bits."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.host_cost")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with torch.no_grad():
        found = {f"{n} layers": run(n, options.device, options.rounds, options.calls) for n in (1, 8)}
    result = {
        "command": "python " + " ".join(["-m", "tests.gpu.host_cost", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
        "rounds": options.rounds, "calls_per_round": options.calls, "results": found,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return any(variant["parity"] is False for variants in found.values() for variant in variants.values())


if __name__ == "__main__":
    raise SystemExit(main())
