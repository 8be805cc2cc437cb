"""`rollmesh check --probe` lists verifiers with a planted mistake, and does not list sound ones."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rollmesh.cli.__main__ import app
from rollmesh.services.reward.item import AnswerKey, ScoreItem, TaskView
from rollmesh.shared.domain.trajectory import EpisodeKey, Message

from . import planted

PAYS = re.compile(
    r"^probe: (task \S+ pays \S+ for the answer|\d+ answers that are the same for every task)", re.MULTILINE
)


def probe(folder: Path, name: str, tasks: list[planted.Task]) -> Result:
    """Run the command on four of the tasks, or on one if each answer is executed in a process."""
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    config: dict[str, Any] = {
        "made_model": {"tasks": {"name": "calc"}},
        "rollout": {"limits": {"context_tokens_max": 256}},
        "inference": {"engine": {"options": {"context_max": 256}}},
        "data": {
            "source": {"name": "jsonl", "options": {"path": "tasks.jsonl", "validation_share": 0, "test_share": 0}}
        },
        "run": {"eval_every": 0},
        "reward": {"scorers": [{"name": f"{planted.__file__}:{name}", "reward": "correct"}]},
    }
    (folder / "planted.yaml").write_text(json.dumps(config))
    num_tasks = "1" if name == "ExitCode" else "4"
    return CliRunner().invoke(
        app, ["check", str(folder / "planted.yaml"), "--probe", "--probe-tasks", num_tasks], terminal_width=200
    )


def score(name: str, task: planted.Task, response: str) -> float:
    said = (Message(role="user", content=task["question"]), Message(role="assistant", content=response))
    item = ScoreItem(
        key=EpisodeKey(run="r", task="t", group="g", episode="e", attempt=0),
        task=TaskView(task_id="t"),
        answer_key=AnswerKey(answers=(task["answer"],), record=task),
        messages=said,
        sample_id="s",
    )
    value: float = asyncio.run(getattr(planted, name)().score(item))
    return value


@pytest.mark.parametrize("name", [*planted.WEAK, *planted.SOUND])
def test_a_planted_verifier_pays_every_key_and_not_every_answer(name: str) -> None:
    tasks = {**planted.WEAK, **planted.SOUND}[name]
    assert [score(name, task, task["answer"]) for task in tasks] == [1.0] * len(tasks)
    wrong = [tasks[1]["answer"], "I do not know."]
    assert min(score(name, tasks[0], answer) for answer in wrong) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", planted.WEAK)
def test_a_weak_verifier_is_listed(name: str, tmp_path: Path) -> None:
    result = probe(tmp_path, name, planted.WEAK[name])
    assert PAYS.search(result.output), result.output[-2000:]
    assert result.exit_code == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", planted.SOUND)
def test_a_sound_verifier_is_not_listed(name: str, tmp_path: Path) -> None:
    result = probe(tmp_path, name, planted.SOUND[name])
    assert "4 tasks: 0 tasks pay for no answer, and 0 others for a trick" in result.output
    assert (result.exit_code, PAYS.search(result.output)) == (0, None)
