"""A reward that only the environment knows trains a run in a mesh: as an agent, as a program and as a service."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from typer.testing import CliRunner

from rollmesh.cli.__main__ import app
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh import Mesh
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.learner.metrics_log import read_metrics
from rollmesh.services.reward.config import RewardConfig
from rollmesh.services.rollout.agent import Agent, Environment, Task
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.trainer.model_files import write_model_folder

from ..chaos.world import mesh_config, save_model_folder
from .test_mesh import Operator

SCORE = {"name": "environment", "reward": "score", "options": {"min": 0, "max": 1}}
STEP = {"name": "environment", "reward": "step", "options": {"min": -1, "max": 0, "per": "turn"}}


class Parity(Agent):
    """Two turns of any text. The score is 1 for every second episode of a group, which no text tells."""

    async def run(self, task: Task, env: Environment) -> None:
        for _ in range(2):
            await env.generate(max_tokens=4)
            env.reward("step", -env.index / 4, turn=-1)
            env.observe("go on")
        env.reward("score", env.index % 2, evidence=f"episode {env.index}")


async def test_a_run_is_trained_on_rewards_that_only_the_environment_knows(tmp_path: Path) -> None:
    base = mesh_config(save_model_folder(tmp_path / "model"), batch_groups=2, group_size=4, updates_max=3)
    config = msgspec.structs.replace(
        base,
        reward=config_from_dict(RewardConfig, {"scorers": [SCORE, STEP]}),
        rollout=msgspec.structs.replace(base.rollout, agent=Extension(f"{__name__}:Parity")),
        run=msgspec.structs.replace(base.run, success_reward="score"),
    )
    async with Mesh(config, run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        await operator.finished()
        state = await operator.until(lambda state: bool(state.ended))
        report, facts = await operator.audit(), await operator.facts()
    assert (state.ended, report.holds) == ("UPDATES_MAX", True)
    samples = [sample for fact in facts if isinstance(fact, f.EpisodeScored) for sample in fact.samples]
    assert len(samples) >= 3 * 8
    given = Counter[int]()
    for sample in samples:
        found = {(reward.name, reward.segment): reward for reward in sample.rewards}
        assert {reward.scorer for reward in found.values()} == {"environment@1"}
        score = found.pop(("score", -1))
        number = int(score.evidence.removeprefix("episode "))
        assert score.value == number % 2
        assert [(name, reward.value) for (name, _), reward in found.items()] == [("step", -number / 4)] * 2
        assert sorted(segment for _, segment in found) == [turn.segment for turn in sample.summary.turns]
        given[number] += 1
    assert set(given) == {0, 1, 2, 3}


# Learning -------------------------------------------------------------------------------------------------------------

UPDATES = 20
RULE = """
def is_right(text):
    # Known to the environment alone: a character of the first half of ASCII, and not a tag.
    return bool(text) and not text.startswith("<") and text[0] < "O"
"""
AGENT = f"""
{RULE}
class Game:
    async def run(self, task, env):
        score = 0.0
        for _ in range(2):
            score += is_right((await env.generate(max_tokens=1)).text) / 2
            env.observe("go on")
        env.reward("score", score)
"""
PROGRAM = f"""
import json, os, sys, urllib.request
{RULE}
messages, score = json.load(sys.stdin)["messages"], 0.0
for _ in range(2):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({{"model": "policy", "messages": messages, "max_tokens": 1}}).encode(),
        {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}},
    )
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    score += is_right(message["content"]) / 2
    messages += [message, {{"role": "user", "content": "go on"}}]
with open(int(os.environ["ROLLMESH_REWARDS_FD"]), "w") as rewards:
    print(json.dumps({{"name": "score", "value": score}}), file=rewards)
"""
CONFIG = """
model: model
run: {max_staleness: 1, batch_groups: 1, group_size: 16, updates_max: 20, eval_every: 0, success_reward: score}
counts: {sandbox: 0}
processes: {enabled: false}
data: {source: {name: jsonl, options: {path: tasks.jsonl, validation_share: 0.1, test_share: 0.1}}}
rollout: {limits: {context_tokens_max: 256}}
reward: {scorers: [{name: environment, reward: score, options: {min: 0, max: 1}}]}
inference: {engine: {name: torch, options: {context_max: 256}}}
learner: {checkpoint_every: 20, tensorboard: false, publish: {num_probes: 0}, optimizer: {lr: 1.0e-2, warmup_updates: 0}}
"""
SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)


@contextmanager
def service() -> Iterator[str]:
    """Serve the game at a URL, in a thread, until the context ends."""
    scope: dict[str, Any] = {}
    exec(RULE, scope)  # noqa: S102 - a constant of this file

    async def work(request: web.Request) -> web.Response:
        asked = await request.json()
        messages, score = asked["task"]["messages"], 0.0
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {asked['api_key']}"}) as session:
            for _ in range(2):
                body = {"model": "policy", "messages": messages, "max_tokens": 1}
                async with session.post(f"{asked['base_url']}/chat/completions", json=body) as reply:
                    message = (await reply.json())["choices"][0]["message"]
                score += scope["is_right"](message["content"]) / 2
                messages += [message, {"role": "user", "content": "go on"}]
        return web.json_response({"rewards": [{"name": "score", "value": score}]})

    loop = asyncio.new_event_loop()
    started: asyncio.Future[str] = loop.create_future()
    ended = asyncio.Event()

    async def serve() -> None:
        application = web.Application()
        application.router.add_post("/run", work)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        started.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}/run")
        ready.set()
        await ended.wait()
        await runner.cleanup()

    ready = threading.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield started.result()
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["agent", "program", "url"])
def test_the_reward_of_a_game_rises_within_20_updates(kind: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_model_folder(build_tiny_model(SMALL, seed=1), build_tokenizer(), tmp_path / "model")
    tasks = "".join(json.dumps({"question": f"{n}+{n}", "answer": str(2 * n)}) + "\n" for n in range(30))
    (tmp_path / "tasks.jsonl").write_text(tasks)
    (tmp_path / "game.py").write_text(AGENT)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "run.yaml").write_text(CONFIG)
    with service() as url:
        agents = {
            "agent": "game.py:Game",
            "program": json.dumps({"name": "program", "options": {"command": [sys.executable, "-S", "program.py"]}}),
            "url": json.dumps({"name": "url", "options": {"url": url}}),
        }
        settings = [f"rollout.agent={agents[kind]}", "--out", str(tmp_path / "run"), "--in-process", "--json"]
        done = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml"), *settings])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["samples"]["failed"] == 0
    lines = read_metrics(next((tmp_path / "run").rglob("metrics.jsonl")))
    scores = [line.metrics["reward/score"] for line in lines.values() if line.outcome == "APPLIED"]
    print(kind, [round(score, 2) for score in scores if score is not None])
    assert len(scores) == UPDATES
    first, last = (sum(filter(None, part)) / 5 for part in (scores[:5], scores[-5:]))
    assert last > first + 0.15, scores
