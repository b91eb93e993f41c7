"""The public reports that only a GPU can show; ``tests/test_reports.py`` has the others, and their addresses."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from tests.gpu.test_gpu import SyncsInCapture, healthy, on_gpu, randn, settled_memory
from tests.modules import Does, mlp
from tests.parity import Twins

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a machine with a CUDA device would run it"),
    pytest.mark.usefixtures("with_and_without_proof"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a machine with two CUDA devices would run it")
GRAPHED = ["warmups", "captures", "replays", "replays"]


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-dim", "1 element"])
@pytest.mark.filterwarnings("ignore:.* runs eager. (limit|scalar_churn)")
def test_hg_17_the_timestep_is_on_the_cpu(shape: tuple[int, ...]) -> None:
    """A kernel takes it as a number, which a capture would freeze: keyed by value, and right each time."""
    with Twins.build(on_gpu(lambda: Does(lambda m, x, t: m.linear(x) * t.to(x.device) + t.sum()))) as twins:
        for value in (0.5, 0.25, 0.5, 0.25, 0.5, 0.25, 0.5, 0.25, 0.125):
            twins(randn(2, 4), torch.full(shape, value))
        assert twins.count("replays") >= 2


def test_hg_17_a_larger_tensor_on_the_cpu_is_named() -> None:
    with Twins.build(on_gpu(lambda: Does(lambda m, x, t: m.linear(x) * t.to(x.device)))) as twins:
        for _ in range(4):
            twins(randn(2, 4), torch.randn(4))
        assert set(twins.outcomes) == {"eager:host_tensor"}


def test_hg_17_a_weight_on_the_cpu() -> None:
    """Moved over inside forward, edited between the calls."""
    with Twins.build(on_gpu(lambda: Does(lambda m, x: m.linear(x) * m.table[0].to(x.device), table=None))) as twins:
        twins.apply(lambda module: setattr(module, "table", [torch.arange(4.0)]))
        for step in range(12):
            twins(randn(2, 4))
            if step in (4, 8):
                twins.apply(lambda module: module.table[0].add_(1))


def test_hg_18_a_table_made_on_the_cpu() -> None:
    def forward(m: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x + torch.cos(t * torch.arange(4.0, device="cpu").to(x.device))

    with Twins.build(on_gpu(lambda: Does(forward))) as twins:
        for _ in range(6):
            twins(randn(2, 4), randn(1))
        assert twins.count("errors") == 0
    healthy()


def test_hg_18_a_failed_capture_names_its_line() -> None:
    module = SyncsInCapture(at=2, draws=False).cuda()
    handle = hookgraph.attach(module)
    x = randn(2, 4)
    for _ in range(3):
        assert torch.equal(module(x), module.linear(x))
    (detail,) = handle.stats.modules[0].details["capture_failed"]
    assert "test_gpu.py:" in detail
    healthy()


@pytest.mark.parametrize("draws", [False, True], ids=["raw capture", "torch's capture"])
def test_hg_28_a_thread_pins_memory_during_a_capture(draws: bool) -> None:
    """A loader's thread pins and copies on a stream of its own; neither side is disturbed."""
    stop = threading.Event()
    errors: list[BaseException] = []
    copied = [0]

    def load() -> None:
        stream = torch.cuda.Stream()
        try:
            while not stop.is_set():
                host = torch.arange(4096.0).pin_memory()
                with torch.cuda.stream(stream):
                    device = host.to("cuda", non_blocking=True)
                stream.synchronize()
                assert device.sum().item() == 4095 * 2048
                copied[0] += 1
        except BaseException as error:  # told to the test below
            errors.append(error)

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.linear(x)
        before = copied[0]
        for _ in range(500):
            if copied[0] > before + 1 or errors:
                break
            threading.Event().wait(0.002)  # let the other thread pin while this capture is under way
        return y + torch.randn_like(y) * 0 if draws else y * 2

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(5):
            with Twins.build(on_gpu(lambda: Does(forward))) as twins:
                for _ in range(4):
                    twins(randn(2, 4))
                assert twins.outcomes == GRAPHED
    finally:
        stop.set()
        thread.join()
    assert not errors
    healthy()


@two_gpus
@pytest.mark.parametrize("draws", [False, True], ids=["raw capture", "torch's capture"])
def test_hg_30_another_device_is_current(draws: bool) -> None:
    """The graph belongs to the device of the tensors, whatever the current one is."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.linear(x)
        return y + torch.randn_like(y) if draws else y * 2

    with Twins.build(lambda: Does(forward).to("cuda:1")) as twins:
        for _ in range(5):
            twins(torch.randn(2, 4, device="cuda:1"))
        with torch.cuda.device(1):
            for _ in range(4):
                twins(torch.randn(2, 4, device="cuda:1"))
        for _ in range(3):
            twins(torch.randn(2, 4, device="cuda:1"))
        assert twins.outcomes[-1] == "replays"
        assert torch.cuda.current_device() == 0


@two_gpus
def test_hg_30_arguments_on_another_device() -> None:
    with Twins.build(on_gpu(lambda: Does(lambda m, x, y: m.linear(x) + y.to(x.device)))) as twins:
        for _ in range(4):
            twins(randn(2, 4), torch.randn(2, 4, device="cuda:1"))
        assert set(twins.outcomes) == {"eager:mixed_devices"}


def test_hg_30_a_graph_of_nothing() -> None:
    with Twins.build(on_gpu(lambda: Does(lambda m, x: x[:1]))) as twins:
        for _ in range(5):
            twins(randn(2, 4))
        assert twins.outcomes == ["warmups", *["eager:capture_failed"] * 4]
    healthy()


@pytest.mark.parametrize("draws", [False, True], ids=["raw capture", "torch's capture"])
def test_hg_33_the_pool_of_a_failed_capture_is_given_back(draws: bool) -> None:
    def use() -> None:
        module = SyncsInCapture(at=2, draws=draws).cuda()
        with hookgraph.attach.__wrapped__(module) as handle:
            for _ in range(3):
                module(randn(1 << 20, 4))
            assert handle.stats.reasons == {"capture_failed": 2}

    use()  # libraries allocate their workspaces the first time
    before = settled_memory()
    for _ in range(4):
        use()
    assert settled_memory() - before <= 2 << 20
    healthy()


def test_hg_33_another_module_captures_after_a_failure() -> None:
    first = SyncsInCapture(at=2, draws=False).cuda()
    with Twins.build(on_gpu(mlp)) as twins:
        hookgraph.attach(first)
        x = randn(2, 4)
        for _ in range(4):
            assert torch.equal(first(x), first.linear(x))
            twins(randn(2, 4))
        assert twins.outcomes == GRAPHED


class Wide(nn.Module):
    """Matrix products that want a workspace of the library."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


@pytest.mark.filterwarnings("ignore:.* runs eager. limit")
def test_hg_34_one_of_two_attachments_goes() -> None:
    """The graphs of one do not live in what the other's had allocated first: libraries' workspaces."""
    first, second = (Twins.build(on_gpu(lambda: Wide().to(torch.bfloat16)), max_graphs=2) for _ in range(2))

    def use(twins: Twins, *rows: int) -> None:
        for count in rows:
            twins(randn(count, 512).bfloat16())

    use(first, 64, 64, 64, 128, 128, 128)
    use(second, 64, 64, 64, 256, 256, 256)
    use(first, 32, 16, 64, 128)  # beyond the bound: eager, and nothing is evicted
    assert first.outcomes[-4:] == ["eager:limit", "eager:limit", "replays", "replays"]
    first.finish()
    del first
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]  # into whatever was freed
    for _ in range(4):
        use(second, 64, 256)
    assert second.outcomes[-8:] == ["replays"] * 8
    second.finish()
    del junk


def test_hg_34_a_signature_that_is_dropped_leaves_the_others() -> None:
    with Twins.build(on_gpu(Wide), max_graphs=3) as twins:
        for rows in (64, 128, 256):
            for _ in range(3):
                twins(randn(rows, 512))
        twins.handle.invalidate()
        gc.collect()
        torch.cuda.empty_cache()
        junk = torch.full((1 << 24,), float("nan"), device="cuda")
        for _ in range(4):
            for rows in (128, 64, 256):
                twins(randn(rows, 512))
        assert twins.outcomes[-3:] == ["replays"] * 3
        del junk


@pytest.mark.parametrize("draws", [False, True], ids=["raw capture", "torch's capture"])
def test_hg_53_a_lost_graph_is_collected_in_a_capture(draws: bool) -> None:
    """Destroying a graph while another is captured is an error of the driver's."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.linear(x)
        y = y + torch.randn_like(y) if draws else y
        gc.collect()
        return y * 2

    for _ in range(3):
        lost = Does(lambda m, x: m.linear(x) + (torch.randn_like(x) if draws else 0)).cuda()
        handle = hookgraph.attach.__wrapped__(lost)
        for _ in range(3):
            lost(randn(2, 4))
        assert handle.stats.replays
        lost.cycle = [lost, handle]
        del lost, handle
    with Twins.build(on_gpu(lambda: Does(forward))) as twins:
        for _ in range(4):
            twins(randn(2, 4))
        assert twins.outcomes == GRAPHED
        assert gc.isenabled()
    healthy()
