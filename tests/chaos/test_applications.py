"""Real processes, ended by SIGKILL while an application has an episode open: it counts once, or is opened again."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from rollmesh.client import Client, Run
from rollmesh.services.coordinator.core import facts as f
from rollmesh.shared.errors import EpisodeLost
from rollmesh.shared.net.retry import RetryConfig

from ..integration.test_application_episodes import chat, config
from .test_submitted import STEP_S, is_replaced
from .verdict import settle
from .world import World, save_model_folder, world

NUM = 4


async def kill(mesh: World, host: str) -> None:
    """Kill a process, and wait until another one runs in its place."""
    pid = mesh.kill(host)
    await mesh.until(f"{host} is replaced", lambda: is_replaced(mesh, pid), limit_s=STEP_S)


async def lived(mesh: World, run: Run, key: str, *, at_open: str, at_chat: str) -> int:
    """Open an episode, kill a process, chat, kill another, and finish it; begin again if it is lost. Return the number
    of its attempts."""
    for attempt, (first, second) in enumerate([(at_open, at_chat), ("", "")], start=1):
        async with run.episode(key) as episode:
            try:
                if first:
                    await kill(mesh, first)
                await chat(episode, "Hello", "And now?")
            except (OSError, aiohttp.ClientError):  # its worker is gone; the mesh says so, too
                pass
        if second:
            await kill(mesh, second)
        try:
            assert len(await run.finish_episode(episode.lease_id, {"liked": 1.0})) == 1
        except EpisodeLost:
            continue
        return attempt
    raise AssertionError(key)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_episodes_of_an_application_under_kills_count_once(tmp_path: Path) -> None:
    made = config(save_model_folder(tmp_path / "model"), batch_groups=1, max_staleness=8)
    async with world(tmp_path, made) as mesh:
        await mesh.until_state("the run exists", lambda s: s.submitted.open == 0, limit_s=STEP_S)
        retry = RetryConfig(retry_s=STEP_S)
        async with Client(mesh.layout.gateway, token=mesh.layout.access.token, retry=retry) as client:
            run = client.run(mesh.layout.run)
            assert await lived(mesh, run, "a", at_open="coordinator", at_chat="coordinator") == 1
            assert await lived(mesh, run, "b", at_open="gateway", at_chat="services") == 1
            assert await lived(mesh, run, "c", at_open="rollout-0", at_chat="") == 2
            assert await lived(mesh, run, "d", at_open="", at_chat="rollout-0") == 2
            await run.submit_tasks([], finish=True)
        state = await mesh.until_state("the end", lambda s: bool(s.ended), limit_s=STEP_S)
        verdict = await settle(mesh, updates=state.policies[0].applied_step, limit_s=STEP_S)
    print(verdict.audit.to_text(), f"exits: {mesh.exits}", sep="\n")
    assert (state.ended, state.submitted.answered) == ("TASKS_EXHAUSTED", NUM)
    scored = [fact for fact in verdict.facts if isinstance(fact, f.EpisodeScored)]
    assert len(scored) == NUM == verdict.audit.samples.reserved == verdict.audit.samples.trained
