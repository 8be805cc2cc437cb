"""The agent that keeps a diverse subset of its answers: the choice by hand, and what becomes a sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollmesh.services.rollout.agents.diverse_answers import (
    DiverseAnswersAgent,
    DiverseAnswersOptions,
    most_diverse,
    pooled,
)
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.shared.domain.trajectory import text_view
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import types_pb2

STATES = {"a": 0.0, "b": 10.0, "c": -4.0}


async def answers(purpose: types_pb2.Purpose.ValueType, **limits: Any) -> list[str]:
    """Return the samples of an episode whose model answers a, a, b, c. The state of a token is a number, 0 at the end
    of a turn."""
    said = iter("aabc")
    mesh = LocalMesh(
        script=lambda _: f"{next(said)}<|end|>",
        column=lambda name, text: STATES.get(text, 0.0),
        config=RolloutConfig(limits=LimitsConfig(**limits)),
    )
    agent = DiverseAnswersAgent(options=DiverseAnswersOptions(answers=4, keep=2))
    report = await mesh.runner(agent).run(lease(messages=["q"], purpose=purpose))
    episode = mesh.samples.episodes[report.payload.sequence - 1]
    return [text_view(episode.path_segments(sample))[-1].content for sample in episode.samples]


async def test_the_answers_that_differ_most_are_the_samples_of_an_evaluation() -> None:
    """The pooled states 0, 0, 5, -2 minus their mean 0.75: b is chosen first, and then c, which is farther from the
    mean than the copies of a."""
    assert await answers(types_pb2.PURPOSE_EVAL) == ["b", "c"]
    assert await answers(types_pb2.PURPOSE_TRAIN) == ["a"]


async def test_no_more_answers_than_turns_are_left_are_sampled() -> None:
    """The limit of three turns leaves a, a, b, so that c is never said."""
    assert await answers(types_pb2.PURPOSE_EVAL, turns_max=3) == ["b", "a"]


@pytest.mark.row("S037")
def test_a_copy_of_a_chosen_answer_is_chosen_after_all_others() -> None:
    """The copies 0 and 1 are the farthest from the mean, so that one of them is chosen first."""
    states = np.array([[5.0, 0, 0], [5.0, 0, 0], [0, 2.0, 0], [0, 0, 2.0], [0, 0, -2.0]])
    first, second, third = most_diverse(states, 3, 0.01)
    assert first == 0
    assert {second, third} <= {2, 3, 4}
    assert len(most_diverse(states, 9, 0.01)) == 5
    assert most_diverse(np.ones((3, 2)), 2, 0.01) == [0, 1], "copies alone"


def test_the_choice_equals_that_by_the_matrices() -> None:
    rng = np.random.default_rng(0)
    states, ridge = rng.normal(size=(7, 3)), 0.3
    away = states - states.mean(0)
    matrix, chosen = ridge * np.eye(3), []
    for _ in range(5):
        bonus = [-1.0 if n in chosen else float(h @ np.linalg.solve(matrix, h)) for n, h in enumerate(away)]
        chosen.append(int(np.argmax(bonus)))
        matrix += np.outer(away[chosen[-1]], away[chosen[-1]])
    assert most_diverse(states, 5, ridge) == chosen


def test_states_of_half_precision_are_averaged_in_double_precision() -> None:
    assert pooled(np.array([[1.0, 2048.0], [2.0, 2050.0]], np.float16)).tolist() == [1.5, 2049.0]


def test_more_answers_than_are_sampled_cannot_be_kept() -> None:
    with pytest.raises(ValueError, match="`keep` must be <= answers = 2, got 3"):
        DiverseAnswersOptions(answers=2, keep=3)
