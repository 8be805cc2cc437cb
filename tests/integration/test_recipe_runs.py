"""Recipes in a whole run: three updates of a small model with `rollmesh train`, after which the audit holds.

The suite recipes does it for every file in `recipes/`, and repeats the last update from the checkpoint before it. With
`NUM` it does so for that many of them, drawn with `SEED`. `UPDATES` and `ETA` are the updates of a run and its bound on
staleness. Then it kills a run, resumes it, and repeats all its updates. `make test` has the recipes in `FAST`.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from rollmesh.cli.__main__ import app
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.services.learner.engine import Position, Restored
from rollmesh.services.learner.engines.torch_trainer import TorchTrainer
from rollmesh.services.learner.metrics_log import read_metrics
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.trainer.checkpoint import OPTIMIZER_NAME, PLUGINS_NAME
from rollmesh.trainer.checkpoint_files import TRAINED_NAME
from rollmesh.trainer.model_files import WEIGHTS_NAME, write_model_folder
from rollmesh.trainer.recipe import find_recipe, read_recipe, recipe_names
from tests.unit.trainer.mixtures import tiny_mixture

from .process_tree import descendants

AGENT = """
class Agent:
    async def run(self, task, env):
        await env.generate(max_tokens=4)
        await env.generate(max_tokens=4)
"""
STOPPER = """
class Agent:
    async def run(self, task, env):
        await env.generate(max_tokens=4)
        await env.generate(max_tokens=24, stop=list("0123456789 abcdefghij"))
"""
"""An agent whose last turn rarely reaches its limit, for recipes that do not train truncated samples."""
GIVER = """
from rollmesh.shared.domain.trajectory import Role, Source


class Agent:
    async def run(self, task, env):
        await env.generate(max_tokens=4)
        env.sample()
        env.context(task.messages)
        env.append(env.encode("the answer", end=True), role=Role.ACTION, source=Source.DATASET, train=True)
        env.sample(weight=0.5)
"""
SCORER = """
class Scorer:
    async def score(self, item):
        return float(sum(map(ord, item.response())) % 2)


class Prior:
    async def score(self, item):
        return 0.5
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
RECORDER = """
import pickle
from dataclasses import replace
from pathlib import Path

from rollmesh.services.learner.engines.torch_trainer import TorchTrainer


class Recorder:
    trains_model = True

    @classmethod
    def open(cls, config, options):
        restored = TorchTrainer.open(config)
        return replace(restored, engine=cls(restored.engine, config))

    def __init__(self, inner, config):
        self.inner, self.config = inner, config

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def update(self, k, samples, groups):
        Path(self.config.directory, f"update-{k}.pickle").write_bytes(pickle.dumps((self.config, samples, groups)))
        return self.inner.update(k, samples, groups)
"""
"""The torch trainer, which also writes what it trains on."""
STEPS = [{"action": "1", "observation": "seen"}, {"action": "2"}]
"""A trajectory of an expert."""
SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)
IN_PROCESS = ["--in-process"]
"""Two processes of a run import torch and transformers for 8 s of processor time."""
PROCESSES = os.environ.get("ROLLMESH_PROCESSES", "false")
"""Whether each service of a run in the suite recipes is a process, which costs three times the processor time, mostly
for imports."""
ETA, UPDATES = int(os.environ.get("ROLLMESH_ETA", "1")), int(os.environ.get("ROLLMESH_UPDATES", "3"))
"""Staleness bound, unless the recipe sets one, and number of updates of a run in the suite recipes."""
NUM, SEED = int(os.environ.get("ROLLMESH_NUM", "0")), int(os.environ.get("ROLLMESH_SEED", "0"))
RECIPES = random.Random(SEED).sample(sorted(recipe_names()), NUM) if NUM else recipe_names()
"""Recipes of the suite recipes: all, or `NUM` that `SEED` draws."""
OWN = {
    "remax": "estimator/without_baseline",
    "risk_po": "estimator/quantile_low",
    "mssr": "estimator/rho",
    "vcpo": "estimator/sequence_ess",
    "seeupo": "loss",
    "archer": "estimator/q_mean",
    "riql": "estimator/weight_mean",
    "stable_reinforce": "estimator/outliers",
    "campo": "estimator/loop_share_mean",
    "grpo_kl_reward": "estimator/kl_mean",
    "gmpo": "clipped_share",
    "kl_cov": "chosen_share",
    "drpo": "divergence_share",
    "verl_rank": "estimator/ranked_share",
    "rep_exp": "estimator/bonus_mean",
    "trloo": "rejected_share",
    "hgpo": "loss",
    "v0": "estimator/context",
    "v05": "estimator/prior_weight_mean",
    "copo": "estimator/local_share_mean",
    "dsdr": "estimator/diversity_mean",
    "tree_ps": "estimator/shared_steps",
    "lp_reg": "protected_share",
    "grpo_router_replay": "router_replay/differing_share",
    "imitation.yaml": "Imitate/other_share",
}
"""A metric of each recipe. They have a greedy sample, memory, one rollout per group, gradients of samples, ordered
passes, tokens of the samples, a reference in the estimator, steps of whole groups, hidden states, a quantile of the
step, answers after another prompt, and estimators that read turns, answers and texts of all members,
and records of experts."""
GIVEN = {
    "grpo_imitation": "imitation/imitation_nll_share",
    "rl_plus": "exploration_share",
    "red": "estimator/imitation_weight",
}
"""A metric of each recipe that runs with given solutions."""
FAST = {"remax", "v0", "grpo_router_replay", "imitation.yaml"}
"""Recipes that need what only a whole run has: a greedy member, texts of all members, records of experts, and the
tokenizer of the model. The others run in `make suite NAME=recipes`."""
MIXTURES = ("grpo_router_replay",)
"""Recipes for mixtures of experts."""
FURTHER = {
    "mssr": ["learner.estimator.options.first_visit=train"],  # a run of three updates visits no task twice
    "v05": ['reward.scorers=[{name: "scorer.py:Scorer", reward: correct}, {name: "scorer.py:Prior", reward: prior}]'],
    "tree_ps": ["rollout.agent={name: tree_rollouts, options: {leaves: 3, width: 2}}"],  # the configuration has another
    "latr": ["run.group_size=4"],  # its groups are the branches of one episode, and the agent here has no branches
    "text_feedback": ["reward.finalizers=[keep_all]"],  # its rewards are those of turns, and the scorer here has none
    "crossthink": ["data.selector=uniform"],  # the tasks here are of one source
    "wsrl": ["learner.update_rule.options.warmup_updates=0"],  # its warm-up is longer than a run of three updates
    **{name: ["model=mixture"] for name in MIXTURES},
}
"""Settings that a recipe needs beside its own."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("recipes")
    (made / "model").mkdir()
    write_model_folder(build_tiny_model(SMALL, seed=1), build_tokenizer(), made / "model")
    (made / "mixture").mkdir()
    write_model_folder(tiny_mixture(vocab_size=len(build_tokenizer())), build_tokenizer(), made / "mixture")
    (made / "agent.py").write_text(AGENT)
    (made / "giver.py").write_text(GIVER)
    (made / "stopper.py").write_text(STOPPER)
    (made / "scorer.py").write_text(SCORER)
    (made / "imitation.yaml").write_text(IMITATION)
    (made / "imitate.py").write_text(TERM)
    (made / "recorder.py").write_text(RECORDER)
    (made / "tasks.jsonl").write_text(
        "".join(
            json.dumps({"question": f"{n}+{n}", "answer": str(2 * n), "worked": str(2 * n), "steps": STEPS}) + "\n"
            for n in range(30)
        )
    )
    (made / "run.yaml").write_text(CONFIG)
    return made


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in OWN])
def test_three_updates_with_a_recipe_and_an_audit(recipe: str, folder: Path) -> None:
    out = folder / f"run-{recipe}"
    settings = [f"recipe={recipe}", *FURTHER.get(recipe, []), *IN_PROCESS]
    done = CliRunner().invoke(app, ["train", str(folder / "run.yaml"), *settings, "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert (summary["updates"], summary["outcome"], summary["samples"]["live"]) == (3, "finished", 0)
    lines = read_metrics(next(out.rglob("metrics.jsonl")))
    assert all(OWN[recipe] in line.metrics for line in lines.values() if line.outcome == "APPLIED")
    assert "APPLIED" in {line.outcome for line in lines.values()}
    audit = CliRunner().invoke(app, ["audit", str(out), "--json"])
    assert audit.exit_code == 0, audit.output
    assert json.loads(audit.stdout)["holds"]


def test_router_replay_of_a_model_without_routers_is_rejected_before_the_run(folder: Path) -> None:
    found = CliRunner().invoke(app, ["check", str(folder / "run.yaml"), "recipe=grpo_router_replay"])
    assert found.exit_code == 2, found.output
    assert "`rollout.outputs` must be among" in found.output
    assert "replayed in Qwen3ForCausalLM: it has no routers; set it to false" in found.output


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
  finalizers: [keep_all]
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
    """The configuration beside it has neither scorers nor an agent. A resumed run needs no recipe, and keeps its
    method."""
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
    train = ["train", str(tmp_path / "run.yaml"), "--out", str(out), "--json", *IN_PROCESS]
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
    more = CliRunner().invoke(app, ["train", "--resume", str(out), "run.updates_max=4", "--json", *IN_PROCESS])
    assert more.exit_code == 0, more.output
    assert json.loads(more.stdout)["updates"] == 4
    other = CliRunner().invoke(app, ["train", "--resume", str(out), "learner.estimator=grpo", "run.updates_max=5"])
    assert other.exit_code == 2
    assert '`learner.estimator.name` "gdpo" -> "grpo"' in other.output
    assert "fixed after the run began" in other.output


# Every recipe ---------------------------------------------------------------------------------------------------------


def command(recipe: str, folder: Path, out: Path) -> list[str]:
    """Return the command that trains with a recipe, records the batches and keeps a checkpoint of each update."""
    about, tree = read_recipe(find_recipe(recipe))
    success = tree.get("run", {}).get("success_reward", "correct")
    rewards = ["correct", success, *tree.get("reward", {}).get("weights", {})]
    scorers = [{"name": "scorer.py:Scorer", "reward": name} for name in dict.fromkeys(rewards)]
    settings = ["learner.engine=recorder.py:Recorder", "learner.checkpoint_every=1", f"processes.enabled={PROCESSES}"]
    settings += [f"run.max_staleness={tree.get('run', {}).get('max_staleness', ETA)}", f"run.updates_max={UPDATES}"]
    settings += [*FURTHER.get(recipe, []), f"reward.scorers={json.dumps(scorers)}"]
    estimator = tree.get("learner", {}).get("estimator", "")
    if isinstance(estimator, dict) and estimator.get("options", {}).get("drop_truncated"):
        settings += ["rollout.agent=stopper.py:Agent"]
    if tree.get("rollout", {}).get("agent") == "given_solution":
        settings += ["rollout.agent=given_solution", "data.source.options.private_extras={solution: worked}"]
    elif about.given_solutions:
        settings += ["rollout.agent=giver.py:Agent"]
    train = ["train", str(folder / "run.yaml"), f"recipe={recipe}", *settings, "--out", str(out), "--json"]
    return [sys.executable, "-m", "rollmesh.cli", *train]


def assert_finished(summary: dict[str, Any], recipe: str, out: Path, *, updates: int) -> None:
    """Check that every update was made, that the audit holds, and that stale samples were trained if any may be."""
    assert (summary["updates"], summary["outcome"], summary["samples"]["live"]) == (updates, "finished", 0)
    audit = CliRunner().invoke(app, ["audit", str(out), "--payloads", "--json"])
    assert audit.exit_code == 0, audit.output
    found = json.loads(audit.stdout)
    assert found["holds"]
    print(f"{recipe}: {updates} updates, samples by staleness {found['lags']}")
    assert min(1, found["eta"]) <= found["lag_max"] <= found["eta"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_and_resumes_bit_for_bit(recipe: str, folder: Path, tmp_path: Path) -> None:
    """The run makes its last update without a break. A fresh trainer makes it again from the checkpoint before it, on
    the same batch."""
    out = tmp_path / "run"
    done = subprocess.run(command(recipe, folder, out), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_finished(json.loads(done.stdout), recipe, out, updates=UPDATES)

    lines = read_metrics(next(out.rglob("metrics.jsonl")))
    assert all(value is not None for line in lines.values() for value in line.metrics.values())
    assert [line.outcome for line in lines.values()] == ["APPLIED"] * UPDATES
    about, _ = read_recipe(find_recipe(recipe))
    described = re.findall(r"`([\w/]+)`", about.deviations.partition("Metrics:")[2])
    assert {*described, (OWN | GIVEN).get(recipe, "loss")} <= set(lines[UPDATES].metrics), (
        "a metric of the recipe is missing"
    )

    last = next(out.rglob(f"update-{UPDATES}.pickle"))
    config, _, _ = pickle.loads(last.read_bytes())
    before = f"checkpoints/update-{UPDATES - 1:08}.0"
    shutil.copytree(last.parent / before, tmp_path / "again" / before)
    restored = TorchTrainer.open(msgspec.structs.replace(config, directory=str(tmp_path / "again")))
    assert_repeated(restored, last.parent)


def assert_repeated(restored: Restored, learner: Path) -> None:
    """Make the remaining updates on the batches that `learner` recorded. They equal those of its run, bit for bit."""
    lines = read_metrics(learner / "metrics.jsonl")
    last = max(lines)
    for k in range(restored.engine.step + 1, last + 1):
        _, samples, groups = pickle.loads((learner / f"update-{k}.pickle").read_bytes())
        result = restored.engine.update(k, samples, groups)
        reported = {name: value for name, value in lines[k].metrics.items() if not name.startswith("dropped/")}
        assert reported == result.metrics, f"update {k}"
        restored.log.append(k, result.used_ids, incarnation=lines[k].incarnation, outcome="APPLIED")
    position = Position(update=last, digest=restored.log.digest, head=LedgerHead(position=last))
    again = restored.engine.save(restored.log, position, data_snapshot=b"")
    once = max((learner / "checkpoints").iterdir())
    assert once.name.startswith(f"update-{last:08}.")
    for name in (WEIGHTS_NAME, TRAINED_NAME):
        assert (once / name).read_bytes() == (again / name).read_bytes(), name
    for name in (OPTIMIZER_NAME, PLUGINS_NAME):
        assert equal(torch.load(once / name), torch.load(again / name)), name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_on_stored_trajectories_trains_the_turns_of_the_model_alone(folder: Path, tmp_path: Path) -> None:
    """The recipe `ui_s1` with its agent, scorers and permission: an untrained model departs nearly always, and each
    departure is patched."""
    agent = {"name": "expert_replay", "options": {"pattern": "(?P<action>[0-9])", "patches": -1}}
    scorers = read_recipe(find_recipe("ui_s1"))[1]["reward"]["scorers"]
    settings = [
        "recipe=ui_s1",
        f"rollout.agent={json.dumps(agent)}",
        f"reward.scorers={json.dumps(scorers)}",
        "rollout.sampling.max_tokens=4",
        "data.source.options.private_extras={trajectory: steps}",
        "reward.finalizers=[keep_all]",
    ]
    out = tmp_path / "run"
    done = CliRunner().invoke(
        app, ["train", str(folder / "run.yaml"), *settings, *IN_PROCESS, "--out", str(out), "--json"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["updates"] == 3
    last = read_metrics(next(out.rglob("metrics.jsonl")))[3].metrics
    assert 0 <= (last["reward/progress"] or 0) <= 1
    assert last["tokens/external_share"] == 0, "turns of the expert are not trained"
    audit = CliRunner().invoke(app, ["audit", str(out), "--payloads", "--json"])
    assert json.loads(audit.stdout)["holds"], audit.output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_resumes_to_the_weights_of_an_uninterrupted_trainer(folder: Path, tmp_path: Path) -> None:
    """SIGKILL reaches every process of the run after a checkpoint. A trainer that is not interrupted makes all updates
    on the batches of both halves. The critic of this recipe, its optimizer and its replay buffer are in the
    checkpoint."""
    out = tmp_path / "run"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command("archer", folder, out), "run.updates_max=2000"], stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + 240
        while not (out / f"checkpoints/update-{UPDATES:08}.0").exists():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline_s, f"the run did not make {UPDATES} updates within 240 s"
            time.sleep(0.01)
    finally:
        family = descendants(process.pid)
        process.kill()
        for one in family:
            if one.alive:
                os.kill(one.pid, signal.SIGKILL)
        process.wait()

    updates = max(read_metrics(out / "metrics.jsonl")) + UPDATES
    resume = ["train", "--resume", str(out), f"run.updates_max={updates}", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "rollmesh.cli", *resume], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_finished(json.loads(done.stdout), "archer, killed and resumed", out, updates=updates)
    config, _, _ = pickle.loads((out / f"update-{updates}.pickle").read_bytes())
    assert_repeated(TorchTrainer.open(msgspec.structs.replace(config, directory=str(tmp_path / "again"))), out)


def equal(one: Any, other: Any) -> bool:
    """Compare trees of tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize(
    ("recipe", "metric"),
    [pytest.param(*item, marks=() if item[0] == "red" else pytest.mark.slow) for item in GIVEN.items()],
)
def test_given_solutions_pass_through_the_mesh_and_are_trained(recipe: str, metric: str, folder: Path) -> None:
    out = folder / f"given-{recipe}"
    asked = [
        str(folder / "run.yaml"),
        f"recipe={recipe}",
        "rollout.agent=giver.py:Agent",
        "--out",
        str(out),
        "--json",
    ]
    done = CliRunner().invoke(app, ["train", *asked, *IN_PROCESS])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["updates"] == 3
    lines = [line for line in read_metrics(next(out.rglob("metrics.jsonl"))).values() if line.outcome == "APPLIED"]
    assert lines
    assert any(line.metrics["tokens/external_share"] for line in lines)
    assert all(metric in line.metrics for line in lines)
    audit = CliRunner().invoke(app, ["audit", str(out), "--json"])
    assert audit.exit_code == 0, audit.output
    assert json.loads(audit.stdout)["holds"]
