"""Observable instruments for OpenTelemetry: ``pip install 'hookgraph[otel]'``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.metrics import Observation, get_meter

import hookgraph
from hookgraph.exports.totals import Totals, retained_bytes, signatures

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.metrics import CallbackOptions, MeterProvider


def observe(meter_provider: MeterProvider | None = None) -> None:
    """Offer the counts of everything attached in the process to a meter, which reads them when it collects.

    Call it once for each provider.  Modules of one name are summed.  Counters keep what a detached
    attachment counted; the others are of what is attached.

    Args:
        meter_provider: the provider to use; None takes the global one.
    """
    totals = Totals()

    def calls(_: CallbackOptions) -> Iterable[Observation]:
        for module, total in totals.read().items():
            for outcome, count in total.calls.items():
                yield Observation(count, {"hookgraph.module": module, "hookgraph.outcome": outcome})

    def eager_calls(_: CallbackOptions) -> Iterable[Observation]:
        for module, total in totals.read().items():
            for reason, count in total.eager_calls.items():
                yield Observation(count, {"hookgraph.module": module, "hookgraph.reason": reason})

    def retained(_: CallbackOptions) -> Iterable[Observation]:
        for module, size in retained_bytes(hookgraph.stats()).items():
            yield Observation(size, {"hookgraph.module": module})

    def pool(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(hookgraph.stats().pool_bytes)

    def states(_: CallbackOptions) -> Iterable[Observation]:
        for (module, state), count in signatures(hookgraph.stats()).items():
            yield Observation(count, {"hookgraph.module": module, "hookgraph.state": state})

    meter = get_meter("hookgraph", hookgraph.__version__, meter_provider)
    meter.create_observable_counter("hookgraph.calls", [calls], "{call}", "Calls of attached modules.")
    meter.create_observable_counter("hookgraph.eager_calls", [eager_calls], "{call}", "Calls that ran eager.")
    meter.create_observable_up_down_counter("hookgraph.retained", [retained], "By", "Memory that graphs retain.")
    meter.create_observable_up_down_counter(
        "hookgraph.pool", [pool], "By", "Memory that graphs of several modules share."
    )
    meter.create_observable_up_down_counter("hookgraph.signatures", [states], "{signature}", "Signatures by state.")
