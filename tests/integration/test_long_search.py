"""ASearcher's asynchronous rollouts in a whole mesh with fake model and trainer: one episode of 128 turns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollmesh.mesh import Mesh
from rollmesh.services.reward import scorer
from rollmesh.services.reward.config import RewardConfig
from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.rollout import agent
from rollmesh.services.rollout.agent import Environment, Task
from rollmesh.services.rollout.config import LimitsConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import IntArray, Role, Source, TrainingSample

from ..chaos.world import mesh_config, save_model_folder
from .test_mesh import Operator, policy, watching

TURNS = 128
LIMITS = {"turns_max": TURNS, "tokens_max": 4096, "context_tokens_max": 8192}


class Record:
    """What happened in the run, shared by the parts below, which run in this process."""

    def __init__(self) -> None:
        self.half = asyncio.Event()
        """The long episode has made half of its turns."""
        self.go = asyncio.Event()
        """Others have been trained."""
        self.long_task = ""
        self.sampled: list[IntArray] = []
        """Tokens of each turn of the long episode."""
        self.equal: set[str] = set()
        """Tasks whose episodes have equal rewards."""


RECORDS: list[Record] = []
"""The record of the run."""


class OneLongEpisode(agent.Agent):
    """The first episode has 128 turns, and waits in the middle; every third task gives all episodes one reward."""

    async def run(self, task: Task, env: Environment) -> None:
        (record,) = RECORDS
        equal = sum(task.task_id.encode()) % 3 == 0
        is_long = not (equal or record.long_task) and env.index == 0
        if is_long:
            record.long_task = task.task_id
        if equal:
            record.equal.add(task.task_id)
        right = equal or env.index == 0
        num_turns = TURNS if is_long else 2
        for number in range(num_turns):
            if is_long and number == TURNS // 2:
                record.half.set()
                await record.go.wait()
            turn = await env.generate(max_tokens=2)
            if is_long:
                record.sampled.append(turn.token_ids)
            if number < num_turns - 1:
                env.observe("right" if right else "wrong")


class RightObserved(scorer.Scorer):
    async def score(self, item: ScoreItem) -> float:
        return float(item.messages[-2].content == "right")


@pytest.mark.row("S014")
async def test_an_episode_of_128_turns_ends_while_others_are_trained_on(tmp_path: Path) -> None:
    record = Record()
    RECORDS[:] = [record]
    seen: dict[int, Sequence[TrainingSample]] = {}
    made = mesh_config(
        save_model_folder(tmp_path / "model"),
        max_staleness=32,
        batch_groups=2,
        group_size=2,
        updates_max=0,
        episode_lease_s=30.0,
    )
    module = "tests.integration.test_long_search"
    made = msgspec.structs.replace(
        made,
        rollout=msgspec.structs.replace(
            made.rollout, agent=Extension(f"{module}:OneLongEpisode"), limits=config_from_dict(LimitsConfig, LIMITS)
        ),
        inference=msgspec.structs.replace(
            made.inference, engine=Extension(made.inference.engine.name, {"vocab_size": 112, "context_max": 8192})
        ),
        reward=config_from_dict(RewardConfig, {"scorers": [{"name": f"{module}:RightObserved", "reward": "correct"}]}),
    )
    async with Mesh(made, run_dir=tmp_path / "run", options={"learner": {"open_engine": watching(seen)}}) as mesh:
        operator = Operator(mesh)
        async with asyncio.timeout(60):
            await record.half.wait()
        await operator.until(lambda s: policy(s).published_step >= 3)
        assert not long_samples(seen)
        record.go.set()
        state = await operator.until(lambda s: bool(long_samples(seen)))
        report = await operator.audit()
    assert report.holds, report.to_text()

    (long,) = long_samples(seen)
    actions = [s for s in long.segments if s.role is Role.ACTION]
    assert len(record.sampled) == TURNS
    assert np.array_equal(np.concatenate([s.token_ids for s in actions]), np.concatenate(record.sampled))
    assert all(s.loss_mask is None or s.loss_mask.all() for s in actions), "each generated token has the mask 1"
    others = [s for s in long.segments if s.source is not Source.POLICY]
    assert len([s for s in others if s.source is Source.TOOL]) == TURNS - 1
    assert not any(s.num_trainable for s in others), "tokens of tools have the mask 0"
    steps = [s.version.step for s in actions if s.version is not None]
    assert len(steps) == len(actions)
    assert steps == sorted(steps)
    assert (steps[0], steps[-1] >= 3) == (0, True), "each token has the version that sampled it"

    assert record.equal, "some groups have equal rewards"
    assert record.equal.isdisjoint(sample.task for samples in seen.values() for sample in samples)
    assert state.samples.reasons["filtered/ZERO_VARIANCE"] >= 2


def long_samples(seen: Mapping[int, Sequence[TrainingSample]]) -> list[TrainingSample]:
    return [sample for samples in list(seen.values()) for sample in samples if len(sample.segments) > TURNS]
