"""Episodes that an application opens itself, in a mesh: its requests become samples, and the rewards come later."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rollmesh.client import Client, OpenEpisode, Run
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.reward.config import RewardConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import EpisodeConflict

from ..chaos.world import mesh_config, save_model_folder
from .test_mesh import Operator

SCORE = {"name": "environment", "reward": "score", "options": {"min": 0, "max": 1}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model"))


def config(model: Path, *, options: dict[str, Any] | None = None, **run: Any) -> MeshConfig:
    """One episode per key; an update trains on two of them."""
    values = {"submitted_tasks": True, "group_size": 1, "batch_groups": 2, "updates_max": 0, "max_staleness": 2}
    made = mesh_config(model, **(values | {"success_reward": "score"} | run))
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


async def ended_with(operator: Operator, reason: str, num: int = 1) -> None:
    await operator.until(lambda state: state.samples.reasons.get(reason, 0) == num)


async def test_two_turns_of_an_application_are_trained_with_a_reward_from_another_connection(
    tmp_path: Path, model: Path
) -> None:
    async with Mesh(config(model), run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        leases = []
        async with client_of(mesh) as run:
            for key in ("chat-1", "chat-2"):
                async with run.episode(key) as episode:
                    assert len(await chat(episode, "Hello", "And now?")) == 4
                    leases.append(episode.lease_id)
        async with client_of(mesh) as later:
            for number, lease_id in enumerate(leases):
                ids = await later.finish_episode(lease_id, {"score": number})
                assert ids == await later.finish_episode(lease_id, {"score": number}), "repeated"
                with pytest.raises(EpisodeConflict):
                    await later.finish_episode(lease_id, {"score": 0.5})
            await later.submit_tasks([], finish=True)
        await operator.finished()
        state, facts, report = await operator.state(), await operator.facts(), await operator.audit()
    assert (state.ended, dict(state.samples.reasons)) == ("TASKS_EXHAUSTED", {"trained": 2})
    assert report.holds, report.to_text()
    samples = [sample for fact in facts if isinstance(fact, f.EpisodeScored) for sample in fact.samples]
    assert [[(one.name, one.value) for one in sample.rewards] for sample in samples] == [[("score", 0)], [("score", 1)]]
    for sample in samples:
        assert len(sample.summary.turns) == 2
        assert sum(span.num_tokens for span in sample.steps) == sum(turn.num_tokens for turn in sample.summary.turns)
