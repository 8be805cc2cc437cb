"""Weights of rewards and the advantage estimator are declared once and reach the trainer and the finalizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.mesh_services import learner_config, reward_config
from rollmesh.mesh.run_layout import RunLayout
from rollmesh.services.reward.config import build_engine
from rollmesh.services.reward.servicer import RewardServicer
from rollmesh.shared.codec.trajectory import encode_group_context
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome, Reward
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.rpc.access import Access
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.samples import build_table
from rollmesh.v1 import reward_pb2

from ..trainer.builders import action, prompt, training_sample

SCORERS = [
    {"name": "exact", "reward": "correct"},
    {"name": "length", "reward": "brief", "options": {"budget_tokens": 9}},
]


def _group(*rewards: tuple[float, float]) -> tuple[MemberOutcome, ...]:
    return tuple(
        MemberOutcome(
            sample_id=f"s{i}", rewards=(Reward(name="correct", value=a), Reward(name="brief", value=b)), end="ready"
        )
        for i, (a, b) in enumerate(rewards)
    )


@pytest.mark.parametrize(
    "weights", [{}, {"correct": 1.0}, {"correct": 1.0, "brief": 0.1}, {"correct": 1.0, "brief": 0.0}]
)
@pytest.mark.parametrize("rewards", [((1.0, 0.0), (0.0, 1.0)), ((1.0, 0.2), (1.0, 0.7)), ((0.1, 0.0), (0.0, 1.0))])
@pytest.mark.parametrize(
    "method",
    [
        {},
        {"recipe": "dr_grpo"},
        {"recipe": "gdpo"},
        {"learner": {"estimator": {"name": "gdpo", "options": {"scale_by_std": False}}}},
    ],
)
async def test_a_group_is_kept_exactly_if_it_has_advantages(
    method: dict[str, Any], weights: dict[str, float], rewards: tuple[tuple[float, float], ...]
) -> None:
    config = config_from_dict(MeshConfig, {"reward": {"weights": weights, "scorers": SCORERS}, **method})
    engine = build_engine(reward_config(config), estimator=config.learner.estimator)
    group = GroupContext(group="g", task="t", members=_group(*rewards))
    servicer = RewardServicer(engine)
    reply = await servicer.FinalizeGroup(reward_pb2.FinalizeGroupRequest(group=encode_group_context(group)), None)
    trained = learner_config(_place(config))
    samples = [training_sample(m.sample_id, [prompt([1]), action([2], [-1.0])], of="g") for m in group.members]
    batch = UpdateBatch(update=1, samples=tuple(samples), groups=(group,), table=build_table(samples, update=1))
    advantages = make_estimator(trained.estimator, trained.reward_weights)(batch).advantages
    kept = reply.decision == reward_pb2.GROUP_DECISION_KEEP
    assert kept == any(abs(a) > 1e-6 for a in advantages)


def test_weights_at_the_learner_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"reward_weights` must be empty.*`reward.weights`"):
        config_from_dict(MeshConfig, {"learner": {"reward_weights": {"correct": 1.0}}})


def _place(config: MeshConfig) -> RunLayout:
    here = {"coordinator": "localhost:1", "gateway": "localhost:2", "depot": "localhost:3"}
    return RunLayout(config=config, base_dir=Path(), run_dir=Path("run"), access=Access(token="t"), **here)


def test_texts_of_a_batch_that_exceed_a_message_are_rejected() -> None:
    rollout, run = {"summary_text_chars": 16_384}, {"batch_groups": 8, "group_size": 16}
    assert config_from_dict(MeshConfig, {"rollout": rollout, "run": run}).rollout.summary_text_chars == 16_384
    with pytest.raises(ConfigError, match=r"`rollout.summary_text_chars`.* <= 2097152.*got 4194304"):
        config_from_dict(MeshConfig, {"rollout": rollout, "run": run | {"batch_groups": 16}})


def test_a_batch_whose_metadata_exceed_a_message_is_rejected() -> None:
    run = {"max_staleness": 0, "batch_groups": 400, "group_size": 128}
    assert config_from_dict(MeshConfig, {"run": run}).run.batch_groups == 400
    with pytest.raises(ConfigError, match=r"`run.batch_groups` \* run.group_size must be <= 52428.*got 64000"):
        config_from_dict(MeshConfig, {"run": run | {"batch_groups": 500}})


def test_a_greedy_first_episode_needs_another_one_to_train() -> None:
    assert config_from_dict(MeshConfig, {"rollout": {"greedy_first": True}, "run": {"group_size": 2}})
    with pytest.raises(ConfigError, match=r"`run.group_size` must be >= 2 with `rollout.greedy_first`"):
        config_from_dict(MeshConfig, {"rollout": {"greedy_first": True}, "run": {"group_size": 1}})


def test_a_given_solution_is_not_the_untrained_first_episode() -> None:
    solving = {"agent": {"name": "mine"}, "agents": {"mine": {"name": "given_solution"}}}
    assert config_from_dict(MeshConfig, {"rollout": solving})
    with pytest.raises(ConfigError, match=r"`(rollout\.)?greedy_first` must be false with the agent given_solution"):
        config_from_dict(MeshConfig, {"rollout": {"greedy_first": True, **solving}})
