"""Episodes that an application opens itself, in a mesh: its requests become samples, and the rewards come later."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rollmesh.client import BatchSample, Client, OpenEpisode, Run
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.mesh.mesh import create_run
from rollmesh.services.coordinator import applications
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.audit_report import AuditReport
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.reward.config import RewardConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.application_reasons import DISCARDED, NOT_USED, REWARD_LATE
from rollmesh.shared.domain.plans import Variant
from rollmesh.shared.errors import (
    EpisodeConflict,
    EpisodeLost,
    EpisodeOver,
    EpisodesNotServed,
    InvalidInput,
    UnknownLease,
)
from rollmesh.v1 import coordinator_pb2, run_pb2, types_pb2

from ..chaos.world import mesh_config, save_model_folder
from .coordinator_mesh import CONFIG, coordinator_mesh
from .external_trainer_mesh import ROOT, finish, mesh_without_learner, write_weights
from .test_mesh import Operator

EXAMPLE = ROOT / "examples" / "live_traffic"
CONTEXT, ACTION = types_pb2.SEGMENT_ROLE_CONTEXT, types_pb2.SEGMENT_ROLE_ACTION
OBSERVATION = types_pb2.SEGMENT_ROLE_OBSERVATION
SCORE = {"name": "environment", "reward": "liked", "options": {"min": 0, "max": 1}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model"))


def config(model: Path, *, options: dict[str, Any] | None = None, **run: Any) -> MeshConfig:
    """One episode per key; an update trains on two of them."""
    values = {"submitted_tasks": True, "group_size": 1, "batch_groups": 2, "updates_max": 0, "max_staleness": 2}
    made = mesh_config(model, **(values | {"success_reward": "liked"} | run))
    return msgspec.structs.replace(
        made,
        data=msgspec.structs.replace(made.data, source=Extension("submitted"), selector=Extension("uniform")),
        reward=config_from_dict(RewardConfig, {"scorers": [SCORE], "finalizers": ["keep_all"]}),
        rollout=msgspec.structs.replace(
            made.rollout, agent=Extension("single_turn"), agents={"live": Extension("application", options or {})}
        ),
    )


@asynccontextmanager
async def client_of(mesh: Mesh) -> AsyncIterator[Run]:
    async with Client(mesh.gateway_address, token=mesh.access.token) as client:
        yield client.run(mesh.run)


async def chat(episode: OpenEpisode, *turns: str) -> list[dict[str, Any]]:
    """Send the turns of a user, one after the other; return the conversation."""
    messages: list[dict[str, Any]] = []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {episode.api_key}"}) as session:
        for said in turns:
            messages.append({"role": "user", "content": said})
            body = {"model": episode.model, "messages": messages, "max_tokens": 8}
            async with session.post(f"{episode.base_url}/chat/completions", json=body) as reply:
                answer = await reply.json()
                assert reply.status == 200, answer
            messages.append(answer["choices"][0]["message"])
    return messages


async def audit(operator: Operator) -> AuditReport:
    """Audit without a checkpoint."""
    bus = await operator._bus()
    try:
        return await audit_run(bus, operator.mesh.run)
    finally:
        await bus.close()


async def ended_with(operator: Operator, reason: str, num: int = 1) -> None:
    await operator.until(lambda state: state.samples.reasons.get(reason, 0) == num)


async def finish_elsewhere(mesh: Mesh, leases: Sequence[str]) -> None:
    """Give each episode its number as the reward, on a new connection, twice; other rewards are rejected."""
    async with client_of(mesh) as run:
        for number, lease_id in enumerate(leases):
            ids = await run.finish_episode(lease_id, {"liked": number})
            assert ids == await run.finish_episode(lease_id, {"liked": number}), "repeated"
            with pytest.raises(EpisodeConflict):
                await run.finish_episode(lease_id, {"liked": 0.5})
        await run.submit_tasks([], finish=True)


async def test_two_turns_of_an_application_reach_the_trainer_with_a_reward_that_came_later(
    tmp_path: Path, model: Path
) -> None:
    leases, weights = [], write_weights(tmp_path / "weights.safetensors")
    seen: dict[str, BatchSample] = {}
    async with mesh_without_learner(config(model), tmp_path / "run") as mesh, client_of(mesh) as run:
        operator = Operator(mesh)
        await create_run(mesh.layout)
        async with await run.attach(keeps_no_checkpoints=True) as trainer:
            await trainer.publish(weights)
            for key in ("chat-1", "chat-2"):
                async with run.episode(key) as episode:
                    assert len(await chat(episode, "Hello", "And now?")) == 4
                    leases.append(episode.lease_id)
            await finish_elsewhere(mesh, leases)
            async for batch in trainer.batches():
                seen |= {sample.leased.task: sample for sample in batch.samples}
                await trainer.commit(batch)
                await trainer.publish(weights)
        state = await operator.state()
        report = await audit(operator)
    assert (state.ended, dict(state.samples.reasons)) == ("TASKS_EXHAUSTED", {"trained": 2})
    assert report.holds, report.to_text()
    for number, key in enumerate(("chat-1", "chat-2")):
        path = seen[key].path()
        assert [(one.name, one.value) for one in seen[key].leased.meta.rewards] == [("liked", number)]
        assert [part.role for part in path] == [CONTEXT, ACTION, OBSERVATION, ACTION]
        for turn in path[1::2]:
            num = len(turn.token_ids) // 4
            assert num > 0
            assert len(turn.logprobs) // 4 == num
            assert (turn.version.step, turn.version.policy) == (0, "main")


async def crash(run: Run) -> None:
    """Drop one episode of a key, and fail before the end of the other."""
    async with run.episode("b") as failed, run.episode("b", index=1) as dropped:
        with pytest.raises(InvalidInput, match="likd"):
            await failed.finish({"likd": 1.0})
        assert await dropped.finish({}) == await dropped.finish({}) == []
        with pytest.raises(EpisodeConflict):
            await dropped.finish({"liked": 1.0})
        raise RuntimeError


async def test_an_episode_that_no_application_uses_or_finishes_in_time_is_dropped_with_its_reason(
    tmp_path: Path, model: Path
) -> None:
    made = config(model, options={"idle_s_max": 5.0, "reward_s_max": 0.2}, group_size=2)
    async with Mesh(made, run_dir=tmp_path / "run") as mesh, client_of(mesh) as run:
        operator = Operator(mesh)
        with pytest.raises(EpisodesNotServed, match="live"):
            async with run.episode("x", task=types_pb2.Task(agent="other")):
                pytest.fail("no such agent")
        await run.submit_tasks([types_pb2.Task(task_id="y", messages=[types_pb2.Message(role="user", content="1")])])
        with pytest.raises(EpisodesNotServed, match="the default agent"):
            async with run.episode("y"):
                pytest.fail("another agent works on it")
        async with run.episode("a") as used, run.episode("a", index=1) as unused:
            await chat(used, "Hello")
        with pytest.raises(InvalidInput, match="index"):
            async with run.episode("a", index=2):
                pytest.fail("a group has two episodes")
        await ended_with(operator, f"filtered/{NOT_USED}")
        await ended_with(operator, f"filtered/{REWARD_LATE}")
        for episode, reason in ((used, REWARD_LATE), (unused, NOT_USED)):
            with pytest.raises(EpisodeOver) as over:
                await episode.finish({"liked": 1.0})
            assert over.value.metadata["end"] == f"filtered/{reason}"
        with pytest.raises(EpisodeOver):
            async with run.episode("a"):
                pytest.fail("it has ended")
        with pytest.raises(RuntimeError):
            await crash(run)
        await ended_with(operator, f"filtered/{DISCARDED}", 2)
        report = await audit(operator)
    assert report.holds, report.to_text()


async def test_an_episode_survives_its_coordinator_and_is_opened_again_after_the_loss_of_its_worker(
    tmp_path: Path, model: Path
) -> None:
    """Also at the limit of turns, after which the rewards still count."""
    made = config(model, batch_groups=1)
    limits = msgspec.structs.replace(made.rollout.limits, turns_max=1)
    made = msgspec.structs.replace(made, rollout=msgspec.structs.replace(made.rollout, limits=limits))
    async with Mesh(made, run_dir=tmp_path / "run") as mesh, client_of(mesh) as run:
        operator = Operator(mesh)
        async with run.episode("a") as lost:
            await chat(lost, "Hello")
        await mesh.restart("rollout-0")
        with pytest.raises(EpisodeLost):
            await lost.finish({"liked": 1.0})
        async with run.episode("a") as episode:
            assert (episode.lease_id, episode.api_key) != (lost.lease_id, lost.api_key)
            with pytest.raises(AssertionError, match="turns"):
                await chat(episode, "Hello", "And now?")
            await mesh.restart("coordinator")
            ids = await episode.finish({"liked": 0.25})
        await mesh.restart("coordinator")
        assert len(ids) == 1
        assert ids == await episode.finish({"liked": 0.25}), "the ledger knows it"
        with pytest.raises(EpisodeConflict):
            await episode.finish({"liked": 1.0})
        with pytest.raises(EpisodeLost):
            await lost.finish({"liked": 1.0})
        await run.submit_tasks([], finish=True)
        await operator.finished()
        state, facts, report = await operator.state(), await operator.facts(), await operator.audit()
    assert report.holds, report.to_text()
    assert dict(state.samples.reasons) == {"trained": 1}
    (scored,) = [fact for fact in facts if isinstance(fact, f.EpisodeScored)]
    assert [reward.value for sample in scored.samples for reward in sample.rewards] == [0.25]


async def test_the_time_limit_of_an_episode_drops_it_and_is_no_failed_attempt(tmp_path: Path, model: Path) -> None:
    made = config(model)
    limits = msgspec.structs.replace(made.rollout.limits, run_s_max=2.0)
    made = msgspec.structs.replace(made, rollout=msgspec.structs.replace(made.rollout, limits=limits))
    async with Mesh(made, run_dir=tmp_path / "run") as mesh, client_of(mesh) as run:
        operator = Operator(mesh)
        async with run.episode("a") as episode:
            await chat(episode, "Hello")
        await ended_with(operator, f"filtered/{REWARD_LATE}")
        assert (await operator.state()).failed_attempts.num == 0


async def test_the_example_chats_and_rates_each_chat(tmp_path: Path, model: Path) -> None:
    async with Mesh(config(model), run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        command: list[str | Path] = [
            sys.executable,
            EXAMPLE / "application.py",
            mesh.gateway_address,
            mesh.layout.run_dir,
            mesh.run,
            "4",
        ]
        output = await finish(command, limit_s=60)
        assert output.count("rated") == 4, output
        await operator.until(lambda state: state.policies[0].applied_step == 2)


async def test_each_side_gets_what_it_waits_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an application whose episode no worker has when it opens it. The test is the worker."""
    monkeypatch.setattr(applications, "INTERVAL_S", 0.0)  # nothing is read by chance after it was announced
    limits = msgspec.structs.replace(CONFIG.run, watch_idle_s=60.0)
    made = msgspec.structs.replace(CONFIG, run=limits)
    async with coordinator_mesh(tmp_path, made) as mesh, asyncio.timeout(20):
        await mesh.begin(submitted_tasks=True, group_size=1)
        opening = run_pb2.OpenEpisodeRequest(run=mesh.name, key="a", wait_s=40.0)
        open_episode = asyncio.ensure_future(mesh.call(mesh.run.OpenEpisode, opening))
        (lease,) = await mesh.acquire(num_max=1)
        served = run_pb2.OpenEpisodeResponse(base_url="http://worker/v1", api_key="rm-1", idle_s_max=3.0)
        request = coordinator_pb2.ServeEpisodeRequest(
            node_id=mesh.worker, lease_id=lease.lease_id, served=served, wait_s=40.0
        )
        other = coordinator_pb2.ServeEpisodeRequest()
        other.CopyFrom(request)
        other.node_id = "another-worker"
        with pytest.raises(UnknownLease):
            await mesh.call(mesh.coordinator.ServeEpisode, other)
        serving = asyncio.ensure_future(mesh.call(mesh.coordinator.ServeEpisode, request))
        opened = await open_episode
        assert (opened.base_url, opened.api_key, opened.idle_s_max) == (served.base_url, served.api_key, 3.0)
        finishing = run_pb2.FinishEpisodeRequest(run=mesh.name, lease_id=opened.lease_id)
        finish_episode = asyncio.ensure_future(mesh.call(mesh.run.FinishEpisode, finishing))
        assert await serving == coordinator_pb2.ServeEpisodeResponse(finished=True)
        report = coordinator_pb2.EpisodeReport(lease_id=lease.lease_id, key=lease.key)
        report.outcome, report.failure.reason = coordinator_pb2.EPISODE_OUTCOME_COMPLETED, DISCARDED
        assert await mesh.report([report]) == [""]
        assert not (await finish_episode).sample_ids


async def test_a_run_whose_variants_have_another_agent_opens_no_episode(tmp_path: Path, model: Path) -> None:
    variants = (Variant(name="own", count=1), Variant(name="other", count=1, agent="solver"))
    made = config(model, group_size=2, variants=variants)
    agents = {**made.rollout.agents, "solver": Extension("single_turn")}
    made = msgspec.structs.replace(made, rollout=msgspec.structs.replace(made.rollout, agents=agents))
    async with Mesh(made, run_dir=tmp_path / "run") as mesh, client_of(mesh) as run:
        with pytest.raises(EpisodesNotServed, match="got solver"):
            async with run.episode("x"):
                pytest.fail("one of its two episodes would be of the agent solver")
        assert (await Operator(mesh).state()).submitted.open == 0
