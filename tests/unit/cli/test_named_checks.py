"""What `rollmesh check` finds out about the agents and scorers that tasks name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rollmesh.app.checks.config_checks import find_mistakes
from rollmesh.app.checks.config_notes import notes
from rollmesh.app.checks.effective_config import effective_config
from rollmesh.app.checks.model_checks import calls_tools
from rollmesh.app.checks.task_survey import survey_tasks
from rollmesh.app.config import TrainConfig
from rollmesh.services.data.config import build_pools
from rollmesh.services.data.task import Split
from rollmesh.services.rollout.agent import load_agents
from rollmesh.services.rollout.config import RolloutConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.trainer.recipe import find_recipe, read_recipe

OPTIONS = {"path": "tasks.jsonl", "split": "split", "agent": "agent", "scorers": "scorers"}
SCORERS = [{"name": "exact", "reward": "correct"}, {"name": "length", "reward": "short"}]
AGENTS = {"solver": "single_turn", "caller": {"name": "tool_calling"}}
KNOWN = "known: solver, caller; add it to rollout.agents, or correct the name in the task source"
Named = tuple[str | None, list[str] | None]


def config(tools: tuple[str, ...] = (), **rollout: Any) -> TrainConfig:
    return config_from_dict(
        TrainConfig,
        {
            "data": {"source": {"name": "jsonl", "options": {**OPTIONS, "tools": tools}}},
            "reward": {"scorers": SCORERS},
            "rollout": {"agents": AGENTS, "agent": "single_turn", **rollout},
            "counts": {"inference": 0, "sandbox": 0},
            "learner": {"engine": "fake"},
        },
    )


def write(folder: Path, *named: Named, test: Named = (None, None)) -> None:
    """Write a task of the train split for each name, and one of the test split."""
    lines = [
        {"question": f"{number}+1", "answer": "1", "split": split, "agent": agent, "scorers": scorers}
        for number, (split, (agent, scorers)) in enumerate([*(("train", one) for one in named), ("test", test)])
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def mistakes(folder: Path, settings: TrainConfig) -> list[tuple[str, str]]:
    found = find_mistakes(settings, folder, learner=False)
    return [(one.metadata["key"], one.message) for one in found]


def test_names_that_exist_are_no_mistake(tmp_path: Path) -> None:
    write(tmp_path, ("solver", ["correct"]), ("caller", None), (None, ["short", "correct"]))
    assert mistakes(tmp_path, config()) == []


def test_unknown_agents_are_named_with_a_task_and_the_known_ones(tmp_path: Path) -> None:
    write(tmp_path, (None, None), ("solvr", None), ("solvr", None), test=("judge", None))
    assert mistakes(tmp_path, config()) == [
        (
            "data.source",
            f"`data.source`: task {task} names the agent `{name}`, which does not exist; {KNOWN}",
        )
        for task, name in (("tasks-2", "solvr"), ("tasks-4", "judge"))
    ]


def test_a_built_in_agent_is_no_name_of_a_task_unless_the_table_has_it(tmp_path: Path) -> None:
    write(tmp_path, ("single_turn", None))
    ((key, message),) = mistakes(tmp_path, config())
    assert key == "data.source"
    assert "task tasks-1 names the agent `single_turn`, which does not exist; known: solver, caller" in message


def test_unknown_scorers_are_named_with_a_task_once(tmp_path: Path) -> None:
    write(tmp_path, (None, ["correct"]), (None, ["corect"]), (None, ["corect"]), test=(None, ["corect"]))
    ((key, message),) = mistakes(tmp_path, config())
    assert key == "data.source"
    assert message.startswith("`data.source`: task tasks-")
    assert "`scorers` must have different names of rewards among [correct, short], got 'corect'" in message


def test_every_agent_of_the_table_is_loaded_and_named_by_its_key(tmp_path: Path) -> None:
    write(tmp_path, (None, None))
    settings = config(
        agents={"a": "mine.py:Missing", "b": {"name": "single_turn", "options": {"x": 1}}, "c": "program"}
    )
    assert [key for key, _ in mistakes(tmp_path, settings)] == [
        "rollout.agents.a",
        "rollout.agents.b",
        "rollout.agents.c.options.command",
    ]
    assert [key for key, _ in mistakes(tmp_path, config(agent="missing"))] == ["rollout.agent"]


def remarks(folder: Path, settings: TrainConfig) -> list[str]:
    """Return the remarks about a configuration."""
    return notes(settings, folder, survey_tasks(build_pools(settings.data, folder)))


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ("single_turn", ["rollout.agents.caller: no task names this agent, and rollout.agent is another"]),
        ("caller", []),
    ],
)
def test_an_agent_that_no_task_has_is_noted(tmp_path: Path, agent: str, said: list[str]) -> None:
    write(tmp_path, ("solver", None))
    assert [line for line in remarks(tmp_path, config(agent=agent)) if "no task names" in line] == [
        f"note: {line}" for line in said
    ]


@pytest.mark.parametrize(("scorers", "noted"), [(["short"], True), (["short", "correct"], False), (None, False)])
def test_tasks_of_evaluations_without_the_success_reward_are_noted(
    tmp_path: Path, scorers: list[str] | None, noted: bool
) -> None:
    write(tmp_path, ("solver", ["short"]), ("caller", None), test=(None, scorers))
    found = [line for line in remarks(tmp_path, config()) if "run.success_reward is correct" in line]
    assert bool(found) == noted, found


@pytest.mark.parametrize(
    ("agents", "named", "calls"),
    [
        ({"solver": "single_turn"}, "solver", False),
        ({"solver": "tool_calling"}, "solver", True),
        ({"solver": "tool_calling"}, None, False),
        ({"solver": "summarizing"}, "solver", True),
        ({"solver": "prefix"}, "solver", True),
    ],
)
def test_calls_must_be_readable_if_the_tasks_of_an_agent_that_reads_them_have_tools(
    tmp_path: Path, agents: dict[str, str], named: str | None, calls: bool
) -> None:
    """The tools of a task count for its own agent, not for others of the table."""
    write(tmp_path, (named, None), test=(named, None))
    settings = config(("calculator",), agents=agents)
    assert calls_tools(settings, survey_tasks(build_pools(settings.data, tmp_path)), tmp_path) == calls


def test_the_survey_keeps_the_first_task_of_each_agent_and_of_each_list_of_scorers(tmp_path: Path) -> None:
    write(tmp_path, ("solver", ["short"]), (None, None), ("solver", ["short"]))
    survey = survey_tasks(build_pools(config().data, tmp_path))
    assert {name: task.task_id for name, task in survey.by_agent.items()} == {"solver": "tasks-1", "": "tasks-2"}
    assert {split: task.task_id for split, task in survey.scored_by.items()} == {
        (Split.TRAIN, ("short",)): "tasks-1",
        (Split.TRAIN, ()): "tasks-2",
        (Split.TEST, ()): "tasks-4",
    }


def test_the_effective_configuration_has_the_options_of_every_agent(tmp_path: Path) -> None:
    write(tmp_path, ("solver", None))
    agents = {"solver": {"name": "program", "options": {"command": ["true"]}}}
    for agent in ("solver", "single_turn"):
        shown = effective_config(config(agent=agent, agents=agents), tmp_path).rollout
        assert shown.agents["solver"].options["stop_s"] == 5.0
        assert (shown.agent.name, shown.agent.options) == (agent, {})


# Private extras -------------------------------------------------------------------------------------------------------


def with_solutions(folder: Path, of_source: dict[str, Any], source: str = "jsonl", **rollout: Any) -> TrainConfig:
    lines = [{"question": f"{split}+1", "answer": "1", "split": split, "worked": "#"} for split in ("train", "test")]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = config(**{"agents": {}, **rollout})
    options = {"path": "tasks.jsonl", "split": "split", **of_source}
    return replace(settings, data=replace(settings.data, source=Extension(source, options)))


@pytest.mark.parametrize("source", ["jsonl", "files"])
def test_an_agent_that_reads_a_private_extra_needs_the_permission_and_the_field(tmp_path: Path, source: str) -> None:
    mapped, permitted = {"private_extras": {"solution": "worked"}}, {"prefix": ["solution"]}
    assert mistakes(tmp_path, with_solutions(tmp_path, mapped, source, agent="prefix", private_extras=permitted)) == []
    ((key, message),) = mistakes(tmp_path, with_solutions(tmp_path, mapped, source, agent="prefix"))
    assert key == "rollout.private_extras.prefix"
    assert message == (
        "agent `prefix` reads the private extra `solution` of its tasks, which the configuration does not permit; if it "
        "may, add `rollout: {private_extras: {prefix: [solution]}}`"
    )
    labelled = {"labels": {"solution": "worked"}}
    ((key, message),) = mistakes(
        tmp_path, with_solutions(tmp_path, labelled, source, agent="prefix", private_extras=permitted)
    )
    assert key == "data.source.options.private_extras"
    assert message == (
        "`data.source`: the task tasks-1 has no private extra `solution`; name its field in "
        "data.source.options.private_extras, and remove the label `solution`, which every process of the run can read"
    )


@pytest.mark.parametrize("source", ["jsonl", "files"])
def test_each_source_of_a_mixture_needs_the_private_extras_of_its_agent(tmp_path: Path, source: str) -> None:
    permitted = {"prefix": ["solution"]}
    settings = with_solutions(tmp_path, {}, source, agent="prefix", private_extras=permitted)
    options = {"path": "tasks.jsonl", "split": "split"}
    parts = {
        name: {"source": {"name": source, "options": {**options, "private_extras": private}}}
        for name, private in (("a", {"solution": "worked"}), ("b", {}))
    }
    mixed = replace(settings, data=replace(settings.data, source=Extension("mixture", {"sources": parts})))
    ((key, message),) = mistakes(tmp_path, mixed)
    assert key == "data.source.options.private_extras"
    assert message.startswith("`data.source`: the task b/tasks-1 has no private extra `solution`; name its field")


@pytest.mark.parametrize(
    "agent",
    [
        {"name": "program", "options": {"command": ["true"]}},
        {"name": "url", "options": {"url": "http://localhost:1"}},
    ],
)
def test_agents_in_other_processes_get_no_private_extras(tmp_path: Path, agent: dict[str, Any]) -> None:
    name = agent["name"]
    settings = with_solutions(tmp_path, {}, agent=agent, private_extras={name: ["solution"]})
    ((key, message),) = mistakes(tmp_path, settings)
    assert key == f"rollout.private_extras.{name}"
    assert (
        f"the agent `{name}` gets no private extras, because it runs in a process that the worker does not" in message
    )
    entry = with_solutions(tmp_path, {}, agents={"mine": agent}, private_extras={"mine": ["solution"]})
    assert [key for key, _ in mistakes(tmp_path, entry)] == ["rollout.private_extras.mine"]


@pytest.mark.parametrize("recipe", ["prefix_rl", "dr_po", "im_rag", "red", "rl_plus"])
def test_recipes_with_solutions_permit_them(recipe: str) -> None:
    rollout = read_recipe(find_recipe(recipe))[1]["rollout"]
    agent = rollout["agent"] if isinstance(rollout["agent"], str) else rollout["agent"]["name"]
    assert rollout["private_extras"] == {agent: ["solution"]}
    load_agents(config_from_dict(RolloutConfig, {key: rollout[key] for key in ("agent", "private_extras")}))
