"""What a group shows, end to end: an agent with two turns, a scorer by segment and an estimator by turn, each in a
user's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollmesh.cli.__main__ import app
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.services.learner.metrics_log import read_metrics
from rollmesh.trainer.model_files import write_model_folder

AGENT = """
class Agent:
    async def run(self, task, env):
        await env.generate(max_tokens=4)
        env.observe(f"You are number {env.index}. Continue.")
        await env.generate(max_tokens=5)
"""
SCORER = """
from rollmesh.shared.domain.trajectory import Reward


class Steps:
    rewards = ("step",)

    async def score(self, item):
        whole = Reward(name="", value=1.0, answer=f"answer of {item.sample_id}")
        return [whole, *(Reward(name="step", value=10.0 * n + len(item.turns), segment=turn.segment)
                         for n, turn in enumerate(item.turns))]
"""
ESTIMATOR = """
import json
from pathlib import Path

import numpy as np

from rollmesh.trainer.estimators.base import Estimate, GroupEstimator, turn_rewards

LOG = Path(__file__).with_name("seen.jsonl")


class ByObservation(GroupEstimator):
    # The reward of a turn minus the mean over the turns of the group with the same observation.
    def of_group(self, group):
        self.note("finalizer", group)
        return {member.sample_id: 1.0 for member in group.members}

    def __call__(self, batch):
        cells = {}
        for group in batch.groups:
            self.note("learner", group)
            for member in group.members:
                for turn, reward in zip(member.summary.turns, turn_rewards(member, self.weights)):
                    cells.setdefault((group.group, turn.observation), []).append(reward)
        rows = [
            np.array([reward - np.mean(cells[group.group, turn.observation])
                      for turn, reward in zip(member.summary.turns, turn_rewards(member, self.weights))])
            for member, group in zip(batch.members, batch.contexts)
        ]
        alone = [turn.observation for member in batch.members for turn in member.summary.turns]
        return Estimate(advantages=batch.per_turn(rows) + 0.5, metrics={"cells": float(len(cells)), "turns": float(len(alone))})

    def note(self, reader, group):
        members = [
            {"id": m.sample_id, "rewards": turn_rewards(m, self.weights).tolist(), "answer": m.answer, "text": m.summary.text,
             "tokens": [t.num_tokens for t in m.summary.turns], "observations": [t.observation for t in m.summary.turns],
             "logprob": m.summary.mean_logprob, "finish": m.summary.finish.name}
            for m in group.members
        ]
        with LOG.open("a") as file:
            print(json.dumps({"reader": reader, "group": group.group, "labels": dict(group.labels), "members": members}), file=file)
"""
CONFIG = """
model: model
run: {max_staleness: 1, batch_groups: 2, group_size: 3, updates_max: 2, eval_every: 0}
counts: {sandbox: 0}
processes: {enabled: false}
data:
  source:
    name: jsonl
    options: {path: tasks.jsonl, validation_share: 0.1, test_share: 0.1, labels: {level: level}}
rollout: {agent: "agent.py:Agent", limits: {context_tokens_max: 256}, summary_text_chars: 6}
reward:
  scorers: [{name: "scorer.py:Steps", reward: correct}]
  weights: {correct: 1.0, step: 0.5}
  finalizers: [keep_all]
inference: {engine: {name: torch, options: {context_max: 256}}}
learner: {estimator: "estimator.py:ByObservation", checkpoint_every: 2, tensorboard: false, publish: {num_probes: 0}}
"""
SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    write_model_folder(build_tiny_model(SMALL, seed=1), build_tokenizer(), tmp_path / "model")
    for name, text in (("agent.py", AGENT), ("scorer.py", SCORER), ("estimator.py", ESTIMATOR), ("run.yaml", CONFIG)):
        (tmp_path / name).write_text(text)
    tasks = [{"question": f"{n}+{n}", "answer": str(2 * n), "level": str(n % 3)} for n in range(30)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return tmp_path


@pytest.mark.row("S092")
def test_an_estimator_reads_turns_observations_answers_and_text_of_all_members(folder: Path) -> None:
    out = folder / "run"
    done = CliRunner().invoke(app, ["train", str(folder / "run.yaml"), "--out", str(out), "--json", "--in-process"])
    assert done.exit_code == 0, done.output
    assert (json.loads(done.stdout)["updates"], json.loads(done.stdout)["outcome"]) == (2, "finished")
    seen = [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]
    by_reader = {reader: {s["group"]: s for s in seen if s["reader"] == reader} for reader in ("finalizer", "learner")}
    assert len(by_reader["learner"]) == 4
    for name, group in by_reader["learner"].items():
        _check(group)
        assert by_reader["finalizer"][name]["members"] == group["members"]
        assert by_reader["finalizer"][name]["labels"] == group["labels"]
    lines = read_metrics(next(out.rglob("metrics.jsonl")))
    # Two groups of three: the first observation is the prompt of the group, the second one names the episode.
    assert [line.metrics["estimator/cells"] for line in lines.values()] == [2 * (1 + 3)] * 2
    assert [line.metrics["estimator/turns"] for line in lines.values()] == [2 * 3 * 2] * 2
    audit = CliRunner().invoke(app, ["audit", str(out), "--json"])
    assert audit.exit_code == 0, audit.output
    assert json.loads(audit.stdout)["holds"]


def _check(group: dict[str, Any]) -> None:
    members = group["members"]
    assert group["labels"]["level"] in "012"
    assert len(members) == 3
    for member in members:
        assert member["rewards"] == [0.5 * 2, 0.5 * 12]
        assert member["answer"] == f"answer of {member['id']}"
        assert [1 <= n <= most for n, most in zip(member["tokens"], (4, 5), strict=True)] == [True, True]
        assert 0 < len(member["text"]) <= 6
        assert member["logprob"] < 0
        assert member["finish"] in ("STOP", "LENGTH")
    first, second = zip(*(member["observations"] for member in members), strict=True)
    assert len(set(first)) == 1
    assert len(set(second)) == 3
    assert not {*first} & {*second}
