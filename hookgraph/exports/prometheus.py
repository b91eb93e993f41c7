"""A collector for ``prometheus_client``: ``pip install 'hookgraph[prometheus]'``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

import hookgraph
from hookgraph.exports.totals import Totals, retained_bytes, signatures

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric


class HookgraphCollector(Collector):
    """Give the counts of everything attached in the process, read when Prometheus scrapes.

    Register it once: ``prometheus_client.REGISTRY.register(HookgraphCollector())``.  Modules of one
    name are summed.  Counters keep what a detached attachment counted; gauges are of what is attached.
    """

    def __init__(self) -> None:
        self._totals = Totals()

    def describe(self) -> Iterable[Metric]:
        """Give the metrics without samples, which tells a registry their names."""
        return self._families()

    def collect(self) -> Iterable[Metric]:
        """Give the metrics with their samples as of now."""
        calls, eager_calls, retained, pool, states = families = self._families()
        for module, total in self._totals.read().items():
            for outcome, count in total.calls.items():
                calls.add_metric([module, outcome], count)
            for reason, count in total.eager_calls.items():
                eager_calls.add_metric([module, reason], count)
        stats = hookgraph.stats()
        for module, size in retained_bytes(stats).items():
            retained.add_metric([module], size)
        pool.add_metric([], stats.pool_bytes)
        for (module, state), count in signatures(stats).items():
            states.add_metric([module, state], count)
        return families

    @staticmethod
    def _families() -> tuple[
        CounterMetricFamily, CounterMetricFamily, GaugeMetricFamily, GaugeMetricFamily, GaugeMetricFamily
    ]:
        return (
            CounterMetricFamily("hookgraph_calls", "Calls of attached modules.", labels=["module", "outcome"]),
            CounterMetricFamily("hookgraph_eager_calls", "Calls that ran eager.", labels=["module", "reason"]),
            GaugeMetricFamily("hookgraph_retained_bytes", "Memory that graphs retain.", labels=["module"]),
            GaugeMetricFamily("hookgraph_pool_bytes", "Memory that graphs of several modules share."),
            GaugeMetricFamily("hookgraph_signatures", "Signatures by state.", labels=["module", "state"]),
        )
