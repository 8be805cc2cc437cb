"""Several versions at once in a whole mesh: evaluations beside training, and responses that finish under one
version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import Purpose
from rollmesh.services.inference.node import InferenceNode
from rollmesh.shared.config.registry import Extension

from ..chaos.world import mesh_config, save_model_folder
from . import eval_agent
from .test_mesh import Operator, policy

ETA = 2
NUM_EVALUATED = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model"))


def config(model: Path, *, agent: str, versions_max: int, pin: str = "none", **options: Any) -> MeshConfig:
    """Four groups of four per update; the engines hold `versions_max` sets of weights."""
    made = mesh_config(
        model, batch_groups=4, group_size=4, updates_max=12, max_staleness=ETA, eval_every=100, eval_tasks=NUM_EVALUATED,
        episode_lease_s=30.0, eval_s_max=60.0,
    )  # fmt: skip
    engine = made.inference.engine
    engine = Extension(engine.name, {**engine.options, "versions_max": versions_max, **options})
    return msgspec.structs.replace(
        made,
        inference=msgspec.structs.replace(made.inference, engine=engine),
        rollout=msgspec.structs.replace(made.rollout, agent=Extension(agent), pin=pin),
    )


def nodes_of(mesh: Mesh) -> list[InferenceNode]:
    nodes = [mesh.service(f"inference-{number}") for number in range(2)]
    assert all(isinstance(node, InferenceNode) for node in nodes)
    return nodes


def active_steps(mesh: Mesh) -> list[int]:
    return [node.state.active.step if node.state.active else -1 for node in nodes_of(mesh)]


@pytest.mark.parametrize("versions_max", [1, 2])
async def test_an_evaluation_delays_only_engines_that_hold_one_version(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, versions_max: int
) -> None:
    monkeypatch.setattr(eval_agent, "resume", asyncio.Event())
    made = config(model, agent="tests.integration.eval_agent:WaitsInEvaluation", versions_max=versions_max)
    async with Mesh(made, run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        if versions_max == 1:
            await operator.until(
                lambda s: policy(s).applied_step == ETA + 1 and s.waiting["learner/main"].startswith("READY groups: 0")
            )
            assert active_steps(mesh) == [0, 0]
        else:
            await operator.until(lambda s: policy(s).applied_step > 2 * ETA and min(active_steps(mesh)) > ETA)
            assert [[held.step for held in node.state.held] for node in nodes_of(mesh)] == [[0], [0]]
        (evaluation,) = (await operator.state()).evals
        assert (evaluation.step, evaluation.complete) == (0, False)
        eval_agent.resume.set()
        await operator.finished()
        state = await operator.until(lambda s: len(s.evals) == 2 and all(result.complete for result in s.evals))
        report, facts = await operator.audit(), await operator.facts()
    assert report.holds, report.to_text()
    assert [(result.step, result.num_samples, result.complete) for result in state.evals] == [
        (step, NUM_EVALUATED, True) for step in (0, 12)
    ]
    assert dict(state.eval_samples.reasons) == {"exported/EVALUATED": 2 * NUM_EVALUATED}
    evaluated = {g.group: g.step_min for g in facts if isinstance(g, f.GroupReserved) and g.purpose is Purpose.EVAL}
    scored = [fact for fact in facts if isinstance(fact, f.EpisodeScored) and fact.group in evaluated]
    assert len(scored) == 2 * NUM_EVALUATED
    assert all({span.step for s in fact.samples for span in s.steps} == {evaluated[fact.group]} for fact in scored)


@pytest.mark.row("S012")
@pytest.mark.parametrize("pin", ["none", "response"])
async def test_pinned_responses_of_a_run_have_one_version_each(tmp_path: Path, model: Path, pin: str) -> None:

    slow = {"tokens_per_step": 1, "step_s": 0.01}  # a response lasts over several updates
    made = config(model, agent="single_turn", versions_max=4, pin=pin, **slow)
    async with Mesh(made, run_dir=tmp_path / "run") as mesh:
        operator, nodes = Operator(mesh), nodes_of(mesh)
        await operator.until(lambda s: any(n.state.held for n in nodes) or policy(s).applied_step > 2 * ETA)
        assert any(node.state.held for node in nodes) is (pin == "response"), "an older version beside the active one"
        await operator.finished()
        report, facts = await operator.audit(), await operator.facts()
    assert report.holds, report.to_text()
    assert report.lag_max <= ETA
    samples = [sample for fact in facts if isinstance(fact, f.EpisodeScored) for sample in fact.samples]
    mixed = [sample for sample in samples if len({span.step for span in sample.steps}) > 1]
    assert bool(mixed) is (pin == "none"), f"{len(mixed)} of {len(samples)} responses have several versions"
