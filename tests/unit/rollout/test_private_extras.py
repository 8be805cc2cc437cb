"""Private extras at a worker: the agent with a permission gets them, and nothing else has them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.rollout.agent import Agent, Environment, Task, load_agents
from rollmesh.services.rollout.agents.single_turn import SingleTurnAgent
from rollmesh.services.rollout.config import RolloutConfig, StagesConfig, WorkerConfig
from rollmesh.services.rollout.data_link import DataLink
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.errors import ConfigError
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2, types_pb2

SECRET = "the-walrus-is-in-the-garden"
COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED


class Reader(Agent):
    """Read an extra, call a tool and answer. The extra decides only how often it generates."""

    private_extras = ("solution", "turns")

    def __init__(self, name: str = "solution") -> None:
        self._name = name
        self.read: list[object] = []

    async def run(self, task: Task, env: Environment) -> None:
        self.read += [env.private_text(self._name), env.private_extra("turns"), dict(task.extras)]
        await env.generate()
        env.observe(await env.tool("calculator", "1+1"))
        await env.generate()


def mesh_with(**settings: Any) -> LocalMesh:
    extras = {"solution": SECRET, "turns": [{"role": "user", "content": SECRET}], "tests": SECRET}
    return LocalMesh(
        script=lambda text: "<answer>3</answer><|end|>",
        **{"functions": {"call": lambda text: "2"}, "private_extras": extras, **settings},
    )


async def test_the_agent_reads_what_it_declares_and_no_message_has_it(caplog: pytest.LogCaptureFixture) -> None:
    mesh, agent = mesh_with(), Reader()
    calls: list[str] = []
    mesh.sandbox = type(mesh.sandbox)({"call": lambda text: calls.append(text) or "2"})  # type: ignore[func-returns-value]
    given = lease(tools=["calculator"], extras={"files": {"a.py": "x"}})
    with caplog.at_level(logging.DEBUG):
        report = await mesh.runner(agent).run(given)
    assert report.outcome == COMPLETED, report.failure
    assert agent.read == [SECRET, [{"role": "user", "content": SECRET}], {"files": {"a.py": "x"}}]
    assert mesh.data.asked == [("t", ("solution", "turns"))], "one request, for the declared names"
    prompts = [mesh.tokenizer.decode(prompt) for prompt, _, _ in mesh.generator.asked]
    sent = [given, report, *mesh.scorer.items, *mesh.samples.payloads, *prompts, *calls, *mesh.sandbox.session_ids]
    assert all(SECRET not in str(one) and SECRET.encode() not in _bytes(one) for one in sent)
    assert SECRET not in caplog.text
    assert len(calls) == 1


def _bytes(sent: Any) -> bytes:
    return (
        sent if isinstance(sent, bytes) else str(sent).encode() if isinstance(sent, str) else sent.SerializeToString()
    )


async def test_agents_without_declared_names_cause_no_request() -> None:
    mesh = mesh_with()
    assert (await mesh.runner().run(lease())).outcome == COMPLETED
    assert mesh.data.asked == []


async def test_wrong_reads_fail_the_attempt_and_say_what_to_do() -> None:
    failed = await mesh_with().runner(Reader("tests")).run(lease())
    assert failed.failure.reason == "PERMISSION_DENIED"
    assert (
        "does not declare the private extra `tests`; add it to `private_extras` of its class" in failed.failure.message
    )
    lacking = await mesh_with(private_extras={"turns": 1}).runner(Reader()).run(lease())
    assert "the task t has no private extra `solution`; name its field in data.source" in lacking.failure.message
    other = await mesh_with(private_extras={"solution": [SECRET], "turns": 1}).runner(Reader()).run(lease())
    assert "must be a text or null for its agent, got a list" in other.failure.message
    assert SECRET not in str(other)


async def test_an_unavailable_data_service_is_an_infra_failure_and_holds_no_session_or_slot() -> None:
    clock = ManualClock()
    mesh = mesh_with(clock=clock, config=RolloutConfig(stages=StagesConfig(init_max=1, init_s_max=5.0)))
    link = DataLink(list, lambda address: pytest.fail(address), clock, WorkerConfig(backoff_s_max=60.0, give_up_s=120))
    mesh.data = link  # type: ignore[assignment]
    runner = mesh.runner(Reader(), {"plain": SingleTurnAgent()})
    running = [asyncio.ensure_future(runner.run(lease(tools=["calculator"], lease_id=str(n)))) for n in range(2)]
    for _ in range(25):  # the episodes request their extras
        await asyncio.sleep(0)
    assert "2 requests for private extras are retried: no data node has joined" in link.waiting_for
    other = await runner.run(lease(lease_id="other", agent="plain"))
    assert other.outcome == COMPLETED, "agents without private extras still run"
    assert mesh.sandbox.num_opened == 0
    while not all(one.done() for one in running):
        clock.advance(60.0)
        await asyncio.sleep(0)
    for one in running:
        assert one.result().outcome == coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE
        assert "data: no data node has joined; start one, or wait until it joins" in one.result().failure.message


async def test_a_submitted_task_gets_no_extras_of_a_task_with_its_id() -> None:
    mesh = mesh_with()
    given = lease()
    given.submitted = True
    report = await mesh.runner(Reader()).run(given)
    assert "the task t has no private extra `solution`" in report.failure.message
    assert mesh.data.asked == []


async def test_an_evaluation_requests_no_private_extras_and_a_read_says_why() -> None:
    mesh = mesh_with()
    report = await mesh.runner(Reader()).run(lease(purpose=types_pb2.PURPOSE_EVAL))
    assert report.failure.reason == "PERMISSION_DENIED"
    assert "an evaluation has no private extras, because its result must not depend on" in report.failure.message
    assert mesh.data.asked == []
    exported = await mesh.runner(Reader()).run(lease(purpose=types_pb2.PURPOSE_EXPORT, tools=["calculator"]))
    assert exported.outcome == COMPLETED, exported.failure


class Patient(Reader):
    """`turns` is a part of its environment."""

    environment_extras = ("turns",)

    async def run(self, task: Task, env: Environment) -> None:
        self.read.append(env.private_extra("turns"))
        await env.generate()
        env.private_text("solution")


async def test_an_evaluation_has_what_is_a_part_of_the_environment_and_no_solution() -> None:
    mesh, agent = mesh_with(), Patient()
    report = await mesh.runner(agent).run(lease(purpose=types_pb2.PURPOSE_EVAL))
    assert agent.read == [[{"role": "user", "content": SECRET}]]
    assert mesh.data.asked == [("t", ("turns",))]
    assert report.failure.reason == "PERMISSION_DENIED"
    assert "read `solution` only if `env.purpose` is not EVAL" in report.failure.message


# Permissions ----------------------------------------------------------------------------------------------------------

HINTS = """
from rollmesh.services.rollout.agent import Agent
from rollmesh.services.rollout.agents.program import ProgramAgent

class Hints(Agent):
    private_extras = ("solution", "facts")

    async def run(self, task, env): ...

class Started(ProgramAgent):
    pass

class Wrong(Hints):
    private_extras = "solution"

class Late(Agent):
    private_extras = ()

    async def run(self, task, env):
        self.private_extras = ("solution",)
        await env.generate()

class Changing(Agent):
    num_read = 0

    @property
    def private_extras(self):
        self.num_read += 1
        return () if self.num_read == 1 else ("solution",)

    async def run(self, task, env):
        await env.generate()
"""
PROGRAM = {"name": "program", "options": {"command": ["true"]}}
URL = {"name": "url", "options": {"url": "http://localhost:1/run"}}


def load(folder: Path, **settings: Any) -> dict[str, Agent]:
    (folder / "hints.py").write_text(HINTS)
    return load_agents(config_from_dict(RolloutConfig, settings), folder)


def test_an_agent_loads_with_its_permission_and_the_error_says_how_to_give_it(tmp_path: Path) -> None:
    given = {"hints.py:Hints": ["facts", "solution"], "prefix": ["solution"]}
    load(tmp_path, agent="hints.py:Hints", private_extras=given)
    load(tmp_path, agent="h", agents={"h": "hints.py:Hints"}, private_extras={"h": ["facts", "solution"]})
    load(tmp_path, agent={"name": "prefix", "options": {"solution": "worked"}}, private_extras={"prefix": ["worked"]})
    load(tmp_path, agent={"name": "refined_search", "options": {"solution": ""}})
    for settings, name, extra in (
        ({"agent": "hints.py:Hints", "private_extras": {"hints.py:Hints": ["facts"]}}, "hints.py:Hints", "solution"),
        ({"agent": "single_turn", "agents": {"h": "hints.py:Hints"}, "private_extras": given}, "h", "solution"),
        ({"agent": "refined_search"}, "refined_search", "solution"),
    ):
        with pytest.raises(ConfigError) as error:
            load(tmp_path, **settings)
        assert f"agent `{name}` reads the private extra `{extra}` of its tasks" in str(error.value)
        assert f"add `rollout: {{private_extras: {{{name}: [" in str(error.value)
        assert error.value.metadata["key"] == f"rollout.private_extras.{name}"


@pytest.mark.parametrize("agent", [PROGRAM, URL, {"name": "hints.py:Started", "options": {"command": ["true"]}}])
def test_agents_that_run_elsewhere_get_no_private_extras(tmp_path: Path, agent: dict[str, Any]) -> None:
    load(tmp_path, agent=agent)
    message = f"the agent `{agent['name']}` gets no private extras, because it runs in a process"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, agent=agent, private_extras={agent["name"]: ["solution"]})
    with pytest.raises(ConfigError, match="`rollout.private_extras.p`: the agent `p` gets no private extras"):
        load(tmp_path, agents={"p": agent}, private_extras={"p": ["solution"]})


@pytest.mark.parametrize("name", ["Late", "Changing"])
async def test_an_agent_that_declares_an_extra_after_it_was_loaded_needs_the_permission(
    tmp_path: Path, name: str
) -> None:
    settings = {"agent": f"hints.py:{name}", "private_extras": {"other": ["solution"]}}
    agent = load(tmp_path, **settings)[""]
    mesh = mesh_with(config=config_from_dict(RolloutConfig, settings))
    reports = [await mesh.runner(agent).run(lease(lease_id=str(n))) for n in range(2)]
    message = f"agent: agent `hints.py:{name}` reads the private extra `solution` of its tasks, which the configuration"
    assert message in reports[1].failure.message
    assert mesh.data.asked == []


def test_malformed_names_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`private_extras` must be a tuple of at most 64 names, got 'solution'"):
        load(tmp_path, agent="hints.py:Wrong", private_extras={"hints.py:Wrong": ["solution"]})
    for name in ("not a name", "solution\n"):
        with pytest.raises(ConfigError, match="private_extras"):
            load(tmp_path, private_extras={"prefix": [name]})
    with pytest.raises(ConfigError, match="solution"):
        load(tmp_path, agent={"name": "refined_search", "options": {"solution": "\n"}})
