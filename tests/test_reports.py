"""Public bug reports of tools like ours, each as a test: the report's own input, and what is right for it.

One test (or more) for each report, named by its id.  ``ADDRESSES`` says where each was reported, and
``WHOLE_KIND`` names the tests in other files that go through the rest of its kind.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import gc
import inspect
import io
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import hookgraph
from hookgraph import signature
from hookgraph.reasons import Fallback
from tests.modules import AttributeDict, Does, Fragile, Pair, Parent, Rope, Sample, Scaled, StepCache, mlp
from tests.parity import Both, ParityError, Twins, check_balance
from tests.residue import Watch

ROOT = Path(__file__).parent.parent
X = torch.arange(8.0).reshape(2, 4) / 8
GRAPHED = ["warmups", "captures", "replays", "replays"]
loud = pytest.mark.filterwarnings("ignore:.* runs eager. (limit|scalar_churn)")  # said once, and expected here

ADDRESSES = {
    "HG-01": "NVIDIA/TensorRT-LLM/pull/16095",
    "HG-03": "pytorch/pytorch/issues/170604",
    "HG-04": "sgl-project/sglang/pull/31852",
    "HG-06": "pytorch/torchtitan/pull/4432",
    "HG-07": "hidet-org/hidet/pull/384",
    "HG-09": "pytorch/pytorch/issues/103985",
    "HG-11": "LibreYOLO/libreyolo/pull/671",
    "HG-12": "pytorch/pytorch/issues/114844",
    "HG-14": "jcelerier/librediffusion/pull/20",
    "HG-15": "NVIDIA/TensorRT-LLM/pull/17449",
    "HG-17": "Comfy-Org/ComfyUI/issues/6866",
    "HG-18": "pytorch/pytorch/issues/91302",
    "HG-20": "vllm-project/vllm-omni/pull/6082",
    "HG-21": "ELS-RD/kernl/issues/286",
    "HG-23": "NVIDIA/Megatron-LM/pull/6508",
    "HG-24": "pytorch/pytorch/issues/71631",
    "HG-25": "pytorch/pytorch/issues/135892",
    "HG-27": "pytorch/pytorch/issues/84614",
    "HG-28": "LibreYOLO/libreyolo/pull/681",
    "HG-30": "pytorch/pytorch/issues/87894",
    "HG-32": "huggingface/transformers/pull/48199",
    "HG-33": "pytorch/pytorch/pull/190308",
    "HG-34": "vllm-project/vllm-omni/issues/6457",
    "HG-35": "pytorch/pytorch/issues/119640",
    "HG-37": "sgl-project/sglang-omni/pull/523",
    "HG-38": "chengzeyi/stable-fast/issues/143",
    "HG-40": "LibreYOLO/libreyolo/pull/645",
    "HG-41": "sgl-project/sglang/pull/38439",
    "HG-43": "NVIDIA/TensorRT-LLM/pull/10799",
    "HG-44": "vllm-project/vllm-omni/pull/2689",
    "HG-46": "huggingface/diffusers/issues/14135",
    "HG-47": "NVIDIA/Megatron-LM/issues/5789",
    "HG-48": "jsboige/CoursIA/issues/15036",
    "HG-50": "huggingface/accelerate/issues/1835",
    "HG-52": "pytorch/pytorch/issues/117758",
    "HG-53": "pytorch/pytorch/pull/161037",
}

WHOLE_KIND = {
    "HG-01": ["tests/test_outputs.py::test_hg_01_guidance_uses_two_outputs_of_one_signature"],
    "HG-03": ["tests/test_outputs.py::test_hg_03_a_part_of_an_output_comes_back_as_input"],
    "HG-04": ["tests/test_outputs.py::test_outputs", "tests/test_outputs.py::test_what_cannot_be_rebuilt_runs_eager"],
    "HG-06": ["tests/test_signature_behaviour.py::test_hg_06_tensors_in_containers"],
    "HG-07": ["tests/test_outputs.py::test_outputs"],
    "HG-09": ["tests/test_lifecycle.py::test_hg_09_writes_reach_the_caller_exactly_once"],
    "HG-11": ["tests/test_lifecycle.py::test_hg_11_buffers_advance_exactly_once"],
    "HG-12": ["tests/test_lifecycle.py::test_hg_12_python_state"],
    "HG-14": ["tests/test_signature_behaviour.py::test_hg_14_scalars_count_by_type_and_value"],
    "HG-15": ["tests/test_signature_behaviour.py::test_hg_15_tensors_in_objects"],
    "HG-17": ["tests/gpu/test_reports_gpu.py::test_hg_17_the_timestep_is_on_the_cpu"],
    "HG-18": ["tests/gpu/test_reports_gpu.py::test_hg_18_a_table_made_on_the_cpu"],
    "HG-21": ["tests/test_signature_behaviour.py::test_hg_21_layouts"],
    "HG-24": ["tests/test_signature_behaviour.py::test_ambient_state"],
    "HG-25": ["tests/test_signature_behaviour.py::test_hg_25_inference_tensors_outside_of_inference_mode"],
    "HG-27": ["tests/test_lifecycle.py::test_hg_27_a_generator"],
    "HG-28": ["tests/gpu/test_reports_gpu.py::test_hg_28_a_thread_pins_memory_during_a_capture"],
    "HG-30": ["tests/gpu/test_reports_gpu.py::test_hg_30_another_device_is_current"],
    "HG-32": ["tests/test_lifecycle.py::test_hg_32_a_table_that_a_cache_evicts"],
    "HG-33": ["tests/gpu/test_reports_gpu.py::test_hg_33_the_pool_of_a_failed_capture_is_given_back"],
    "HG-34": ["tests/gpu/test_reports_gpu.py::test_hg_34_one_of_two_attachments_goes"],
    "HG-35": ["tests/test_signature_behaviour.py::test_hg_35_what_is_beyond_the_bound_is_not_kept"],
    "HG-38": ["tests/test_hazards.py::test_weights"],
    "HG-40": ["tests/test_lifecycle.py::test_hg_40_plain_python_state"],
    "HG-41": ["tests/test_lifecycle.py::test_hg_41_hooks_of_children_accepted"],
    "HG-43": ["tests/test_lifecycle.py::test_hg_43_a_value_read_back_is_never_baked"],
    "HG-44": ["tests/test_neighbours.py::test_hg_44_a_library_s_wrapper"],
    "HG-50": ["tests/test_attach.py::test_hg_50_a_copy_is_plain_and_uses_its_own_weights"],
    "HG-53": ["tests/gpu/test_reports_gpu.py::test_hg_53_a_lost_graph_is_collected_in_a_capture"],
}


def _tests_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("report", ADDRESSES)
def test_every_report_is_a_test(report: str) -> None:
    prefix = f"test_{report.lower().replace('-', '_')}_"
    assert any(name.startswith(prefix) for name in _tests_of("tests/test_reports.py"))
    for other in WHOLE_KIND.get(report, []):
        path, _, name = other.partition("::")
        assert name in _tests_of(path), f"{other} does not exist"


def test_there_are_thirty_six_reports() -> None:
    assert len(ADDRESSES) == len(set(ADDRESSES.values())) == 36
    assert set(WHOLE_KIND) <= set(ADDRESSES)


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def calls(twins: Twins, count: int = 4, rows: int = 2) -> None:
    for _ in range(count):
        twins(torch.randn(rows, 4))


# -- A: outputs -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_01_guidance_combines_two_outputs_of_one_graph() -> None:
    """The positive and the negative prompt have one shape, and so one graph."""
    with Twins.build(lambda: nn.Linear(4, 4)) as twins:
        calls(twins, 3)
        positive, negative = twins(torch.randn(2, 4)), twins(torch.randn(2, 4))
        guided = [n + 4.0 * (p - n) for p, n in zip(_sides(positive), _sides(negative), strict=True)]
        assert torch.equal(*guided)
        assert not torch.equal(positive.attached, negative.attached)
        kept = [twins(torch.randn(2, 4)) for _ in range(3)]
        for out in (positive, negative, *kept):
            assert torch.equal(*_sides(out))
        assert len({out.attached.untyped_storage()._cdata for out in (positive, negative, *kept)}) == 5
        assert twins.outcomes[3:] == ["replays"] * 5


def _sides(both: Both) -> tuple[Any, Any]:
    return both.eager, both.attached


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_03_a_module_is_iterated() -> None:
    with Twins.build(mlp) as twins:
        h: Any = torch.randn(2, 4)
        for _ in range(10):
            h = twins(h)
        first = twins(torch.randn(2, 4))
        second = twins(first)
        twins(second)
        assert torch.equal(*_sides(first))
        assert twins.outcomes == ["warmups", "captures", *["replays"] * 11]


CLASSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a dataclass": Sample,
    "a dict with attributes": lambda y: AttributeDict(sample=y, loss=None),
    "a NamedTuple": lambda y: Pair(y, None),
    "a dict with None": lambda y: {"sample": y, "hidden_states": None, "attentions": None},
}


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("kind", CLASSES)
def test_hg_04_an_output_object_keeps_what_it_holds(kind: str) -> None:
    with Twins.build(lambda: Does(lambda m, x: CLASSES[kind](m.linear(x)))) as twins:
        calls(twins, 3)
        first = twins(torch.randn(2, 4))
        calls(twins, 2)
        mine, theirs = (out["sample"] if isinstance(out, dict) else out.sample for out in _sides(first))
        assert torch.equal(mine, theirs)
        assert type(first.attached) is type(first.eager)
        assert twins.outcomes == [*GRAPHED, "replays", "replays"]


def test_hg_04_a_graph_that_never_engages_is_told() -> None:
    """Each call has another prompt length: nothing is replayed, and the user hears of it without asking."""
    module = mlp()
    handle = hookgraph.attach(module)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for length in range(1, 12):
            module(torch.randn(length, 4))
    assert [(warning.category, "limit" in str(warning.message)) for warning in told] == [
        (hookgraph.HookgraphWarning, True)
    ]
    assert handle.stats.replays == 0
    assert handle.stats.reasons == {"limit": 7}


def test_hg_04_nonzero_in_the_mask_s_path() -> None:
    def forward(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return m.linear(x)[torch.nonzero(mask, as_tuple=True)[0]]

    with Twins.build(lambda: Does(forward)) as twins:
        for n in (4, 4, 3, 4, 2):
            twins(torch.randn(4, 4), torch.arange(4) < n)
        assert set(twins.outcomes) == {"eager:read_back"}


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda y: (y, y), id="twice"),
        pytest.param(lambda y: (y, y[:, :1]), id="with a view"),
        pytest.param(lambda y: {"a": y, "b": y}, id="under two keys"),
        pytest.param(lambda y: [y, (y, {"y": y.view(-1)})], id="nested"),
    ],
)
def test_hg_07_one_tensor_in_two_slots(make: Callable[[torch.Tensor], Any]) -> None:
    """The harness compares which objects are the same, and which memory is shared."""
    with Twins.build(lambda: Does(lambda m, x: make(m.linear(x)))) as twins:
        calls(twins)
        assert twins.outcomes == GRAPHED


# -- B, C: inputs in containers, effects ------------------------------------------------------------------


def _with_residuals(m: Any, x: torch.Tensor, extras: Any = None, res: Any = ()) -> torch.Tensor:
    y = m.linear(x) + extras["added"]["emb"]
    for weight, value in enumerate(res, start=1):
        y = y + weight * value
    for weight, value in enumerate(extras.values(), start=1):
        y = y + weight * (value if isinstance(value, torch.Tensor) else 0)
    return y


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_06_a_residual_in_a_list_changes() -> None:
    with Twins.build(lambda: Does(_with_residuals), max_graphs=8) as twins:
        x, t1, t2, t3, t4 = torch.randn(5, 2, 4)
        for _ in range(3):
            twins(x, extras={"added": {"emb": t1}}, res=[t2, t3])
        for _ in range(3):
            twins(x, extras={"added": {"emb": t1}}, res=[t2, torch.randn(2, 4)])  # only the last one changes
        assert twins.outcomes[-1] == "replays"
        for _ in range(4):
            twins(x, extras={"added": {"emb": t1}}, res=[t2])
            twins(x, extras={"added": {"emb": t1}, "more": t4}, res=[t2])
            twins(x, extras={"more": t4, "added": {"emb": t1}}, res=[t2])
            twins(x, extras={"added": {"emb": t1}, "z": t3, "more": t4}, res=(t2,))
            twins(x, extras={"added": {"emb": t1}, "more": t4, "z": t3}, res=(t2,))
        twins(x, extras={"added": {"emb": torch.randn(2, 4)}}, res=[t2])
        assert twins.outcomes[-1] == "replays"


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_09_one_cache_is_written_by_every_call() -> None:
    with Twins.build(lambda: Does(lambda m, x, cache: (cache.add_(x), cache.sum())[1])) as twins:
        cache = twins.keep(torch.zeros(2, 4))
        total = torch.zeros(2, 4)
        for _ in range(6):
            x = torch.randn(2, 4)
            twins(x, cache)
            assert torch.equal(cache.attached, total.add_(x))
        assert twins.outcomes[:4] == GRAPHED


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_11_batch_statistics_count_one_call_once() -> None:
    """In training mode, which runs eager, and with only the normalisation in training mode."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    for whole in (True, False):
        with Twins.build(build, evaluate=not whole) as twins:
            twins.apply(lambda module: module[1].train())
            norm: Any = twins.modules.attached[1]
            addresses = [buffer.data_ptr() for buffer in norm.buffers()]
            for step in range(1, 7):
                twins(torch.randn(3, 4))
                assert int(norm.num_batches_tracked) == step
            assert [buffer.data_ptr() for buffer in norm.buffers()] == addresses


class Remembers(nn.Module):
    """Keeps an intermediate for whoever asks."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.lin1(x)
        return self.lin2(self.last)


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_12_an_intermediate_kept_on_the_module() -> None:
    with Twins.build(Remembers) as twins:
        for step in range(6):
            twins(torch.randn(2, 4))
            assert torch.equal(twins.modules.eager.last, twins.modules.attached.last), step
            if step == 3:
                twins.apply(lambda module: setattr(module, "last", None))  # the user lets go of it
        assert twins.outcomes[-1] == "eager:changes_state"
        (detail,) = twins.handle.stats.modules[0].details["changes_state"]
        assert "last" in detail


# -- D: values that are not tensors of the device ----------------------------------------------------------


@loud
@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_14_timesteps_as_numbers() -> None:
    with Twins.build(Scaled) as twins:
        for step in range(24):
            twins(torch.randn(2, 4), 999.0 - step)
        stats = twins.handle.stats
        assert stats.captures <= 4
        assert "scalar_churn" in stats.reasons
        assert any("[1]" in detail for detail in stats.modules[0].details["scalar_churn"])
        assert "scalar_churn" in str(stats.modules[0])


def _by_class(m: Any, x: torch.Tensor, t: Any, scale: float = 7.5) -> torch.Tensor:
    return m.linear(x) * float(t) + scale + {int: 1, float: 2, bool: 3, np.float32: 4, np.float64: 5}[type(t)]


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize(
    "values",
    [
        pytest.param((1, 1.0, True), id="equal and of other classes"),
        pytest.param((float("nan"),), id="nan"),
        pytest.param((np.float32(0.5), np.float64(0.5), 0.5), id="numpy"),
    ],
)
def test_hg_14_the_class_of_a_number_counts(values: tuple[Any, ...]) -> None:
    with Twins.build(lambda: Does(_by_class)) as twins:
        for _ in range(5):
            for value in values:
                twins(torch.randn(2, 4), value)
        assert twins.count("captures") == len(values)
        assert twins.count("replays") == 3 * len(values)


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_15_a_fresh_metadata_object_for_each_step() -> None:
    def forward(m: Any, x: torch.Tensor, meta: Any) -> torch.Tensor:
        return m.linear(x) * meta.lens.sum() + meta.n

    with Twins.build(lambda: Does(forward)) as twins:
        for step in range(6):
            twins(torch.randn(2, 4), SimpleNamespace(lens=torch.tensor([0, step, 9]), n=3))
        assert twins.count("errors") == 0


class Positions:
    """A cache that says in Python how long it is."""

    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self) -> int:
        return self.length


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_15_positions_from_the_length_of_a_cache() -> None:
    def forward(m: Any, x: torch.Tensor, cache: Positions) -> torch.Tensor:
        start = cache.get_seq_length()
        cache.length += 2
        return m.linear(x) * torch.arange(start, start + 2)[:, None]

    with Twins.build(lambda: Does(forward)) as twins:
        cache = twins.keep(Positions(3))
        for _ in range(5):
            twins(torch.randn(2, 4), cache)
            twins(torch.randn(2, 4), Positions(7))
        assert set(twins.outcomes) == {"eager:unsupported_argument"}


def test_hg_17_a_tensor_on_the_host_counts_by_value() -> None:
    """For a module on a GPU; that needs none, since only the arguments are looked at."""
    device = torch.device("cuda", 0)

    def key(tensor: torch.Tensor) -> Any:
        call = signature.read((tensor,), {}, device)
        return call if isinstance(call, Fallback) else signature.of(call, ())

    for shape in ((), (1,), (1, 1)):
        assert key(torch.full(shape, 0.5)) == key(torch.full(shape, 0.5))
        assert key(torch.full(shape, 0.5)) != key(torch.full(shape, 0.25))
    assert key(torch.tensor(1)) != key(torch.tensor(1.0)) != key(torch.tensor([1.0]))
    refused = key(torch.ones(2))
    assert isinstance(refused, Fallback)
    assert refused.reason == "host_tensor"
    assert "args[0]" in refused.detail


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_17_on_the_cpu_every_tensor_is_an_input() -> None:
    with Twins.build(Scaled) as twins:
        for value in (0.5, 0.25, 0.125, 1.0, 2.0):
            twins(torch.randn(2, 4), torch.tensor(value))
        assert twins.outcomes == [*GRAPHED, "replays"]


def _timestep_embedding(m: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    frequencies = torch.arange(4.0, device="cpu").to(x.device)
    return m.linear(x) + torch.cos(t * frequencies)


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_18_a_table_made_in_forward() -> None:
    with Twins.build(lambda: Does(_timestep_embedding)) as twins:
        for _ in range(5):
            twins(torch.randn(2, 4), torch.randn(1))
        assert twins.outcomes == [*GRAPHED, "replays"]


def test_hg_18_a_failed_capture_quotes_the_error_and_its_place() -> None:
    module, other = Fragile("hg 18", fail_at=(2,)), mlp()
    handle, second = hookgraph.attach(module), hookgraph.attach(other)
    for _ in range(4):
        assert torch.equal(module(X), module.linear(X).relu())
        other(X)
    assert handle.stats.reasons == {"capture_failed": 3}
    (detail,) = handle.stats.modules[0].details["capture_failed"]
    assert "RuntimeError" in detail
    assert "run 2 fails" in detail
    lines, start = inspect.getsourcelines(Fragile.forward)
    place = start + next(i for i, line in enumerate(lines) if "raise" in line)
    assert f"modules.py:{place}" in detail
    assert second.stats.replays == 2


# -- E: what makes a signature -------------------------------------------------------------------------


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_20_no_cache_is_not_an_empty_cache() -> None:
    def forward(m: Any, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        return m.linear(x) * 2 if cache is None else m.linear(x) + cache.sum() + cache.shape[1]

    with Twins.build(lambda: Does(forward), max_graphs=8) as twins:
        for _ in range(4):
            x = torch.randn(2, 4)
            twins(x, None)
            twins(x, torch.randn(1, 3, 4))
            twins(x, None)
            twins(x, torch.randn(1, 0, 4))
            twins(x)
            twins(x, cache=None)
        assert twins.count("errors") == twins.count("eager") == 0
        assert twins.count("captures") == 5


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_21_an_expanded_mask() -> None:
    with Twins.build(lambda: Does(lambda m, x, mask: m.linear(x) * mask)) as twins:
        x = torch.randn(3, 2, 4)
        for _ in range(4):
            twins(x, torch.randn(1, 1, 4).expand(3, 1, 4))
        assert twins.outcomes == GRAPHED
        for _ in range(4):
            twins(x, torch.randn(1, 1, 4).expand(3, 1, 4).contiguous())


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_23_no_cast_and_no_broadcast_into_a_buffer() -> None:
    def forward(m: Any, x: torch.Tensor, index: Any = None) -> Any:
        table = torch.arange(20.0).reshape(5, 4)
        return x * 2, x.sum(), None if index is None else table[index]

    with Twins.build(lambda: Does(forward), max_graphs=16) as twins:
        for _ in range(4):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                twins(torch.randn(4, 3).to(dtype))
            for shape in ((4, 3), (1, 3), ()):
                twins(torch.randn(shape))
            for index in (torch.int32, torch.int64):
                twins(torch.randn(2, 3), torch.randint(5, (3,), dtype=index))
            twins((torch.randn(2, 3) * 9).long(), torch.randint(5, (3,)))
        assert twins.count("eager") == 0
        assert twins.count("captures") == 8


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_24_autocast_off_and_on() -> None:
    with Twins.build(lambda: nn.Linear(4, 4), max_graphs=8) as twins:
        for _ in range(4):
            calls(twins, 1)
            for dtype in (torch.bfloat16, torch.float16):
                with torch.autocast("cpu", dtype):
                    assert twins(torch.randn(2, 4)).attached.dtype is dtype
            calls(twins, 1)
        assert twins.count("captures") == 3
        assert twins.count("eager") == 0


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_hg_24_a_weight_is_edited_between_two_calls_under_autocast(trainable: bool) -> None:
    """Two calls in one block for frozen weights; eager itself keeps its casts of trainable ones until a block ends."""
    with Twins.build(lambda: nn.Linear(4, 4).requires_grad_(trainable)) as twins:
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                calls(twins, 1)
                if not trainable:
                    twins.apply(lambda module: module.weight.mul_(2))
                    calls(twins, 1)
            twins.apply(lambda module: module.weight.add_(1))
        assert twins.outcomes[-1] == "replays"


def test_hg_24_trainable_weights_edited_within_one_autocast_block() -> None:
    """A documented limit: eager goes on using the cast that it made first in the block, a replay the weights."""
    module = nn.Linear(4, 4).eval()
    x = torch.randn(2, 4)
    with hookgraph.attach(module, verify=0) as handle, torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            module(x)
        module.weight.data.mul_(2)
        edited = nn.functional.linear(x.bfloat16(), module.weight.bfloat16(), module.bias.bfloat16())
        assert torch.equal(module(x), edited)
        assert handle.stats.replays == 2


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_25_inference_mode_then_training_then_no_grad() -> None:
    with Twins.build(mlp) as twins:
        with torch.inference_mode():
            calls(twins, 3)
        for _ in range(3):
            with torch.enable_grad():
                twins.backward(twins(torch.randn(2, 4)))
            calls(twins, 2)
            with torch.inference_mode():
                assert twins(torch.randn(2, 4)).attached.is_inference()
        assert twins.count("eager:needs_grad") == twins.count("eager") == 3
        assert twins.outcomes[-1] == "replays"


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("whole", [True, False], ids=["training mode", "dropout in training mode only"])
def test_hg_27_each_call_has_a_mask_of_its_own(whole: bool) -> None:
    with Twins.build(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), evaluate=not whole) as twins:
        twins.apply(lambda module: module[1].train())
        x = torch.randn(8, 4)
        for _ in range(3):
            twins(x)
        assert not torch.equal(twins(x).attached, twins(x).attached)
        outputs = []
        for _ in range(2):
            torch.manual_seed(0)
            outputs += [twins(x).attached]
        assert torch.equal(*outputs)
        if not whole:
            assert twins.outcomes[-1] == "replays"


def test_hg_27_a_generator_as_argument() -> None:
    def forward(m: Any, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return m.linear(x) + torch.randn(2, 4, generator=generator)

    module = Does(forward)
    handle = hookgraph.attach(module)
    mine, theirs = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for _ in range(5):
        assert torch.equal(module(X, mine), module.linear(X) + torch.randn(2, 4, generator=theirs))
    assert handle.stats.reasons == {"generator": 5}


# -- F, G, H: threads, devices, lazy caches, failures, bounds -----------------------------------------------


def test_hg_28_another_thread_works_during_the_capture() -> None:
    """Its operators are not recorded, and nothing of it is disturbed."""
    seen: list[Any] = []
    busy, done = threading.Event(), threading.Event()

    def work() -> None:
        while not done.is_set():
            busy.wait(1)
            seen.append(int((torch.arange(64) + 1).sum().item()))  # a read-back, which a capture of its own forbids

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.linear(x)
        busy.set()
        count = len(seen)
        for _ in range(1000):
            if len(seen) > count + 2:
                break
            threading.Event().wait(0.002)
        return y * 2

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with Twins.build(lambda: Does(forward)) as twins:
            calls(twins)
            assert twins.outcomes == GRAPHED
            assert twins.handle.stats.modules[0].signatures[0].nodes == 2
    finally:
        done.set()
        busy.set()
        thread.join()
    assert set(seen) == {64 * 65 // 2}


def test_hg_30_tensors_of_two_devices() -> None:
    with Twins.build(lambda: Does(lambda m, x, other: m.linear(x) * other.shape[0])) as twins:
        for rows in (3, 3, 3, 5):
            twins(torch.randn(2, 4), torch.empty(rows, 2, device="meta"))
        assert set(twins.outcomes) == {"eager:mixed_devices"}


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(lambda m, x: x, id="its argument"),
        pytest.param(lambda m, x: x[:1], id="a view of it"),
        pytest.param(lambda m, x: 3, id="a number"),
        pytest.param(lambda m, x: m.linear.weight, id="a weight"),
    ],
)
def test_hg_30_a_graph_of_nothing_is_no_graph(forward: Callable[[Any, torch.Tensor], Any]) -> None:
    with Twins.build(lambda: Does(forward)) as twins:
        calls(twins, 5)
        assert twins.outcomes == ["warmups", *["eager:capture_failed"] * 4]


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_32_a_table_that_grows_with_other_values() -> None:
    with Twins.build(Rope) as twins:
        for rows in (4, 8, 4):
            calls(twins, 4, rows)
            gc.collect()
            assert torch.equal(twins.modules.eager.cos, twins.modules.attached.cos)
            assert len(twins.modules.attached.cos) == max(rows, len(twins.modules.eager.cos))
        twins.handle.detach()
        x = torch.randn(6, 4)
        assert torch.equal(twins.modules.eager(x), twins.modules.attached(x))


def _cross_attention(m: Any, x: torch.Tensor, encoded: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
    if not cache["is_updated"]:
        cache["keys"] = m.linear(encoded)
        cache["is_updated"] = True
    return x @ cache["keys"].T


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_32_keys_made_by_the_first_step_of_each_request() -> None:
    """They must outlive the replays of later requests."""
    with Twins.build(lambda: Does(_cross_attention)) as twins:
        caches = []
        for _ in range(5):
            encoded = torch.randn(3, 4)
            cache = twins.keep({"is_updated": False})
            caches.append(cache)
            for _ in range(4):
                twins(torch.randn(2, 4), encoded, cache)
        for cache in caches:
            assert torch.equal(cache.eager["keys"], cache.attached["keys"])
        assert twins.count("replays") >= 12


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError], ids=lambda e: e.__name__)
def test_hg_33_an_error_in_the_capture_only(error: type[Exception]) -> None:
    module, other = Fragile(f"hg 33 {error.__name__}", fail_at=(2,), error=error), mlp()
    handle = hookgraph.attach(module)
    for _ in range(5):
        assert torch.equal(module(X), module.linear(X).relu())
    assert handle.stats.reasons == {"capture_failed": 4}
    assert Fragile.runs[module.name] == 6  # the capture is not tried again
    for _ in range(4):
        x = torch.randn(3, 4)
        assert torch.equal(module(x), module.linear(x).relu())
    assert handle.stats.replays == 2
    with hookgraph.attach(other) as second:
        for _ in range(3):
            other(X)
        assert second.stats.replays == 1


def test_hg_33_an_interrupted_capture() -> None:
    module = Fragile("hg 33 interrupted", fail_at=(2,), error=KeyboardInterrupt)
    handle = hookgraph.attach(module)
    module(X)
    with pytest.raises(KeyboardInterrupt, match="run 2 fails"):
        module(X)
    assert gc.isenabled()
    assert torch.is_autocast_cache_enabled()
    for _ in range(4):
        assert torch.equal(module(X), module.linear(X).relu())
    check_balance(handle.stats)
    assert (handle.stats.errors, handle.stats.replays) == (1, 2)


@loud
@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_34_nothing_is_evicted() -> None:
    with Twins.build(mlp, max_graphs=2) as first, Twins.build(mlp, max_graphs=2) as second:
        for twins in (first, second):
            for rows in (1, 2, 3, 4, 1, 2):
                calls(twins, 3, rows)
            assert twins.outcomes[6:12] == ["eager:limit"] * 6
            assert twins.outcomes[12:] == ["replays"] * 6
        first.handle.detach()
        gc.collect()
        for rows in (1, 2):
            calls(second, 3, rows)
        assert second.outcomes[-6:] == ["replays"] * 6


def test_hg_35_a_hundred_prompt_lengths() -> None:
    """Each length comes twice: four are captured, the others run eager, and one warning says so."""
    module = mlp()
    handle = hookgraph.attach(module, max_graphs=4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for length in range(1, 101):
            for _ in range(2):
                module(torch.randn(length, 4))
    assert [(warning.category, "limit" in str(warning.message)) for warning in told] == [
        (hookgraph.HookgraphWarning, True)
    ]
    assert handle.stats.captures == 4
    assert handle.stats.reasons == {"limit": 2 * 96}
    for length in range(1, 5):
        module(torch.randn(length, 4))
    assert handle.stats.replays == 4
    assert len(handle.stats.modules[0].signatures) == 4


# -- I: counters ------------------------------------------------------------------------------------------


def _counted(m: Any, x: torch.Tensor, other: Any = None) -> torch.Tensor:
    if x.shape[0] == 7:
        raise ValueError("seven rows")
    if x.shape[0] == 6:
        return m(x[:5]) * 2
    return m.linear(x)


@loud
def test_hg_37_the_counts_balance_after_each_step() -> None:
    module = Does(_counted)
    handle = hookgraph.attach(module, max_graphs=1)
    expected = dict.fromkeys(("warmups", "captures", "replays", "eager", "errors"), 0)

    def call(outcome: str, *args: Any, grad: bool = False) -> None:
        with torch.set_grad_enabled(grad), contextlib.suppress(ValueError):
            module(*args)
        for name in outcome.split():
            expected[name] += 1
        stats = handle.stats
        assert {name: getattr(stats, name) for name in expected} == expected
        assert stats.calls == sum(expected.values())
        assert sum(stats.reasons.values()) == stats.eager
        check_balance(stats)

    call("warmups", X)
    call("captures", X)
    call("replays", X)
    call("eager", X, {1, 2})  # not hashable
    call("eager", torch.randn(3, 4))  # the limit
    call("eager", X, grad=True)
    module.train()
    call("eager", X)
    module.eval()
    with hookgraph.disabled():
        call("eager", X)
    call("errors", torch.randn(7, 4))
    call("eager eager", torch.randn(6, 4))  # a nested call: both are over the limit
    call("replays", X)
    assert handle.stats.reasons == {
        "unsupported_argument": 1, "limit": 3, "needs_grad": 1, "training": 1, "disabled": 1,
    }  # fmt: skip


# -- J: the module changes ----------------------------------------------------------------------------------


def _new_weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: value + 0.5 for name, value in module.state_dict().items()}


MOVES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "in place": (lambda m: m.linear.weight.add_(0.5), True),
    "of a buffer, in place": (lambda m: m.table.mul_(2), True),
    "load_state_dict": (lambda m: m.load_state_dict(_new_weights(m)), True),
    "data =": (lambda m: setattr(m.linear.weight, "data", m.linear.weight + 0.5), False),
    "data = of a buffer": (lambda m: setattr(m.table, "data", m.table + 0.5), False),
    "a new Parameter": (lambda m: setattr(m.linear, "weight", nn.Parameter(m.linear.weight + 0.5)), False),
    "a new buffer": (lambda m: setattr(m, "table", m.table + 0.5), False),
    "assign=True": (lambda m: m.load_state_dict(_new_weights(m), assign=True), False),
    "bfloat16 and back": (lambda m: m.to(torch.bfloat16).to(torch.float32), False),
}


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("change", MOVES)
def test_hg_38_weights_after_the_capture(change: str) -> None:
    move, goes_on = MOVES[change]
    with Twins.build(lambda: Does(lambda m, x: m.linear(x) * m.table, table=torch.ones(4))) as twins:
        calls(twins)
        twins.apply(move)
        gc.collect()
        calls(twins)
        assert twins.outcomes[4:] == (["replays"] * 4 if goes_on else GRAPHED)
        assert twins.handle.stats.modules[0].invalidations == (0 if goes_on else 1)


class Quantised(nn.Module):
    """A linear layer whose weight is stored in eight bits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("scale", linear.weight.abs().amax() / 127)
        self.register_buffer("weight", (linear.weight / self.scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * self.scale)


def _seven_classes(module: Any) -> None:
    torch.manual_seed(3)
    module.linear = nn.Linear(4, 7)


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_seven_classes, id="another head"),
        pytest.param(lambda m: setattr(m, "linear", Quantised(m.linear)), id="quantised"),
        pytest.param(lambda m: m.linear.train(), id="a child to training mode"),
        pytest.param(lambda m: setattr(m, "fast", True), id="a flag"),
    ],
)
def test_hg_40_the_structure_after_the_capture(change: Callable[[Any], Any]) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.linear(x) * (1 if m.fast else 2)

    with Twins.build(lambda: Does(forward, fast=False)) as twins:
        calls(twins)
        twins.apply(change)
        gc.collect()
        calls(twins)
        assert twins.outcomes[4:] == GRAPHED
        for mode in (True, False):
            twins.apply(lambda module, mode=mode: module.train(mode))
            calls(twins, 4)
        assert twins.outcomes[8:12] == ["eager:training"] * 4
        assert twins.outcomes[-1] == "replays"


# -- K: hooks of children, step caches ---------------------------------------------------------------------------


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("when", ["before attach", "after attach", "after the capture"])
def test_hg_41_a_dumper_on_a_child(when: str) -> None:
    """It sees every call, and what it does to the result is there; gone when it is removed."""
    torch.manual_seed(0)
    eager = mlp()
    attached = copy.deepcopy(eager)
    frames: list[list[torch.Tensor]] = [[], []]

    def register() -> list[Any]:
        def dump(module: Any, args: Any, out: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
            seen.append(out.clone())
            return out * 2

        return [
            module[0].register_forward_hook(lambda m, a, out, seen=seen: dump(m, a, out, seen))
            for module, seen in zip((eager, attached), frames, strict=True)
        ]

    hooks = register() if when == "before attach" else []
    with Twins(eager, attached) as twins:
        hooks = hooks or (register() if when == "after attach" else [])
        calls(twins)
        hooks = hooks or register()
        calls(twins)
        assert len(frames[0]) == len(frames[1]) == (4 if when == "after the capture" else 8)
        assert all(torch.equal(a, b) for a, b in zip(*frames, strict=True))
        assert twins.outcomes[-1] == "eager:child_hooks"
        for hook in hooks:
            hook.remove()
        calls(twins)
        assert twins.outcomes[-4:] == GRAPHED


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_43_a_step_cache_inside_the_forward() -> None:
    """The decision is never frozen; attached to the block inside, it stays in Python and the block is a graph."""
    inputs = [torch.full((2, 4), 0.1 if step in (1, 2, 4, 7) else 10.0 + step) for step in range(10)]
    with Twins.build(StepCache) as twins:
        for x in inputs:
            twins(x)
        assert twins.count("replays") == twins.count("captures") == 0
        assert "read_back" in twins.handle.stats.reasons
        (detail, *_) = twins.handle.stats.modules[0].details["read_back"]
        assert "modules.py" in detail
    with Twins.build(StepCache, targets="block") as twins:
        for x in inputs:
            twins(x)
        assert twins.count("replays") >= 2


# -- L: other wrappers, signatures, forward() ----------------------------------------------------------------------


def _register(module: nn.Module) -> Callable[[], None]:
    """As a hook registry does: keep the original, put a wrapper in its place."""
    original = module.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) * 2

    module.forward = doubled

    def remove() -> None:
        module.forward = original

    return remove


@pytest.mark.usefixtures("with_and_without_proof")
@pytest.mark.parametrize("order", ["registry attach", "attach registry", "registry attach registry"])
def test_hg_44_both_effects_in_either_order(order: str, no_residue: Watch) -> None:
    model, plain = mlp(), mlp()
    plain.load_state_dict(model.state_dict())
    factor = 1
    handles = []
    for step in order.split():
        if step == "registry":
            _register(model)
            factor *= 2
        else:
            handles.append(hookgraph.attach(model, **Twins.default_options))
    for _ in range(6):
        x = torch.randn(2, 4)
        assert torch.equal(model(x), plain(x) * factor)
    assert handles[0].stats.calls == 6
    assert handles[0].stats.replays == 4
    handles[0].detach()
    x = torch.randn(2, 4)
    assert torch.equal(model(x), plain(x) * factor)
    no_residue.allow(model, "new: <root>.forward", "changed: <root>*")


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_46_signature_export_and_styles_of_calling() -> None:
    with Twins.build(Scaled, max_graphs=8) as twins:
        model: Any = twins.modules.attached
        assert inspect.signature(model.forward) == inspect.signature(twins.modules.eager.forward)
        t = torch.tensor(2.0)
        for _ in range(4):
            twins(torch.randn(2, 4), t)
            twins(torch.randn(2, 4), t=t)
            twins(torch.randn(2, 4), t, 7.5)
        program = torch.export.export(model, (X,), kwargs={"t": t})
        assert torch.equal(program.module()(X, t=t), twins.modules.eager(X, t=t))
        assert "hookgraph" not in program.graph_module.code
        assert inspect.signature(model.forward) == inspect.signature(twins.modules.eager.forward)
        assert twins.count("replays") == 6


@pytest.mark.usefixtures("with_and_without_proof")
def test_hg_47_a_parent_calls_forward_itself() -> None:
    with Twins.build(Parent, targets="expert") as twins:
        calls(twins)
        assert twins.outcomes == GRAPHED
        assert twins.handle.stats.calls == 4
        (expert,) = (module.expert for module in [twins.modules.attached])
        expert(X)
        assert twins.handle.stats.calls == 5


# -- M, N: attached twice, copied, compiled, collected ---------------------------------------------------------------


def test_hg_48_a_notebook_cell_is_run_three_times() -> None:
    model, plain = mlp(), mlp()
    plain.load_state_dict(model.state_dict())
    before = model.__dict__.get("forward")
    handle = hookgraph.attach(model)
    assert hookgraph.attach(model) is hookgraph.attach(model) is handle
    with pytest.raises(hookgraph.AttachError, match=r"max_graphs=2 here, 4 there.*detach\(\) first"):
        hookgraph.attach(model, max_graphs=2)
    for count in range(1, 5):
        x = torch.randn(2, 4)
        assert torch.equal(model(x), plain(x))
        assert handle.stats.calls == count
    handle.detach()
    assert model.__dict__.get("forward") is before
    assert torch.equal(model(X), plain(X))
    assert handle.stats.calls == 4


@pytest.mark.parametrize("how", ["deepcopy", "torch.save", "pickle"])
def test_hg_50_a_copy_runs_its_own_weights(how: str) -> None:
    model = nn.Linear(1, 1, bias=False).eval()
    model.weight.fill_(1.0)
    handle = hookgraph.attach(model)
    one = torch.ones(1, 1)
    for _ in range(4):
        model(one)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, buffer := io.BytesIO())
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    other.weight.fill_(9.0)
    assert (model(one).item(), other(one).item()) == (1.0, 9.0)
    assert not hookgraph.is_attached(other)
    assert handle.stats.calls == 5
    assert list(other.state_dict()) == list(model.state_dict()) == ["weight"]
    model.load_state_dict(other.state_dict())
    assert model(one).item() == 9.0
    assert handle.stats.replays == 4


def test_hg_50_an_averaged_copy() -> None:
    model = mlp()
    plain = copy.deepcopy(model)
    hookgraph.attach(model)
    for _ in range(3):
        model(X)
    mine, theirs = (torch.optim.swa_utils.AveragedModel(m) for m in (model, plain))
    for average, source in ((mine, model), (theirs, plain)):
        average.update_parameters(source)
        for parameter in source.parameters():
            parameter.mul_(3)
        average.update_parameters(source)
    assert not hookgraph.is_attached(mine)
    assert torch.equal(mine(X), theirs(X))
    assert torch.equal(model(X), plain(X))


@contextlib.contextmanager
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def test_hg_52_attached_after_the_first_compiled_call(no_residue: Watch) -> None:
    """The compiled code never comes back to our hooks: the user is told at ``attach``."""
    with fresh_dynamo():
        model = mlp()
        plain = copy.deepcopy(model)
        compiled = _compiled(model)
        compiled(X)
        with pytest.warns(hookgraph.HookgraphWarning, match="compile"):
            handle = hookgraph.attach(model)
        for _ in range(4):
            x = torch.randn(2, 4)
            assert torch.equal(compiled(x), plain(x))
        assert handle.stats.balanced
        no_residue.allow(model, "new: <root>._is_torch_compile")


def test_hg_52_an_unhooked_twin_is_compiled_first(no_residue: Watch) -> None:
    with fresh_dynamo():
        first, model = mlp(), mlp()
        plain = copy.deepcopy(model)
        _compiled(first)(X)
        handle = hookgraph.attach(model)
        compiled = _compiled(model)
        for _ in range(4):
            x = torch.randn(2, 4)
            assert torch.equal(compiled(x), plain(x))
        assert handle.stats.balanced
        no_residue.allow(model, "new: <root>._is_torch_compile")


def test_hg_52_a_compiled_module_is_attached(no_residue: Watch) -> None:
    with fresh_dynamo():
        model = mlp()
        plain = copy.deepcopy(model)
        compiled = _compiled(model)
        with hookgraph.attach(compiled) as handle:
            for _ in range(4):
                x = torch.randn(2, 4)
                assert torch.equal(compiled(x), plain(x))
            assert handle.stats.calls == 4
            assert set(handle.stats.reasons) == {"compiled_part"}
        no_residue.allow(compiled, "changed: *", "new: *")


def test_hg_52_compiled_around_an_attached_module(no_residue: Watch) -> None:
    """hookgraph stands aside without a break of the graph and without compiling again on each call."""
    with fresh_dynamo():
        model = mlp()
        plain = copy.deepcopy(model)
        hookgraph.attach(model)
        counter = torch._dynamo.testing.CompileCounter()
        compiled: Any = torch.compile(model, backend=counter, fullgraph=True)
        for _ in range(5):
            x = torch.randn(2, 4)
            assert torch.equal(compiled(x), plain(x))
        assert counter.frame_count == 1
        no_residue.allow(model, "new: <root>._is_torch_compile")


@pytest.mark.parametrize("enabled", [True, False], ids=["collector on", "collector off"])
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt], ids=["captured", "failed", "interrupted"])
def test_hg_53_the_collector_is_put_back_to_what_it_was(enabled: bool, error: type[BaseException] | None) -> None:
    seen: list[bool] = []

    class Looks(Fragile):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(gc.isenabled())
            return super().forward(x)

    module = Looks(f"hg 53 {error} {enabled}", fail_at=(2,) if error else (), error=error or RuntimeError)
    hookgraph.attach(module)
    try:
        if not enabled:
            gc.disable()
        for step in range(4):
            if error is KeyboardInterrupt and step == 1:
                with pytest.raises(KeyboardInterrupt):
                    module(X)
            else:
                module(X)
            assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert seen[0] is enabled
    assert seen[1] is False  # the capture


def test_the_harness_sees_a_report_s_symptom() -> None:
    """One static buffer handed out twice, as in HG-01."""
    with warnings.catch_warnings(), Twins.build(lambda: nn.Linear(4, 4)) as twins:
        buffer = torch.empty(2, 4)
        leaky = Both(lambda x: x + 1, lambda x: buffer.copy_(x + 1))
        twins.run(leaky, X)
        with pytest.raises(ParityError, match=re.escape("call 0")):
            twins.run(leaky, X * 2)
        twins._kept.clear()
