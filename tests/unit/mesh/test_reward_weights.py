"""Weights of rewards are declared once and reach the trainer and the finalizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.services.learner.engines.recipe import resolve_recipe
from rollmesh.services.mesh.config import MeshConfig
from rollmesh.services.mesh.parts import learner_config, reward_config
from rollmesh.services.mesh.place import Place
from rollmesh.services.reward.config import build_engine
from rollmesh.services.reward.finalizer import Decision, Group
from rollmesh.services.reward.item import TaskView
from rollmesh.shared.config import config_from_dict
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.trajectory import GroupContext, MemberOutcome, Reward
from rollmesh.trainer.advantages.grpo import Grpo

SCORERS = [
    {"scorer": "exact", "name": "correct"},
    {"scorer": "length", "name": "brief", "options": {"budget_tokens": 9}},
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
@pytest.mark.parametrize("rewards", [((1.0, 0.0), (0.0, 1.0)), ((1.0, 0.2), (1.0, 0.7))])
def test_a_group_is_kept_exactly_if_it_has_advantages(
    weights: dict[str, float], rewards: tuple[tuple[float, float], ...]
) -> None:
    config = config_from_dict(MeshConfig, {"reward": {"weights": weights, "scorers": SCORERS}})
    members = _group(*rewards)
    engine = build_engine(reward_config(config))
    verdict = engine.finalize(Group(group="g", task=TaskView(task_id="t"), members=members, weights=engine.weights))
    learner = learner_config(_place(config))
    recipe = resolve_recipe(learner.recipe, learner.recipe_options, learner.reward_weights)
    advantages = Grpo(recipe.advantage).of_group(GroupContext(group="g", task="t", members=members))
    assert (verdict.decision is Decision.KEEP) == any(abs(a) > 1e-6 for a in advantages.values())


def test_weights_at_the_learner_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"reward_weights must be empty.*`reward.weights`"):
        config_from_dict(MeshConfig, {"learner": {"reward_weights": {"correct": 1.0}}})


def _place(config: MeshConfig) -> Place:
    here = {"coordinator": "localhost:1", "gateway": "localhost:2", "depot": "localhost:3"}
    return Place(config=config, base_dir=Path(), run_dir=Path("run"), access=Access(token="t"), **here)
