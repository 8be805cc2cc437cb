"""Recipes: the built-in files, a user's file, and their precedence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from rollmesh.cli.__main__ import app
from rollmesh.mesh.config import MeshConfig
from rollmesh.services.reward.config import build_scorer
from rollmesh.shared.config.loader import config_from_dict, load_config, to_yaml
from rollmesh.shared.domain.trajectory import Reward
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.config import LossTermChoice
from rollmesh.trainer.estimators import ESTIMATORS, make_estimator
from rollmesh.trainer.losses import LossSum
from rollmesh.trainer.plugins import Plugins
from rollmesh.trainer.recipe import DEFAULT_RECIPE, find_recipe, read_recipe, recipe_names

from .builders import random_batch

ROOT = Path(__file__).parents[3]
WITH_SCORERS = [name for name in recipe_names() if "scorers" in read_recipe(find_recipe(name))[1].get("reward", {})]
"""The recipes that name the scorers of their rewards."""


def configured(**values: Any) -> MeshConfig:
    return config_from_dict(MeshConfig, values)


@pytest.mark.parametrize("name", recipe_names())
def test_a_built_in_recipe_resolves_and_its_test_exists(name: str) -> None:
    learner = configured(recipe=name).learner
    LossSum(learner.loss)
    ESTIMATORS.options(learner.estimator)
    about, _ = read_recipe(find_recipe(name))
    assert all((about.summary, about.kind, about.paper, about.formula)), "what `rollmesh recipes` shows"
    assert all(re.fullmatch(r"S\d{3}", seed) for seed in about.seeds)
    file, _, function = about.test.partition("::")
    assert re.search(rf"^(async )?def {function}\(", (ROOT / file).read_text(), re.MULTILINE), about.test


@pytest.mark.parametrize("name", WITH_SCORERS)
async def test_a_recipe_with_scorers_names_rewards_that_they_give_and_that_its_estimator_reads(name: str) -> None:
    """A user adds nothing to the names of rewards of such a recipe. A reward of turns needs an estimator that reads
    them."""
    found = configured(recipe=name)
    scorers = [build_scorer(scorer, ROOT) for scorer in found.reward.scorers]
    given = [name for scorer in scorers for name in scorer.reward_names]
    for scorer in scorers:
        await scorer.scorer.close()
    assert found.run.success_reward in given
    assert set(found.reward.weights) <= set(given)
    Plugins(found.learner, reward_weights=found.reward.weights, base_dir=ROOT).check_rewards(given)
    of_turns = {s.reward for s in found.reward.scorers if s.options.get("per") == "turn" or s.name == "turn_answer"}
    for reward in of_turns & {reward for reward, weight in found.reward.weights.items() if weight}:
        estimator = make_estimator(found.learner.estimator, found.reward.weights, ROOT)
        (group,) = random_batch(1, 2)[1]
        members = [
            msgspec.structs.replace(
                m, rewards=(Reward(name="other", value=0.0), Reward(name=reward, value=n, segment=3))
            )
            for n, m in enumerate(group.members)
        ]
        assert any(estimator.of_group(msgspec.structs.replace(group, members=tuple(members))).values()), reward


def test_the_default_recipe_is_what_the_structs_hold() -> None:
    found = configured()
    options = found.learner.loss[0].options
    assert options == msgspec.to_builtins(LossSum(found.learner.loss)._terms[0].loss.options)  # type: ignore[attr-defined]
    plain = msgspec.structs.replace(found.learner, loss=(LossTermChoice("ppo_clip"),))
    assert msgspec.structs.replace(found, learner=plain, recipe_applied=False) == MeshConfig()
    assert found.recipe == DEFAULT_RECIPE


def test_recipes_are_found_from_the_configs_folder() -> None:
    assert (ROOT / "configs/recipes").resolve() == find_recipe("gdpo").parent


def test_a_users_file_wins_over_the_recipe_key_by_key() -> None:
    found = configured(
        recipe="dr_grpo", learner={"optimizer": {"lr": 1e-4}, "estimator": {"options": {"epsilon": 0.1}}}
    )
    assert (found.learner.optimizer.lr, found.learner.optimizer.betas) == (1e-4, (0.9, 0.95))
    assert found.learner.estimator.options == {"std": "none", "epsilon": 0.1}


def test_another_name_starts_from_its_own_defaults_and_a_list_replaces_the_list() -> None:
    learner = {"estimator": {"name": "gdpo"}, "loss": ["policy_gradient"]}
    found = configured(recipe="dr_grpo", learner=learner, run={"name": "other"}).learner
    assert found.estimator.options == {}
    assert found.loss == (LossTermChoice("policy_gradient"),)


def test_a_users_recipe_is_a_whole_method(tmp_path: Path) -> None:
    """It is stored beside the configuration. The resolved configuration does not need it."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "about: {summary: Prefer short answers, status: partial, missing: the schedule}\n"
        "learner: {estimator: {name: gdpo}}\n"
        "reward: {weights: {correct: 1.0, length: 0.1}, finalizers: [keep_all]}\n"
        "data: {selector: {name: thompson, options: {target: 0.4}}}\n"
        "rollout: {sampling: {temperature: 0.7}}\n"
    )
    (tmp_path / "run.yaml").write_text("recipe: mine.yaml\nreward: {weights: {length: 0.2}}\nrun: {name: short}\n")
    found = load_config(MeshConfig, tmp_path / "run.yaml", ["data.selector.options.target=0.5"])
    assert found.learner.estimator.name == "gdpo"
    assert found.reward.weights == {"correct": 1.0, "length": 0.2}
    assert (found.reward.finalizers[0].name, found.rollout.sampling.temperature) == ("keep_all", 0.7)
    assert found.data.selector.options == {"target": 0.5}
    recipe.unlink()
    (tmp_path / "resolved.yaml").write_text(to_yaml(found))
    assert load_config(MeshConfig, tmp_path / "resolved.yaml") == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "learner: {estimater: {name: gdpo}}",
            r"mine.yaml:1: `learner.estimater`: unknown key; did you mean `estimator`",
        ),
        ("learner:\n  optimizer: {lr: fast}", r"mine.yaml:2: `learner.optimizer.lr`: Expected `float`.*found 'fast'"),
        ("security: {}", "mine.yaml: `security`: a recipe may have the sections about, run"),
        ("learner: 3", "`learner`: expected a mapping of keys, got 3"),
        ("about: {seed: [S001], status: works}", "about: .*`seed`: unknown key; did you mean `seeds`"),
        ("about: {status: partial}", "`missing` must name the missing part"),
        ("about: {seeds: [S001]}", "`status` must be works or partial if `seeds` names rows"),
    ],
)
def test_a_mistake_in_a_recipe_names_its_file_and_key(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "run.yaml").write_text("recipe: mine.yaml\n")
    with pytest.raises(ConfigError, match=message):
        load_config(MeshConfig, tmp_path / "run.yaml")


def test_a_recipe_of_the_release_before_loads_and_the_new_place_of_its_expectations_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.yaml").write_text("about: {summary: s, baseline: gdpo, expected: [{task: calc}]}\n")
    assert read_recipe(tmp_path / "mine.yaml")[0].summary == "s"
    logged = [record.message for record in caplog.records]
    assert [re.findall(r"`(\w+)`|(NAME\.expected\.yaml)", line) for line in logged] == [
        [(key, ""), ("", "NAME.expected.yaml")] for key in ("baseline", "expected")
    ], logged


def test_a_recipe_that_does_not_exist_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(
        ConfigError, match=r"`recipe`: there is no recipe `grpoo`; known: .*dr_grpo.*did you mean `grpo`"
    ):
        configured(recipe="grpoo")
    with pytest.raises(ConfigError, match="`recipe`: there is no file mine.yaml"):
        configured(recipe="mine.yaml")


def test_the_command_lists_the_recipes_with_their_files() -> None:
    found = json.loads(CliRunner().invoke(app, ["recipes", "--json"]).output)
    assert [one["name"] for one in found] == recipe_names()
    by_name = {one["name"]: one for one in found}
    assert (by_name["gdpo"]["seeds"], by_name["gdpo"]["status"]) == (["S015"], "works")
    assert {f"S{number:03}" for number in range(15, 44)} <= {seed for one in found for seed in one["seeds"]}
    assert by_name["rapo"]["status"] == "partial"
    assert by_name["rapo"]["missing"]
    assert all(Path(one["file"]).is_file() for one in found)
    assert by_name["mssr"]["needs"] == {
        "outputs": [],
        "features": {"proximal": "start", "reference": "reference"},
        "gradient_squares": False,
        "reference": "initial",
        "modules": [],
        "memory": ["estimator mssr"],
        "rewards": [],
        "group_size_min": 1,
        "group_size_odd": False,
        "whole_groups": False,
        "given_solutions": False,
    }
    needs = {name: one["needs"] for name, one in by_name.items()}
    assert needs["grpo_high_entropy"]["outputs"] == ["entropy"]
    assert needs["vcpo"]["gradient_squares"]
    assert (needs["spa"]["modules"], needs["siren"]["memory"]) == (["progress"], ["loss term siren"])
    assert (needs["mc_grpo"]["group_size_min"], needs["mc_grpo"]["group_size_odd"]) == (3, True)
    assert needs["drpo"]["features"] == {"current": "step", "proximal": "start"}
    assert needs["drpo"]["whole_groups"]


def test_the_table_fits_120_columns_and_loads_no_torch() -> None:
    code = (
        "import sys, contextlib, rollmesh.cli.__main__ as m\n"
        "with contextlib.suppress(SystemExit): m.app(['recipes'])\n"
        "print([n for n in ('torch', 'transformers', 'grpc') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *table, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    assert {line.split()[1] for line in table if " works " in line} >= {"grpo", "grpo_decoupled"}
    assert max(map(len, table)) <= 120


def test_the_command_prints_one_recipe_whole() -> None:
    shown = CliRunner().invoke(app, ["recipes", "mssr"]).output
    lines = shown.splitlines()
    assert lines[0] == "mssr (estimator, works)"
    partial = CliRunner().invoke(app, ["recipes", "w_reinforce"]).output.splitlines()
    assert partial[0] == "w_reinforce (estimator, partial)"
    assert any(line.startswith("missing     Evaluations do not report") for line in partial)
    assert "  run.group_size: 1\n  reward.finalizers:\n  - name: keep_all\n    options: {}\n" in shown
    assert "  learner.optimizer.clip_norm: 0.5\n" in shown
    assert "learner.optimizer.lr" not in shown, "it equals the default"
    assert shown.endswith(find_recipe("mssr").read_text())
    assert "none, its settings are the defaults" in CliRunner().invoke(app, ["recipes", "grpo"]).output


def test_the_command_prints_a_recipe_of_a_user() -> None:
    file = ROOT / "examples/extending/doubtful.yaml"
    found = json.loads(CliRunner().invoke(app, ["recipes", str(file), "--json"]).output)
    assert found["needs"]["outputs"] == ["top_k"], "the term reads one array of this output"
    assert found["needs"]["features"] == {"margin": "start"}
    assert found["changed"]["rollout.num_top"] == 2
    assert found["yaml"] == file.read_text()


def test_the_command_names_the_nearest_recipe_and_the_mistake_in_a_file(tmp_path: Path) -> None:
    def refused(name: str) -> str:
        done = CliRunner().invoke(app, ["recipes", name])
        assert done.exit_code == 2, done.output
        return done.output

    assert re.search(r"there is no recipe `gspoo`; known: .*did you mean `gspo`\?", refused("gspoo"))
    (tmp_path / "mine.yaml").write_text("learner:\n  optimizer: {lrr: 1}")
    assert re.search(
        r"mine.yaml:2: `learner.optimizer.lrr`: unknown key; did you mean", refused(f"{tmp_path}/mine.yaml")
    )
    (tmp_path / "mine.yaml").write_text("learner: {loss: [gspoo]}")
    assert "there is no loss term `gspoo`" in refused(f"{tmp_path}/mine.yaml")


def test_a_recipe_named_without_the_loader_is_an_error() -> None:
    with pytest.raises(ValueError, match="`recipe` gdpo is not applied"):
        MeshConfig(recipe="gdpo")
