"""What lives how long: nothing of ours outlives its user, and nothing that a user holds dies with us."""

from __future__ import annotations

import collections
import gc
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import hookgraph
from tests.modules import Does, Drops, Fragile, mlp

X = torch.arange(8.0).reshape(2, 4) / 8
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed in the test is freed by itself: there is no cycle to collect."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# The fixture that looks for residue keeps every module that it watches.
attach: Callable[..., hookgraph.Attachment] = hookgraph.attach


class Memory:
    """All that one attached module and its graphs hold, to be looked for later."""

    def __init__(self, module: nn.Module, handle: hookgraph.Attachment) -> None:
        self._objects: dict[str, weakref.ref[Any]] = {"module": weakref.ref(module), "handle": weakref.ref(handle)}
        self._storages: dict[str, StorageWeakRef] = {}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self._storages[name] = StorageWeakRef(tensor.untyped_storage())
        self.graphs = 0
        for hooks in handle._hooks:
            self._objects[f"runner {hooks.runner.name}"] = weakref.ref(hooks.runner)
            for number, entry in enumerate(hooks.runner.entries()):
                if entry.graph is None:
                    continue
                self.graphs += 1
                self._objects[f"graph {number}"] = weakref.ref(entry.graph)
                self._objects[f"tape {number}"] = weakref.ref(entry.graph._graph)
                held = {"static input": entry.graph.inputs.tensors, "static output": entry.graph._recipe.groups}
                held["operator's result"] = entry.graph._graph._owned
                for what, tensors in held.items():
                    for index, tensor in enumerate(tensors):
                        self._storages[f"{what} {number}.{index}"] = StorageWeakRef(tensor.untyped_storage())

    def left(self) -> list[str]:
        """What is still there."""
        objects = [name for name, ref in self._objects.items() if ref() is not None]
        return objects + [name for name, ref in self._storages.items() if not ref.expired()]


def _interrupted(module: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        module(X)


def _reads_back(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x) * x.sum().item()


def _table(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x) * m.table["row"] + m.mean.add_(1)


# a module, and what is called on it before everything is dropped
LIVES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "never called": (mlp, lambda m: None),
    "warmed up": (mlp, lambda m: m(X)),
    "captured": (mlp, lambda m: [m(X) for _ in range(2)]),
    "replayed": (mlp, lambda m: [m(X + i) for i in range(6)]),
    "two signatures": (mlp, lambda m: [m(X[: 1 + i % 2]) for i in range(12)]),
    "random numbers": (Drops, lambda m: [m(X + i) for i in range(6)]),
    "a table and a buffer": (
        lambda: Does(_table, table={"row": torch.ones(4)}, mean=torch.zeros(4)), lambda m: [m(X + i) for i in range(6)],
    ),
    "blocked": (lambda: Does(_reads_back), lambda m: [m(X) for _ in range(3)]),
    "a capture that failed": (lambda: Fragile("life", fail_at=(2,)), lambda m: [m(X) for _ in range(3)]),
    "an interrupted warm-up": (lambda: Fragile("life", (1,), KeyboardInterrupt), _interrupted),
    "an interrupted capture": (lambda: Fragile("life", (2,), KeyboardInterrupt), lambda m: [m(X), _interrupted(m)]),
    "explained": (mlp, lambda m: [m(X) for _ in range(4)] and hookgraph.stats(m)),
}  # fmt: skip


CAPTURED = {"captured", "replayed", "random numbers", "a table and a buffer", "explained"}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("first", ["handle", "module"])
@pytest.mark.parametrize("life", LIVES)
def test_dropping_handle_and_module_frees_everything_at_once(life: str, first: str) -> None:
    build, use = LIVES[life]
    module = build().eval()
    handle = attach(module)
    use(module)
    memory = Memory(module, handle)
    assert memory.graphs == (2 if life == "two signatures" else life in CAPTURED)
    if first == "handle":
        del handle, module
    else:
        del module, handle
    assert memory.left() == []


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("life", LIVES)
def test_detaching_frees_the_graphs_at_once(life: str) -> None:
    """The module stays, and a handle that is kept for its stats holds no memory of a module that goes later."""
    build, use = LIVES[life]
    module = build().eval()
    handle = attach(module)
    use(module)
    memory = Memory(module, handle)
    own = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    handle.detach()
    assert set(memory.left()) == {"module", "handle", "runner ", *own}
    assert handle.stats.bytes == 0
    del module
    assert set(memory.left()) == {"handle", "runner "}
    assert handle.stats.calls >= 0


@pytest.mark.usefixtures("no_collector")
def test_a_module_that_goes_takes_its_graphs_along() -> None:
    """Also where the handle is kept, and without a detach."""
    module = mlp()
    handle = attach(module)
    for step in range(5):
        module(X + step)
    memory = Memory(module, handle)
    del module
    assert set(memory.left()) == {"handle", "runner "}
    assert handle.stats.replays == 3
    handle.detach()


@pytest.mark.usefixtures("no_collector")
def test_an_invalidation_frees_the_graphs_at_once() -> None:
    module = mlp()
    handle = attach(module)
    for step in range(5):
        module(X + step)
    memory = Memory(module, handle)
    handle.invalidate()
    own = {name for name, _ in module.named_parameters()}
    assert set(memory.left()) == {"module", "handle", "runner ", *own}
    handle.detach()


@pytest.mark.usefixtures("no_collector")
def test_arguments_are_not_kept() -> None:
    """What a caller passed dies when the caller drops it, whatever became of the call."""
    module = mlp()
    handle = attach(module)
    for step in range(6):
        x = X + step
        gone = StorageWeakRef(x.untyped_storage())
        module(x)
        del x
        assert gone.expired(), step
    handle.detach()


def test_outputs_outlive_everything() -> None:
    module, plain = mlp(), mlp()
    plain.load_state_dict(module.state_dict())
    handle = attach(module)
    inputs = [torch.randn(2, 4) for _ in range(6)]
    outputs = [module(x) for x in inputs]
    expected = [plain(x) for x in inputs]
    handle.detach()
    assert all(map(torch.equal, outputs, expected))
    del module, handle
    gc.collect()
    junk = [torch.full((2, 4), float("nan")) for _ in range(100)]  # takes whatever memory was freed
    assert all(map(torch.equal, outputs, expected))
    del junk


def test_static_outputs_stay_readable_after_detach() -> None:
    """With ``outputs="view"`` a caller holds memory of the graph; it is kept as long as the caller does."""
    module = mlp()
    handle = attach(module, outputs="view")
    for _ in range(4):
        out = module(X)
    expected = out.clone()
    handle.detach()
    del module, handle
    gc.collect()
    junk = [torch.full((2, 4), float("nan")) for _ in range(100)]
    assert torch.equal(out, expected)
    del junk


# -- growth -----------------------------------------------------------------------------------------


def _census() -> collections.Counter[str]:
    gc.collect()
    return collections.Counter(f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.get_objects())


def _grown(before: collections.Counter[str], after: collections.Counter[str], rounds: int) -> dict[str, int]:
    """Classes of which there are more now, by at least one for every other round."""
    return {
        name: after[name] - count
        for name, count in (after & after).items()
        for count in [before[name]]
        if after[name] - count >= rounds // 2
    }


def _once(module: nn.Module, fails: bool) -> None:
    with hookgraph.attach.__wrapped__(module) as handle:
        for step in range(4):
            module(X + step)
        assert handle.stats.captures == (not fails)


@pytest.mark.parametrize("what", ["one module", "a new module", "a failed capture", "invalidated"])
def test_rounds_of_attaching_and_capturing_do_not_grow(what: str) -> None:
    rounds = 200
    module = mlp()
    handle = hookgraph.attach.__wrapped__(mlp())

    def one() -> None:
        if what == "one module":
            _once(module, fails=False)
        elif what == "a new module":
            _once(mlp(), fails=False)
        elif what == "a failed capture":
            _once(Fragile("grow", fail_at=(2,)), fails=True)
        else:
            for step in range(3):
                other(X + step)
            handle.invalidate()

    other = mlp()
    handle.detach()
    handle = hookgraph.attach.__wrapped__(other)
    for _ in range(20):
        one()
    before, blocks = _census(), sys.getallocatedblocks()
    for _ in range(rounds):
        one()
    gc.collect()  # empties the interpreter's free lists, too, as the census before did
    grown, after = sys.getallocatedblocks() - blocks, _census()  # a census takes memory itself
    handle.detach()
    assert not _grown(before, after, rounds)
    # The test itself takes about 250, however many rounds there are; one block a round would show.
    assert grown < 2 * rounds, f"{grown} blocks of memory in {rounds} rounds"


def test_twenty_thousand_replays_do_not_grow() -> None:
    module = Does(lambda m, x: x + m.shift, shift=torch.ones(4))
    with hookgraph.attach(module) as handle:
        for _ in range(1_000):
            module(X)
        before, blocks, resident = _census(), sys.getallocatedblocks(), _resident_bytes()
        for _ in range(19_000):
            module(X)
        gc.collect()
        grown, after = sys.getallocatedblocks() - blocks, _census()  # a census takes memory itself
        assert not _grown(before, after, 1_000)
        assert grown < 1_000, f"{grown} blocks of memory"
        assert _resident_bytes() - resident < 4 << 20
        assert handle.stats.replays == 19_998


def _resident_bytes() -> int:
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0  # not Linux: then tracemalloc and the census have to do
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.filterwarnings("ignore:.* runs eager. limit")
def test_signatures_that_never_come_back_do_not_grow() -> None:
    """Nothing beyond ``max_graphs`` holds a tensor, and what is remembered of them is bounded."""
    module = mlp()
    with hookgraph.attach(module, max_graphs=2) as handle:
        for rows in range(1, 400):
            module(torch.randn(rows, 4))
        before = _census()
        for rows in range(400, 800):
            module(torch.randn(rows, 4))
        assert not _grown(before, _census(), 400)
        assert handle.stats.reasons == {"limit": 797}
        assert len(handle.stats.modules[0].signatures) == 2


# -- the end of the process ----------------------------------------------------------------------------

START = """
    import threading, torch, hookgraph
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    X = torch.ones(2, 4)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()).eval()
    handle = hookgraph.attach(module)
    for step in range(4):
        module(X + step)
    assert handle.stats.replays == 2
"""
ENDS: dict[str, tuple[str, int]] = {
    "with a live graph": ("", 0),
    "after detach": ("handle.detach()", 0),
    "the graph in a cycle": ("module.me = [module, handle]", 0),
    "the collector off": ("import gc; gc.disable(); module.me = [module]", 0),
    "a thread that goes on calling": (
        """
    def work():
        with torch.no_grad():
            for step in range(3000):
                module(X + step % 5)
        assert handle.stats.replays > 3000
    threading.Thread(target=work).start()
    """,
        0,
    ),
    "inside a call of another thread": (
        """
    inside = threading.Event()
    class Slow(torch.nn.Module):
        def forward(self, x):
            inside.set()
            threading.Event().wait()
            return x + 1
    slow = Slow().eval()
    hookgraph.attach(slow)
    threading.Thread(target=slow, args=(X,), daemon=True).start()
    inside.wait()
    """,
        0,
    ),
    "a call at exit": ("import atexit; atexit.register(lambda: module(X))", 0),
    "an own exit code": ("raise SystemExit(3)", 3),
    "a fork": ("import os; child = os.fork(); child and os.waitpid(child, 0)", 0),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_interpreter_ends_cleanly(end: str) -> None:
    code, expected = ENDS[end]
    script = textwrap.dedent(START) + textwrap.dedent(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (expected, "", "")
