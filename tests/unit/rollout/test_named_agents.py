"""The table of agents: which agent a task gets, what is loaded at the start, and what an unknown name does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmesh.services.rollout.agent import Agent, Environment, Task, load_agents
from rollmesh.services.rollout.agents.single_turn import SingleTurnAgent
from rollmesh.services.rollout.agents.tool_calling import ToolCallingAgent
from rollmesh.services.rollout.config import RolloutConfig
from rollmesh.shared.config.loader import config_from_dict, to_yaml
from rollmesh.shared.errors import Code, ConfigError
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2

AGENT = """
import msgspec
class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    turns: int = 1
class Mine:
    Options = Options
    def __init__(self, *, options):
        self.turns = options.turns
    async def run(self, task, env):
        for _ in range(self.turns):
            await env.generate()
            env.observe("again")
"""


class Seen(Agent):
    """Stores the tasks that it works on."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    async def run(self, task: Task, env: Environment) -> None:
        self.tasks.append(task)
        await env.generate(max_tokens=1)


def config(**settings: Any) -> RolloutConfig:
    return config_from_dict(RolloutConfig, settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(AGENT)
    return tmp_path


async def test_a_task_gets_the_agent_that_it_names_and_the_default_one_without_a_name() -> None:
    default, solver = Seen(), Seen()
    mesh = LocalMesh(script=lambda text: "yes<|end|>")
    runner = mesh.runner(default, {"solver": solver})
    for number, name in enumerate(["solver", "", "solver"]):
        report = await runner.run(lease(lease_id=f"l{number}", agent=name))
        assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_COMPLETED, report.failure
    assert [task.agent for task in solver.tasks] == ["solver", "solver"]
    assert [task.agent for task in default.tasks] == [""]


async def test_an_unknown_agent_is_an_infra_failure_of_the_task_with_the_known_names() -> None:
    default = Seen()
    mesh = LocalMesh(script=lambda text: "yes<|end|>")
    report = await mesh.runner(default, {"solver": Seen(), "coder": Seen()}).run(lease(agent="slover"))
    assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE
    assert report.failure.code == Code.NOT_FOUND.value
    assert report.failure.message == (
        "task: agent `slover` of the task is not configured; known: solver, coder; add it to rollout.agents, or correct "
        "the name in the task source"
    )
    assert report.failure.retry_after_s == 0
    assert not default.tasks
    assert mesh.num_open == 0


def test_the_default_agent_is_an_entry_of_the_table_if_it_names_one(folder: Path) -> None:
    agents = load_agents(
        config(agent="solver", agents={"solver": {"name": "mine.py:Mine", "options": {"turns": 3}}}), folder
    )
    assert agents[""] is agents["solver"]
    assert vars(agents[""]) == {"turns": 3}


def test_an_entry_may_have_the_name_of_a_built_in_agent_and_is_then_meant(folder: Path) -> None:
    agents = load_agents(config(agents={"tool_calling": "mine.py:Mine"}), folder)
    assert agents[""] is agents["tool_calling"]
    assert not isinstance(agents[""], ToolCallingAgent)


def test_an_agent_that_is_not_in_the_table_is_the_default_one_and_is_not_named(folder: Path) -> None:
    agents = load_agents(
        config(agent="single_turn", agents={"solver": "mine.py:Mine", "calls": "tool_calling"}), folder
    )
    assert set(agents) == {"", "solver", "calls"}
    assert isinstance(agents[""], SingleTurnAgent)
    assert isinstance(agents["calls"], ToolCallingAgent)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agents": {"solver": "mine.py:Absent"}}, r"`rollout.agents.solver`: .*Absent"),
        ({"agents": {"solver": "solve"}}, r"`rollout.agents.solver`: there is no agent `solve`; known: tool_calling"),
        (
            {"agents": {"solver": {"name": "mine.py:Mine", "options": {"turn": 1}}}},
            r"`rollout.agents.solver`: options of agent `mine.py:Mine`: .*turn",
        ),
        ({"agent": "solver", "agents": {"coder": "tool_calling"}}, r"there is no agent `solver`; known: tool_calling"),
    ],
)
def test_every_agent_of_the_table_is_loaded_at_the_start(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_agents(config(**settings), folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"agent": {"name": "solver", "options": {"turns": 2}}, "agents": {"solver": "mine.py:Mine"}},
            "`agent` must not have options, because it names the entry 'solver' of `agents`, got turns",
        ),
        ({"agents": {"": "tool_calling"}}, "agents"),
        ({"agents": {"my agent": "tool_calling"}}, "agents"),
        ({"agents": {"mine.py:Mine": "tool_calling"}}, "agents"),
        ({"agents": {"x" * 65: "tool_calling"}}, "agents"),
        ({"agents": ["tool_calling"]}, "agents"),
        ({"agents": {"solver": 3}}, r"agents"),
    ],
)
def test_wrong_tables_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings)


def test_a_table_that_is_written_out_is_read_again() -> None:
    written = config(agent="solver", agents={"solver": {"name": "single_turn", "options": {}}, "coder": "tool_calling"})
    text = to_yaml(written)
    assert "coder" in text
    assert config_from_dict(RolloutConfig, yaml.safe_load(text)) == written
