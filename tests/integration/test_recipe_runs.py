"""Recipes in a whole run: three updates of a small model with `rollmesh train`, after which the audit holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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
        await env.generate(max_tokens=4)
"""
SCORER = """
class Scorer:
    async def score(self, item):
        return float(sum(map(ord, item.response())) % 2)
"""
CONFIG = """
model: model
run: {max_staleness: 1, batch_groups: 2, updates_max: 3, eval_every: 0}
counts: {sandbox: 0}
processes: {enabled: false}
data: {source: {name: jsonl, options: {path: tasks.jsonl, validation_share: 0.1, test_share: 0.1}}}
rollout: {agent: "agent.py:Agent", limits: {context_tokens_max: 256}}
reward: {scorers: [{name: "scorer.py:Scorer", reward: correct}]}
inference: {engine: {name: torch, options: {context_max: 256}}}
learner: {checkpoint_every: 3, tensorboard: false, publish: {num_probes: 0}}
"""
IMITATION = """
about: {summary: "Raise the likelihood of answers after another prompt, which the tokenizer of the model encodes."}
learner:
  features:
    other: {name: other_prompt_logprob, options: {prefix: "1+1", omit_roles: [context]}, under: current, grad: true}
  loss: [ppo_clip, {name: "imitate.py:Imitate", weight: 0.1}]
"""
TERM = """
class Imitate:
    needs = ("other",)

    def __call__(self, inputs):
        return -(inputs["token_weight"] * inputs["other"]).sum(), {"other": inputs["other"].detach()}
"""
SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)
OWN = {
    "remax": "estimator/without_baseline",
    "risk_po": "estimator/quantile_low",
    "mssr": "estimator/rho",
    "vcpo": "estimator/sequence_ess",
    "seeupo": "loss",
    "stable_reinforce": "estimator/outliers",
    "campo": "estimator/loop_share_mean",
    "grpo_kl_reward": "estimator/kl_mean",
    "gmpo": "clipped_share",
    "kl_cov": "chosen_share",
    "drpo": "divergence_share",
    "verl_rank": "estimator/ranked_share",
    "rep_exp": "estimator/bonus_mean",
    "lp_reg": "protected_share",
    "imitation.yaml": "Imitate/other_share",
}
"""A metric of each recipe. They have a greedy sample, memory, one rollout per group, gradients of samples, ordered passes, tokens of
the samples, a reference in the estimator, steps of whole groups, hidden states, a quantile of the step, and answers after another prompt."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("recipes")
    (made / "model").mkdir()
    write_model_folder(build_tiny_model(SMALL, seed=1), build_tokenizer(), made / "model")
    (made / "agent.py").write_text(AGENT)
    (made / "scorer.py").write_text(SCORER)
    (made / "imitation.yaml").write_text(IMITATION)
    (made / "imitate.py").write_text(TERM)
    (made / "tasks.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}+{n}", "answer": str(2 * n)}) + "\n" for n in range(30))
    )
    (made / "run.yaml").write_text(CONFIG)
    return made


@pytest.mark.parametrize("recipe", OWN)
def test_three_updates_with_a_recipe_and_an_audit(recipe: str, folder: Path) -> None:
    out = folder / f"run-{recipe}"
    done = CliRunner().invoke(app, ["train", str(folder / "run.yaml"), f"recipe={recipe}", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert (summary["updates"], summary["outcome"], summary["samples"]["live"]) == (3, "finished", 0)
    lines = read_metrics(next(out.rglob("metrics.jsonl")))
    assert all(OWN[recipe] in line.metrics for line in lines.values() if line.outcome == "APPLIED")
    assert "APPLIED" in {line.outcome for line in lines.values()}
    audit = CliRunner().invoke(app, ["audit", str(out), "--json"])
    assert audit.exit_code == 0, audit.output
    assert json.loads(audit.stdout)["holds"]


METHOD = """
about: {summary: "A whole method: a reward, its weight, a selection of tasks, and how episodes are sampled.", kind: estimator}
run: {group_size: 3}
data: {selector: {name: "hardest.py:Hardest", options: {first: 3}}}
rollout: {agent: "agent.py:Agent", sampling: {temperature: 0.5}, limits: {turns_max: 3}, outputs: [entropy]}
reward:
  scorers:
    - {name: "scorer.py:Scorer", reward: correct}
    - {name: length, reward: brief, options: {budget_tokens: 9}}
  weights: {correct: 1.0, brief: 0.5}
  finalizer: keep_all
learner:
  estimator: gdpo
  loss: [high_entropy]
"""
SELECTOR = """
import msgspec


class HardestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    first: int


class Hardest:
    Options = HardestOptions

    def __init__(self, *, pool, seed, options):
        self.number = min(options.first, len(pool))

    def draw(self, index, in_flight):
        return index % self.number

    def observe(self, result):
        pass

    def snapshot(self):
        return b""

    def restore(self, state):
        pass
"""


def test_a_users_recipe_brings_reward_data_and_rollout_settings(folder: Path, tmp_path: Path) -> None:
    """The configuration beside it has neither scorers nor an agent. A resumed run needs no recipe, and keeps its method."""
    shutil.copytree(folder / "model", tmp_path / "model")
    for name in ("agent.py", "scorer.py", "tasks.jsonl"):
        shutil.copy(folder / name, tmp_path)
    (tmp_path / "method.yaml").write_text(METHOD)
    (tmp_path / "hardest.py").write_text(SELECTOR)
    removed = ('reward: {scorers: [{name: "scorer.py:Scorer", reward: correct}]}\n', 'agent: "agent.py:Agent", ')
    config = CONFIG
    for part in removed:
        assert part in config
        config = config.replace(part, "")
    (tmp_path / "run.yaml").write_text(f"recipe: method.yaml\n{config}")
    out = tmp_path / "out"
    train = ["train", str(tmp_path / "run.yaml"), "--out", str(out), "--json"]
    done = CliRunner().invoke(app, train)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["updates"] == 3
    lines = read_metrics(next(out.rglob("metrics.jsonl")))
    last = lines[max(lines)].metrics
    assert {"reward/correct", "reward/brief"} <= last.keys()
    assert last["samples/leased"] == 2 * 3
    assert 0 < (last["high_entropy_share"] or 0) < 1
    audit = CliRunner().invoke(app, ["audit", str(out), "--json"])
    assert audit.exit_code == 0, audit.output
    assert json.loads(audit.stdout)["holds"]
    (tmp_path / "method.yaml").unlink()
    more = CliRunner().invoke(app, ["train", "--resume", str(out), "run.updates_max=4", "--json"])
    assert more.exit_code == 0, more.output
    assert json.loads(more.stdout)["updates"] == 4
    other = CliRunner().invoke(app, ["train", "--resume", str(out), "learner.estimator=grpo", "run.updates_max=5"])
    assert other.exit_code == 2
    assert '`learner.estimator.name` "gdpo" -> "grpo"' in other.output
    assert "fixed after the run began" in other.output
