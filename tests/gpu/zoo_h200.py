"""Every model case on a CUDA device, attached beside an eager twin: parity, outcomes, times.

    python -m tests.gpu.zoo_h200 --out docs/results/zoo_h200.json

Needs the ``models`` extra and no pytest.  Exit status 1 when any case differs from eager.
``--device cpu`` rehearses it on the tape, where times mean nothing.

Parity: as in ``tests/parity.py``, bit for bit, arguments and caches included.  Where a case differs, a
second eager twin tells whether eager agrees with itself.
Times: latency of one call between two synchronisations, eager and attached in turn on copies of the same
arguments, after all graphs are made; median and the tenth and ninetieth percentile.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.metadata
import json
import platform
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hookgraph
from tests.models.cases import CASES, ZooCase
from tests.models.driving import run_case
from tests.models.zoo import Case
from tests.parity import Both, ParityError, Twins, walk

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "optree", "cuda-bindings")
WARM_ROUNDS = 5  # a warm-up, a lazy one, a capture, a proved replay, and one more


class Collecting(Twins):
    """Notes each difference and goes on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.notes: list[str] = []
        super().__init__(*args, **options)

    def _compare_all(self, where: str, out: Both, sides: Both) -> None:
        try:
            super()._compare_all(where, out, sides)
        except ParityError as error:
            self.notes.append(str(error))

    def largest_difference(self) -> float:
        """Over all outputs as they are now; infinite where they are not comparable."""
        return max((largest_difference(eager, attached) for _, eager, attached in self._kept), default=0.0)


def largest_difference(eager: Any, attached: Any) -> float:
    """The largest absolute difference between two trees of tensors."""
    mine, theirs = ([leaf for _, leaf in walk(v) if isinstance(leaf, torch.Tensor)] for v in (eager, attached))
    if len(mine) != len(theirs) or any(a.shape != b.shape for a, b in zip(mine, theirs, strict=False)):
        return float("inf")
    gaps = [
        (a.double() - b.double()).abs().max().item()
        for a, b in zip(mine, theirs, strict=True)
        if a.numel() and not a.is_complex()
    ]
    return max(gaps, default=0.0)


def check_parity(case: ZooCase, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """One pass over the case's calls, everything compared."""
    twins = run_case(case, device, dtype, Collecting)
    assert isinstance(twins, Collecting)
    stats = twins.handle.stats
    try:
        twins.finish()
    except (ParityError, AssertionError) as error:
        twins.notes.append(str(error))
    return {
        "parity": not twins.notes,
        "differences": twins.notes[:3],
        "max_difference": twins.largest_difference(),
        "outcomes": twins.outcomes,
        "reasons": dict(stats.reasons),
        "details": {reason: dict(seen) for module in stats.modules for reason, seen in module.details.items()},
        "bytes": stats.bytes,
    }


def eager_agrees_with_itself(case: ZooCase, device: str, dtype: torch.dtype) -> bool:
    """Two plain copies on the same calls; where they differ, no graph can be expected to agree."""
    sides = [case.build(device, dtype) for _ in range(2)]
    for first, second in zip(*(side.calls for side in sides), strict=True):
        outputs = [side.run(*args, **kwargs) for side, (args, kwargs) in zip(sides, (first, second), strict=True)]
        if largest_difference(*outputs) != 0:
            return False
    return True


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def latency(case: Case, call: Any) -> float:
    """Milliseconds of one call, from an idle device to an idle device."""
    args, kwargs = copy.deepcopy(call)  # caches are written; each call gets its own
    target: Callable[..., Any] = case.module if case.entry == "__call__" else case.module.forward
    synchronize()
    start = time.perf_counter_ns()
    target(*args, **kwargs)
    synchronize()
    return (time.perf_counter_ns() - start) / 1e6


def measure(case: ZooCase, device: str, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Eager and attached calls in turn."""
    eager, attached = case.build(device, dtype), case.build(device, dtype)
    times: dict[str, list[float]] = {"eager": [], "attached": []}
    with hookgraph.attach(attached.module, max_graphs=case.max_graphs) as handle:
        for _ in range(WARM_ROUNDS):
            for mine, theirs in zip(eager.calls, attached.calls, strict=True):
                latency(eager, mine), latency(attached, theirs)
        handle.reset_counters()
        for step in range(rounds):
            for mine, theirs in zip(eager.calls, attached.calls, strict=True):
                pair = [("eager", eager, mine), ("attached", attached, theirs)]
                for name, side, call in pair if step % 2 else reversed(pair):
                    times[name].append(latency(side, call))
        stats = handle.stats
    result: dict[str, Any] = {f"{name}_ms": spread(values) for name, values in times.items()}
    result["timed_outcomes"] = {name: getattr(stats, name) for name in ("warmups", "captures", "replays", "eager")}
    result["speedup"] = round(result["eager_ms"]["median"] / result["attached_ms"]["median"], 3)
    return result


def spread(values: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(values, n=10)
    return {
        "median": round(statistics.median(values), 4),
        "p10": round(tenths[0], 4),
        "p90": round(tenths[-1], 4),
        "count": len(values),
    }


def look(case: ZooCase, device: str, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """All about one case in one dtype; what goes wrong is part of the result."""
    try:
        result = check_parity(case, device, dtype)
        if not result["parity"]:
            result["eager_agrees_with_itself"] = eager_agrees_with_itself(case, device, dtype)
        return result | (measure(case, device, dtype, rounds) if rounds else {})
    except ImportError as error:
        return {"skipped": f"needs {case.needs or error.name}"}
    except Exception as error:
        return {"parity": False, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def line(name: str, dtype: str, result: dict[str, Any]) -> str:
    """One row of the table."""
    if "skipped" in result:
        return f"{name:34} {dtype:9} skipped: {result['skipped']}"
    if "error" in result:
        return f"{name:34} {dtype:9} ERROR {result['error'].splitlines()[0][:90]}"
    counts = Counter(outcome.split(":")[0] for outcome in result["outcomes"])
    outcomes = " ".join(f"{counts.get(key, 0)}" for key in ("warmups", "captures", "replays", "eager"))
    times = ""
    if "eager_ms" in result:
        times = f"{result['eager_ms']['median']:8.2f} {result['attached_ms']['median']:8.2f} {result['speedup']:6.1f}x"
    verdict = "equal" if result["parity"] else f"DIFFERS by {result['max_difference']:.2g}"
    reasons = " ".join(result["reasons"])
    return f"{name:34} {dtype:9} {verdict:18} {outcomes:>12} {times:26} {reasons}"


def machine(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "system": platform.platform()}
    if device == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        found |= {"gpu": torch.cuda.get_device_name(), "capability": capability, "gpus": torch.cuda.device_count()}
    return found


def surroundings(arguments: list[str], device: str) -> dict[str, Any]:
    """The machine, the versions, the command and the date."""
    versions = {"python": platform.python_version(), "hookgraph": hookgraph.__version__, "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m tests.gpu.zoo_h200", *arguments]),
        "machine": machine(device),
        "versions": versions,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name contains one of these")
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=20, help="timed passes over the calls; 0 measures nothing")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "needs a CUDA device\n")
    for library in ("diffusers", "transformers"):
        importlib.import_module(f"{library}.utils.logging").set_verbosity_error()

    results: dict[str, dict[str, Any]] = {}
    print(f"{'case':34} {'dtype':9} {'beside eager':18} {'w  c  r  e':>12} {'eager':>8} {'attached':>8} ms")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries; ours are among the reasons
        for name, case in CASES.items():
            if options.device not in case.devices or (options.only and not any(part in name for part in options.only)):
                continue
            for dtype in options.dtypes:
                result = look(case, options.device, DTYPES[dtype], options.rounds)
                results.setdefault(name, {})[dtype] = result
                print(line(name, dtype, result), flush=True)
    report = surroundings(arguments, options.device) | {"cases": results}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    looked_at = [result for case in results.values() for result in case.values() if "skipped" not in result]
    equal = sum(result["parity"] for result in looked_at)
    print(f"{equal} of {len(looked_at)} equal to eager bit for bit on {report['machine'].get('gpu', 'the tape')}")
    return 0 if equal == len(looked_at) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
