"""The extremes of a pool and of a group: one task, evaluated on others, and a group of hundreds of episodes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollmesh.mesh import Mesh
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.inference.engine import Emit, GenerateRequest
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome, Outcome, Reward
from rollmesh.testing.fake_engine import FakeEngine
from rollmesh.trainer.estimators import make_estimator

from ..chaos.world import mesh_config, save_model_folder
from .test_mesh import Operator

HELD_OUT = ("physics", "chemistry")
SCORER = """
class Scorer:
    async def score(self, item):
        return float(sum(map(ord, item.response())) % 2)
"""


@pytest.mark.row("S048")
async def test_a_run_on_one_task_fills_every_batch_with_it_and_is_evaluated_on_other_domains(tmp_path: Path) -> None:
    (tmp_path / "scorer.py").write_text(SCORER)
    lines = [
        {"question": "One item of several disciplines", "answer": "1", "subject": "polymath", "split": "train"}
    ] + [
        {"question": f"{subject} {n}", "answer": "1", "subject": subject, "split": "test"}
        for subject in HELD_OUT
        for n in range(3)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = mesh_config(
        save_model_folder(tmp_path / "model"),
        batch_groups=3,
        group_size=4,
        updates_max=3,
        eval_every=3,
        eval_tasks=6,
        eval_split="test",
    )
    source = Extension(
        "jsonl", {"path": str(tmp_path / "tasks.jsonl"), "split": "split", "labels": {"subject": "subject"}}
    )
    scorers = (msgspec.structs.replace(made.reward.scorers[0], name=f"{tmp_path / 'scorer.py'}:Scorer"),)
    made = msgspec.structs.replace(
        made,
        data=msgspec.structs.replace(made.data, source=source),
        rollout=msgspec.structs.replace(made.rollout, agent=Extension("single_turn")),
        reward=msgspec.structs.replace(made.reward, scorers=scorers),
    )
    async with Mesh(made, run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        await operator.finished()
        report, facts, state = await operator.audit(), await operator.facts(), await operator.state()
    assert report.holds, report.to_text()
    reserved = [fact for fact in facts if isinstance(fact, f.GroupReserved)]
    trained = {fact.task.task_id for fact in reserved if fact.purpose is f.Purpose.TRAIN}
    assert len(trained) == 1, "every group has the same task"
    assert state.samples.trained == 3 * 3 * 4
    evaluated = {fact.task.task_id for fact in reserved if fact.purpose is f.Purpose.EVAL}
    assert len(evaluated) == 6
    assert not trained & evaluated


class Counting(FakeEngine):
    """The fake engine, which counts its requests."""

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        REQUESTS[id(self)] += 1
        super().submit(request, emit)


REQUESTS: Counter[int] = Counter()
"""Engine -> number of its requests."""


@pytest.mark.row("S073")
async def test_a_group_of_hundreds_is_spread_over_nodes_and_is_one_group_again(tmp_path: Path) -> None:
    size = 512
    (tmp_path / "scorer.py").write_text(SCORER)
    REQUESTS.clear()
    model = save_model_folder(tmp_path / "model")
    made = mesh_config(
        model, engine=f"{__name__}:Counting", batch_groups=1, group_size=size, updates_max=1, max_staleness=0
    )
    scorers = (msgspec.structs.replace(made.reward.scorers[0], name=f"{tmp_path / 'scorer.py'}:Scorer"),)
    made = msgspec.structs.replace(
        made,
        rollout=msgspec.structs.replace(made.rollout, agent=Extension("single_turn")),
        reward=msgspec.structs.replace(made.reward, scorers=scorers),
    )
    async with Mesh(made, run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        await operator.finished()
        facts = await operator.facts()
    assert len(REQUESTS) == 2
    assert min(REQUESTS.values()) > size / 4, "both nodes take part"
    scored = [fact for fact in facts if isinstance(fact, f.EpisodeScored)]
    (group,) = {fact.group for fact in scored}
    assert len({fact.episode for fact in scored}) == size, "every episode counts once"
    values = np.array([sample.rewards[0].value for fact in scored for sample in fact.samples])
    members = tuple(
        MemberOutcome(
            sample_id=sample.sample_id,
            episode=fact.episode,
            rewards=(Reward(name="correct", value=sample.rewards[0].value, outcome=Outcome.OK),),
            end="ready",
        )
        for fact in scored
        for sample in fact.samples
    )
    advantages = make_estimator("grpo").of_group(GroupContext(group=group, task="t", members=members))
    by_hand = (values - values.mean()) / (values.std() + 1e-6)
    assert [advantages[member.sample_id] for member in members] == pytest.approx(by_hand.tolist())
