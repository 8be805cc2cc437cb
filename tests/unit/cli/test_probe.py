"""`rollmesh check --probe`: answers that solve nothing, and the tasks that pay them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rollmesh.app.checks.probe import PaidAnswer, ProbeReport, probe
from rollmesh.app.checks.tricks import answers_of
from rollmesh.app.config import load_train_config
from rollmesh.cli.__main__ import app
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.shared.domain.trajectory import Message
from rollmesh.shared.errors import ConfigError

SCORERS = """
from rollmesh.services.reward.scorer import Scorer

class Contains(Scorer):
    "Pays a text that contains the answer."
    async def score(self, item):
        return float(item.answer_key.answers[0] in item.response())

class Prompted(Scorer):
    "Pays a text that has the words of the question."
    async def score(self, item):
        return float(set(item.task.messages[-1].content.split()) <= set(item.response().split()))

class NotWrong(Scorer):
    "Pays what it cannot read."
    async def score(self, item):
        try:
            return float(int(item.response()) == int(item.answer_key.answers[0]))
        except ValueError:
            return 1.0

class Zero(Scorer):
    async def score(self, item):
        return float(item.response() == "0")

class Breaks(Scorer):
    async def score(self, item):
        raise RuntimeError("down")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(SCORERS)
    lines = [{"question": f"What is {n} plus {n + 1}?", "answer": str(2 * n + 1)} for n in range(2000, 2012)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def write(folder: Path, scorer: dict[str, object]) -> Path:
    tree = {
        "model": "none",
        "data": {"source": {"name": "jsonl", "options": {"path": "tasks.jsonl"}}},
        "reward": {"scorers": [{"reward": "correct", **scorer}]},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"


def probed(folder: Path, scorer: dict[str, object], num_tasks: int = 4) -> ProbeReport:
    return probe(load_train_config(write(folder, scorer)), folder, num_tasks=num_tasks)


@pytest.mark.parametrize(
    "scorer",
    [
        {"name": "exact"},
        {"name": "exact", "options": {"pattern": ""}},
        {"name": "exact", "options": {"pattern": r"-?\d+"}},
    ],
)
def test_a_sound_verifier_pays_nothing(folder: Path, scorer: dict[str, object]) -> None:
    report = probed(folder, scorer)
    assert (report.num_tasks, report.paid, report.failed, report.key_unpaid) == (4, [], {}, [])
    assert report.num_answers > 4 * 150


@pytest.mark.parametrize(
    ("scorer", "kinds"),
    [
        ("Prompted", {"the question back"}),
        ("NotWrong", {"nothing", "every option", "the question back"}),
    ],
)
def test_a_verifier_with_a_hole_is_listed_for_each_task_with_the_answer(
    folder: Path, scorer: str, kinds: set[str]
) -> None:
    report = probed(folder, {"name": f"own.py:{scorer}"})
    tasks = {one.task for one in report.paid if one.task != "*"}
    assert len(tasks) == report.num_tasks == 4
    assert kinds <= {one.kind for one in report.paid}
    assert {one.reward for one in report.paid if one.task != "*"} == {1.0}


def test_an_answer_that_every_task_pays_is_listed_once_and_a_lucky_one_is_not(folder: Path) -> None:
    report = probed(folder, {"name": "own.py:Zero"})
    assert report.paid == [PaidAnswer(task="*", kind="constant", answer="0", reward=1.0)]
    (folder / "tasks.jsonl").write_text(
        "".join(json.dumps({"question": f"Question {n}", "answer": "ABCD"[n % 4]}) + "\n" for n in range(12))
    )
    assert probed(folder, {"name": "exact", "options": {"pattern": ""}}, num_tasks=8).paid == []


def test_a_constant_that_is_the_answer_of_the_key_of_most_tasks_is_listed(folder: Path) -> None:
    lines = [{"question": f"Question {n}", "answer": "B"} for n in range(12)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = probed(folder, {"name": "exact", "options": {"pattern": ""}})
    assert report.paid == [PaidAnswer(task="*", kind="constant", answer="B", reward=1.0)]


def test_only_the_scorers_that_a_task_names_judge_the_answers_to_it(folder: Path) -> None:
    path = write(folder, {"name": "exact"})
    tree = yaml.safe_load(path.read_text())
    lines = [{"question": f"Question {n}", "answer": f"{n}00", "by": ["correct"]} for n in range(4)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tree["data"]["source"]["options"]["scorers"] = "by"
    tree["reward"]["scorers"].append({"name": "own.py:Breaks", "reward": "other"})
    path.write_text(yaml.safe_dump(tree))
    report = probe(load_train_config(path), folder, num_tasks=2)
    assert (report.failed, report.key_unpaid) == ({}, [])


def test_a_scorer_that_fails_and_a_key_that_is_not_paid_are_counted(folder: Path) -> None:
    report = probed(folder, {"name": "own.py:Breaks"})
    assert list(report.failed) == ["correct: RuntimeError: down"]
    assert report.failed["correct: RuntimeError: down"] > report.num_answers
    report = probed(folder, {"name": "exact", "options": {"pattern": "Result: (.*)"}})
    assert len(report.key_unpaid) == 4


def test_a_scorer_that_needs_an_episode_is_rejected(folder: Path) -> None:
    with pytest.raises(ConfigError, match="reads rewards of the environment, which only an episode has"):
        probed(folder, {"name": "environment", "options": {"min": 0, "max": 1}})


def test_the_command_lists_the_tasks_and_fails(folder: Path) -> None:
    path = write(folder, {"name": "own.py:NotWrong"})
    tree = {
        **yaml.safe_load(path.read_text()),
        "made_model": {"tasks": {"name": "calc"}},
        "rollout": {"limits": {"context_tokens_max": 256}},
        "inference": {"engine": {"options": {"context_max": 256}}},
    }
    del tree["model"]
    path.write_text(yaml.safe_dump(tree))
    done = CliRunner().invoke(app, ["check", str(path), "--probe", "--probe-tasks", "2"])
    assert done.exit_code == 1, done.output
    assert "to 2 tasks: 2 tasks pay for no answer, and 0 others for a trick" in done.output
    assert "pays 1 for the answer '' (nothing)" in done.output


def test_an_answer_occurs_once_and_names_the_options_of_the_question() -> None:
    task = PoolTask(
        task_id="t",
        messages=(Message(role="user", content="Which?\nA) one\nB) two\nF) six"),),
        split=Split.TRAIN,
        oracle_ref="x:1",
    )
    answers = list(answers_of(task))
    assert len({text for _, text in answers}) == len(answers)
    assert ("every option", "A, B, F") in answers
