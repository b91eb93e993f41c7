"""What only a GPU can show, on small modules: graphs beside an eager twin, and the health of the process."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from tests.modules import Does, Drops, Fragile, Norms, Pair, Returns, mlp
from tests.parity import Twins

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a machine with a CUDA device would run it"),
    pytest.mark.usefixtures("with_and_without_proof"),
]


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def on_gpu(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().cuda()


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def healthy() -> None:
    """Random numbers, the current stream and other captures work."""
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not torch.cuda.is_current_stream_capturing()
    first, second = randn(8), randn(8)
    assert not torch.equal(first, second)
    nn.functional.dropout(torch.ones(64, device="cuda"))
    module = mlp().cuda()
    x = randn(2, 4)
    with hookgraph.attach.__wrapped__(module) as handle:
        for _ in range(4):
            out = module(x)
        assert handle.stats.replays == 2
    assert torch.equal(out, module(x))
    torch.cuda.synchronize()


def test_replays() -> None:
    with Twins.build(on_gpu(mlp)) as twins:
        for _ in range(6):
            twins(randn(2, 4))
        assert twins.outcomes == ["warmups", "captures"] + ["replays"] * 4
        assert twins.handle.stats.modules[0].backend == "cuda"


def test_hg_27_dropout_and_randn_are_eager_s() -> None:
    with Twins.build(on_gpu(Drops)) as twins:
        x = randn(4, 4)
        torch.manual_seed(0)
        outputs = [twins(x).attached for _ in range(6)]
        assert not torch.equal(outputs[-1], outputs[-2])
        torch.manual_seed(0)
        assert torch.equal(twins(x).attached, outputs[0])
        state = torch.cuda.get_rng_state()
        first = twins(x).attached
        torch.cuda.set_rng_state(state)
        assert torch.equal(first, twins(x).attached)


def test_random_numbers_between_two_replays() -> None:
    with Twins.build(on_gpu(Drops)) as twins:
        for _ in range(6):
            twins(randn(4, 4))
        twins(torch.empty(4, 4, device="cuda").normal_())


def test_hg_11_batch_norm() -> None:
    with Twins.build(on_gpu(Norms)) as twins:
        twins.apply(lambda module: module.bn.train())
        for _ in range(7):
            twins(randn(8, 4))
        assert int(twins.modules.attached.bn.num_batches_tracked) == 7


OUTPUTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "views": lambda y, x: (y, y[:, :1], y.t()),
    "chunks": lambda y, x: y.chunk(2, dim=1),
    "nested": lambda y, x: {"a": [(y, Pair(y + 1, None))], "b": None},
    "inputs": lambda y, x: (x, x[:, 1:], y),
    "expanded": lambda y, x: y[:, :1].expand(-1, 4),
    "numbers": lambda y, x: (y.argmax(-1), y > 0, y.bfloat16(), 3, "text"),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs(kind: str) -> None:
    with Twins.build(on_gpu(lambda: Returns(OUTPUTS[kind]))) as twins:
        for _ in range(6):
            twins(randn(2, 4))
        assert twins.count("replays") == 4


INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: randn(8, 4),
    "expanded": lambda: randn(1, 4).expand(8, 4),
    "a moving view": lambda: randn(20, 4)[int(torch.randint(12, ())) :][:8],
    "transposed": lambda: randn(4, 8).t(),
    "of one element, moving": lambda: randn(10)[int(torch.randint(9, ()))].expand(8),
    "no elements": lambda: randn(0, 4),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs(kind: str) -> None:
    with Twins.build(on_gpu(lambda: Does(lambda m, x: (x * 2, x.sum())))) as twins:
        for _ in range(6):
            twins(INPUTS[kind]())
        # A view that moves changes the alignment of its address, which belongs to the signature.
        assert twins.count("replays") >= (1 if kind == "a moving view" else 4)


def test_hg_09_writes_reach_the_caller() -> None:
    with Twins.build(on_gpu(lambda: Does(lambda m, x, c: (c.add_(m.linear(x)), c.sum())[1]))) as twins:
        cache = twins.keep(randn(2, 4))
        for _ in range(6):
            twins(randn(2, 4), cache)
            twins(randn(2, 4), randn(2, 4))


def test_recurrent_use_and_outputs_that_are_kept() -> None:
    with Twins.build(on_gpu(mlp)) as twins:
        h: Any = randn(2, 4)
        for _ in range(20):
            h = twins(h)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_hg_24_autocast(dtype: torch.dtype) -> None:
    with Twins.build(on_gpu(mlp)) as twins:
        for _ in range(5):
            twins(randn(2, 4))
            with torch.autocast("cuda", dtype):
                twins(randn(2, 4))


def scaled(m: Any, x: torch.Tensor, t: Any) -> torch.Tensor:
    return m.linear(x) * (t.to(x.device) if isinstance(t, torch.Tensor) else t)


@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5), torch.tensor([0.5])], ids=["number", "0-dim", "1 element"])
def test_hg_17_a_value_on_the_cpu(value: Any) -> None:
    """Never baked: another value is another call."""
    with Twins.build(on_gpu(lambda: Does(scaled))) as twins:
        for step in range(12):
            twins(randn(2, 4), value * (1 + step // 4))


def test_hg_17_a_cpu_tensor_mixed_with_device_tensors() -> None:
    with Twins.build(on_gpu(lambda: Does(lambda m, x, t: m.linear(x) * t))) as twins:
        for step in range(12):
            twins(randn(2, 4), torch.tensor(0.5 + step // 4))


def test_hg_18_a_table_made_on_the_cpu() -> None:
    with Twins.build(on_gpu(lambda: Does(lambda m, x, t: x + torch.cos(t * torch.arange(4.0).to(x.device))))) as twins:
        for _ in range(5):
            twins(randn(2, 4), randn(1))


def test_hg_43_a_read_back_is_eager_and_named() -> None:
    with Twins.build(on_gpu(lambda: Does(lambda m, x: m.linear(x) * x.sum().item()))) as twins:
        for _ in range(5):
            twins(randn(2, 4))
        assert twins.count("replays") == twins.count("captures") == 0
        (detail,) = twins.handle.stats.modules[0].details["read_back"]
        assert "test_gpu.py" in detail
    healthy()


class SyncsInCapture(nn.Module):
    """Reads a value back in one chosen run: what an audit cannot have seen."""

    def __init__(self, at: int, draws: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.draws = draws
        self.eval()
        RUNS[0], RUNS[1] = 0, at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.draws:
            y = y + torch.randn_like(y) * 0
        RUNS[0] += 1
        if RUNS[0] == RUNS[1]:
            y = y + 0 * y.sum().item()
        return y


RUNS = [0, 0]


@pytest.mark.parametrize("draws", [False, True], ids=["raw capture", "torch's capture"])
def test_hg_33_a_capture_that_dies_in_a_synchronising_call(draws: bool) -> None:
    module = SyncsInCapture(at=2, draws=draws).cuda()
    handle = hookgraph.attach(module)
    stream = torch.cuda.Stream()
    x = randn(2, 4)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(4):
            assert torch.equal(module(x), module.linear(x))
            assert torch.cuda.current_stream() == stream
    assert handle.stats.reasons.get("capture_failed") == 3
    assert handle.stats.balanced
    healthy()


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt], ids=lambda e: e.__name__)
def test_hg_33_a_capture_that_raises(error: type[BaseException]) -> None:
    module = Fragile(f"gpu {error.__name__}", fail_at=(2,), error=error).cuda()
    handle = hookgraph.attach(module)
    x = randn(2, 4)
    expected = module.linear(x).relu()
    for step in range(5):
        if error is KeyboardInterrupt and step == 1:
            with pytest.raises(KeyboardInterrupt, match="fails"):
                module(x)
        else:
            assert torch.equal(module(x), expected)
    assert handle.stats.balanced
    healthy()


def settled_memory() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@pytest.mark.parametrize("draws", [False, True], ids=["raw capture", "torch's capture"])
def test_memory_comes_back_after_detach(draws: bool) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.linear(x)
        return (y + torch.randn_like(y) if draws else y) * 2

    def use() -> None:
        module = Does(forward).cuda()
        with hookgraph.attach.__wrapped__(module) as handle:
            for rows in (1 << 18, 1 << 17):
                for _ in range(4):
                    module(randn(rows, 4))
            assert handle.stats.replays == 4
            assert handle.stats.bytes > 1 << 22

    use()  # libraries allocate their workspaces the first time
    before = settled_memory()
    for _ in range(3):
        use()
    assert settled_memory() - before <= 2 << 20


def test_memory_comes_back_after_failed_captures() -> None:
    def use() -> None:
        module = SyncsInCapture(at=2, draws=False).cuda()
        with hookgraph.attach.__wrapped__(module):
            for _ in range(3):
                module(randn(1 << 18, 4))

    use()
    before = settled_memory()
    for _ in range(3):
        use()
    assert settled_memory() - before <= 2 << 20


def test_calls_on_many_streams() -> None:
    """Each caller's stream sees its own result, without a synchronisation by the caller."""
    module = mlp(64).cuda()
    plain = mlp(64).cuda()
    plain.load_state_dict(module.state_dict())
    hookgraph.attach(module, max_graphs=2)
    streams = [torch.cuda.Stream() for _ in range(4)]
    pairs = []
    for step in range(80):
        with torch.cuda.stream(streams[step % 4]):
            x = randn(64 if step % 3 else 32, 64)
            pairs.append((module(x), plain(x)))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in pairs)


def test_hg_28_other_threads_work_during_a_capture() -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream), torch.no_grad():
                while not stop.is_set():
                    host = torch.randn(256).pin_memory()
                    (host.cuda(non_blocking=True) * randn(256)).sum().item()
        except BaseException as error:  # told to the test below
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            module = mlp().cuda()
            with hookgraph.attach.__wrapped__(module) as handle:
                outputs = [module(torch.ones(2, 4, device="cuda")) for _ in range(4)]
                assert handle.stats.replays == 2
            expected = module(torch.ones(2, 4, device="cuda"))
            assert all(torch.equal(out, expected) for out in outputs)
    finally:
        stop.set()
        thread.join()
    assert not errors


def test_hg_53_a_dead_graph_in_a_cycle_is_collected_during_a_forward() -> None:
    for _ in range(3):
        module = mlp().cuda()
        handle = hookgraph.attach.__wrapped__(module)
        for _ in range(3):
            module(randn(2, 4))
        module.cycle = [module, handle]
        del module, handle
    with Twins.build(on_gpu(lambda: Does(lambda m, x: (gc.collect(), m.linear(x))[1]))) as twins:
        for _ in range(4):
            twins(randn(2, 4))
        assert twins.count("replays") == 2
    healthy()


def test_weights_that_move_to_the_cpu_and_back() -> None:
    with Twins.build(on_gpu(mlp)) as twins:
        for _ in range(4):
            twins(randn(2, 4))
        twins.apply(lambda module: module.cpu())
        for _ in range(3):
            twins(torch.randn(2, 4))
        twins.apply(lambda module: module.cuda())
        for _ in range(5):
            twins(randn(2, 4))
        assert twins.outcomes[-1] == "replays"
