"""Prometheus and OpenTelemetry, read back with their own libraries."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

import hookgraph
from hookgraph.exports.otel import observe
from hookgraph.exports.prometheus import HookgraphCollector
from hookgraph.exports.totals import Totals
from tests import modules

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def scrape(registry: CollectorRegistry) -> Samples:
    text = generate_latest(registry).decode()
    return {key(s.name, **s.labels): s.value for family in parse(text) for s in family.samples}


def collect(reader: InMemoryMetricReader) -> dict[str, Any]:
    data = reader.get_metrics_data()
    assert data is not None
    (resource,) = data.resource_metrics
    (scope,) = resource.scope_metrics
    assert (scope.scope.name, scope.scope.version) == ("hookgraph", hookgraph.__version__)
    return {metric.name: metric for metric in scope.metrics}


def points(metric: Any) -> Samples:
    return {key(metric.name, **point.attributes): point.value for point in metric.data.data_points}


def call(model: torch.nn.Module, times: int) -> None:
    with torch.no_grad():
        for _ in range(times):
            model(torch.ones(2, 4))


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry with the collector, and nothing attached."""
    gc.collect()
    registry = CollectorRegistry(auto_describe=True)
    registry.register(HookgraphCollector())
    assert not [name for name, _ in scrape(registry) if "calls" in name]
    return registry


# -- Prometheus -----------------------------------------------------------------------------------


def test_a_scrape_says_what_stats_say(registry: CollectorRegistry) -> None:
    model = modules.Blocks()
    handle = hookgraph.attach(model, ["blocks.0", "head"])
    call(model, 4)
    model(torch.ones(2, 4))  # with gradients
    stats = handle.stats
    samples = scrape(registry)

    for module in stats.modules:
        counts = {label: samples[key("hookgraph_calls_total", module=module.name, outcome=label)] for label in OUTCOMES}
        assert counts == {label: getattr(module, field) for label, field in OUTCOMES.items()}
        assert samples[key("hookgraph_eager_calls_total", module=module.name, reason="needs_grad")] == 1
        assert samples[key("hookgraph_retained_bytes", module=module.name)] == module.bytes > 0
        assert samples[key("hookgraph_signatures", module=module.name, state="trusted")] == len(module.signatures)
    assert samples[key("hookgraph_pool_bytes")] == stats.pool_bytes


OUTCOMES = {"warmup": "warmups", "capture": "captures", "replay": "replays", "eager": "eager", "error": "errors"}


def test_the_text_follows_both_formats(registry: CollectorRegistry) -> None:
    model = modules.mlp()
    hookgraph.attach(model)
    call(model, 3)
    text = generate_latest(registry).decode()
    types = {family.name: family.type for family in parse(text)}
    assert types == {
        "hookgraph_calls": "counter",
        "hookgraph_eager_calls": "counter",
        "hookgraph_retained_bytes": "gauge",
        "hookgraph_pool_bytes": "gauge",
        "hookgraph_signatures": "gauge",
    }
    assert all(family.documentation.endswith(".") for family in parse(text))
    strict = list(parse_openmetrics(generate_openmetrics(registry).decode()))  # raises where names or units are off
    assert {family.name for family in strict} == set(types)


def test_a_registry_knows_the_names_without_a_scrape(registry: CollectorRegistry) -> None:
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(HookgraphCollector())


def test_modules_of_one_name_are_summed(registry: CollectorRegistry) -> None:
    models = [modules.mlp(), modules.mlp()]
    for times, model in enumerate(models, start=3):
        hookgraph.attach(model)
        call(model, times)
    samples = scrape(registry)
    assert samples[key("hookgraph_calls_total", module="Sequential", outcome="replay")] == 1 + 2
    assert samples[key("hookgraph_signatures", module="Sequential", state="trusted")] == 2


@pytest.mark.parametrize("how", ["detach", "forget"])
def test_counters_do_not_fall_when_an_attachment_goes(registry: CollectorRegistry, how: str) -> None:
    one, other = modules.mlp(), modules.mlp()
    for model in (one, other):
        hookgraph.attach.__wrapped__(model)  # the fixture would keep it alive
        call(model, 3)
    replays = key("hookgraph_calls_total", module="Sequential", outcome="replay")
    before = scrape(registry)
    assert before[replays] == 2

    call(one, 5)  # between the scrapes, and gone before the next
    if how == "detach":
        hookgraph.detach(one)
    del one, model
    gc.collect()
    after = scrape(registry)
    assert after[replays] == 2 + 5
    counters = [name for name in before if name[0].endswith("_total")]
    assert all(after[name] >= before[name] for name in counters)
    assert (
        after[key("hookgraph_retained_bytes", module="Sequential")] * 2
        == before[key("hookgraph_retained_bytes", module="Sequential")]
    )

    call(other, 1)
    assert scrape(registry)[replays] == 2 + 5 + 1


def test_totals_keep_no_module_alive() -> None:
    totals = Totals()
    model = modules.mlp()
    hookgraph.attach.__wrapped__(model)  # the fixture would keep it alive
    totals.read()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# -- OpenTelemetry --------------------------------------------------------------------------------


def test_instruments_say_what_stats_say() -> None:
    gc.collect()
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    observe(provider)
    model = modules.mlp()
    handle = hookgraph.attach(model)
    call(model, 4)
    model(torch.ones(2, 4))
    stats = handle.stats
    metrics = collect(reader)

    name = {"hookgraph.module": "Sequential"}
    assert points(metrics["hookgraph.calls"]) == {
        key("hookgraph.calls", **name, **{"hookgraph.outcome": label}): getattr(stats, field)
        for label, field in OUTCOMES.items()
    }
    assert points(metrics["hookgraph.eager_calls"]) == {
        key("hookgraph.eager_calls", **name, **{"hookgraph.reason": "needs_grad"}): 1
    }
    assert points(metrics["hookgraph.retained"]) == {key("hookgraph.retained", **name): stats.modules[0].bytes}
    assert points(metrics["hookgraph.pool"]) == {key("hookgraph.pool"): stats.pool_bytes}
    assert points(metrics["hookgraph.signatures"]) == {
        key("hookgraph.signatures", **name, **{"hookgraph.state": stats.modules[0].signatures[0].state}): 1
    }
    monotonic = {metric.name: metric.data.is_monotonic for metric in metrics.values()}
    assert monotonic == {
        "hookgraph.calls": True,
        "hookgraph.eager_calls": True,
        "hookgraph.retained": False,
        "hookgraph.pool": False,
        "hookgraph.signatures": False,
    }
    assert {metric.name: metric.unit for metric in metrics.values()} == {
        "hookgraph.calls": "{call}",
        "hookgraph.eager_calls": "{call}",
        "hookgraph.retained": "By",
        "hookgraph.pool": "By",
        "hookgraph.signatures": "{signature}",
    }

    hookgraph.detach(model)
    assert points(collect(reader)["hookgraph.calls"]) == points(metrics["hookgraph.calls"])
    provider.shutdown()
