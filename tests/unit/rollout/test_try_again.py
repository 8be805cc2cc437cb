"""The agent that answers again after a wrong answer."""

from __future__ import annotations

import pytest

from rollmesh.services.rollout.agents.try_again import TryAgainAgent, TryAgainOptions
from rollmesh.shared.domain.trajectory import Outcome, Reward, Role
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2

COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
INFRA_FAILURE = coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE


def mesh(answers: str, outcome: Outcome = Outcome.OK) -> LocalMesh:
    turns = iter(answers)
    return LocalMesh(
        script=lambda text: f"{next(turns)}<|end|>",
        rewards=lambda content: (Reward(name="correct", value=float(content == "4"), outcome=outcome),),
    )


@pytest.mark.row("S070")
@pytest.mark.parametrize(("answers", "num_turns"), [("4", 1), ("14", 2), ("12345", 4), ("11111", 5)])
async def test_the_model_answers_until_it_is_right_and_observes_only_that_it_was_wrong(
    answers: str, num_turns: int
) -> None:
    local = mesh(answers)
    report = await local.runner(TryAgainAgent(options=TryAgainOptions())).run(lease())
    assert report.outcome == COMPLETED, report.failure
    (episode,) = local.samples.episodes
    (sample,) = episode.samples
    roles = [segment.role for segment in episode.path_segments(sample)]
    assert roles == [Role.CONTEXT, Role.ACTION, *[Role.OBSERVATION, Role.ACTION] * (num_turns - 1)]
    observed = {m.content for s in episode.segments if s.role is Role.OBSERVATION for m in s.messages}
    assert observed <= {"Incorrect. Please think again."}


async def test_a_verdict_that_is_not_applicable_is_an_error_and_not_a_wrong_answer() -> None:
    report = await mesh("11", Outcome.NOT_APPLICABLE).runner(TryAgainAgent(options=TryAgainOptions())).run(lease())
    assert report.outcome == INFRA_FAILURE
    assert "the reward `correct` is not applicable to task t" in report.failure.message
