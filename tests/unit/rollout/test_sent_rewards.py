"""Rewards that a program or a service sends for its episode: how they are addressed, and malformed ones."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from aiohttp import web

from rollmesh.services.rollout.agent import Agent, Environment, Task, load_agent
from rollmesh.services.rollout.agents.reply_rewards import REWARD_BYTES_MAX, give_lines
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Episode
from rollmesh.testing.rollout import LocalMesh

from .reward_service import environment, failed, played, scored_mesh

T = TypeVar("T")
PROGRAM = """
import json, os, subprocess, sys, time, urllib.request
task = json.load(sys.stdin)
rewards = open(int(os.environ["ROLLMESH_REWARDS_FD"]), "w", buffering=1)
def ask(*contents, **fields):
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(contents)]
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, **fields}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))
def give(name, value, **fields): print(json.dumps({"name": name, "value": value, **fields}), file=rewards)
"""
FREE = environment("step", per="turn", required=False, min=-1)
SAID = "<answer>4</answer>"


def of_program(folder: Path, code: str) -> Agent:
    (folder / "agent.py").write_text(PROGRAM + code)
    options = {"command": [sys.executable, "-S", "agent.py"], "stop_s": 0.5}
    return load_agent(Extension("program", options), folder)


@asynccontextmanager
async def closed(mesh: LocalMesh) -> AsyncIterator[LocalMesh]:
    """The mesh, whose server is closed at the end."""
    try:
        yield mesh
    finally:
        await mesh.server.close()


async def run(folder: Path, code: str, *scorers: Mapping[str, Any], config: RolloutConfig | None = None) -> Episode:
    async with closed(scored_mesh(*(scorers or (environment(),)), config=config)) as mesh:
        return await played(mesh, of_program(folder, code))


async def fail(folder: Path, code: str, *, config: RolloutConfig | None = None) -> str:
    async with closed(scored_mesh(environment(required=False), config=config)) as mesh:
        return await failed(mesh, of_program(folder, code))


def values(episode: Episode, name: str = "score") -> list[dict[int, float]]:
    return [
        {r.segment: r.value for r in s.rewards if r.name == name and r.outcome.name == "OK"} for s in episode.samples
    ]


# Programs -------------------------------------------------------------------------------------------------------------


async def test_a_program_writes_a_reward_of_all_its_conversations(tmp_path: Path) -> None:
    episode = await run(tmp_path, "ask('a'); ask('b'); give('score', 0.5, evidence='half')")
    assert values(episode) == [{-1: 0.5}, {-1: 0.5}]
    reward = episode.samples[0].rewards[0]
    assert (reward.scorer, reward.evidence) == ("environment@1", "half")


async def test_a_program_addresses_replies_choices_and_turns(tmp_path: Path) -> None:
    code = f"""
first = ask("a")
ask("a", {SAID!r}, "b")
other = ask("c", n=2)
give("score", 0.25, reply=first["id"])
for choice in (0, 1): give("score", choice, reply=other["id"], choice=choice)
give("step", -1, reply=first["id"], turn=-1)
"""
    episode = await run(tmp_path, code, environment(), FREE)
    assert values(episode) == [{-1: 0.25}, {-1: 0.0}, {-1: 1.0}]
    assert values(episode, "step") == [{2: -1.0}, {}, {}]


async def test_a_program_with_one_conversation_addresses_its_turns_without_a_reply(tmp_path: Path) -> None:
    code = f"""
ask("a")
ask("a", {SAID!r}, "b")
give("step", 1, turn=0)
give("step", -1, turn=-1)
"""
    assert values(await run(tmp_path, code, FREE), "step") == [{2: 1.0, 4: -1.0}]


WRITE_AND_WAIT = """
ask("a")
give("score", 1)
rewards.write({rest!r})
rewards.flush()
open({marker!r}, "w").close()
time.sleep(1000)
"""


async def at_the_time_limit(folder: Path, rest: str, result: Callable[[LocalMesh, Agent], Awaitable[T]]) -> T:
    """Run a program that writes a reward and `rest`, and then reaches the time limit."""
    clock = ManualClock()
    marker = folder / "written"
    code = WRITE_AND_WAIT.format(rest=rest, marker=str(marker))
    async with closed(scored_mesh(environment(), clock=clock)) as mesh, asyncio.timeout(60):
        running = asyncio.ensure_future(result(mesh, of_program(folder, code)))
        while not marker.exists():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.02)
        clock.advance(mesh.config.limits.run_s_max + 1)
        return await running


async def test_what_a_program_wrote_before_the_time_limit_counts(tmp_path: Path) -> None:
    episode = await at_the_time_limit(tmp_path, '{"name": "score", "val', played)
    assert (values(episode), episode.samples[0].finish.name) == ([{-1: 1.0}], "LENGTH")


async def test_a_wrong_line_before_the_time_limit_fails_the_episode(tmp_path: Path) -> None:
    said = await at_the_time_limit(tmp_path, "won\n", failed)
    assert "has written a wrong reward: line 2 of its rewards, 'won'" in said


async def test_what_a_program_wrote_before_a_limit_of_turns_counts(tmp_path: Path) -> None:
    turns = RolloutConfig(limits=LimitsConfig(turns_max=1))
    episode = await run(tmp_path, "ask('a'); give('score', 1); ask('b')", config=turns)
    assert (values(episode), episode.samples[0].finish.name) == ([{-1: 1.0}], "LENGTH")


async def test_the_children_of_a_program_have_no_way_to_its_pipe(tmp_path: Path) -> None:
    """The standard streams, and the inherited descriptors of `subprocess`, do not lead there."""
    child = "import os; print('{\"name\": \"score\", \"value\": 1}'); os.write(int(os.environ['ROLLMESH_REWARDS_FD']), b'x')"
    code = f"""
ask("a")
print(json.dumps({{"name": "score", "value": 1}}), file=sys.stderr)
done = subprocess.run([sys.executable, "-S", "-c", {child!r}], stderr=subprocess.PIPE)
assert b"Bad file descriptor" in done.stderr, done
give("score", 0)
"""
    assert values(await run(tmp_path, code)) == [{-1: 0.0}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"won\n", "line 1 of its rewards, 'won': JSON is malformed"),
        (b'{"name": "score"}\n', "missing required field `value`"),
        (b'{"name": "score", "value": NaN}\n', "JSON is malformed"),
        (b'{"name": "score", "value": 1e999}\n', "line 1 of its rewards"),
        (b'{"name": "score", "value": 1e31}\n', "`reward.value` must be in [-1e+30, 1e+30], got 1e+31"),
        (b'{"name": "score", "value": "1"}\n', "Expected `float`, got `str` - at `$.value`"),
        (b'{"name": "score", "value": true}\n', "Expected `float`, got `bool` - at `$.value`"),
        (b'{"name": "score", "value": 1, "turns": 1}\n', "unknown field `turns`"),
        (b'{"name": "score", "value": 1, "turn": 5}\n', "`turn` of the reward 'score' must be in [-1, 0], got 5"),
        (b'{"name": "score", "value": 1}\n\n{"name": "score", "value": 0}', "line 3 of its rewards, "),
        (b"[1]\n", "Expected `object`, got `array`"),
        (b"\xff\xfe\x00\n", "line 1 of its rewards"),
        (b"[" * 100_000, "line 1 of its rewards"),
        (b'{"name": "score", "val', 'line 1 of its rewards, \'{"name": "score", "val\''),
        (b"x" * (REWARD_BYTES_MAX + 100), "its rewards must have at most 1048576 bytes; send fewer"),
    ],
)
async def test_a_wrong_line_of_a_program_is_an_error_that_shows_it(line: bytes, message: str) -> None:
    class Writer(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            await env.generate()
            give_lines(line, env, OneConversation(env), complete=True)  # type: ignore[arg-type]

    said = await failed(scored_mesh(environment()), Writer())
    assert said.startswith("agent: ")
    assert message in said
    assert len(said) < 2000


class OneConversation:
    def __init__(self, env: Environment) -> None:
        self._env = env

    def branch(self, reply: str = "", choice: int = 0) -> Environment:
        return self._env


async def test_a_program_that_floods_its_pipe_or_names_an_unknown_reply_is_an_infra_failure(tmp_path: Path) -> None:
    said = await fail(tmp_path, f"ask('a'); rewards.write('x' * {2 * REWARD_BYTES_MAX})")
    assert " has written a wrong reward: its rewards must have at most 1048576 bytes; send fewer" in said
    said = await fail(tmp_path, "ask('a'); give('score', 1, reply='chatcmpl-x')")
    assert "`reply` must be the `id` of a reply of the model in this episode that has the choice 0, got 'chatcm" in said


async def test_a_turn_is_ambiguous_in_an_episode_with_two_conversations(tmp_path: Path) -> None:
    said = await fail(tmp_path, "ask('a'); ask('b'); give('score', 1, turn=0)")
    assert "`reply` must be the `id` of a reply, because the episode has 2 conversations, got none" in said


async def test_a_reward_of_a_program_that_fails_does_not_make_its_episode_complete(tmp_path: Path) -> None:
    assert "exited with 3" in await fail(tmp_path, "ask('a'); give('score', 1); sys.exit(3)")


# Services -------------------------------------------------------------------------------------------------------------


async def served(
    reply: Any,
    *scorers: Mapping[str, Any],
    fails: bool = False,
    content_type: str = "application/json",
    num_asks: int = 1,
    config: RolloutConfig | None = None,
) -> Any:
    """Return the episode, or with `fails` the failure, of a service that asks and replies with JSON or with bytes."""

    async def work(request: web.Request) -> web.Response:
        asked = await request.json()
        headers = {"Authorization": f"Bearer {asked['api_key']}"}
        body = {"model": "policy", "messages": asked["task"]["messages"]}
        async with aiohttp.ClientSession(headers=headers) as session:
            for _ in range(num_asks):
                async with session.post(f"{asked['base_url']}/chat/completions", json=body) as answer:
                    said = await answer.json()
        if isinstance(reply, bytes):
            return web.Response(body=reply, content_type=content_type)
        return web.json_response(reply(said["id"]) if callable(reply) else reply)

    app = web.Application()
    app.router.add_post("/run", work)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    agent = load_agent(Extension("url", {"url": f"http://127.0.0.1:{runner.addresses[0][1]}/run"}))
    try:
        async with closed(scored_mesh(*(scorers or (environment(),)), config=config)) as mesh:
            return await (failed if fails else played)(mesh, agent)
    finally:
        await runner.cleanup()


async def test_a_service_replies_with_rewards() -> None:
    def reply(said: str) -> Any:
        step = {"name": "step", "value": -0.5, "reply": said, "turn": 0}
        return {"state": "done", "rewards": [{"name": "score", "value": 1}, step]}

    episode = await served(reply, environment(), FREE)
    assert (values(episode), values(episode, "step")) == ([{-1: 1.0}], [{1: -0.5}])


@pytest.mark.parametrize(
    "reply",
    [
        b"done",
        b"",
        b"[1, 2",
        b'{"rewards": [',
        b'{"rewards": [\xff]}',
        b'{"rewards": [' + b" " * REWARD_BYTES_MAX,
        {"state": "done"},
        {"rewards": [0.5]},
        {"rewards": {"score": 1}},
        ["rewards"],
        None,
    ],
)
async def test_a_reply_without_rewards_has_none(reply: Any) -> None:
    assert values(await served(reply, environment(required=False))) == [{}]
    assert "the environment gave no reward `score`" in await served(reply, fails=True)


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "application/octet-stream"])
async def test_the_rewards_of_a_json_reply_count_whatever_its_content_type(content_type: str) -> None:
    reply = b' {"rewards": [{"name": "score", "value": 1}]}'
    assert values(await served(reply, content_type=content_type)) == [{-1: 1.0}]


async def test_a_wrong_reward_after_a_limit_does_not_hide_the_limit() -> None:
    reply = {"rewards": [{"name": "score", "value": None}]}
    config = RolloutConfig(limits=LimitsConfig(turns_max=1))
    episode = await served(reply, environment(required=False), config=config, num_asks=2)
    assert episode.samples[0].finish.name == "LENGTH"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"rewards": [{"name": "score", "value": None}]}, "Expected `float`, got `null` - at `$[0].value`"),
        ({"rewards": [{"name": "score", "value": 1e300}]}, "rewards[0] of its reply: the reward 'score' is not valid"),
        (
            {"rewards": [{"name": "score", "value": 1}] * 2},
            "rewards[1] of its reply: the reward 'score' of this branch",
        ),
    ],
)
async def test_a_wrong_reward_in_a_reply_is_an_infra_failure_that_shows_it(reply: Any, message: str) -> None:
    said = await served(reply, fails=True)
    assert " replied with a wrong reward: " in said
    assert message in said
