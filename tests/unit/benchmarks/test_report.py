"""Reports of benches: verdicts, and what remains of a bench that does not finish."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import runner
from benchmarks.handover import bench as handover
from benchmarks.mesh_turn import MODEL, owner_of
from benchmarks.report import BenchTarget, Report


def report() -> Report:
    return Report("b", "s", rows=[{"x": 1}], targets=[BenchTarget("cost", 0.4, 1.0)])


def test_a_short_run_gets_no_verdict() -> None:
    assert "- cost: 0.40 (target: at most 1): met" in report().text()
    assert report().as_json()["targets"][0]["met"] is True
    short = report().text(judged=False)
    assert "- cost: 0.40 (target: at most 1): not judged, because the run was short" in short
    assert report().as_json(judged=False)["targets"][0]["met"] is None


@pytest.mark.parametrize(
    "root", ["/src/rollmesh/{}/rollmesh", "/src/mesh/{}/rollmesh", "/v/lib/python3.11/site-packages/rollmesh"]
)
def test_owners_do_not_depend_on_the_folder_of_the_checkout(root: str) -> None:
    services, shared = root.format("services"), root.format("shared")
    assert owner_of(f"{services}/services/coordinator/core/core.py") == "coordinator"
    assert owner_of(f"{services}/services/learner/engines/torch_trainer.py") == MODEL
    assert owner_of("/src/rollmesh/benchmarks/turns.py") == "rollout"
    assert owner_of(f"{shared}/shared/codec/trajectory.py") == "shared.codec"
    assert owner_of("/src/rollmesh/.venv/lib/python3.11/site-packages/grpc/aio/_call.py") == "grpc, asyncio"
    assert owner_of("/src/rollmesh/tests/x.py") == ""


def test_a_lap_of_the_handover_that_does_not_finish_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(num_bytes: int, num_batches: int) -> handover.Rate:
        if num_bytes == 262144:
            raise TimeoutError("update 4 was not reached within 240 s")
        return handover.Rate(samples_per_s=100.0, cpu_ms=1.0)

    monkeypatch.setattr(handover, "_ours", ours)
    monkeypatch.delenv(handover.RAY_PYTHON, raising=False)
    found = handover.run(quick=False)
    assert [row["sample"] for row in found.rows] == ["4 KB", "64 KB"]
    assert found.notes[0] == "256 KB: lap 1 of 3 did not finish: TimeoutError: update 4 was not reached within 240 s"
    assert not found.targets[-1].met


def test_the_results_of_finished_benches_are_stored_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> SimpleNamespace:
        def run(quick: bool) -> Report:
            if name.endswith(".ledger"):
                raise RuntimeError("broken")
            return report()

        return SimpleNamespace(run=run)

    monkeypatch.setattr("benchmarks.runner.importlib.import_module", load)
    file = tmp_path / "results.json"
    with pytest.raises(RuntimeError, match="broken"):
        runner.run_benches(["engine", "ledger"], quick=True, json_file=file, options={})
    assert [result["bench"] for result in json.loads(file.read_text())] == ["b"]
