"""The doctor says what would be captured, what forbids the rest and where; and what it advises works."""

from __future__ import annotations

import json
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
from tests.modules import Block, Blocks, Does, Drops, Norms, Scaled, Shared, StepCache, mlp
from tests.parity import Twins

X = torch.arange(8.0).reshape(2, 4) / 8
ONE: Calls = [((X,), {})]
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
                                        "unsupported_argument", "args[1] is a object"),
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
    assert all(f"It {note.split(',')[0][:60]}" in str(found) for note in found.notes)


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
        pytest.param(mlp(), [(X,)], r"calls\[0\] is a tuple of Tensor; expected \(args", id="no kwargs"),
        pytest.param(mlp(), [(X, {})], r"calls\[0\] is a tuple of Tensor, dict; expected", id="a bare argument"),
        pytest.param(mlp(), [*ONE, ((X.double(),), {})], r"calls\[1\]: the model itself raises RuntimeError", id="a failing call"),
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


@pytest.mark.parametrize(
    ("address", "match"),
    [
        ("tests.test_doctor", "expected PACKAGE.MODULE:FACTORY"),
        ("no_such_package:f", "cannot import 'no_such_package'"),
        ("tests.test_doctor:goood", "tests.test_doctor has no 'goood'; nearest are 'good'"),
        ("tests.test_doctor:ONE", "is a list, not a function"),
        ("tests.test_doctor:broken", r"broken\(\) raised ValueError: no weights here"),
        ("tests.test_doctor:half", r"returned a Sequential; it has to return \(module, calls\)"),
        ("tests.test_doctor:swapped", "needs a torch.nn.Module, got list"),
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
