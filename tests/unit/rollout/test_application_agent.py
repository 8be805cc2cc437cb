"""The agent that serves an application: what ends its wait, and how its episode is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from openai import AsyncOpenAI, OpenAIError

from rollmesh.services.rollout.agent import Agent, Environment, Task
from rollmesh.services.rollout.agents.application import ApplicationAgent, ApplicationOptions
from rollmesh.services.rollout.config import RolloutConfig, WorkerConfig
from rollmesh.shared.domain.application_reasons import NOT_USED
from rollmesh.shared.errors import EngineFailed, NotReady
from rollmesh.testing.rollout import lease
from rollmesh.v1 import coordinator_pb2, run_pb2

from .reward_service import environment, scored_mesh

COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
Answer = coordinator_pb2.ServeEpisodeResponse
Work = Callable[[run_pb2.OpenEpisodeResponse, float], Awaitable[Answer]]


class Application:
    """Does `work` in each call of the worker."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.waits: list[float] = []

    async def serve(self, lease_id: str, served: run_pb2.OpenEpisodeResponse, wait_s: float) -> Answer:
        assert lease_id == "l1"
        self.waits.append(wait_s)
        return await self.work(served, wait_s)


async def chat(served: run_pb2.OpenEpisodeResponse) -> None:
    async with AsyncOpenAI(base_url=served.base_url, api_key=served.api_key, max_retries=0) as client:
        await client.chat.completions.create(model=served.model, messages=[{"role": "user", "content": "Hello"}])


async def reported(work: Work, **options: float) -> tuple[coordinator_pb2.EpisodeReport, list[float]]:
    """Run one episode with the application."""
    worker = WorkerConfig(backoff_s=0.001, backoff_s_max=0.001)
    mesh = scored_mesh(environment("liked"), config=RolloutConfig(worker=worker))
    application = mesh.applications = Application(work)
    try:
        async with asyncio.timeout(30):
            report = await mesh.runner(ApplicationAgent(options=ApplicationOptions(**options))).run(lease())
    finally:
        await mesh.server.close()
    assert mesh.server.num_episodes == 0
    return report, application.waits


async def test_rewards_after_an_outage_of_the_coordinator_are_those_of_the_environment() -> None:
    failures = [NotReady("a restart"), NotReady("a restart")]

    async def work(served: run_pb2.OpenEpisodeResponse, wait_s: float) -> Answer:
        if failures:
            raise failures.pop()
        await chat(served)
        return Answer(finished=True, rewards={"liked": 0.5})

    report, waits = await reported(work)
    assert report.outcome == COMPLETED, report.failure
    assert [(reward.name, reward.value) for reward in report.samples[0].rewards] == [("liked", 0.5)]
    assert waits == [10.0] * 3


async def test_an_episode_whose_model_fails_ends_at_once_as_an_infra_failure() -> None:
    async def work(served: run_pb2.OpenEpisodeResponse, wait_s: float) -> Answer:
        with pytest.raises(OpenAIError):
            await chat(served)
        await asyncio.Event().wait()
        raise AssertionError

    mesh = scored_mesh(environment("liked"))
    mesh.generator.gate.failure = EngineFailed("the node has left")
    mesh.applications = Application(work)
    async with asyncio.timeout(30):
        report = await mesh.runner(ApplicationAgent(options=ApplicationOptions())).run(lease())
    await mesh.server.close()
    assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE
    assert "the node has left" in report.failure.message


async def test_the_last_wait_is_as_long_as_the_application_has_time() -> None:
    async def work(served: run_pb2.OpenEpisodeResponse, wait_s: float) -> Answer:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await asyncio.Event().wait()
        return Answer()

    report, waits = await reported(work, idle_s_max=0.05)
    assert (report.outcome, report.failure.reason, len(report.samples)) == (COMPLETED, NOT_USED, 0)
    assert 0 < waits[0] <= 0.05
    assert sum(waits) < 0.2


async def test_rewards_without_a_turn_make_no_sample() -> None:
    async def work(served: run_pb2.OpenEpisodeResponse, wait_s: float) -> Answer:
        return Answer(finished=True, rewards={"liked": 1.0})

    report, _ = await reported(work)
    assert (report.outcome, report.failure.reason, len(report.samples)) == (COMPLETED, "", 0)


@pytest.mark.parametrize("reason", ["", "two words", "x" * 100])
async def test_the_reason_of_a_dropped_episode_is_a_word(reason: str) -> None:
    class Dropping(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            env.drop(reason)

    report = await scored_mesh(environment()).runner(Dropping()).run(lease())
    assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE
    assert "the reason for which an episode is dropped must" in report.failure.message
