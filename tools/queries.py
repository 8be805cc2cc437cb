"""PromQL selectors that are checked against the definitions of the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.shared.telemetry.metrics import Metric

SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


@dataclass(frozen=True, slots=True)
class Not:
    """All values of a label but this one."""

    value: str


LabelValue = str | tuple[str, ...] | Not


def select(metric: Metric, suffix: str = "", *, scope: str = "", **labels: LabelValue) -> str:
    """Return a selector, e.g. `rollmesh_coordinator_nodes{state=~"suspect|dead"}`. `scope` is a list of matchers that
    comes first.

    Raises ValueError if the metric does not have the label or the value.
    """
    if suffix not in SUFFIXES[metric.kind]:
        raise ValueError(f"{metric.name} is a {metric.kind}, so it has no series {metric.name}{suffix}")
    matchers = [scope] if scope else []
    for label, value in labels.items():
        _check(metric, label, value)
        matchers.append(_matcher(label, value))
    return f"{metric.name}{suffix}" + (f"{{{','.join(matchers)}}}" if matchers else "")


def _check(metric: Metric, label: str, value: LabelValue) -> None:
    if label not in metric.labels:
        raise ValueError(f"{metric.name} does not have the label {label!r}; it has {metric.labels}")
    given = (value.value,) if isinstance(value, Not) else (value,) if isinstance(value, str) else value
    if unknown := [one for one in given if one not in metric.values.get(label, given)]:
        raise ValueError(f"{metric.name} does not have {label}={unknown[0]!r}; its values are {metric.values[label]}")


def _matcher(label: str, value: LabelValue) -> str:
    if isinstance(value, Not):
        return f'{label}!="{value.value}"'
    return f'{label}="{value}"' if isinstance(value, str) else f'{label}=~"{"|".join(value)}"'
