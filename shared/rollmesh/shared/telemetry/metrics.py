"""Metrics by name, independent of the exporter. If metrics are off, `count` and `observe` return immediately.

Events are counted where they happen. State of a service is read at a scrape (a `Source`), which costs
nothing in between. Every series carries the label `node`: the part it is about, from the caller's `log_context`.
Names follow Prometheus' rules: base units, `_total` for counters; docs/observability.md lists them all, by test.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rollmesh.shared.telemetry.logs import context_id

LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Buckets for waits and calls, seconds."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A family of series. Create it with `counter`, `gauge` or `histogram`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    """Labels in addition to `node`, which every series has."""
    buckets: tuple[float, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    """All values of a label that has a fixed set of them. Dashboards and alerts may select only these."""


def counter(name: str, help_: str, *labels: str, **values: Iterable[str]) -> Metric:
    """A counter. It decreases only at a restart. Its name ends in _total. `values` are the fixed values of labels."""
    return Metric(name, "counter", help_, labels, values=_fixed(labels, values))


def gauge(name: str, help_: str, *labels: str, **values: Iterable[str]) -> Metric:
    """A current value. `values` are the fixed values of labels."""
    return Metric(name, "gauge", help_, labels, values=_fixed(labels, values))


def _fixed(labels: tuple[str, ...], values: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    assert values.keys() <= set(labels), (labels, values)
    return {label: tuple(of_label) for label, of_label in values.items()}


def histogram(name: str, help_: str, *labels: str, buckets: tuple[float, ...] = LATENCY_S) -> Metric:
    """A distribution by upper bounds."""
    return Metric(name, "histogram", help_, labels, buckets)


@dataclass(frozen=True, slots=True)
class Reading:
    """A current value; for a histogram, the number of observations of each value."""

    metric: Metric
    value: float | Mapping[int, int]
    labels: tuple[str, ...] = ()


Source = Callable[[], Awaitable[Iterable[Reading]]]
"""Reads a node, on the event loop."""


class Meter(Protocol):
    """The receiver of metrics."""

    def count(self, metric: Metric, node: str, labels: tuple[str, ...], amount: float) -> None: ...

    def observe(self, metric: Metric, node: str, labels: tuple[str, ...], value: float) -> None: ...


_meter: Meter | None = None


def use(meter: Meter | None) -> None:
    """Send metrics of this process to `meter` from now on."""
    global _meter
    _meter = meter


def is_on() -> bool:
    return _meter is not None


def count(metric: Metric, *labels: str, amount: float = 1.0) -> None:
    """Adds to a counter."""
    if _meter is not None:
        _meter.count(metric, context_id("node"), labels, amount)


def observe(metric: Metric, value: float, *labels: str, node: str = "") -> None:
    """Adds to a histogram. `node` where the caller has no context, as in callbacks of a thread."""
    if _meter is not None:
        _meter.observe(metric, node or context_id("node"), labels, value)
