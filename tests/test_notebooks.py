"""Every notebook runs from top to bottom, and its own assertions hold."""

import os
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from traitlets import default

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


class ThisInterpreter(AsyncKernelManager):
    """Starts kernels in the interpreter that runs the tests.

    Without folders to look in, "python3" can be no other. A kernel of that name that the user once installed would
    run some other environment.
    """

    @default("kernel_spec_manager")
    def _only_the_native_kernel(self):
        return KernelSpecManager(parent=self, kernel_dirs=[])


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    client = NotebookClient(
        notebook,
        kernel_manager_class=ThisInterpreter,
        kernel_name="python3",
        timeout=300,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    # One thread, as in the other tests: two that wait for each other on a busy machine take three times as long.
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs(path):
    """Outputs would be a second, older truth, and would hold the paths of one machine."""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
