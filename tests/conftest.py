"""Settings for every test, and the fixture that no test gets past: nothing may be left on a module."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the libraries read it: no test may ask the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

import hookgraph
from tests import parity
from tests.residue import Watch


def pytest_configure(config: pytest.Config) -> None:
    # One thread: bitwise comparisons then do not depend on how work is split, and tiny models run faster.
    torch.set_num_threads(1)
    # The drivers that the model cases copy still use the older name.
    config.addinivalue_line("filterwarnings", "ignore:`past_key_values` is deprecated:FutureWarning")
    for library in ("diffusers", "transformers"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"{library}.utils.logging").set_verbosity_error()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a GPU runs in one process: two would see each other's memory and load."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.xdist_group("gpu"))


@pytest.fixture(autouse=True)
def no_residue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Every module attached in the test is, once detached, exactly what it was before."""
    watch = Watch()
    monkeypatch.setattr(hookgraph, "attach", watch.observe(hookgraph.attach))
    monkeypatch.setattr(parity, "WATCH", watch)
    monkeypatch.delenv("HOOKGRAPH_DISABLE", raising=False)
    torch.manual_seed(0)
    yield watch
    watch.check_all(hookgraph.detach)


@pytest.fixture(params=[1, 0], ids=["proved", "unproved"])
def with_and_without_proof(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins with the default of ``verify``, and with graphs trusted unseen: then each replay's own values count."""
    monkeypatch.setattr(parity.Twins, "default_options", {"verify": request.param})
