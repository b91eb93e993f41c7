"""``bench``: times of eager and attached in turn, parity, and a verdict that a user can act on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookgraph
from hookgraph import bench, cli
from hookgraph.benchmark import Benchmark, Timing
from tests.modules import Does, mlp
from tests.residue import Snapshot


def x(rows: int = 2) -> torch.Tensor:
    return torch.ones(rows, 4)


def small() -> tuple[nn.Module, list[Any]]:
    return mlp(), [((x(),), {}), ((x(3),), {})]


def reads_back() -> tuple[nn.Module, list[Any]]:
    return Does(lambda m, v: m.linear(v) * v.sum().item()), [((x(),), {})]


def test_every_variant_is_timed_and_nothing_is_left() -> None:
    module, calls = small()
    before = Snapshot(module)
    result = bench.measure(module, calls, rounds=4)
    assert not hookgraph.is_attached(module)
    assert not before.changes(Snapshot(module))
    assert [timing.name for timing in result.timings] == ["eager", "attached"]
    for timing in result.timings:
        assert 0 < timing.wall_low_ms <= timing.wall_ms <= timing.wall_high_ms
        assert timing.parity == "bitwise"
    assert (result.replayed, result.reasons, result.calls) == (1.0, {}, 2)
    assert result.retained_bytes > 0


def test_a_forward_that_stays_eager_is_told() -> None:
    with pytest.warns(hookgraph.HookgraphWarning, match="read_back"):
        result = bench.measure(*reads_back(), rounds=1)
    assert result.verdict == "nothing was replayed: read_back; ask the doctor"


def test_a_forward_that_writes_its_arguments_is_compared_by_them() -> None:
    def forward(m: Any, v: torch.Tensor, bag: list[Any]) -> torch.Tensor:
        bag.append(v.add_(1))
        return m.linear(v)

    v, bag = x(), [x()]
    result = bench.measure(Does(forward), [((v, bag), {})], rounds=2)
    assert result.agrees
    assert torch.equal(v, x())
    assert len(bag) == 1


def _result(eager: float, attached: float, parity: str = "bitwise", replayed: float = 1.0) -> Benchmark:
    timings = tuple(
        Timing(name=name, wall_ms=ms, wall_low_ms=ms, wall_high_ms=ms, host_ms=ms, parity=parity)
        for name, ms in (("eager", eager), ("attached", attached))
    )
    return Benchmark(
        device="cpu", device_name="CPU", calls=1, rounds=1, timings=timings, replayed=replayed, reasons={},
        retained_bytes=1 << 20,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (_result(3.0, 1.0), "worth it: 3.00 times as fast as eager, for 1.0 MiB"),
        (_result(1.02, 1.0), "not worth it: 1.02 times as fast as eager, the device is busy already"),
        (_result(1.0, 2.0), "not worth it: 2.00 times slower than eager"),
        (_result(3.0, 1.0, replayed=0.0), "nothing was replayed: no call repeats; ask the doctor"),
        (_result(3.0, 1.0, parity="output differs by 1"), "WRONG: output differs by 1; report it"),
    ],
)
def test_the_verdict(result: Benchmark, words: str) -> None:
    assert result.verdict == words


def test_the_price_of_a_millisecond() -> None:
    assert _result(3.0, 1.0).bytes_per_ms_saved == (1 << 20) / 2
    assert _result(1.0, 1.0).bytes_per_ms_saved is None


def test_the_table() -> None:
    assert str(_result(3.0, 1.5)).splitlines() == [
        "benchmark",
        "",
        "  variant    wall ms    10 to 90 %   host ms   times as fast   parity",
        " ──────────────────────────────────────────────────────────────────────",
        "  eager        3.000   3.000–3.000     3.000            1.00   bitwise",
        "  attached     1.500   1.500–1.500     1.500            2.00   bitwise",
        "",
        "CPU, medians per call of 1 call in 1 round",
        "100% of the attached calls replayed, 1.00 MiB retained",
        "worth it: 2.00 times as fast as eager, for 1.0 MiB",
        "on a CPU the tape rehearses what a GPU would do; it does not promise speed",
    ]


def test_compiled_variants_are_compared_too() -> None:
    torch._dynamo.reset()
    module = Does(lambda m, v: m.linear(v).relu())
    # Inductor needs a C++ compiler; the eager compiler backend shows that the variant is made and compared.
    result = bench.measure(module, [((x(),), {})], rounds=1, compiled="eager")
    assert [timing.name for timing in result.timings] == ["eager", "attached", "compiled"]
    assert result.agrees


def test_an_attachment_of_the_user_s_own_is_left_alone() -> None:
    module, calls = small()
    with hookgraph.attach(module) as handle:
        with pytest.raises(hookgraph.HookgraphError, match=r"attached to this module already; detach\(\)"):
            bench.measure(module, calls)
        assert handle.attached


def test_buffers_and_random_numbers_are_put_back() -> None:
    module = Does(lambda m, v: m.linear(v) + m.count.add_(1), count=torch.zeros(1))
    state = torch.get_rng_state()
    assert bench.measure(module, [((x(),), {})], rounds=2).agrees
    assert module.count.item() == 0
    assert torch.equal(state, torch.get_rng_state())


def test_nothing_to_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 calls in 3 rounds leave nothing to time"):
        bench.measure(mlp(), [], rounds=3)


# -- the command ------------------------------------------------------------------------------------


def _run(*arguments: str) -> int:
    return cli.main(["bench", *arguments])


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--module", "tests.test_bench:small", "--rounds", "2") == 0
    out = capsys.readouterr().out
    assert "times as fast" in out
    assert "100% of the attached calls replayed" in out


def test_the_command_gives_json_and_a_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an environment with the notebook extra would run it")
    plot = tmp_path / "times.svg"
    assert _run("--module", "tests.test_bench:small", "--rounds", "2", "--json", "--plot", str(plot)) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["timings"][1]["parity"] == "bitwise"
    assert data["speedup"] == pytest.approx(data["timings"][0]["wall_ms"] / data["timings"][1]["wall_ms"])
    assert plot.read_text().startswith("<?xml")


def failing() -> tuple[nn.Module, list[Any]]:
    return mlp(), [((torch.ones(2, 5),), {})]


def nothing() -> tuple[nn.Module, list[Any]]:
    return mlp(), []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--module", "tests.test_bench:nothing"], "0 calls in 20 rounds"),
        (["--module", "tests.test_bench:absent"], "has no 'absent'"),
        (
            ["--module", "tests.test_bench:failing"],
            "calls[0]: the model itself raises RuntimeError: mat1 and mat2 shapes",
        ),
        (
            ["--module", "tests.test_bench:small", "--rounds", "1", "--compile", "nosuch"],
            "compiled='nosuch': InvalidBackend",
        ),
        (["--module", "tests.test_bench:small", "--rounds", "1", "--plot", "no/such/folder/x.png"], "no/such/folder"),
    ],
)
def test_bad_use_is_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(*arguments) == 2
    assert words in capsys.readouterr().err


def test_a_difference_is_status_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong: Callable[..., Benchmark] = lambda *_, **__: _result(2.0, 1.0, parity="output differs by 1")  # noqa: E731
    monkeypatch.setattr(bench, "measure", wrong)  # a module that replays wrongly does not exist
    assert _run("--module", "tests.test_bench:small") == 1
    assert "WRONG" in capsys.readouterr().out
