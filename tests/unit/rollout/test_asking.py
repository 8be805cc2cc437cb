"""`env.ask`: what an episode asks of endpoints is stored with it, and their failures are those of the
infrastructure."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollmesh.services.rollout.agent import Agent, Environment, Task
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2

from ..shared.chat_server import ChatServer, chat_server, failure

COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
INFRA_FAILURE = coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE


class AskingAgent(Agent):
    """Shows each answer of the opponent to the model, twice."""

    async def run(self, task: Task, env: Environment) -> None:
        for _ in range(2):
            await env.generate()
            answer = await env.ask("opponent", env.messages, temperature=1.0)
            env.observe(answer.text)


class StubbornAgent(AskingAgent):
    """Ignores failures."""

    async def run(self, task: Task, env: Environment) -> None:
        try:
            await super().run(task, env)
        except Exception:  # noqa: BLE001 - an agent may catch anything
            return


def local_mesh(server: ChatServer, *, run_s_max: float = 30.0, **options: Any) -> LocalMesh:
    entry = {"kind": "openai", "base_url": server.url, "model": "m", "retry_s": 0.0, "price_completion": 1e6, **options}
    table = {"opponent": config_from_dict(EndpointConfig, entry)}
    limits = LimitsConfig(run_s_max=run_s_max, context_tokens_max=4096)
    return LocalMesh(
        script=lambda text: "<answer>4</answer><|end|>", config=RolloutConfig(limits=limits), endpoints=Endpoints(table)
    )


async def test_the_use_of_an_endpoint_is_stored_with_the_episode_and_its_answers_are_in_the_context() -> None:
    async with chat_server(lambda body: f"move {len(body['messages'])}") as server:
        mesh = local_mesh(server)
        report = await mesh.runner(AskingAgent()).run(lease())
        await mesh.endpoints.close()
    assert report.outcome == COMPLETED, report.failure
    (episode,) = mesh.samples.episodes
    (use,) = episode.endpoints
    assert (use.endpoint, use.caller, use.calls, use.prompt_tokens, use.completion_tokens) == (
        "opponent",
        "agent",
        2,
        20,
        4,
    )
    assert use.price == 4.0
    assert 0 < use.latency_s <= episode.stage_s["ask"]
    shown = [message.content for segment in episode.segments for message in segment.messages if message.role == "tool"]
    assert shown == ["move 2", "move 4"]
    assert [m["role"] for m in server.requests[1]["messages"]] == ["user", "assistant", "tool", "assistant"]


async def test_a_failure_ends_the_episode_as_infra_also_if_the_agent_ignores_it() -> None:
    for agent in (AskingAgent(), StubbornAgent()):
        async with chat_server(lambda body: failure(500, "broken")) as server:
            mesh = local_mesh(server)
            report = await mesh.runner(agent).run(lease())
            await mesh.endpoints.close()
        assert (report.outcome, report.failure.reason) == (INFRA_FAILURE, "ENDPOINT_FAILED")
        assert report.failure.message.startswith("ask: endpoint `opponent`: POST ")
        assert "HTTP 500" in report.failure.message
        assert report.failure.metadata["endpoint"] == "opponent"
        assert not mesh.samples.episodes


async def test_a_reached_price_limit_is_an_infra_failure_with_the_remedy() -> None:
    async with chat_server() as server:
        mesh = local_mesh(server, price_max=1.5)
        report = await mesh.runner(AskingAgent()).run(lease())
        await mesh.endpoints.close()
    assert (report.outcome, report.failure.reason) == (INFRA_FAILURE, "PRICE_LIMIT")
    assert "the run has spent 2 of `price_max` = 1.5; raise it and resume the run" in report.failure.message


async def test_an_endpoint_that_uses_up_the_time_of_an_episode_is_not_a_failure_of_the_model() -> None:
    async with chat_server() as server:
        server.gate = asyncio.Event()
        mesh = local_mesh(server, run_s_max=3.0)
        report = await mesh.runner(AskingAgent()).run(lease())
        await mesh.endpoints.close()
    assert (report.outcome, report.failure.reason) == (INFRA_FAILURE, "ENDPOINT_FAILED")
    assert "no answer before the end of rollout.limits.run_s_max = 3 s" in report.failure.message
    assert mesh.num_open == 0


async def test_an_answer_that_the_agent_did_not_wait_for_does_not_explain_the_time_limit() -> None:
    class Impatient(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            await env.generate()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await env.ask("opponent", "?")
            await asyncio.Event().wait()

    async with chat_server() as server:
        server.gate = asyncio.Event()
        mesh = local_mesh(server, run_s_max=2.0)
        report = await mesh.runner(Impatient()).run(lease())
        await mesh.endpoints.close()
    assert report.outcome == COMPLETED, report.failure
    assert mesh.samples.episodes[0].samples[0].finish.name == "LENGTH"


async def test_an_unknown_endpoint_is_named(tmp_path: Path) -> None:
    mesh = LocalMesh(script=lambda text: "<answer>4</answer><|end|>")
    report = await mesh.runner(AskingAgent()).run(lease())
    assert (report.outcome, report.failure.reason) == (INFRA_FAILURE, "UNKNOWN_ENDPOINT")
    assert "endpoint `opponent` is not configured; known: none" in report.failure.message
