"""Compare a run of tests/perf with the recorded one, and say what changed; it judges nothing.

python -m tests.perf.report perf.json docs/results/perf_cpu.json            # compare
python -m tests.perf.report perf.json docs/results/perf_cpu.json --record   # keep as the recorded one
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text


def _summary(run: dict[str, Any]) -> dict[str, Any]:
    cpu = run["machine_info"]["cpu"]
    return {
        "command": "python -m pytest tests/perf -p no:xdist --benchmark-only --benchmark-json=perf.json",
        "date": run["datetime"][:10],
        "machine": {"cpu": cpu.get("brand_raw", ""), "cores": cpu.get("count")},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "median_us": {
            case["name"]: {
                "median": round(case["stats"]["median"] * 1e6, 2), "q1": round(case["stats"]["q1"] * 1e6, 2),
                "q3": round(case["stats"]["q3"] * 1e6, 2), "rounds": case["stats"]["rounds"],
            }
            for case in run["benchmarks"]
        },
    }  # fmt: skip


def _table(now: dict[str, Any], then: dict[str, Any]) -> Table:
    table = Table("case", "recorded µs", "now µs", "quartiles", "ratio")
    for name, case in now["median_us"].items():
        old = then["median_us"].get(name, {}).get("median")
        ratio = f"{case['median'] / old:.2f}" if old else ""
        table.add_row(Text(name), str(old or ""), str(case["median"]), f"{case['q1']}–{case['q3']}", ratio)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.perf.report")
    parser.add_argument("run", type=Path)
    parser.add_argument("recorded", type=Path)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    now = _summary(json.loads(options.run.read_text()))
    then = json.loads(options.recorded.read_text()) if options.recorded.exists() else {"median_us": {}}
    Console(width=110).print(_table(now, then))
    if options.record:
        options.recorded.write_text(json.dumps(now, indent=1) + "\n")


if __name__ == "__main__":
    main()
