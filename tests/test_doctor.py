"""The doctor says what would be captured, what forbids the rest and where; and what it advises works."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from hookgraph.cli import main
from hookgraph.diagnosis import Finding
from hookgraph.doctor import Calls
from hookgraph.errors import AttachError, HookgraphError
from tests.models.cases import CASES
from tests.modules import Block, Blocks, Does, Drops, Norms, Rope, Scaled, Shared, StepCache, mlp
from tests.parity import Twins

X = torch.arange(8.0).reshape(2, 4) / 8
ONE: Calls = [((X,), {})]
NUMBER = 3
LARGE: Calls = [((torch.ones(2, 4),), {})]  # for which StepCache runs its block in each call


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Gated(nn.Module):
    """Blocks around two decisions that the host makes."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = mlp()
        self.linear = nn.Linear(4, 4)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        if x.sum().item() > 1e9:
            x = x * 2
        if x.abs().max() > 1e9:
            x = x * 3
        return self.head(self.linear(x))


class GatedBlock(nn.Module):
    """Cannot be captured itself, while what lies in it can."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp, self.proj = mlp(), mlp(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.mlp(self.attn(x) * float(x.sum())))


def line_of(text: str) -> int:
    """The line of this file that holds a piece of code, the first time."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def reasons(found: hookgraph.Diagnosis) -> list[str]:
    return [finding.reason.value for finding in found.findings]


# -- what can be captured -----------------------------------------------------------------------------


def test_a_module_without_a_fault() -> None:
    found = hookgraph.diagnose(mlp(), [((X,), {}), ((X[:1],), {})])
    assert (found.can_capture, found.can_capture_whole, found.targets) == (True, True, ("",))
    assert (found.findings, found.notes, found.parts) == ((), (), ())
    assert [(one.state, one.replays) for one in found.whole.signatures] == [("trusted", 3), ("trusted", 3)]
    assert str(found).startswith("Sequential can be captured as a whole.\nWhat to do: hookgraph.attach(model)\n")


def test_calls_by_keyword_alone() -> None:
    found = hookgraph.diagnose(Scaled(), [{"x": X}, ([X], {"scale": 2.0})])
    assert [one.summary.partition(" ")[0] for one in found.whole.signatures] == ["x", "args[0]"]


def test_every_line_that_forbids_is_named_not_only_the_first() -> None:
    found = hookgraph.diagnose(Gated(), ONE)
    assert reasons(found) == ["read_back", "read_back"]
    first, second = found.findings
    assert (first.calls, second.calls) == (5, 1)
    assert f"test_doctor.py:{line_of('x.sum().item() > 1e9')} in Gated.forward" in first.seen
    assert f"test_doctor.py:{line_of('x.abs().max() > 1e9')} in Gated.forward" in second.seen
    assert first.seen.endswith("takes a value by .item(), float(), int(), bool() or if")


@pytest.mark.parametrize(
    ("build", "targets"),
    [
        pytest.param(Gated, ("blocks.*", "head"), id="siblings as a glob"),
        pytest.param(lambda: nn.Sequential(GatedBlock(), GatedBlock()).eval(), ("*.attn", "*.mlp"), id="deeper"),
        pytest.param(lambda: nn.Sequential(Block(), GatedBlock(), Block()).eval(), ("0", "1.attn", "1.mlp", "2"), id="mixed"),
        pytest.param(lambda: StepCache().eval(), ("block",), id="a stateful cache"),
    ],
)  # fmt: skip
def test_the_largest_parts_are_found_and_can_be_attached(
    build: Callable[[], nn.Module], targets: tuple[str, ...]
) -> None:
    model = build()
    found = hookgraph.diagnose(model, LARGE)
    assert not found.can_capture_whole
    assert found.targets == targets
    assert all(part.replays == 3 for part in found.parts)
    with hookgraph.attach(model, found.targets) as handle:
        assert [module.name for module in handle.stats.modules] == [part.name for part in found.parts]
        for _ in range(4):
            model(*LARGE[0][0])
        assert handle.stats.replays == 2 * len(found.parts)
        assert not handle.stats.reasons
    if isinstance(model, StepCache):
        model.residual = None


def test_attached_as_advised_the_numbers_are_those_of_eager() -> None:
    found = hookgraph.diagnose(Gated(), ONE)
    with Twins.build(Gated, targets=list(found.targets)) as twins:
        for step in range(5):
            twins(X + step)


def test_a_model_that_can_be_captured_for_some_calls() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.linear(x) * (x.sum().item() if len(x) == 1 else 2.0)

    found = hookgraph.diagnose(Does(forward), [((X,), {}), ((X[:1],), {})])
    assert (found.can_capture, found.can_capture_whole, found.targets) == (True, False, ("",))
    assert str(found).startswith(
        "Does cannot be captured as a whole for 5 of 10 calls.\nWhat to do: hookgraph.attach(model)\n"
    )


def test_nothing_can_be_captured() -> None:
    found = hookgraph.diagnose(Does(lambda m, x: m.linear(x) * x.sum().item()), ONE)
    assert (found.can_capture, found.targets) == (False, ())  # one linear layer would be no gain
    assert "change what forbids it" in str(found)


def test_a_shared_submodule_is_advised_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Blocks()
            self.again = nn.Sequential(self.first.blocks[0])
            self.eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(self.first.blocks[1](x)) * x.sum().item()

    model = Twice()
    found = hookgraph.diagnose(model, ONE)
    assert found.targets == ("first.blocks.*",)
    assert hookgraph.diagnose(Shared(), ONE).can_capture_whole


# -- real models ------------------------------------------------------------------------------------------


def rehearsed(name: str) -> hookgraph.Diagnosis:
    pytest.importorskip("transformers", reason="needs the extra: pip install 'hookgraph[models]'")
    case = CASES[name].build()
    return hookgraph.diagnose(case.module, [(tuple(args), kwargs) for args, kwargs in case.calls])


def test_a_decoder_that_looks_at_its_mask_is_served_layer_by_layer() -> None:
    found = rehearsed("qwen3_vl_text_prefill")
    assert reasons(found) == ["read_back"] * 3  # the mask, and the two that would come to light after it
    assert re.search(
        r"transformers/masking_utils.py:\d+ in _ignore_causal_mask_sdpa: takes a value", found.findings[0].seen
    )
    assert found.targets == ("layers.*", "norm", "rotary_emb")


def test_a_cache_that_the_loop_crops_after_each_call() -> None:
    """Each call is made with the cache as it is given: full of the prompt, and nothing else."""
    found = rehearsed("alpamayo_expert")
    assert found.can_capture_whole
    assert len(found.whole.signatures) == 1


# -- what forbids it ----------------------------------------------------------------------------------


def scales(count: int) -> Calls:
    return [((X,), {"scale": step / 7}) for step in range(count)]


def hooked() -> nn.Module:
    model = Blocks()
    model.blocks[0].mlp.register_forward_hook(lambda module, args, output: None)
    return model


FORBIDDEN: dict[str, tuple[Callable[[], nn.Module], Calls, str, str]] = {
    "a number per step": (Scaled, scales(8), "scalar_churn", "kwargs['scale']"),
    "a child hook": (hooked, ONE, "child_hooks", "blocks.0.mlp has"),
    "training": (lambda: mlp().train(), ONE, "training", ""),
    "state": (lambda: StepCache().eval(), LARGE, "changes_state", "residual"),
    "a read-back of a CPU value": (lambda: Does(lambda m, x: m.linear(x) * x.tolist()[0][0]), ONE, "read_back", "tolist"),
    "a generator": (
        lambda: Does(lambda m, x: m.linear(x) + torch.randn(4, generator=torch.Generator())), ONE, "generator", "randn",
    ),
    "an argument of an unknown class": (lambda: Does(lambda m, x, f: m.linear(x)), [((X, object()), {})],
                                        "unsupported_argument", "args[1] is an object"),
    "aliased arguments": (lambda: Does(lambda m, x, y: m.linear(x.add_(1)) + y), [((X, X[:1]), {})],
                          "aliased_arguments", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_forbids_it(name: str) -> None:
    build, calls, reason, seen = FORBIDDEN[name]
    found = hookgraph.diagnose(build(), calls)
    assert not found.can_capture_whole
    finding = found.findings[0]
    assert (finding.reason.value, seen in finding.seen) == (reason, True), found.findings
    assert finding.calls == found.whole.reasons[reason]
    assert found.findings[0].reason.remedy.split()[0] in str(found)


def test_a_foreign_hook() -> None:
    hooks = pytest.importorskip("diffusers.hooks", reason="needs the extra: pip install 'hookgraph[models]'")
    model = Blocks()
    hooks.apply_layerwise_casting(model, torch.float16, torch.float32)
    found = hookgraph.diagnose(model, ONE)
    assert reasons(found)[0] == "foreign_hook"
    assert "layerwise casting" in found.findings[0].seen


def test_a_child_hook_that_is_accepted() -> None:
    assert hookgraph.diagnose(hooked(), ONE, child_hooks="ignore").can_capture_whole


def test_more_signatures_than_places_are_no_fault_of_the_forward() -> None:
    calls = [((torch.ones(rows, 4),), {}) for rows in (1, 2, 3)]
    found = hookgraph.diagnose(mlp(), calls, max_graphs=2)
    assert found.can_capture_whole
    assert reasons(found) == ["limit"]
    assert "1 other signature in 5 calls: max_graphs=3 would retain it." in str(found)


# -- what a graph would rely on ------------------------------------------------------------------------


TABLE = torch.arange(4.0)


def test_notes_on_what_a_graph_does_right() -> None:
    def forward(m: Any, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        m.count.add_(1)
        out.copy_(m.linear(x))
        return out + TABLE + torch.rand(4)

    found = hookgraph.diagnose(Does(forward, count=torch.zeros(())), [((X,), {"out": torch.zeros(2, 4)})])
    assert found.can_capture_whole
    notes = "\n".join(found.notes)
    assert "writes in place to kwargs['out'], count: a replay does so, too" in notes
    assert "draws random numbers from the default generator" in notes
    assert re.search(r"guarded by their places: tests/test_doctor.py:\d+ in ", notes)
    assert all(note.split(",")[0][:60] in str(found) for note in found.notes)


# -- what the calls tell when they are compared ----------------------------------------------------------


class Stepped(nn.Module):
    """Takes two numbers beside its tensor, one by position."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.eval()

    def forward(self, x: torch.Tensor, t: float = 1.0, scale: float = 1.0, steps: int = 1) -> torch.Tensor:
        return self.body(x) * t + scale * steps


def loop(count: int) -> Calls:
    return [((X, float(step)), {"scale": step / 7}) for step in range(count)]


DIFFER = (
    "args[1] (t), kwargs['scale'] are numbers that differ between calls, and each value is a signature of its own: "
    "pass them as tensors"
)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_numbers_that_differ_are_noted_though_there_is_a_place_for_each(count: int) -> None:
    found = hookgraph.diagnose(Stepped(), loop(count))
    assert found.can_capture_whole
    assert found.notes == (DIFFER,)


@pytest.mark.parametrize("count", [5, 8])
def test_numbers_that_change_are_one_finding_and_the_first_advice(count: int) -> None:
    found = hookgraph.diagnose(Stepped(), loop(count))
    (churn,) = [finding for finding in found.findings if finding.reason == "scalar_churn"]
    assert churn.seen == "args[1] (t), kwargs['scale']"
    assert found.advice.startswith(
        "pass args[1] (t), kwargs['scale'] as tensors, and ask again; meanwhile hookgraph.attach("
    )
    assert found.notes == ()


def test_numbers_of_a_single_call_are_noted_floats_first() -> None:
    found = hookgraph.diagnose(Stepped(), [((X,), {"steps": 3, "scale": 0.5})])
    assert found.notes == (
        "kwargs['scale'], kwargs['steps'] are numbers and part of the signature: what changes from call to call should "
        "be a tensor",
    )
    assert hookgraph.diagnose(Stepped(), [((X, torch.ones(())), {})]).notes == ()


def test_more_than_three_numbers_are_counted() -> None:
    model = Does(lambda m, x, *numbers: m.linear(x) * sum(numbers))
    (note,) = hookgraph.diagnose(model, [((X, 1.0, 2.0, 3.0, 4.0, 5.0), {})]).notes
    assert note.startswith("args[1], args[2], args[3] and 2 more are numbers")


def test_numbers_that_differ_with_the_shapes_are_no_churn() -> None:
    calls: Calls = [((torch.ones(rows, 4),), {"steps": rows}) for rows in range(1, 7)]
    found = hookgraph.diagnose(Stepped(), calls)
    assert (reasons(found), found.notes) == (["limit"], ())
    assert found.advice == "hookgraph.attach(model, max_graphs=6)"


def test_more_signatures_than_can_be_listed_need_no_number() -> None:
    found = hookgraph.diagnose(mlp(), [((torch.ones(rows, 4),), {}) for rows in range(1, 50)], total_calls=147)
    assert found.advice == "hookgraph.attach(model)"


def test_each_of_three_faults_is_a_finding() -> None:
    """A hook, a read-back and a number: none hides the others."""

    def forward(m: Any, x: torch.Tensor, t: float) -> torch.Tensor:
        return m.block(m.linear(x)) * t if x.sum().item() > 0 else x

    model = Does(forward)
    model.block = mlp()
    model.block.register_forward_hook(lambda module, args, output: None)
    found = hookgraph.diagnose(model, [((X, float(step)), {}) for step in range(6)])
    assert set(reasons(found)) == {"child_hooks", "read_back", "scalar_churn"}
    assert (
        found.advice == "pass args[1] as a tensor, and ask again; meanwhile hookgraph.attach(model, targets=['block'])"
    )


def test_a_container_that_calls_share_is_noted() -> None:
    state = {"kept": torch.zeros(2, 4)}
    sizes = [(1, 2)]
    model = Does(lambda m, x, state, sizes: m.linear(x) + state["kept"])
    calls: Calls = [((X,), {"state": state, "sizes": sizes}) for _ in range(5)]
    (note,) = hookgraph.diagnose(model, calls).notes
    assert note == (
        "calls[0], calls[1], calls[2] and 2 more share kwargs['state']: as it is now, not as it was in each call; "
        "record them with hookgraph.record_calls"
    )


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'hookgraph[models]'")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def generated(model: Any, most: int = 8, **options: Any) -> Calls:
    prompt = torch.arange(5)[None]
    with hookgraph.record_calls(model, most=most) as calls:
        model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0, **options)
    return calls


def cache_of(calls: Calls) -> str:
    """Its name, which is not the same in all versions of transformers."""
    (name,) = {"cache", "past_key_values"} & set(calls[0][1])  # type: ignore[index]
    return f"kwargs['{name}']"


def test_a_cache_that_grows_is_told_before_anything_else() -> None:
    model = llama()
    calls = generated(model)
    found = hookgraph.diagnose(model, calls)
    assert found.advice == "use a static cache (transformers: cache_implementation='static'), and ask again"
    assert found.notes[0].startswith(cache_of(calls))
    assert "from call to call: every length is a signature of its own; use a static cache" in found.notes[0]


def test_a_static_cache_is_captured_as_it_was_in_each_call() -> None:
    model = llama()
    calls = generated(model, cache_implementation="static")
    found = hookgraph.diagnose(model, calls)
    assert (found.can_capture_whole, found.findings) == (True, ())
    assert found.advice == "hookgraph.attach(model)"
    assert found.notes == (f"It writes in place to {cache_of(calls)}: a replay does so, too",)
    assert len(found.whole.signatures) == 2  # the prompt, and one token


def test_a_cache_that_is_full_by_now_is_told_with_the_error() -> None:
    model, seen = llama(), []
    keep = model.register_forward_pre_hook(lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    model.generate(
        torch.arange(5)[None], max_new_tokens=8, do_sample=False, pad_token_id=0, cache_implementation="static"
    )
    keep.remove()
    with pytest.raises(HookgraphError, match=r"raises IndexError: .* share kwargs\['\w+'\]: .* hookgraph.record_calls"):
        hookgraph.diagnose(model, seen[1:4])


class Joins(nn.Module):
    """Keeps what it computed in a list of its caller's, one row longer after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.eval()

    def forward(self, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        past[0] = torch.cat([past[0], self.body(x)])
        return past[0].sum(0)


@pytest.mark.parametrize("shares", [False, True], ids=["one call", "calls that share it"])
def test_a_cache_that_the_forward_makes_longer(shares: bool) -> None:
    past = [torch.ones(3, 4)]
    calls: Calls = [((X, past), {})] * (2 if shares else 1)
    found = hookgraph.diagnose(Joins(), calls)
    assert "The forward makes args[1] (past) longer: unless the loop cuts it back, every length" in found.notes[-1]


def test_a_cache_that_grows_by_several_rows_a_call() -> None:
    past, model = [torch.ones(3, 4)], Joins()
    with hookgraph.record_calls(model) as calls:
        for _ in range(4):
            model(X, past)
    found = hookgraph.diagnose(model, calls, max_graphs=2)
    assert found.advice == (
        "use a static cache (transformers: cache_implementation='static'), then hookgraph.attach(model, max_graphs=2)"
    )


def test_two_caches_that_grow_in_turns() -> None:
    """Guidance by two calls: the sizes go up and down from call to call."""
    pasts, model = ([torch.ones(3, 4)], [torch.ones(30, 4)]), Joins()
    with hookgraph.record_calls(model) as calls:
        for step in range(6):
            model(X, pasts[step % 2])
    assert hookgraph.diagnose(model, calls).notes[0].startswith("args[1] (past) grows from call to call")


def test_tokens_without_a_cache_can_be_padded() -> None:
    calls: Calls = [((torch.ones(1, length, 4),), {}) for length in range(5, 10)]
    found = hookgraph.diagnose(mlp(), calls)
    assert found.advice == "pad args[0] (input) to a fixed length, then hookgraph.attach(model)"
    assert found.notes[0].startswith("args[0] (input) grows from call to call: every length is a signature of its own")


@pytest.mark.parametrize("sizes", [(1, 2, 3, 4, 5, 6), (16, 32, 64, 128, 256)], ids=["batches", "lengths"])
def test_sizes_that_come_in_any_order_do_not_grow(sizes: tuple[int, ...]) -> None:
    shape = (lambda size: (size, 2, 4)) if sizes[0] == 1 else (lambda size: (1, size, 4))
    found = hookgraph.diagnose(mlp(), [((torch.ones(shape(size)),), {}) for size in sizes])
    assert found.advice == f"hookgraph.attach(model, max_graphs={len(sizes)})"


def test_the_answer_is_for_calls_without_gradients() -> None:
    with torch.enable_grad():
        found = hookgraph.diagnose(mlp(), ONE)
    assert found.notes[-1].startswith("This is told for calls under torch.no_grad()")
    assert hookgraph.diagnose(mlp(), ONE).notes == ()


# -- words --------------------------------------------------------------------------------------------------


LOG = logging.getLogger("tests.a model")
PLAIN: dict[str, tuple[Callable[..., Any], str]] = {
    "item": (lambda m, x: m.linear(x) * x.sum().item(), "takes a value by .item()"),
    "mask": (lambda m, x: m.linear(x)[x > 0.3], "indexes by a mask, as x[mask]"),
    "unique": (lambda m, x: m.linear(x) + x.unique().sum(), "torch.unique: "),
    "nonzero": (lambda m, x: m.linear(x)[x[:, 0].nonzero().flatten()], "nonzero, argwhere or torch.where(condition)"),
    "f-string": (lambda m, x: (m.linear(x), f"{x.sum():.2f}")[0], "shows values (print, repr, an f-string or a log line)"),
    "log line": (lambda m, x: (m.linear(x), LOG.warning("%s", x))[0], "shows values (print, repr, an f-string or a log line)"),
    "numpy": (lambda m, x: m.linear(x) * float(x.numpy()[0, 0]), "hands values to numpy"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.* runs eager")
@pytest.mark.parametrize("name", PLAIN)
def test_one_finding_for_a_line_in_plain_words_everywhere(name: str) -> None:
    forward, words = PLAIN[name]
    (finding,) = hookgraph.diagnose(Does(forward), ONE).findings
    line = f"tests/test_doctor.py:{line_of(f'{chr(34)}{name}{chr(34)}: (lambda')} in <lambda>: "
    assert finding.seen.startswith(line + words)
    model = Does(forward)
    with hookgraph.attach(model) as handle:
        model(X)
        assert handle.explain(X).fallback is not None
        assert handle.explain(X).fallback.detail == finding.seen
        assert list(handle.stats.modules[0].details["read_back"]) == [finding.seen]


@pytest.mark.parametrize(
    ("moves", "noted"),
    [
        pytest.param(lambda y: y.cpu(), True, id="cpu()"),
        pytest.param(lambda y: y.to("cpu"), True, id="to"),
        pytest.param(lambda y: y.to(device="cpu"), True, id="to by keyword"),
        pytest.param(lambda y: y.to(X.device), False, id="to the same device"),
        pytest.param(lambda y: y.to(torch.float64), False, id="to a dtype"),
    ],
)
def test_a_move_to_the_cpu_is_noted_where_it_does_nothing(moves: Callable[[torch.Tensor], Any], noted: bool) -> None:
    found = hookgraph.diagnose(Does(lambda m, x: moves(m.linear(x))), ONE)
    assert found.can_capture_whole
    assert [note.rpartition(":")[0] for note in found.notes] == (
        ["It moves a tensor to the CPU, which is nothing here and a read_back on a GPU: tests/test_doctor.py"] * noted
    )
    assert "cpu" not in vars(torch.Tensor)
    assert "to" not in vars(torch.Tensor)


def test_the_line_of_a_read_back_is_not_told_twice() -> None:
    found = hookgraph.diagnose(Does(lambda m, x: m.linear(x) * x.sum().cpu().item()), ONE)
    assert (reasons(found), found.notes) == (["read_back"], ())


def test_hooks_are_counted_and_the_first_is_placed() -> None:
    model = Blocks()
    for child in model.modules():
        if isinstance(child, nn.Linear):
            child.register_forward_hook(_does_nothing)
    (finding, *_) = hookgraph.diagnose(model, ONE).findings
    line = _does_nothing.__code__.co_firstlineno
    assert finding.seen == f"blocks.0.mlp.0 has _does_nothing (tests/test_doctor.py:{line}), and 4 more"
    assert "attach(..., child_hooks='ignore')" in finding.reason.remedy


def _does_nothing(module: nn.Module, args: Any, output: Any) -> None:
    pass


def test_a_hook_that_is_ignored_is_named_where_it_may_be_the_cause() -> None:
    kept: list[torch.Tensor] = []
    model = Blocks()
    model.head.register_forward_hook(lambda module, args, output: kept.append(output))
    model.blocks[0].register_forward_hook(lambda module, args, output: kept.append(output))
    found = hookgraph.diagnose(model, ONE, child_hooks="ignore")
    (finding,) = found.findings
    assert finding.reason == "changes_state"
    assert re.search(r"kept outside the module; .*hook that is ignored.*: blocks.0 has .* and 1 more", finding.seen)


def test_options_of_the_rehearsal_are_in_the_advice() -> None:
    assert hookgraph.diagnose(hooked(), ONE, child_hooks="ignore", verify=1).advice == (
        "hookgraph.attach(model, child_hooks='ignore')"
    )


def test_single_layers_are_told_from_nothing() -> None:
    single = hookgraph.diagnose(Does(lambda m, x: m.linear(x) * x.sum().item()), ONE)
    assert single.advice == (
        "change what forbids it, below, and ask again; as it is only single layers are left, and a graph for one is not "
        "worth it"
    )

    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item()

    assert hookgraph.diagnose(Sums().eval(), ONE).advice.endswith("nothing of it can be captured as it is")


# -- too few calls to tell --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "total", "enough"),
    [(ONE, 1, 3), (ONE, 2, 3), ([*ONE, *ONE], 5, 6)],
    ids=["one", "two", "two calls"],
)
def test_fewer_calls_than_reach_a_replay_are_refused(calls: Calls, total: int, enough: int) -> None:
    with pytest.raises(HookgraphError, match=f"{total} calls reach no replay: .* at least {enough}, or leave"):
        hookgraph.diagnose(mlp(), calls, total_calls=total)
    assert hookgraph.diagnose(mlp(), calls, total_calls=enough).can_capture_whole


def test_a_forward_that_fills_a_table_first_takes_more() -> None:
    with pytest.raises(HookgraphError, match=r"3 calls reach no replay: .* at least 5, or leave"):
        hookgraph.diagnose(Rope().eval(), ONE, total_calls=3)
    assert hookgraph.diagnose(Rope().eval(), ONE).can_capture_whole


def test_more_warm_ups_take_more_calls() -> None:
    assert hookgraph.diagnose(mlp(), ONE, warmup=7).can_capture_whole
    with pytest.raises(HookgraphError, match="at least 9"):
        hookgraph.diagnose(mlp(), ONE, warmup=7, total_calls=8)


# -- it leaves no trace --------------------------------------------------------------------------------


def counts_and_replaces(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.calls = m.calls + 1
    m.total.add_(1)
    m.last = x.sum()  # a buffer is replaced by another tensor
    x.mul_(2)
    return m.linear(x) + torch.rand(4)


def test_model_arguments_and_random_state_are_as_they_were() -> None:
    model = Does(counts_and_replaces, calls=0, total=torch.zeros(()), last=torch.ones(()))
    before, last = {name: value.clone() for name, value in model.state_dict().items()}, model.last
    given, random = X.clone(), torch.get_rng_state()
    hookgraph.diagnose(model, [((given,), {})])
    assert model.calls == 0
    assert model.last is last
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(given, X)
    assert torch.equal(random, torch.get_rng_state())
    assert not hookgraph.is_attached(model)
    assert "forward" not in vars(model)


def test_running_statistics_come_back() -> None:
    model = Norms().train()
    hookgraph.diagnose(model, ONE)
    assert int(model.bn.num_batches_tracked) == 0
    assert torch.equal(model.bn.running_mean, torch.zeros(4))


def test_arguments_that_cannot_be_copied_are_used_as_they_are() -> None:
    found = hookgraph.diagnose(Does(lambda m, x, g: m.linear(x)), [((X, torch.Generator()), {})])
    assert reasons(found) == ["generator"]


# -- it refuses with a reason -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "calls", "match"),
    [
        pytest.param(3, ONE, "needs a torch.nn.Module, got int", id="no module"),
        pytest.param(mlp(), [], r"at least one, not a list of nothing", id="no calls"),
        pytest.param(mlp(), X, r"not a Tensor", id="no list"),
        pytest.param(mlp(), 3, r"not an int", id="a number"),
        pytest.param(mlp(), ((X,), {}), r"a single call; put it into a list: \[\(args, kwargs\)\]", id="one call"),
        pytest.param(mlp(), [(X,), {}], r"a single call; put it into a list", id="one call in a list"),
        pytest.param(mlp(), {"input": X}, r"a single call; put it into a list", id="one dict"),
        pytest.param(mlp(), [(X,)], r"calls\[0\] is a tuple of Tensor; expected \(args", id="no kwargs"),
        pytest.param(mlp(), [(X, {})], r"calls\[0\] is a tuple of Tensor, dict; expected", id="a bare argument"),
        pytest.param(mlp(), [*ONE, ((X.double(),), {})], r"calls\[1\]: the model itself raises RuntimeError", id="a failing call"),
        pytest.param(Does(lambda m, x: m.linear(x) @ x), ONE, r"raises RuntimeError: .*, at tests/test_doctor.py:\d+ in <lambda>", id="a failing line"),
    ],
)  # fmt: skip
def test_what_cannot_be_diagnosed(model: Any, calls: Any, match: str) -> None:
    with pytest.raises(HookgraphError, match=match):
        hookgraph.diagnose(model, calls)


def test_an_attached_model_is_not_diagnosed() -> None:
    model = mlp()
    hookgraph.attach(model)
    with pytest.raises(HookgraphError, match=r"detach\(\) it"):
        hookgraph.diagnose(model, ONE)


def test_not_where_the_environment_disables_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKGRAPH_DISABLE", "1")
    with pytest.raises(HookgraphError, match="HOOKGRAPH_DISABLE"):
        hookgraph.diagnose(mlp(), ONE)


def test_wrong_options() -> None:
    with pytest.raises(AttachError, match="max_graphs=0"):
        hookgraph.diagnose(mlp(), ONE, max_graphs=0)
    with pytest.raises(HookgraphError, match="total_calls=0"):
        hookgraph.diagnose(mlp(), ONE, total_calls=0)


# -- the command ------------------------------------------------------------------------------------------


def good() -> tuple[nn.Module, Calls]:
    return Gated(), ONE


def bad() -> tuple[nn.Module, Calls]:
    print("a library that talks")
    return Does(lambda m, x: m.linear(x) * x.sum().item()), ONE


def broken() -> None:
    raise ValueError("no weights here")


def half() -> nn.Module:
    return mlp()


def swapped() -> Any:
    return ONE, mlp()


def no_module() -> Any:
    return 3, ONE


def leaves() -> None:
    sys.exit("done")


def with_hooks() -> tuple[nn.Module, Calls]:
    return hooked(), ONE


@pytest.mark.parametrize(("factory", "status"), [("good", 0), ("bad", 1)])
def test_exit_status_and_report(capsys: pytest.CaptureFixture[str], factory: str, status: int) -> None:
    assert main(["doctor", "--module", f"tests.test_doctor:{factory}"]) == status
    report = capsys.readouterr().out
    assert "cannot be captured as a whole" in report
    assert "test_doctor.py:" in report
    assert "a library that talks" not in report


def test_json_and_the_number_of_calls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--module", "tests.test_doctor:good", "--calls", "7", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["targets"], data["whole"]["calls"]) == (["blocks.*", "head"], 7)
    assert data["advice"] == "hookgraph.attach(model, targets=['blocks.*', 'head'])"
    assert data["findings"][0]["reason"] == "read_back"
    assert data["findings"][0]["remedy"]
    plain = hookgraph.diagnose(*good()).to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain.keys() == data.keys()


def test_the_built_in_model(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers", reason="needs the extra: pip install 'hookgraph[models]'")
    assert main(["doctor"]) == 0
    assert "QwenImageTransformer2DModel can be captured as a whole." in capsys.readouterr().out


def test_the_address_may_stand_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "tests.test_doctor:good", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "Gated"
    assert main(["doctor", "tests.test_doctor:good", "--module", "tests.test_doctor:bad"]) == 2
    assert "two factories are given" in capsys.readouterr().err


def test_hooks_may_be_ignored_from_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["doctor", "tests.test_doctor:with_hooks", "--json"]
    main(command)
    assert json.loads(capsys.readouterr().out)["can_capture_whole"] is False
    assert main([*command, "--child-hooks", "ignore"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["can_capture_whole"], data["advice"]) == (True, "hookgraph.attach(model, child_hooks='ignore')")


def test_too_few_calls_from_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "tests.test_doctor:good", "--calls", "2"]) == 2
    assert "2 calls reach no replay" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("import no_such_thing", "importing 'mine' raised ModuleNotFoundError: .*, at .*mine.py:1 in <module>"),
        ("\n\n1 / 0", "importing 'mine' raised ZeroDivisionError: .*, at .*mine.py:3 in <module>"),
        ("x = (", "importing 'mine' raised SyntaxError: .*, at .*mine.py:1"),
        ("import sys; sys.exit(3)", r"importing 'mine' called sys.exit\(3\), at .*mine.py:1 in <module>"),
    ],
    ids=["a missing package", "an error", "syntax", "exit"],
)
def test_an_import_that_fails_names_the_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, match: str
) -> None:
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert main(["doctor", "mine:small"]) == 2
    assert re.search(f"error: {match}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("address", "match"),
    [
        ("tests.test_doctor", "expected PACKAGE.MODULE:FACTORY"),
        (
            "no_such_package:f",
            "cannot import 'no_such_package': .*; looked in .*; run it in the folder that holds no_such_package",
        ),
        ("tests.test_doctor:goood", "tests.test_doctor has no 'goood'; nearest are 'good'"),
        ("tests.test_doctor:ONE", "is a list, not a function"),
        ("tests.test_doctor:X", "is a Tensor, not a function"),
        ("tests.test_doctor:NUMBER", "is an int, not a function"),
        (
            "tests.test_doctor:broken",
            r"broken\(\) raised ValueError: no weights here, at tests/test_doctor.py:\d+ in broken",
        ),
        ("tests.test_doctor:leaves", r"leaves\(\) called sys.exit\('done'\), at tests/test_doctor.py:\d+ in leaves"),
        ("tests.test_doctor:half", r"returned a Sequential; it has to return \(module, calls\)"),
        (
            "tests.test_doctor:swapped",
            r"test_doctor:swapped returned \(list, Sequential\): the other way round; it has to",
        ),
        ("tests.test_doctor:no_module", r"test_doctor:no_module returned \(int, list\); it has to"),
        ("cases.py:small", "by name, not by file: cases:small"),
        ("./cases.py:small", "by name, not by file: cases:small"),
        ("my/cases.py:small", "by name, not by file: my.cases:small"),
        ("/my/cases.py:small", "by name, not by file: cases:small in the folder /my"),
        ("../my/cases.py:small", r"by name, not by file: cases:small in the folder \.\./my"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], address: str, match: str) -> None:
    assert main(["doctor", "--module", address]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(f"hookgraph doctor: error: .*{match}", captured.err), captured.err


def test_a_module_of_the_current_folder_from_a_shell(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def small():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()).eval()\n"
        "    return model, [((torch.ones(2, 4),), {})]\n"
    )
    command = [sys.executable, "-m", "hookgraph", "doctor", "--module", "mine:small", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["can_capture_whole"] is True


def test_a_finding_is_data() -> None:
    finding = Finding(hookgraph.FallbackReason.LIMIT, "max_graphs=1", 2)
    assert finding.to_dict() == {
        "reason": "limit", "seen": "max_graphs=1", "calls": 2, "meaning": hookgraph.FallbackReason.LIMIT.meaning,
        "remedy": hookgraph.FallbackReason.LIMIT.remedy,
    }  # fmt: skip


def test_dropout_in_eval_mode_is_no_finding() -> None:
    assert hookgraph.diagnose(Drops().eval(), ONE).can_capture_whole


def test_in_train_mode_the_advice_is_eval() -> None:
    model = mlp().train()
    found = hookgraph.diagnose(model, [((torch.ones(2, 4),), {})])
    assert found.advice == "call model.eval(), and ask again"
    assert [finding.reason.value for finding in found.findings] == ["training"]
