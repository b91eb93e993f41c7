"""Stats: sums, balance, and the way to JSON and back."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest

from hookgraph.errors import HookgraphError
from hookgraph.stats import STATS_SCHEMA, ModuleStats, SignatureStats, Stats


def signature(**changes: object) -> SignatureStats:
    plain = SignatureStats(
        summary="x f32 (2,3)",
        state="trusted",
        calls=7,
        warmups=1,
        captures=1,
        replays=5,
        eager=0,
        errors=0,
        input_bytes=24,
        output_bytes=48,
        capture_ns=1_500_000,
        nodes=12,
    )
    return replace(plain, **changes)


def module(**changes: object) -> ModuleStats:
    plain = ModuleStats(
        name="transformer",
        class_name="Transformer",
        backend="tape",
        calls=10,
        warmups=1,
        captures=1,
        replays=5,
        eager=3,
        errors=0,
        reasons={"limit": 2, "training": 1},
        details={"limit": {"x f32 (4,3)": 2}, "training": {"": 1}},
        invalidations=1,
        bytes=100,
        signatures=(signature(),),
        unretained=(("x f32 (4,3)", 2),),
        varied={"kwargs['x']": 2},
    )
    return replace(plain, **changes)


def test_of_sums_the_modules_and_adds_the_shared_pool() -> None:
    stats = Stats.of([module(), module(name="vae", eager=1, calls=8, reasons={"training": 1}, errors=0)], pool_bytes=7)

    assert (stats.calls, stats.warmups, stats.captures, stats.replays, stats.eager, stats.errors) == (
        18,
        2,
        2,
        10,
        4,
        0,
    )
    assert stats.reasons == {"limit": 2, "training": 2}
    assert (stats.bytes, stats.pool_bytes) == (207, 7)
    assert [m.name for m in stats.modules] == ["transformer", "vae"]
    assert stats.balanced


def test_reasons_come_with_the_most_frequent_first() -> None:
    stats = Stats.of([module(), module(reasons={"training": 3})])
    assert list(stats.reasons.items()) == [("training", 4), ("limit", 2)]


def test_nothing_attached_balances() -> None:
    stats = Stats.of([])
    assert stats.calls == stats.bytes == 0
    assert stats.balanced


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"calls": 11}, id="a call without an outcome"),
        pytest.param({"errors": 1}, id="a call with two outcomes"),
        pytest.param({"reasons": {"limit": 2}}, id="eager without a reason"),
    ],
)
def test_what_does_not_balance_says_so(changes: dict[str, object]) -> None:
    assert not module(**changes).balanced
    assert not Stats.of([module(**changes)]).balanced


def test_two_mistakes_that_cancel_out_do_not_balance() -> None:
    assert not Stats.of([module(calls=11), module(calls=9)]).balanced


def test_to_dict_is_json_and_comes_back_equal() -> None:
    stats = Stats.of([module(), module(name="")], pool_bytes=3)
    data = stats.to_dict()

    assert data["schema"] == STATS_SCHEMA == 3
    assert json.loads(json.dumps(data)) == data
    assert Stats.from_dict(data) == stats
    assert Stats.from_json(stats.to_json(indent=2)) == stats


def test_to_dict_gives_a_copy() -> None:
    stats = Stats.of([module()])
    data = stats.to_dict()
    data["reasons"].clear()
    data["modules"][0]["details"]["limit"].clear()
    assert stats == Stats.of([module()])


def test_fields_of_the_schema() -> None:
    """Another set of fields is another schema: raise STATS_SCHEMA, and this list."""
    data = Stats.of([module()]).to_dict()
    counts = ["calls", "warmups", "captures", "replays", "eager", "errors"]
    assert list(data) == ["schema", *counts, "reasons", "bytes", "pool_bytes", "modules"]
    assert list(data["modules"][0]) == [
        *["name", "class_name", "backend"], *counts, *["reasons", "details", "invalidations", "bytes", "signatures"],
        *["unretained", "varied"],
    ]  # fmt: skip
    assert list(data["modules"][0]["signatures"][0]) == [
        *["summary", "state"], *counts, *["detail", "input_bytes", "output_bytes", "capture_ns", "nodes"],
        *["eager_ms", "replay_ms", "verdict"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param({"schema": 4}, r"cannot read schema 4, this version reads 3", id="a later schema"),
        pytest.param({"schema": None}, r"cannot read schema None", id="no schema"),
        pytest.param({"calls": "many"}, r"calls is 'many', not a whole number", id="a word for a count"),
        pytest.param({"speed": 1}, r"not what to_dict\(\) gives.*speed", id="an unknown field"),
        pytest.param({"modules": [{"name": "x"}]}, r"not what to_dict\(\) gives.*signatures", id="a module cut short"),
    ],
)
def test_other_data_are_refused(change: dict[str, object], match: str) -> None:
    data = Stats.of([module()]).to_dict() | change
    with pytest.raises(HookgraphError, match=match):
        Stats.from_dict(data)


@pytest.mark.parametrize(("text", "match"), [("{", "not JSON"), ("[]", "object is expected, not a list")])
def test_other_text_is_refused(text: str, match: str) -> None:
    with pytest.raises(HookgraphError, match=match):
        Stats.from_json(text)


def test_repr_is_one_line() -> None:
    stats = Stats.of([module(bytes=3 << 20)])
    assert repr(stats) == (
        "Stats(10 calls = 1 warmups + 1 captures + 5 replays + 3 eager; 1 module, 1 signature, 3.00 MiB)"
    )
    assert repr(stats.modules[0]) == (
        "ModuleStats(transformer: 10 calls = 1 warmups + 1 captures + 5 replays + 3 eager; 1 signature, 3.00 MiB)"
    )


def test_stats_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError, match="calls"):
        Stats.of([]).calls = 1


def test_reading_numbers_loads_no_rich() -> None:
    """A service that only exports counts does not pay for tables."""
    code = (
        "import sys\n"
        "from hookgraph.stats import Stats; repr(Stats.of([])); Stats.of([]).to_json()\n"
        "assert 'hookgraph.tables' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_frame_has_a_row_a_signature() -> None:
    stats = Stats.of([module(), module(name="", signatures=(signature(), signature(summary="y", calls=9)))])
    shown = stats.to_frame()
    assert list(shown.columns) == ["module", *SignatureStats.__dataclass_fields__, "speedup"]
    assert list(shown["module"]) == ["transformer", "Transformer", "Transformer"]
    assert list(shown["summary"]) == ["x f32 (2,3)", "x f32 (2,3)", "y"]
    assert list(shown["calls"]) == [7, 7, 9]
    assert list(shown["capture_ns"]) == [1_500_000] * 3


def test_frame_has_a_row_a_module() -> None:
    shown = Stats.of([module(), module(name="vae", replays=6, eager=2)]).to_frame("modules")
    assert list(shown["module"]) == ["transformer", "vae"]
    assert list(shown["replays"]) == [5, 6]
    assert list(shown["bytes"]) == [100, 100]


@pytest.mark.parametrize("rows", ["signatures", "modules"])
def test_frame_of_nothing_has_its_columns(rows: str) -> None:
    shown = Stats.of([]).to_frame(rows)
    assert len(shown) == 0
    assert {"module", "calls", "replays"} <= set(shown.columns)


def test_frame_of_other_rows_is_refused() -> None:
    with pytest.raises(HookgraphError, match=r"rows='reasons'.*'signatures' or 'modules'"):
        Stats.of([]).to_frame("reasons")


def test_frame_without_pandas_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(HookgraphError, match=r"pip install 'hookgraph\[notebook\]'"):
        Stats.of([]).to_frame()
