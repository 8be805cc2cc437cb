"""The tasks of `python -m benchmarks methods`: small, and each for one kind of difference between methods.

All are calculator tasks of `rollmesh.demo.families.calc` with a tiny warm-started model. Tasks with the same `model`
share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCORERS = "benchmarks.methods.scorers"
NUM_TEST = 64
"""Tasks in the test range, from which evaluations take the first ones."""
SHAPE = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 160}
SETTINGS: dict[str, Any] = {
    "run": {"eval_every": 0},
    "rollout": {
        "sampling": {"temperature": 1.0, "max_tokens": 24},
        "limits": {"turns_max": 6, "tokens_max": 96, "context_tokens_max": 160},
    },
    "inference": {
        "engine": {"options": {"slots_max": 128, "context_max": 160, "resident_slots_max": 128, "flush_tokens": 24}}
    },
    "learner": {"tensorboard": False},
}
"""Settings of all tasks, above those of the recipe. The arm adds the learning rate."""


def _model(levels: int, target_success: float) -> dict[str, Any]:
    """Return a model that imitates demonstrations of levels 1 to `levels` until it has the target success on them."""
    return {
        "shape": SHAPE,
        "warm_start": {"levels": levels, "levels_first": min(levels, 2), "target_success": target_success},
        "tasks": {"name": "calc", "options": {"level_max": levels, "num_validation": 64 * levels}},
    }


def _source(level_min: int, level_max: int) -> dict[str, Any]:
    options = {"level_min": level_min, "level_max": level_max, "num_train": 1024, "num_test": NUM_TEST}
    return {"source": {"name": "calc", "options": options}}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOfMethods:
    """One task: what it shows, its settings above `SETTINGS`, and the model from which all arms start."""

    summary: str
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    """Settings of `MadeModelConfig`."""
    reward: Mapping[str, Any]
    agent: str = "tool_calling"
    """Agent for recipes that learn from given solutions. The others have `tool_calling`."""
    success: str = "correct"
    """Reward that evaluations measure as success; it is not always one that is trained on."""


SUPPLIED: Mapping[str, Mapping[str, Any]] = {
    "prior": {"name": f"{SCORERS}:LevelPrior", "reward": "prior"},
    "called": {"name": "turn_success", "reward": "called"},
}
"""Scorers by reward that tasks have only for a recipe whose `reward.weights` names the reward."""
CALC = _model(levels=2, target_success=0.4)
EXACT = {"name": "exact", "reward": "correct"}
TASKS: Mapping[str, TaskOfMethods] = {
    "calc": TaskOfMethods(
        summary="Expressions with one or two operators; the reward is 1 for the right answer.",
        data=_source(1, 2),
        model=CALC,
        reward={"scorers": [EXACT]},
    ),
    "noisy": TaskOfMethods(
        summary="The same, but a fifth of the training rewards is flipped. Success is measured without flips.",
        data=_source(1, 2),
        model=CALC,
        reward={
            "scorers": [
                {"name": f"{SCORERS}:FlippedExact", "reward": "correct", "options": {"share": 0.2}},
                {"name": "exact", "reward": "truth"},
            ],
            "weights": {"correct": 1.0},
        },
        success="truth",
    ),
    "two_rewards": TaskOfMethods(
        summary="The same with a second reward for brevity: minus one for 64 sampled tokens.",
        data=_source(1, 2),
        model=CALC,
        reward={
            "scorers": [EXACT, {"name": "length", "reward": "short", "options": {"form": "linear", "scale_tokens": 64}}]
        },
    ),
    "turns": TaskOfMethods(
        summary="Expressions with two or three operators; besides the answer, every turn has a reward if it is the "
        "ideal one.",
        data=_source(2, 3),
        model=_model(levels=3, target_success=0.4),
        reward={"scorers": [{"name": f"{SCORERS}:IdealTurns", "reward": "correct"}]},
    ),
    "sparse": TaskOfMethods(
        summary="Expressions with three operators, of which the model solves few at first: most groups have no "
        "success.",
        data=_source(3, 3),
        model=_model(levels=3, target_success=0.3),
        reward={"scorers": [EXACT]},
    ),
    "given": TaskOfMethods(
        summary="The same. One member of each group is the ideal episode, for recipes that learn from given solutions.",
        data=_source(3, 3),
        model=_model(levels=3, target_success=0.3),
        reward={"scorers": [EXACT]},
        agent="benchmarks.methods.agents:FirstGiven",
    ),
}
