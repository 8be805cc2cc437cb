"""Agents that ask for rewards while their episode runs (`env.score`)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollmesh.services.rollout.agent import Agent, Task
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.codec.trajectory import decode_segment
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import Outcome, Reward, Role
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2, reward_pb2

COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
INFRA_FAILURE = coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE


def rewards(content: str) -> tuple[Reward, ...]:
    return (
        Reward(name="correct", value=float("4" in content), scorer="answer@1"),
        Reward(name="judged", value=0.0, outcome=Outcome.NOT_APPLICABLE),
        Reward(name="correct", value=9.0, segment=1),
    )


class TriesAgain(Agent):
    """Answer until an answer is right."""

    def __init__(self) -> None:
        self.found: list[dict[str, float | None]] = []

    async def run(self, task: Task, env: Environment) -> None:
        while True:
            await env.generate()
            self.found.append(await env.score("correct", "judged"))
            if self.found[-1]["correct"]:
                return
            env.observe("no")


def mesh(answers: str, **limits: float) -> LocalMesh:
    turns = iter(answers)
    config = RolloutConfig(limits=config_from_dict(LimitsConfig, limits))
    return LocalMesh(script=lambda text: f"{next(turns)}<|end|>", rewards=rewards, config=config)


async def test_an_agent_asks_for_rewards_of_its_branch_and_tries_again() -> None:
    local, agent = mesh("234"), TriesAgain()
    report = await local.runner(agent).run(lease())
    assert report.outcome == COMPLETED
    assert agent.found == [{"correct": value, "judged": None} for value in (0.0, 0.0, 1.0)]
    *asked, final = local.scorer.items
    assert [(list(item.scorers), len(item.samples)) for item in asked] == [(["correct", "judged"], 1)] * 3
    assert [item.samples[0].sample_id for item in asked] == [f"e-l1-score{number}" for number in (1, 2, 3)]
    assert [sum(decode_segment(s).role is Role.ACTION for s in item.segments) for item in asked] == [1, 2, 3]
    assert not final.scorers, "the episode is scored again by all scorers at its end"


async def test_the_number_of_calls_is_a_limit_of_the_episode() -> None:
    local, agent = mesh("2233", score_calls_max=2), TriesAgain()
    report = await local.runner(agent).run(lease())
    assert (report.outcome, len(agent.found)) == (COMPLETED, 2)
    (episode,) = local.samples.episodes
    assert len(episode.samples) == 1, "the tokens until the limit are scored and trained"


async def test_a_scorer_that_fails_is_an_infra_failure_even_if_the_agent_goes_on() -> None:
    class Catches(TriesAgain):
        async def run(self, task: Task, env: Environment) -> None:
            try:
                await super().run(task, env)
            except Exception:  # noqa: BLE001 - what a careless agent does
                await env.generate()

    local = mesh("22")
    local.scorer._rewards = lambda content: (
        Reward(name="correct", value=0.0, scorer="answer@1", evidence="judge is down", outcome=Outcome.INFRA_FAILURE),
    )
    report = await local.runner(Catches()).run(lease())
    assert report.outcome == INFRA_FAILURE
    assert "judge is down" in report.failure.message


async def test_a_time_limit_while_the_agent_awaits_a_reward_is_no_failure_of_the_model() -> None:
    local = mesh("22", run_s_max=0.5)
    score = local.scorer.score

    async def slow(run: str, item: reward_pb2.ScoreItem, uses: Any = None) -> list[tuple[Reward, ...]]:
        if item.scorers:  # asked by the agent
            await asyncio.Event().wait()
        return await score(run, item, uses)

    local.scorer.score = slow  # type: ignore[method-assign]
    report = await local.runner(TriesAgain()).run(lease())
    assert report.outcome == INFRA_FAILURE
    assert "env.score had no reward before the end of rollout.limits.run_s_max = 0.5 s" in report.failure.message


async def test_a_branch_without_an_answer_cannot_be_scored() -> None:
    class Early(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            with pytest.raises(ValueError, match="requires a generation on this branch"):
                await env.score()
            await env.generate()

    report = await mesh("2").runner(Early()).run(lease())
    assert report.outcome == COMPLETED
