"""Dashboards and alert rules are current, and every query below deploy/, and in its documentation, names metrics and
label values that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from rollmesh.mesh.observe import catalog
from rollmesh.services.coordinator.metrics import NODES, STALENESS, STEP
from tools import alerts, dashboards
from tools.dashboards import DASHBOARDS, Dashboard, to_json
from tools.queries import Not, select

from .promtool import ROOT

DEPLOY = ROOT / "deploy"
REMEDY = "run: make docs"
METRICS = {metric.name: metric for metric in catalog()}
SERIES = {
    f"{name}{suffix}": m
    for name, m in METRICS.items()
    for suffix in ("", "_bucket", "_count", "_sum")[: 4 if m.buckets else 1]
}
SELECTOR = re.compile(
    r"\b(rollmesh_(?:coordinator|inference|rollout|openai|sandbox|reward|data|gateway|learner|endpoint|rpc|disk|certificate)_\w+)(?:\{([^}]*)\})?"
)
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
EXTERNAL = set(re.findall(r"\| `(rollmesh_\w+)` \| `sum", (ROOT / "docs" / "deploy.md").read_text()))
"""Names that an adapter gives to queries, for autoscalers. docs/deploy.md has the queries, which are checked below."""
EVERY_SERIES = {"node", "job", "instance", "le", "process", "namespace", "pod"}
"""Labels of every series, or that Prometheus adds."""


def files() -> Iterator[Path]:
    for path in sorted(DEPLOY.rglob("*")):
        if path.suffix in (".json", ".yml", ".yaml") and "node_modules" not in path.parts:
            yield path
    yield from (ROOT / "docs" / name for name in ("deploy.md", "scaling.md", "observability.md"))


def test_the_committed_files_are_current() -> None:
    for dashboard in DASHBOARDS:
        assert (DEPLOY / "grafana" / f"{dashboard.name}.json").read_text() == to_json(dashboard), REMEDY
    assert (DEPLOY / "alerts.yml").read_text() == alerts.to_yaml("docs/runbooks.md"), REMEDY
    assert {path.stem for path in (DEPLOY / "grafana").iterdir()} == {dashboard.name for dashboard in DASHBOARDS}


@pytest.mark.parametrize("path", list(files()), ids=lambda path: str(path.relative_to(ROOT)))
def test_queries_name_metrics_and_label_values_that_exist(path: Path) -> None:
    for name, matchers in SELECTOR.findall(path.read_text().replace('\\"', '"')):
        if name in EXTERNAL and not matchers:
            continue
        assert name in SERIES, f"{path.name}: no metric is named {name}"
        metric = SERIES[name]
        for label, operator, value in MATCHER.findall(matchers):
            assert label in {*metric.labels, *EVERY_SERIES}, f"{path.name}: {name} does not have the label {label}"
            values = value.split("|") if "~" in operator else [value]
            fixed = metric.values.get(label, ())
            unknown = [one for one in values if fixed and one not in fixed and not one.startswith("$")]
            assert not unknown, f"{path.name}: {name} does not have {label}={unknown[0]!r}; its values are {fixed}"


def test_every_metric_is_in_a_dashboard() -> None:
    shown = {name for dashboard in DASHBOARDS for name, _ in SELECTOR.findall(to_json(dashboard))}
    assert METRICS.keys() - {SERIES[name].name for name in shown} == set()


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_panels_have_ids_and_do_not_overlap(dashboard: Dashboard) -> None:
    panels: list[dict[str, Any]] = json.loads(to_json(dashboard))["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= dashboards.COLUMNS for panel in panels)


def test_a_selector_is_checked_against_its_metric() -> None:
    assert select(NODES, state=("suspect", "dead")) == 'rollmesh_coordinator_nodes{state=~"suspect|dead"}'
    assert select(STEP, scope='job="a"', state=Not("applied")) == 'rollmesh_coordinator_step{job="a",state!="applied"}'
    with pytest.raises(ValueError, match="does not have the label 'shade'"):
        select(STEP, shade="red")
    with pytest.raises(ValueError, match="does not have state='aplied'; its values are"):
        select(STEP, state="aplied")
    with pytest.raises(ValueError, match="is a histogram, so it has no series"):
        select(STALENESS)
