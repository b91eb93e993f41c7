"""Each fallback reason is provoked by a call, is counted under its name, and says what was seen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import hookgraph
from hookgraph import signature
from hookgraph.audit import Audit, watch
from hookgraph.backends.tape import TapeBackend
from hookgraph.reasons import Fallback, FallbackReason
from tests.modules import Does, Drops, Fragile, Scaled, Tagged, mlp
from tests.parity import check_balance

X = torch.arange(8.0).reshape(2, 4) / 8
CUDA = torch.device("cuda", 0)

pytestmark = pytest.mark.filterwarnings("ignore:.* runs eager. (limit|parity|scalar_churn|unstable)")


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def attached(module: nn.Module, **options: Any) -> hookgraph.Attachment:
    return hookgraph.attach(module, **options)


def does(function: Callable[..., Any], *args: Any, calls: int = 1, **options: Any) -> hookgraph.Attachment:
    module = Does(function)
    handle = attached(module, **options)
    for _ in range(calls):
        module(*args)
    return handle


def disabled() -> hookgraph.Attachment:
    module = mlp()
    handle = attached(module)
    with hookgraph.disabled():
        module(X)
    return handle


def paused() -> hookgraph.Attachment:
    module = mlp()
    handle = attached(module)
    with handle.paused():
        module(X)
    return handle


def training() -> hookgraph.Attachment:
    module = mlp().train()
    handle = attached(module)
    module(X)
    return handle


def needs_grad() -> hookgraph.Attachment:
    module = mlp()
    handle = attached(module)
    with torch.enable_grad():
        module(X)
    return handle


def tracing() -> hookgraph.Attachment:
    module = mlp()
    handle = attached(module)
    torch.func.vmap(module)(X[None])
    return handle


def mode_active() -> hookgraph.Attachment:
    module = mlp()
    handle = attached(module)
    with FlopCounterMode(display=False):
        module(X)
    return handle


def busy() -> hookgraph.Attachment:
    """Another thread calls while the warm-up is under way."""
    inside, go_on = threading.Event(), threading.Event()

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is worker:
            inside.set()
            go_on.wait(30)
        return m.linear(x)

    module = Does(forward)
    handle = attached(module)

    def work() -> None:
        with torch.no_grad():
            module(X)

    worker = threading.Thread(target=work)
    worker.start()
    inside.wait(30)
    try:
        module(X)
    finally:
        go_on.set()
        worker.join()
    return handle


def foreign_module() -> hookgraph.Attachment:
    module = Scaled()
    handle = attached(module)
    replica = module._replicate_for_data_parallel()
    replica.linear = nn.Linear(4, 4)
    replica(X)
    return handle


def displaced() -> hookgraph.Attachment:
    module = mlp()
    seam = vars(module).get("forward")
    handle = attached(module)
    ours = vars(module)["forward"]
    vars(module)["forward"] = lambda x: x
    module(X)
    vars(module)["forward"] = ours
    assert seam is None
    return handle


def scalar_churn() -> hookgraph.Attachment:
    module = Scaled()
    handle = attached(module)
    for step in range(24):
        module(X, 100.0 + step)
    return handle


def changes_state() -> hookgraph.Attachment:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.step = getattr(m, "step", 0) + 1
        return m.linear(x) * m.step

    module = Does(forward, step=0)
    handle = attached(module)
    for _ in range(4):
        module(X)
    module.step = 0
    return handle


def side_tensor() -> hookgraph.Attachment:
    """From an object with slots, in which a replacement could not be noticed."""

    class Holder:
        __slots__ = ("table",)

        def __init__(self) -> None:
            self.table = torch.arange(4.0)

    holder = Holder()
    return does(lambda m, x: m.linear(x) * holder.table, X, calls=2)


def child_hooks() -> hookgraph.Attachment:
    module = mlp()
    handle = attached(module)
    hook = module[0].register_forward_hook(lambda m, args, out: None)
    module(X)
    hook.remove()
    return handle


def compiled_part() -> hookgraph.Attachment:
    torch._dynamo.reset()
    module = nn.Sequential(torch.compile(mlp(), backend="eager")).eval()
    handle = attached(module)
    module(X)
    torch._dynamo.reset()
    return handle


def capture_failed() -> hookgraph.Attachment:
    module = Fragile("provoked", fail_at=(2,))
    handle = attached(module)
    module(X), module(X)
    return handle


def parity() -> hookgraph.Attachment:
    """A number outside of the module that nothing watches changes between the warm-up and the next call."""
    factor = [1.0]

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.linear(x) * float(factor[0])

    module = Does(forward)
    handle = attached(module)
    module(X), module(X)
    factor[0] = 2.0
    assert torch.equal(module(X + 1), module.linear(X + 1) * 2.0)
    return handle


def unstable() -> hookgraph.Attachment:
    module = mlp()
    handle = attached(module)
    for _ in range(20):
        module(X)
        module[0].weight.data = module[0].weight.data.clone()
    return handle


def generator() -> hookgraph.Attachment:
    own = torch.Generator()
    return does(lambda m, x: m.linear(x) + torch.randn(4, generator=own), X)


def collective() -> hookgraph.Attachment:
    import torch.distributed as dist

    if not dist.is_available():
        pytest.skip("a build of torch with torch.distributed would run it")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
            y = m.linear(x)
            dist.all_reduce(y)
            return y

        return does(forward, X)
    finally:
        dist.destroy_process_group()


def higher_order() -> hookgraph.Attachment:
    return does(lambda m, x: torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, (m.linear(x),)), X)


def foreign_hook() -> hookgraph.Attachment:
    hooks = pytest.importorskip("diffusers.hooks", reason="an environment with diffusers would run it")
    module = mlp()
    hooks.apply_layerwise_casting(module[0], storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    handle = attached(module)
    module(X)
    return handle


def not_worth_it() -> hookgraph.Attachment:
    module = mlp()
    handle = attached(module, min_speedup=1e6)
    with mock.patch.object(TapeBackend, "promises_speed", True):  # as if it were a GPU
        for step in range(4):
            module(X + step)
    return handle


# How each is provoked, and what the detail has to name.
PROVOKED: dict[str, tuple[Callable[[], hookgraph.Attachment], str]] = {
    "disabled": (disabled, ""),
    "paused": (paused, ""),
    "training": (training, ""),
    "needs_grad": (needs_grad, ""),
    "tracing": (tracing, ""),
    "mode_active": (mode_active, "TorchDispatchMode"),
    "busy": (busy, ""),
    "foreign_module": (foreign_module, ""),
    "displaced": (displaced, "lambda"),
    "unsupported_argument": (lambda: does(lambda m, x, f: f(m.linear(x)), X, torch.relu), "args[1]"),
    "tensor_kind": (lambda: does(lambda m, x: m.linear(x), X.as_subclass(Tagged)), "args[0] is a Tagged"),
    "mixed_devices": (lambda: does(lambda m, x, y: m.linear(x), X, X.to("meta")), "meta"),
    "no_device": (lambda: _no_device(), "no tensor"),
    "aliased_arguments": (lambda: does(lambda m, x, y: (x.add_(1), m.linear(y))[1], *_twice(), calls=2), ""),
    "batch_size": (lambda: does(lambda m, x: m.linear(x), X, max_batch_size=1), "2 > 1"),
    "limit": (lambda: _limit(), "max_graphs=1"),
    "memory": (lambda: does(lambda m, x: m.linear(x), X, calls=2, max_bytes=1), "bytes > 1"),
    "not_worth_it": (not_worth_it, "times as fast as eager, min_speedup=1e+06"),
    "scalar_churn": (scalar_churn, "args[1]"),
    "read_back": (lambda: does(lambda m, x: m.linear(x) * x.sum().item(), X), "test_reasons_provoked.py:"),
    "changes_state": (changes_state, "step"),
    "side_tensor": (side_tensor, "test_reasons_provoked.py:"),
    "generator": (generator, "test_reasons_provoked.py:"),
    "collective": (collective, "test_reasons_provoked.py:"),
    "higher_order": (higher_order, "cond"),
    "output_kind": (lambda: does(lambda m, x: (m.linear(x), object()), X, calls=2), "object"),
    "child_hooks": (child_hooks, "0 has"),
    "foreign_hook": (foreign_hook, "layerwise casting by diffusers on 0"),
    "compiled_part": (compiled_part, "0"),
    "capture_failed": (capture_failed, "run 2 fails"),
    "parity": (parity, "output"),
    "unstable": (unstable, "invalidations"),
}  # fmt: skip

# No call on the CPU can meet these: the rule behind each is asked directly, below.
WITHOUT_A_CALL = {
    "capturing": "tests/gpu/test_worth_gpu.py: a stream that is captured already",
    "host_tensor": "a module on another device",
    "host_copy": "a forward on another device",
    "internal_error": "tests/test_faults.py: a fault at each step of a call",
}


def _no_device() -> hookgraph.Attachment:
    module = nn.Identity().eval()
    handle = attached(module)
    module(3)
    return handle


def _twice() -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.randn(3, 4)
    return base[:2], base[1:]


def _limit() -> hookgraph.Attachment:
    module = mlp()
    handle = attached(module, max_graphs=1)
    for rows in (1, 2):
        module(torch.randn(rows, 4))
    return handle


@pytest.mark.parametrize("name", PROVOKED)
def test_a_reason_is_provoked(name: str) -> None:
    provoke, seen = PROVOKED[name]
    handle = provoke()
    stats = handle.stats
    check_balance(stats)
    assert stats.reasons.get(name), stats.reasons
    (module,) = stats.modules
    details = module.details[name]
    assert any(seen in detail for detail in details), details
    assert sum(details.values()) == stats.reasons[name]
    assert name in str(module)


def test_every_reason_is_accounted_for() -> None:
    every = {reason.value for reason in FallbackReason}
    assert every == PROVOKED.keys() | WITHOUT_A_CALL.keys()
    assert not PROVOKED.keys() & WITHOUT_A_CALL.keys()


def test_on_fallback_raise_names_reason_and_remedy() -> None:
    module = mlp().train()
    attached(module, on_fallback="raise")
    with pytest.raises(hookgraph.FallbackError, match=r"Sequential: training: .*eval\(\)"):
        module(X)


# -- rules for another device ------------------------------------------------------------------------


def test_host_tensor_by_the_arguments() -> None:
    found = signature.read((torch.ones(3),), {"t": torch.ones(())}, CUDA)
    assert found == Fallback(FallbackReason.HOST_TENSOR, "args[0] is [3] on cpu, not on cuda:0")


def _audited(forward: Callable[[torch.Tensor], Any], device: torch.device) -> Fallback | None:
    x = torch.empty(2, 4, device=device)
    audit = Audit(device, {}, {}, False)
    with watch(audit):
        forward(x)
    return audit.findings.blocker


def test_host_copy_of_random_numbers() -> None:
    """The meta device stands for one that is not the host: what is copied there came from the host."""
    found = _audited(lambda x: x + torch.randn(4).to("meta"), torch.device("meta"))
    assert found is not None
    assert found.reason == "host_copy"
    assert "random numbers" in found.detail
    assert "test_reasons_provoked.py:" in found.detail


def test_constants_from_the_host_are_no_reason() -> None:
    for forward in (
        lambda x: x + torch.arange(4.0).to("meta"),
        lambda x: x * torch.tensor(2.0, device="meta"),
        lambda x: x + torch.as_tensor([1.0, 2.0, 3.0, 4.0], device="meta"),
    ):
        assert _audited(forward, torch.device("meta")) is None


def test_dropout_is_no_reason() -> None:
    module = Drops().eval()
    handle = attached(module)
    for _ in range(4):
        module(X)
    assert not handle.stats.reasons
