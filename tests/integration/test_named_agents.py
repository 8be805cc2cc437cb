"""A mesh with two agents and two kinds of tasks: each task has the agent and the scorers that it names."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rollmesh.cli.__main__ import app

from .test_cli import CONFIG, save_user_folder

AGENTS = """
from rollmesh.services.rollout.agent import Agent


class Once(Agent):
    async def run(self, task, env):
        await env.generate(max_tokens=2)


class Twice(Agent):
    async def run(self, task, env):
        await env.generate(max_tokens=2)
        env.observe("again")
        await env.generate(max_tokens=2)
"""
SCORER = """
from rollmesh.services.reward.scorer import Scorer
from rollmesh.shared.domain.trajectory import Reward


class Named(Scorer):
    async def score(self, item):
        noise = sum(map(ord, item.response())) % 2  # members of a group differ, so that they are trained
        return Reward(name="", value=len(item.turns) + noise / 4, evidence=f"scorers: {list(item.task.scorers)}")
"""
SETTINGS = (
    "data.source.options.agent=worked_by",
    "data.source.options.scorers=scored_by",
    "rollout.agents={twice: 'two.py:Twice', unused: single_turn}",
    "rollout.agent=two.py:Once",
    "inference.engine={name: fake, options: {vocab_size: 4096}}",  # an observation has special tokens
    "reward.scorers=[{name: 'named.py:Named', reward: correct}]",
)
KINDS = {"twice": ["correct"], "": []}
NUM = 8


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write_tasks(folder: Path, *, agent: str = "twice") -> None:
    """Write tasks of two kinds: with an agent and scorers, and without."""
    tasks = [
        {
            "question": f"{n}+{n}",
            "answer": str(2 * n),
            "parity": str(n % 2),
            "worked_by": agent if n % 2 else None,
            "scored_by": ["correct"] if n % 2 else None,
        }
        for n in range(60)
    ]
    (folder / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_user_folder(tmp_path_factory.mktemp("mine"))
    (folder / "two.py").write_text(AGENTS)
    (folder / "named.py").write_text(SCORER)
    (folder / "mine.yaml").write_text(CONFIG.replace("eval_every: 2", "eval_every: 0"))
    write_tasks(folder)
    return folder


@pytest.fixture(scope="module")
def lines(mine: Path) -> list[dict[str, Any]]:
    """The samples of one rollout, which several tests read."""
    done = run("rollout", mine / "mine.yaml", *SETTINGS, "-n", NUM, "--out", mine / "samples.jsonl", "--run-dir", mine / "run")  # fmt: skip
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in (mine / "samples.jsonl").read_text().splitlines()]


def num_turns(line: dict[str, Any]) -> int:
    return sum(segment["role"] == "action" for segment in line["segments"])


def test_each_task_is_worked_on_by_its_agent_and_scored_with_its_names(lines: list[dict[str, Any]]) -> None:
    kinds = Counter((line.get("agent", ""), num_turns(line)) for line in lines)
    assert sum(kinds.values()) == NUM
    assert set(kinds) == {("twice", 2), ("", 1)}
    for line in lines:
        (reward,) = line["rewards"]
        assert line.get("scorers", []) == KINDS[line.get("agent", "")]
        assert reward["evidence"] == f"scorers: {line.get('scorers', [])}"
        assert int(reward["value"]) == num_turns(line)


def test_the_ledger_and_a_later_score_have_the_names(mine: Path, lines: list[dict[str, Any]]) -> None:
    named = next(line for line in lines if line.get("agent"))
    shown = json.loads(run("show", mine / "run", named["sample_id"], "--json").stdout)["sample"]
    assert (shown["agent"], shown["scorers"]) == ("twice", ["correct"])
    scored = json.loads(
        run("score", mine / "samples.jsonl", "--config", mine / "mine.yaml", *SETTINGS, "--json").stdout
    )
    evidence = {line["sample_id"]: line["rewards"][0]["evidence"] for line in scored["lines"]}
    assert evidence == {line["sample_id"]: line["rewards"][0]["evidence"] for line in lines}


def test_a_run_trains_on_both_kinds(mine: Path) -> None:
    settings = (*SETTINGS, "run.updates_max=2", "--in-process")
    done = run("train", mine / "mine.yaml", *settings, "--out", mine / "trained", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["updates"] == 2
    groups = json.loads(run("show", mine / "trained", "--json", "--limit", 1000).stdout)
    assert {int(reward["value"]) for sample in groups for reward in sample["rewards"]} == {1, 2}


@pytest.mark.parametrize("command", ["check", "rollout", "train"])
def test_commands_refuse_a_task_with_an_unknown_agent_before_anything_starts(
    tmp_path: Path, mine: Path, command: str
) -> None:
    write_tasks(tmp_path, agent="twise")
    path = f"data.source.options.path={tmp_path / 'tasks.jsonl'}"
    done = run(command, mine / "mine.yaml", *SETTINGS, path)
    assert done.exit_code == 2
    assert "names the agent `twise`, which does not exist; known: twice, unused" in done.output
