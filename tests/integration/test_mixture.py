"""A run over a mixture of two sources: its draws follow the weights, and held-out success is reported by source."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from rollmesh.mesh import Mesh
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import Purpose
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.telemetry.config import TelemetryConfig

from ..chaos.world import mesh_config, save_model_folder
from .test_mesh import Operator
from .test_metrics import scrape, series_of, value

SIZES = {"num_train": 8, "num_validation": 0, "num_test": 4}


async def test_a_run_draws_by_weight_and_reports_success_by_source(tmp_path: Path) -> None:
    made = mesh_config(
        save_model_folder(tmp_path / "model"), batch_groups=4, group_size=2, updates_max=3, eval_every=3, eval_tasks=6
    )
    sources = {
        "easy": {"source": {"name": "calc", "options": {**SIZES, "level_max": 1}}},
        "hard": {"source": {"name": "calc", "options": {**SIZES, "level_min": 5}}},
    }
    data = msgspec.structs.replace(
        made.data,
        source=Extension("mixture", {"sources": sources}),
        selector=Extension("mixture", {"weights": {"easy": 1, "hard": 3}}),
    )
    made = msgspec.structs.replace(made, data=data, telemetry=TelemetryConfig(metrics="prometheus"))
    async with Mesh(made, run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        await operator.finished()
        state = await operator.until(lambda s: len(s.evals) == 2 and all(e.complete for e in s.evals))
        series = series_of(await scrape(mesh))
        report, facts = await operator.audit(), await operator.facts()
    assert report.holds, report.to_text()
    reserved = [fact for fact in facts if isinstance(fact, f.GroupReserved)]
    trained = sorted((fact.draw, fact.task.labels["source"]) for fact in reserved if fact.purpose is Purpose.TRAIN)
    assert [draw for draw, _ in trained] == list(range(len(trained)))
    assert Counter(source for _, source in trained[:12]) == {"easy": 3, "hard": 9}
    evaluated = Counter(fact.task.labels["source"] for fact in reserved if fact.purpose is Purpose.EVAL)
    assert evaluated == {"easy": 6, "hard": 6}, "two evaluations of 6 tasks"
    for result in state.evals:
        by_source = [result.success_by_label[f"source={name}"] for name in sources]
        assert sum(by_source) / 2 == pytest.approx(result.mean_rewards["correct"])
    shares = {
        (name, of): value(series, "rollmesh_data_source_share_ratio", source=name, state=of)
        for name in sources
        for of in ("requested", "decided")
    }
    assert [shares[name, "requested"] for name in sources] == [0.25, 0.75]
    assert shares["easy", "decided"] + shares["hard", "decided"] == pytest.approx(1.0)
    assert 0.0 < shares["easy", "decided"] < shares["hard", "decided"]
