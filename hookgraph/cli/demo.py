"""``demo``: a guided Qwen-Image denoising loop, eager and attached, compared bit for bit."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import hookgraph
from hookgraph.cli.errors import CommandError
from hookgraph.cli.sameness import Snapshot, same_bits
from hookgraph.errors import AttachError
from hookgraph.tables import WIDTH

if TYPE_CHECKING:
    from types import ModuleType

    from hookgraph.cli.qwen_image import Job, Run
    from hookgraph.stats import Stats


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``demo`` and its options to the command line."""
    parser = commands.add_parser("demo", help="run a small Qwen-Image loop eager and attached, and compare")
    parser.add_argument("--steps", type=_positive, default=20, help="denoising steps (20)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--backend", choices=("auto", "cuda", "tape"), default="auto")
    parser.add_argument("--max-graphs", type=_positive, default=4, help="signatures to retain (4); the loop has two")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demo and report on it; 0 when the outputs agree, the counts balance and no trace is left."""
    device = _pick_device(options.device, options.backend)
    # Standard output belongs to the report: whatever a library prints meanwhile goes to standard error.
    with contextlib.redirect_stdout(sys.stderr):
        qwen_image = _load_qwen_image()
        report = _compare(qwen_image, qwen_image.build(device, options.steps), options)
    if options.json:
        print(json.dumps(report.to_dict()))
    else:
        report.show(Console(width=None if sys.stdout.isatty() else WIDTH))
    return 0 if report.good else 1


@dataclass(frozen=True, slots=True)
class Report:
    """What the two runs showed.

    Args:
        parity: whether every output of the transformer had the same bits in both runs.
        untouched: whether the transformer was after ``detach()`` what it was before ``attach()``.
        timed_steps: steps without a warm-up or a capture; the times are medians over these, in both runs.
    """

    job: Job
    stats: Stats
    parity: bool
    untouched: bool
    timed_steps: int
    eager_ms_per_step: float | None
    attached_ms_per_step: float | None

    @property
    def good(self) -> bool:
        """Whether everything that must hold does."""
        return self.parity and self.untouched and self.stats.balanced

    @property
    def device(self) -> torch.device:
        """Where the transformer ran."""
        return self.job.latents.device

    @property
    def backend(self) -> str:
        """The backend that served the transformer."""
        return self.stats.modules[0].backend

    def to_dict(self) -> dict[str, Any]:
        """Give the report as JSON-safe data."""
        import diffusers

        return {
            "parity": self.parity,
            "untouched": self.untouched,
            "stats": self.stats.to_dict(),
            "eager_ms_per_step": self.eager_ms_per_step,
            "attached_ms_per_step": self.attached_ms_per_step,
            "timed_steps": self.timed_steps,
            "steps": self.job.steps,
            "device": str(self.device),
            "device_name": _device_name(self.device),
            "backend": self.backend,
            "versions": {
                "torch": torch.__version__,
                "diffusers": diffusers.__version__,
                "hookgraph": hookgraph.__version__,
            },
        }

    def show(self, console: Console) -> None:
        """Print the report for a person."""
        transformer = self.job.transformer
        millions = sum(parameter.numel() for parameter in transformer.parameters()) / 1e6
        dtype = str(self.job.latents.dtype).removeprefix("torch.")
        lines = [
            f"{type(transformer).__name__} of diffusers, {millions:.1f} M random weights, {dtype}, "
            f"on {_device_name(self.device)}, backend {self.backend}",
            f"{self.job.steps} steps with two prompts: {2 * self.job.steps} calls of two signatures",
        ]
        console.print(*lines, sep="\n", highlight=False, markup=False)
        console.print()
        console.print(self.stats)
        console.print(*self._verdicts(), sep="\n", highlight=False, markup=False)

    def _verdicts(self) -> list[str]:
        count = 2 * self.job.steps
        verdicts = [
            f"outputs   all {count} bitwise equal to eager"
            if self.parity
            else f"outputs   DIFFERENT from eager, of {count}",
            f"per step  {self._times()}",
            f"detach    {'the module is as it was' if self.untouched else 'the module is CHANGED'}",
        ]
        if self.device.type == "cpu":
            verdicts.append("note      on a CPU the tape rehearses what a GPU would do; it does not promise speed")
        return verdicts

    def _times(self) -> str:
        if self.eager_ms_per_step is None or self.attached_ms_per_step is None:
            return "no step without a warm-up or a capture to time; try more --steps"
        left_out = self.job.steps - self.timed_steps
        return (
            f"eager {self.eager_ms_per_step:.2f} ms, attached {self.attached_ms_per_step:.2f} ms (medians of "
            f"{self.timed_steps} steps; {left_out} that warmed up or captured left out)"
        )


def _compare(qwen_image: ModuleType, job: Job, options: argparse.Namespace) -> Report:
    with _progress() as progress:
        bars = {name: progress.add_task(name, total=job.steps) for name in ("eager", "attached")}
        eager = qwen_image.denoise(job, lambda step: progress.advance(bars["eager"]))
        before = Snapshot(job.transformer)
        try:
            handle = hookgraph.attach(job.transformer, max_graphs=options.max_graphs, backend=options.backend)
        except AttachError as error:
            raise CommandError(str(error)) from error
        timed: list[int] = []
        learned = 0

        def after_step(step: int) -> None:
            nonlocal learned
            stats = handle.stats
            if stats.warmups + stats.captures == learned:
                timed.append(step)
            learned = stats.warmups + stats.captures
            progress.advance(bars["attached"])

        with handle:
            attached = qwen_image.denoise(job, after_step)
            stats = handle.stats
    return Report(
        job=job,
        stats=stats,
        parity=_same_outputs(eager, attached),
        untouched=before.matches(job.transformer),
        timed_steps=len(timed),
        eager_ms_per_step=_median_ms(eager, timed),
        attached_ms_per_step=_median_ms(attached, timed),
    )


def _same_outputs(eager: Run, attached: Run) -> bool:
    pairs = zip([*eager.outputs, eager.latents], [*attached.outputs, attached.latents], strict=True)
    return all(same_bits(one, other) for one, other in pairs)


def _median_ms(run: Run, steps: list[int]) -> float | None:
    return statistics.median(run.step_ns[step] for step in steps) / 1e6 if steps else None


def _pick_device(device: str, backend: str) -> torch.device:
    """Settle ``auto``, and refuse a pair that cannot work before anything is built."""
    if device == "auto":
        wants_cuda = torch.cuda.is_available() if backend == "auto" else backend == "cuda"
        device = "cuda" if wants_cuda else "cpu"
    if device == "cuda" and backend == "tape":
        raise CommandError("the tape backend serves the CPU only; use --device cpu, or --backend cuda")
    if device == "cpu" and backend == "cuda":
        raise CommandError("the cuda backend needs a GPU; use --device cuda, or --backend tape")
    if device == "cuda" and not torch.cuda.is_available():
        raise CommandError("torch sees no CUDA device here; use --device cpu, or install a CUDA build of torch")
    return torch.device(device)


def _load_qwen_image() -> ModuleType:
    try:
        from hookgraph.cli import qwen_image
    except ImportError as error:
        raise CommandError(f"needs diffusers: pip install 'hookgraph[models]' ({error})") from error
    return qwen_image


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)
