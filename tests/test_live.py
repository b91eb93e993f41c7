"""The live table: in a terminal, in a notebook, and where there is neither."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import hookgraph
from hookgraph import tables
from hookgraph.stats import Stats
from tests import modules
from tests.test_notebooks import ThisInterpreter

ROOT = Path(__file__).parent.parent

LOOP = """
import time, torch, hookgraph
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()).eval()
handle = hookgraph.attach(model)
with torch.no_grad(), handle.live(refresh_seconds=0.02):
    for step in range(10):
        model(torch.ones(2, 4))
        time.sleep(0.02)
        print("step", step)
"""


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "50"} | changes


def test_without_a_terminal_it_is_written_once_and_out_of_the_way() -> None:
    done = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"step {step}" for step in range(10)]
    assert done.stderr.count("10 of 10 calls") == 0
    assert done.stderr.count("8 of 10 calls replayed (80%).") == 1
    assert done.stderr.count("calls replayed") == 1
    assert "\x1b" not in done.stderr
    assert max(map(len, done.stderr.splitlines())) <= 115


def test_in_a_terminal_it_stays_in_its_place() -> None:
    ours, theirs = pty.openpty()
    running = subprocess.Popen([sys.executable, "-c", LOOP], stdout=theirs, stderr=theirs, cwd=ROOT, env=environment())
    os.close(theirs)
    drawn = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        drawn += part
    os.close(ours)
    text = drawn.decode()
    assert running.wait() == 0, text
    assert text.count("calls replayed") > 2  # drawn again and again
    assert "\x1b[1A" in text  # over the one before
    assert "\x1b[?25l" in text  # without the cursor,
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # which comes back
    assert all(f"step {step}" in text for step in range(10))
    assert "8 of 10 calls replayed (80%)." in text[text.rindex("calls replayed") - 40 :]


def test_in_a_notebook_one_output_is_updated() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(LOOP)])
    client = NotebookClient(notebook, kernel_manager_class=ThisInterpreter, kernel_name="python3", timeout=120)
    client.execute(env=environment(PYTHONPATH=str(ROOT)))
    outputs = notebook.cells[0].outputs
    shown = [output for output in outputs if output.output_type == "display_data"]
    streams = [(output.name, output.text) for output in outputs if output.output_type == "stream"]
    assert len(shown) == 1
    assert "8 of 10 calls replayed (80%)." in shown[0].data["text/plain"]
    assert shown[0].data["text/html"].startswith("<pre style=")
    assert {name for name, _ in streams} == {"stdout"}
    assert "".join(text for _, text in streams) == "".join(f"step {step}\n" for step in range(10))


def test_an_error_of_the_loop_passes_and_the_thread_ends(capsys: pytest.CaptureFixture[str]) -> None:
    handle = hookgraph.attach(modules.mlp())
    with pytest.raises(ValueError, match="of the loop"), handle.live(refresh_seconds=0.01):
        raise ValueError("of the loop")
    assert "0 of 0 calls replayed." in capsys.readouterr().err
    assert "hookgraph live" not in {thread.name for thread in threading.enumerate()}


def test_a_line_written_under_a_lock_that_the_table_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner logs while it holds its lock; the line goes through rich, which must not wait for that lock."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the captured stream for a terminal,
    monkeypatch.setenv("TERM", "xterm")  # and prints what is written to it above the table
    lock, reading = threading.Lock(), threading.Event()

    def read() -> Stats:
        reading.set()
        with lock:
            return Stats.of([])

    def work() -> None:
        with tables.live(read, refresh_seconds=0.001):
            with lock:
                reading.clear()
                assert reading.wait(10)  # now the table waits for us
                print("a line", file=sys.stderr)
            done.append(True)

    done: list[bool] = []
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(timeout=20)
    assert done, "the loop and the table wait for each other"
    worker.join()


def test_a_pause_of_nothing_is_refused() -> None:
    handle = hookgraph.attach(modules.mlp())
    with pytest.raises(hookgraph.HookgraphError, match=r"live\(refresh_seconds=0\).*above 0"), handle.live(0):
        pass
