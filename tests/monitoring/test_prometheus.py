"""A real Prometheus scrapes a mesh: the query of every panel returns data, unless the panel names the event that it
needs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.telemetry import TelemetryConfig
from tools.alerts import ALERTS
from tools.dashboards import DASHBOARDS, Panel, Query

from ..chaos.world import mesh_config, save_model_folder
from ..integration.test_mesh import Operator
from .prometheus import ask, prometheus, until_any
from .promtool import tool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRAPES = 12
"""Seconds of scrapes, one per second, before the queries are read."""
VALUES = {"$job": "rollmesh", "$run": ".*", "$metric": ".*", "$node": ".*", "$__rate_interval": "10s"}


def config(model: Path) -> MeshConfig:
    """A run that lasts longer than the test, with evaluations and tool calls."""
    made = mesh_config(model, batch_groups=4, group_size=4, updates_max=100_000, eval_every=4, eval_tasks=8)
    return msgspec.structs.replace(
        made,
        telemetry=TelemetryConfig(metrics="prometheus"),
        data=msgspec.structs.replace(made.data, source=Extension("calc")),
        bus=msgspec.structs.replace(made.bus, payloads="stream"),
    )


def value_of(url: str, query: Query) -> Any:
    expr = query.expr
    for name, value in VALUES.items():
        expr = expr.replace(name, value)
    return ask(url, "query", query=expr)["result"]


async def test_panels_show_data_and_rules_are_evaluated(tmp_path: Path) -> None:
    tool("prometheus")
    model = save_model_folder(tmp_path / "model")
    async with Mesh(config(model), run_dir=tmp_path / "run") as mesh:
        await Operator(mesh).until(lambda state: any(result.complete for result in state.evals))
        with prometheus(tmp_path, tmp_path / "run" / "metrics") as url:
            await until_any(url, f"min(count_over_time(rollmesh_disk_free_bytes[1m])) >= {SCRAPES}")  # rates have data
            panels = [panel for board in DASHBOARDS for section in board.sections for panel in section.panels]
            empty = [panel.title for panel in panels if await asyncio.to_thread(_is_empty, url, panel)]
            groups = (await asyncio.to_thread(ask, url, "rules"))["groups"]
    assert empty == []
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert rules.keys() == {f"Rollmesh{alert.name}" for alert in ALERTS}
    assert {rule["health"] for rule in rules.values()} == {"ok"}, rules
    firing = {name: rule["alerts"] for name, rule in rules.items() if rule["state"] == "firing"}
    assert firing.keys() <= {"RollmeshDiskNearlyFull"}, firing  # the disk of the host may be nearly full


def _is_empty(url: str, panel: Panel) -> bool:
    """Return whether a query of a panel that should have data has none."""
    return not panel.rare and not all(value_of(url, query) for query in panel.queries)
