"""Recordings: one record for each call, bounded, from any thread; and the same calls for a profiler."""

from __future__ import annotations

import gzip
import itertools
import json
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import hookgraph
from hookgraph import trace
from hookgraph.counters import Outcome
from hookgraph.recording import CallRecord, Recording
from tests import modules
from tests.parity import Twins


def outcomes(recording: Recording) -> list[str]:
    return [r.outcome.label + (f":{r.reason}" if r.reason else "") for r in recording.records]


def record(**changes: Any) -> CallRecord:
    plain: dict[str, Any] = {
        "start_ns": 1_000, "duration_ns": 500, "module": "blocks.0", "outcome": Outcome.REPLAY, "reason": None,
        "signature": "x float32[2]", "signature_id": 7, "thread": 1,
    }  # fmt: skip
    return CallRecord(**plain | changes)


class Raises(nn.Module):
    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        if fail:
            raise ValueError("asked to")
        return x + 1


# -- what is recorded -----------------------------------------------------------------------------


def test_each_call_has_one_record_that_agrees_with_the_counts() -> None:
    with Twins.build(modules.mlp, max_graphs=1) as twins:
        with twins.handle.recording() as recording, torch.no_grad():
            for width in (2, 2, 2, 2):
                twins(torch.ones(width, 4))
            with hookgraph.disabled():
                twins(torch.ones(2, 4))
            with pytest.warns(hookgraph.HookgraphWarning, match="limit"):
                twins(torch.ones(3, 4))
        twins(torch.ones(2, 4))  # after the block

        assert outcomes(recording) == ["warmup", "capture", "replay", "replay", "eager:disabled", "eager:limit"]
        assert recording.calls == 6
        assert [r.signature for r in recording.records[:4]] == ["args[0] float32[2, 4]"] * 4
        assert recording.records[4].signature == ""  # stood aside before the arguments were looked at
        assert recording.records[5].signature == "args[0] float32[3, 4]"
        assert len({r.signature_id for r in recording.records[:4]}) == 1
        assert recording.records[5].signature_id not in (None, recording.records[0].signature_id)
        assert {r.module for r in recording.records} == {"Sequential"}
        assert {r.thread for r in recording.records} == {threading.get_ident()}


def test_times_follow_each_other() -> None:
    model = modules.mlp()
    handle = hookgraph.attach(model)
    with torch.no_grad(), handle.recording() as recording:
        for _ in range(4):
            model(torch.ones(2, 4))
    records = recording.records
    assert all(r.duration_ns is not None and r.duration_ns > 0 for r in records)
    assert records[0].start_ns >= 0
    assert all(b.start_ns >= a.start_ns + (a.duration_ns or 0) for a, b in itertools.pairwise(records))


def test_an_error_is_recorded_and_raised() -> None:
    model = Raises().eval()
    handle = hookgraph.attach(model)
    with handle.recording() as recording, pytest.raises(ValueError, match="asked to"):
        model(torch.ones(2), fail=True)
    assert outcomes(recording) == ["error"]


def test_forward_called_directly_is_recorded() -> None:
    model = modules.mlp()
    handle = hookgraph.attach(model)
    with torch.no_grad(), handle.recording() as recording:
        model.forward(torch.ones(2, 4))
    assert outcomes(recording) == ["warmup"]


def test_a_call_that_another_library_kept_has_no_duration() -> None:
    model = modules.mlp()
    handle = hookgraph.attach(model)
    ours = model.forward
    with handle.recording() as recording:
        model.forward = lambda x: x
        model(torch.ones(2, 4))
        model.forward = ours
    (kept,) = recording.records
    assert (kept.outcome, kept.reason, kept.duration_ns) == (Outcome.EAGER, "displaced", None)
    assert handle.stats.reasons == {"displaced": 1}


def test_a_call_for_a_replica_is_recorded() -> None:
    model = modules.mlp()
    handle = hookgraph.attach(model)
    with handle.recording() as recording:
        model._replicate_for_data_parallel()(torch.ones(2, 4))
    assert handle.stats.reasons == {"foreign_module": 1}
    assert outcomes(recording) == ["eager:foreign_module"]


def test_two_recordings_at_once_have_their_own_calls() -> None:
    model = modules.mlp()
    handle = hookgraph.attach(model)
    with torch.no_grad(), handle.recording() as long:
        model(torch.ones(2, 4))
        with handle.recording() as short:
            model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    assert outcomes(long) == ["warmup", "capture", "replay"]
    assert outcomes(short) == ["capture"]


def test_an_attachment_that_is_switched_off_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKGRAPH_DISABLE", "1")
    model = modules.mlp()
    with hookgraph.attach(model).recording() as recording:
        model(torch.ones(2, 4))
    assert recording.records == ()
    assert str(recording) == "hookgraph: nothing is recorded yet."


# -- bounds ---------------------------------------------------------------------------------------


def test_the_oldest_go_first() -> None:
    model = modules.mlp()
    handle = hookgraph.attach(model)
    with torch.no_grad(), handle.recording(most=2) as recording:
        for _ in range(5):
            model(torch.ones(2, 4))
    assert outcomes(recording) == ["replay", "replay"]
    assert (recording.calls, recording.dropped) == (5, 3)
    assert repr(recording) == "<hookgraph.Recording of 5 calls: 2 replays; 3 dropped>"
    assert "The last 2 of 5 calls." in str(recording)


def test_a_bound_of_nothing_is_refused() -> None:
    handle = hookgraph.attach(modules.mlp())
    with pytest.raises(hookgraph.HookgraphError, match=r"recording\(most=0\).*at least 1"), handle.recording(most=0):
        pass


def test_it_holds_no_tensor() -> None:
    model = modules.mlp()
    handle = hookgraph.attach(model)
    with torch.no_grad(), handle.recording() as recording:
        for _ in range(3):
            model(torch.ones(2, 4))
    assert {type(getattr(r, name)) for r in recording.records for name in CallRecord.__dataclass_fields__} <= {
        int, str, Outcome, type(None),
    }  # fmt: skip


def test_many_threads_lose_no_record() -> None:
    threads, calls = 6, 40
    model = modules.mlp()
    handle = hookgraph.attach(model)

    def work() -> None:
        with torch.no_grad():
            for _ in range(calls):
                model(torch.ones(2, 4))

    with handle.recording() as recording:
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        seen = 0
        while any(worker.is_alive() for worker in workers):
            now = len(recording.records)  # reading while others write
            assert now >= seen
            seen = now
        for worker in workers:
            worker.join()
    stats = handle.stats
    assert recording.calls == threads * calls == stats.calls
    counted = Counter(r.outcome.value for r in recording.records)
    assert {name: getattr(stats, name) for name in counted} == counted


def test_nobody_pays_while_nobody_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a recording and a profiler nothing of this is even made."""
    monkeypatch.setattr("hookgraph.hooks.Observed", None)
    model = modules.mlp()
    handle = hookgraph.attach(model)
    with torch.no_grad():
        model(torch.ones(2, 4))
        with handle.recording(), pytest.raises(TypeError, match="NoneType"):
            model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    assert (handle.stats.warmups, handle.stats.captures) == (1, 1)


# -- the same as data -----------------------------------------------------------------------------


def test_frame_has_a_row_a_call() -> None:
    recording = Recording(10)
    recording.add("blocks.0", Outcome.REPLAY, None, started=1)
    recording.add("blocks.1", Outcome.ERROR, None)
    shown = recording.to_frame()
    assert list(shown.columns) == list(CallRecord.__dataclass_fields__)
    assert list(shown["outcome"]) == ["replay", "error"]
    assert list(shown["module"]) == ["blocks.0", "blocks.1"]
    assert shown["duration_ns"].isna().tolist() == [False, True]
    assert isinstance(Recording(1).to_frame(), pandas.DataFrame)


def load(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_chrome_trace_of_real_calls(tmp_path: Path, name: str) -> None:
    model = modules.Blocks()
    handle = hookgraph.attach(model, "blocks.*")
    with torch.no_grad(), handle.recording() as recording:
        for _ in range(3):
            model(torch.ones(2, 4))
    recording.export_chrome_trace(tmp_path / name)
    loaded = load(tmp_path / name)

    tracks = {e["tid"]: e["args"]["name"] for e in loaded["traceEvents"] if e["name"] == "thread_name"}
    spans = [e for e in loaded["traceEvents"] if e["ph"] == "X"]
    assert sorted(tracks.values()) == ["blocks.0", "blocks.1"]
    assert loaded["baseTimeNanoseconds"] == recording.began_ns
    assert [(tracks[e["tid"]], e["name"]) for e in spans] == [
        (block, outcome) for outcome in ("warmup", "capture", "replay") for block in ("blocks.0", "blocks.1")
    ]
    for span, kept in zip(spans, recording.records, strict=True):
        assert span["ts"] == pytest.approx(kept.start_ns / 1e3)
        assert span["dur"] == pytest.approx((kept.duration_ns or 0) / 1e3)
        assert span["args"] == {"module": kept.module, "signature": "args[0] float32[2, 4]"}


def test_chrome_trace_keeps_threads_and_instants_apart() -> None:
    eager = {"outcome": Outcome.EAGER, "reason": "displaced", "duration_ns": None}
    events = trace.events([record(), record(thread=2), record(module="head"), record(**eager)])
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {1: "blocks.0", 2: "blocks.0 (thread 2)", 3: "head"}
    assert [(e["ph"], e["tid"]) for e in events if e["ph"] in "Xi"] == [("X", 1), ("X", 2), ("X", 3), ("i", 1)]
    assert "dur" not in events[-1]
    assert events[-1]["args"]["reason"] == "displaced"


# -- profilers ------------------------------------------------------------------------------------


def spans(profiled: Any) -> list[str]:
    return [e.name.removeprefix("hookgraph::") for e in profiled.events() if e.name.startswith("hookgraph::")]


def test_a_profiler_sees_spans_and_changes_nothing() -> None:
    with Twins.build(modules.mlp) as twins, torch.no_grad():
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True, with_modules=True) as seen:
            for value in range(5):
                twins(torch.full((2, 4), float(value)))
            with hookgraph.disabled():
                twins(torch.ones(2, 4))
        twins(torch.ones(2, 4))
        assert twins.outcomes == ["warmups", "captures", "replays", "replays", "replays", "eager:disabled", "replays"]
    assert spans(seen) == [
        *["call Sequential", "warmup Sequential"],
        *["call Sequential", "capture Sequential"],
        *["call Sequential", "verify Sequential"],  # compared with eager, as verify=1 asks
        *["call Sequential", "replay Sequential"],
        *["call Sequential", "replay Sequential"],
        *["call Sequential", "eager Sequential"],
    ]


def test_a_real_loop_that_is_watched_gives_what_eager_gives() -> None:
    pytest.importorskip("diffusers", reason="needs diffusers: pip install 'hookgraph[models]'")
    from hookgraph.cli import qwen_image
    from hookgraph.cli.sameness import same_bits

    job = qwen_image.build(torch.device("cpu"), steps=6)
    eager = qwen_image.denoise(job, lambda step: None)
    handle = hookgraph.attach(job.transformer)
    with handle.recording() as recording, profile(activities=[ProfilerActivity.CPU]) as seen:
        watched = qwen_image.denoise(job, lambda step: None)

    assert all(map(same_bits, eager.outputs, watched.outputs))
    assert same_bits(eager.latents, watched.latents)
    stats = handle.stats
    assert recording.calls == stats.calls == 12
    assert Counter(r.outcome.value for r in recording.records) == {
        name: count for name in ("warmups", "captures", "replays") if (count := getattr(stats, name))
    }
    assert len({r.signature_id for r in recording.records}) == 2  # two prompts of different lengths
    assert spans(seen).count("call QwenImageTransformer2DModel") == 12
    replays = [name for name in spans(seen) if name.startswith(("replay", "verify"))]
    assert len(replays) == stats.replays > 0


def test_a_span_of_an_eager_call_holds_its_operators() -> None:
    model = modules.mlp()
    hookgraph.attach(model)
    with torch.no_grad(), hookgraph.disabled(), profile(activities=[ProfilerActivity.CPU]) as seen:
        model(torch.ones(2, 4))
    (span,) = [e for e in seen.events() if e.name == "hookgraph::eager Sequential"]
    assert {"aten::linear", "aten::gelu"} <= {child.name for child in span.cpu_children}


def test_spans_close_when_a_call_fails() -> None:
    model = Raises().eval()
    hookgraph.attach(model)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        with pytest.raises(ValueError, match="asked to"):
            model(torch.ones(2), fail=True)
        torch.arange(3)
    assert spans(seen)[0] == "call Raises"
    assert {e.cpu_parent for e in seen.events() if e.name == "aten::arange"} & {None}


def test_nvtx_without_a_device_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    monkeypatch.setenv("HOOKGRAPH_NVTX", "1")
    model = modules.mlp()
    handle = hookgraph.attach(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 4))
    assert handle.stats.warmups == 1
