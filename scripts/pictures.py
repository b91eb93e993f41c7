"""Draws the pictures of docs/observing.md:  python scripts/pictures.py

The terminal is rich's own export. The notebook is a real one: its cells run in a kernel, and headless Chromium shows
what they gave. Needs hookgraph[models,notebook] and a Chromium on the path (on Debian: apt install chromium).
"""

import argparse
import html
import io
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from rich.console import Console

import hookgraph
from hookgraph.cli import qwen_image
from hookgraph.tables import WIDTH

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "_static"

CELLS = [
    """\
import torch

import hookgraph
from hookgraph import plots
from hookgraph.cli import qwen_image

job = qwen_image.build(torch.device("cpu"), steps=12)
handle = hookgraph.attach(job.transformer)
with handle.recording() as recording:
    qwen_image.denoise(job, after_step=lambda step: None)""",
    "handle.stats",
    "plots.timeline(recording);",
]
STYLE = """
body { margin: 18px 24px; width: 960px; font-family: "DejaVu Sans", sans-serif; background: white }
pre { font-family: "DejaVu Sans Mono", monospace; font-size: 12px; line-height: 1.35; margin: 0 }
.input { background: #f5f5f5; border: 1px solid #e0e0e0; padding: 8px 10px; margin: 12px 0 6px }
.output { padding: 2px 10px }
img { max-width: 100% }
"""


def draw_terminal(path: Path) -> None:
    import torch

    console = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    job = qwen_image.build(torch.device("cpu"), steps=12)
    with hookgraph.attach(job.transformer) as handle:
        qwen_image.denoise(job, after_step=lambda step: None)
        job.transformer(**call_with_gradients(job))
        console.print(handle.stats)
    console.save_svg(str(path), title="print(handle.stats)", unique_id="hookgraph")


def call_with_gradients(job: qwen_image.Job) -> dict[str, object]:
    """A call that runs eager, so that the picture shows a reason."""
    return {
        "hidden_states": job.latents.clone().requires_grad_(),
        "timestep": job.latents.new_ones(1),
        "encoder_hidden_states": job.prompts[0],
        "img_shapes": [[(1, 16, 16)]],
    }


def draw_notebook(path: Path, browser: str) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute(env={**os.environ, "OMP_NUM_THREADS": "1"})
    body = "".join(show_cell(cell) for cell in notebook.cells)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{body}", encoding="utf-8")
        subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--user-data-dir={folder}/profile", "--window-size=1010,1090", f"--screenshot={path}", page.as_uri(),
            ],
            check=True, capture_output=True,
        )  # fmt: skip


def show_cell(cell: nbformat.NotebookNode) -> str:
    shown = [f"<div class=input><pre>{html.escape(cell.source)}</pre></div>"]
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/png" in data:
            shown.append(f'<div class=output><img src="data:image/png;base64,{data["image/png"]}"></div>')
        elif "text/html" in data:
            shown.append(f"<div class=output>{data['text/html']}</div>")
    return "".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/observing.md.")
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    options = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    draw_terminal(PICTURES / "terminal.svg")
    if options.browser is None:
        parser.error("found no Chromium for the picture of a notebook; name one with --browser")
    draw_notebook(PICTURES / "notebook.png", options.browser)


if __name__ == "__main__":
    main()
