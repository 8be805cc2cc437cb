"""`python -m benchmarks methods`: arms, records, budget, verdicts and the report."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.methods import bench as methods
from benchmarks.methods.agents import FirstGiven
from benchmarks.methods.arm import MODEL_SEED, ArmWork, Size, resolved, run_work, settings_digest, turns_of
from benchmarks.methods.bench import MethodsOptions, planned, read_outcome
from benchmarks.methods.expectations import FOLDER, Expectation, Expected, MethodTask, expected_of
from benchmarks.methods.records import (
    ArmRecord,
    EvalPoint,
    MethodArm,
    UpdatePoint,
    append_record,
    chosen_records,
    read_records,
)
from benchmarks.methods.scorers import (
    DriftingExact,
    DriftingExactOptions,
    FirstTurn,
    FlippedExact,
    FlippedExactOptions,
    IdealTurns,
    LevelPrior,
    LevelPriorOptions,
    RatedCalls,
)
from benchmarks.methods.sources import (
    ConfidentSource,
    CountOracle,
    CountSource,
    GuessOracle,
    GuessSource,
    LateOracle,
    LateSource,
)
from benchmarks.methods.tasks import NUM_TEST, TASKS
from benchmarks.methods.verdict import (
    CONFIRM_SEED,
    FALSE_SHARE,
    LOOKS,
    Case,
    benjamini_hochberg,
    cases,
    confirmed,
    decided,
    paired_p,
    screened,
    student_p,
)
from rollmesh.demo.config import MadeModelConfig, demonstrated_sources
from rollmesh.demo.families.calc import demonstrate
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.services.data.config import build_pools
from rollmesh.services.data.task import Split
from rollmesh.services.reward.item import AnswerKey, JudgedSegment, ScoreItem, TaskView
from rollmesh.services.reward.scorers.exact import ExactOptions
from rollmesh.services.reward.scorers.extract import AnswerOptions
from rollmesh.services.reward.scorers.process_reward import ProcessRewardOptions
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import EpisodeKey, FinishReason, Message, Role, Segment, Source, text_view
from rollmesh.shared.errors import ConfigError, InvalidInput, UnknownOracle
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.trainer.model_files import write_model_folder
from rollmesh.trainer.recipe import recipe_names
from rollmesh.v1 import coordinator_pb2, types_pb2

TINY = Size(updates=1, evals=1, eval_tasks=2)


def arm(method: str = "grpo", *, task: str = "calc", lag: int = 0, seed: int = 0, **fields: Any) -> MethodArm:
    return MethodArm(**{"method": method, "task": task, "lag": lag, "seed": seed, **fields})


def record(of: MethodArm, success: tuple[float, ...] = (0.0,), **fields: Any) -> ArmRecord:
    """Return a record with these successes, one evaluation per update."""
    points = tuple(
        EvalPoint(update=number, success=value, pass_at_k=value, length=10.0, entropy=0.5, kl=0.1)
        for number, value in enumerate(success)
    )
    ess = tuple(UpdatePoint(update=number, metrics={"ess": 1 / number}) for number in range(1, len(success)))
    defaults: dict[str, Any] = {"commit": "c", "settings": "s", "updates_max": 9, "cpu_s": 1.0, "wall_s": 2.0}
    return ArmRecord(**{**defaults, "arm": of, "evals": points, "updates": ess, **fields})


# Records and measures -------------------------------------------------------------------------------------------------


def test_measures_are_means_of_the_last_three_evaluations_and_the_updates_since() -> None:
    found = record(arm(), (0.0, 0.1, 0.3, 0.5, 0.7)).measures()
    assert found["success"] == pytest.approx((0.3 + 0.5 + 0.7) / 3)
    assert found["ess"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert found["length"] == 10.0
    assert record(arm(), error="ValueError: no").measures() == {}


def test_a_torn_last_line_is_ignored_and_then_removed(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    append_record(file, record(arm()))
    with file.open("ab") as stream:
        stream.write(b'{"commit": "to')
    assert [one.arm for one in read_records(file)] == [arm()]
    append_record(file, record(arm(seed=1)))
    assert [one.arm for one in read_records(file)] == [arm(), arm(seed=1)]


def test_records_count_for_their_commit_and_settings() -> None:
    wanted = {arm(): "s", arm(seed=1): "s"}
    records = [
        record(arm(), commit="old"),
        record(arm(seed=1), commit="old", error="ValueError"),
        record(arm(), commit="new", settings="others"),
        record(arm(seed=2), commit="new"),
    ]
    assert chosen_records(records, wanted, "new") == {}
    assert chosen_records(records, wanted, "old") == {arm(): records[0], arm(seed=1): records[1]}
    assert chosen_records(records, wanted, None) == {arm(): records[0]}, "a failure of another commit is run again"


# Verdicts -------------------------------------------------------------------------------------------------------------


CALC = Expectation(task="calc")


def records_of(lag: int = 0, first: int = 0, **successes: Sequence[float | None]) -> dict[MethodArm, ArmRecord]:
    """Return records by method and seed; None is an arm that failed."""
    return {
        one: record(one, (value or 0.0,), error="" if value is not None else "ValueError")
        for name, values in successes.items()
        for seed, value in enumerate(values, first)
        for one in (arm(name, lag=lag, seed=seed),)
    }


def test_a_screened_difference_equals_the_hand_computed_value_and_has_no_verdict() -> None:
    """Differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, standard error 0.1 / sqrt 3."""
    found = records_of(16, grpo=(0.4, 0.5, 0.3), mine=(0.5, 0.7, 0.6))
    (case,) = cases("mine", Expected(expected=(CALC,)), [("calc", 16)], [5e-4])
    (row,) = screened([case], found)
    assert (row.seeds, case.measure, row.verdict, row.p) == (3, "success", "no verdict", None)
    assert row.difference == pytest.approx(0.2)
    assert row.error == pytest.approx(0.1 / math.sqrt(3))
    assert (row.value, row.baseline_value) == pytest.approx((0.6, 0.4))
    del found[arm("mine", lag=16, seed=1)]
    failed = arm("mine", lag=16, seed=2)
    (row,) = screened([case], found | {failed: record(failed, error="ValueError")})
    assert (row.seeds, row.error) == (1, None)
    assert screened([replace(case, lag=4)], found) == []


def test_an_expectation_holds_from_a_lag_and_up_to_a_learning_rate() -> None:
    expected = Expected(
        expected=(
            Expectation(task="calc", lag_min=4, lr_max=1.5e-4),
            Expectation(task="calc", lag_min=16, direction="down"),
            Expectation(task="calc", measure="entropy"),
        )
    )
    found = cases("mine", expected, [("calc", 0), ("calc", 4), ("calc", 16), ("late", 4)], [1.5e-4, 5e-4])
    assert [(case.task, case.lag, case.lr, case.measure, case.expected) for case in found] == [
        ("calc", 0, 5e-4, "entropy", "up"),
        ("calc", 0, 1.5e-4, "entropy", "up"),
        ("calc", 4, 5e-4, "entropy", "up"),
        ("calc", 4, 1.5e-4, "entropy", "up"),
        ("calc", 4, 1.5e-4, "success", "up"),
        ("calc", 16, 5e-4, "entropy", "up"),
        ("calc", 16, 5e-4, "success", "down"),
        ("calc", 16, 1.5e-4, "entropy", "up"),
        ("calc", 16, 1.5e-4, "success", "down"),
        ("late", 4, 5e-4, "success", ""),
        ("late", 4, 1.5e-4, "success", ""),
    ]
    assert cases("grpo", Expected(), [("calc", 0)], [5e-4]) == [], "the baseline is not compared with itself"


def test_each_learning_rate_is_compared_with_the_baseline_at_the_same_rate() -> None:
    found = {
        one: record(one, (value,))
        for name, lr, value in (("grpo", 5e-4, 0.4), ("mine", 5e-4, 0.6), ("grpo", 1e-4, 0.7), ("mine", 1e-4, 0.5))
        for one in (arm(name, lr=lr),)
    }
    rows = screened(cases("mine", Expected(), [("calc", 0)], [5e-4, 1e-4]), found)
    assert [row.difference for row in rows] == pytest.approx([0.2, -0.2])
    assert {row.verdict for row in rows} == {"no expectation"}


def test_p_of_paired_differences_equals_published_values() -> None:
    """Quantiles of Student's t for 5 % and 0.1 % (two-sided)."""
    for dof, t, p in ((1, 12.706, 0.05), (2, 4.303, 0.05), (4, 2.776, 0.05), (4, 8.610, 0.001), (9, 4.781, 0.001)):
        assert student_p(t, dof) == pytest.approx(p, rel=2e-3)
        assert student_p(-t, dof) == student_p(t, dof)
    # mean 3, deviation sqrt 2.5, standard error sqrt 0.5, t = 4.243 with 4 degrees of freedom
    assert paired_p([1, 2, 3, 4, 5]) == pytest.approx(student_p(3 / math.sqrt(0.5), 4))
    assert paired_p([0.0, 0.0]) == 1.0
    assert paired_p([-0.1, -0.1]) == 0.0, "all pairs have the same difference"


def test_the_correction_equals_the_hand_computed_one() -> None:
    # level 0.05, 5 hypotheses: bounds 0.01, 0.02, 0.03, 0.04, 0.05; 0.028 <= 0.03 takes 0.024 along, which is > 0.02
    assert benjamini_hochberg([0.028, 0.6, 0.004, 0.024, 0.2], 0.05, 5) == [True, False, True, True, False]
    assert benjamini_hochberg([0.028, 0.6, 0.004, 0.024, 0.2], 0.05, 20) == [False] * 5
    assert benjamini_hochberg([0.002, 0.2], 0.05, 20) == [True, False], "hypotheses without a p count"
    assert benjamini_hochberg([], 0.05, 3) == []


def test_a_verdict_needs_five_seeds_that_did_not_screen() -> None:
    (case,) = cases("mine", Expected(expected=(CALC,)), [("calc", 0)], [5e-4])
    better: dict[str, Any] = {"grpo": (0.4, 0.5, 0.3, 0.4, 0.5), "mine": (0.6, 0.71, 0.5, 0.6, 0.7)}
    assert confirmed([case], records_of(**better), 5) == [], "seeds that screen do not count"
    (row,) = confirmed([case], records_of(first=CONFIRM_SEED, **better), 5)
    assert (row.stage, row.seeds, row.verdict) == ("confirm", 5, "agrees")
    assert row.p is not None
    assert row.p < FALSE_SHARE / 2
    (row,) = confirmed([replace(case, expected="down")], records_of(first=CONFIRM_SEED, **better), 5)
    assert row.verdict == "contradicts"
    failed = records_of(first=CONFIRM_SEED, grpo=better["grpo"], mine=(0.6, 0.71, None, 0.6, 0.7))
    (row,) = confirmed([case], failed, 5)
    assert (row.seeds, row.verdict, row.p) == (4, "no verdict", None)
    equal = records_of(first=CONFIRM_SEED, grpo=better["grpo"], mine=(0.6, 0.3, 0.5, 0.2, 0.6))
    assert confirmed([case], equal, 5)[0].verdict == "not shown"


def test_seeds_between_two_looks_are_not_tested() -> None:
    """A test after every new seed would be one look more for each of them."""
    (case,) = cases("mine", Expected(expected=(CALC,)), [("calc", 0)], [5e-4])
    clear = (0.6, 0.71, 0.52, 0.6, 0.7)
    unclear: dict[str, Any] = {"grpo": (0.4, 0.5, 0.3, 0.4, 0.5), "mine": (0.5, 0.8, 0.25, 0.7, 0.55)}
    found = records_of(first=CONFIRM_SEED, grpo=unclear["grpo"][:4], mine=clear[:4])
    (row,) = confirmed([case], found, 5)
    assert (row.seeds, row.verdict, row.p) == (4, "no verdict", None)
    found = records_of(first=CONFIRM_SEED, **unclear)
    at_5 = confirmed([case], found, 5)
    later = records_of(first=CONFIRM_SEED + 5, grpo=(0.0,) * 5, mine=(0.2, 0.21, 0.22, 0.21, 0.2))
    for seed in range(CONFIRM_SEED + 5, CONFIRM_SEED + 9):
        found |= {one: later[one] for one in case.arms(seed)}
        assert confirmed([case], found, 10) == at_5, "the figures are those of the last complete look"
    found |= later
    (row,) = confirmed([case], found, 10)
    assert (row.seeds, row.verdict) == (10, "agrees")


def family(num: int) -> list[Case]:
    return [replace(cases("mine", Expected(expected=(CALC,)), [("calc", 0)], [5e-4])[0], lag=n) for n in range(num)]


def test_a_decided_comparison_keeps_the_verdict_of_its_look() -> None:
    clear, unclear, none = family(3)
    up = [0.1, 0.11, 0.09, 0.1, 0.1]
    noisy = [0.1, -0.1, 0.1, 0.3, -0.05, 0.1, 0.12, 0.11, 0.09, 0.1]
    assert decided({clear: [*up, *[-9.0] * 5], unclear: noisy, none: [0.0, 0.1, -0.1, 0.0, 0.1] * 2}) == {clear: 5}
    steady = [0.1, 0.11, 0.09, 0.1, 0.02] * 2
    assert decided({clear: up, unclear: [None, *up[:4]], none: steady[:5]}) == {clear: 5, none: 5}
    assert decided({unclear: [None, *up[:4], *up]}) == {unclear: 10}, "four pairs are too few for the first look"


@pytest.mark.parametrize("shared", [False, True], ids=["independent", "shared baselines"])
def test_without_a_true_difference_at_most_1_in_20_tables_has_a_verdict(shared: bool) -> None:
    """54 comparisons. Two standard errors at 3 seeds, the rule of the first table, gave 18 % of them a verdict."""
    rng, found, trials = np.random.default_rng(7), family(54), 300
    any_verdict, old = 0, 0
    for _ in range(trials):
        arms = rng.normal(size=(54, LOOKS[-1]))
        baselines = np.repeat(rng.normal(size=(6, LOOKS[-1])), 9, axis=0) if shared else rng.normal(size=arms.shape)
        differences = arms - baselines
        any_verdict += bool(decided(dict(zip(found, differences.tolist(), strict=True))))
        screen = differences[:, :3]
        old += int((abs(screen.mean(1)) > 2 * screen.std(1, ddof=1) / math.sqrt(3)).sum())
    assert any_verdict / trials <= FALSE_SHARE
    assert old / trials / 54 == pytest.approx(0.18, abs=0.02)


def test_of_the_verdicts_at_most_1_in_20_is_chance_when_some_methods_differ() -> None:
    rng, found, trials = np.random.default_rng(8), family(40), 200
    shares, hits = [], 0
    for _ in range(trials):
        differences = rng.normal(size=(40, LOOKS[-1]))
        differences[:20] += 2.0
        verdicts = set(decided(dict(zip(found, differences.tolist(), strict=True))))
        wrong = len(verdicts & set(found[20:]))
        hits += len(verdicts) - wrong
        shares.append(wrong / max(1, len(verdicts)))
    assert np.mean(shares) <= FALSE_SHARE
    assert hits / trials / 20 > 0.9, "differences of two standard deviations are found"


# The plan -------------------------------------------------------------------------------------------------------------


def user_recipe(folder: Path, expected: str = "{}") -> str:
    file = folder / "mine.yaml"
    file.write_text("learner: {estimator: {options: {std: none}}}\n")
    file.with_suffix(".expected.yaml").write_text(expected)
    return str(file)


def test_the_plan_has_whole_pairs_seed_by_seed(tmp_path: Path) -> None:
    mine = user_recipe(tmp_path, "{baseline: grpo_tis, expected: [{task: noisy}, {task: calc, lag_min: 4}]}")
    arms = planned(MethodsOptions(methods=(mine,), seeds=(3, 5), out=tmp_path), {})
    places = [("noisy", 0), ("calc", 0), ("calc", 4), ("calc", 16)]
    assert arms == [
        arm(name, task=task, lag=lag, seed=seed, lr=lr)
        for seed in (3, 5)
        for task, lag in places
        for lr in (5e-4, 1.5e-4)
        for name in ("grpo_tis", mine)
    ]
    (one,) = planned(
        MethodsOptions(methods=("grpo",), tasks=("sparse",), lags=(64,), seeds=(0,), lrs=(5e-4,), out=tmp_path), {}
    )
    assert one == arm(task="sparse", lag=64)


def test_a_confirmed_method_gets_new_seeds_until_its_comparisons_are_decided(tmp_path: Path) -> None:
    mine = user_recipe(tmp_path, "{expected: [{task: calc}, {task: calc, measure: entropy}, {task: noisy}]}")
    options = MethodsOptions(methods=(mine,), confirm=(mine,), confirm_seeds=10, seeds=(0,), lrs=(5e-4,), out=tmp_path)
    screening = [arm(name, task=task) for task in ("calc", "noisy") for name in ("grpo", mine)]

    def pairs(tasks: Sequence[str], first: int, stop: int) -> list[MethodArm]:
        seeds = range(CONFIRM_SEED + first, CONFIRM_SEED + stop)
        return [arm(name, task=task, seed=seed) for seed in seeds for task in tasks for name in ("grpo", mine)]

    first = pairs(["calc", "noisy"], 0, 5)
    assert planned(options, {}) == [*screening, *first]
    # noisy differs by the same 0.5 for all seeds; on calc success differs, and entropy does not
    done = {one: record(one, (0.5 + 0.01 * one.seed * (one.task == "calc") * (-1) ** one.seed,)) for one in first}
    done |= {one: record(one, (1.0,)) for one in first if (one.task, one.method) == ("noisy", mine)}
    assert planned(options, {one: done[one] for one in first[:-1]}) == [*screening, *first], "the look is not complete"
    assert planned(options, done) == [*screening, *first, *pairs(["calc"], 5, 10)], "noisy is decided"
    assert planned(replace(options, confirm_seeds=5), done) == [*screening, *first]


def test_a_baseline_takes_over_settings_of_the_method(tmp_path: Path) -> None:
    settings = (
        "{run: {group_size: 4}, learner: {loss: [{name: policy_gradient}], optimizer: {lr: 1.0, clip_norm: 0.5}}}"
    )
    mine = user_recipe(tmp_path, f"{{baseline_settings: {settings}}}")
    baseline, method = planned(MethodsOptions(methods=(mine,), seeds=(0,), lrs=(5e-4,), out=tmp_path), {})
    assert (baseline, method) == (arm("grpo", like=mine), arm(mine))
    assert str(baseline) == f"grpo as {mine} on calc at lag 0, seed 0, lr 0.0005"
    config = resolved(baseline)[0]
    assert (config.run.group_size, config.run.batch_groups) == (4, 16), "as many samples in all"
    assert [term.name for term in config.learner.loss] == ["policy_gradient"]
    assert (config.learner.optimizer.lr, config.learner.optimizer.clip_norm) == (5e-4, 0.5), "the rate is the arm's"
    assert settings_digest(baseline, TINY) != settings_digest(arm("grpo"), TINY)


def test_baselines_of_vcpo_mssr_and_seeupo_differ_only_in_the_method() -> None:
    pairs = {
        name: [resolved(one)[0] for one in (arm(name, task=task), arm("grpo", task=task, like=name))]
        for name, task in (("vcpo", "calc"), ("mssr", "calc"), ("seeupo", "turns"))
    }
    for method, baseline in pairs.values():
        assert method.run == baseline.run, "the same prompts and samples per update"
        assert method.learner.loss == baseline.learner.loss
        assert method.learner.normalization == baseline.learner.normalization
        assert method.learner.optimizer == baseline.learner.optimizer
        assert baseline.learner.estimator.name == "grpo"
        parts = [(one.learner.estimator, one.learner.update_rule) for one in (method, baseline)]
        assert parts[0] != parts[1]
    assert pairs["mssr"][1].run.group_size == 1
    assert pairs["vcpo"][1].learner.optimizer.warmup_updates == 0
    assert pairs["seeupo"][1].learner.update_rule.options["num_minibatches"] == 4


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ("{expected: [{task: calcs}]}", r"`expected\[0\].task` must be one of .*two_rewards, got 'calcs'"),
        ("{expected: [{measure: ess}]}", r"expected\[0\].*task"),
        (
            "{expected: [{task: calc, direction: higher}]}",
            r"`expected\[0\].direction` must be one of down, up, got 'higher'",
        ),
        ("{expected: [{task: calc}, {task: calc}]}", "`expected` must name each task, measure and lag_min once"),
        ("{expected: [{task: calc, lr_max: 0}]}", r"`expected\[0\].lr_max` must be > 0"),
        ("{baseline_settings: {data: {seed: 1}}}", "`baseline_settings` may have the sections run, .*got data"),
    ],
)
def test_a_mistake_in_the_expectations_of_a_recipe_names_its_key(tmp_path: Path, expected: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expected_of(user_recipe(tmp_path, expected))


def test_every_file_of_expectations_belongs_to_a_recipe() -> None:
    named = {file.stem for file in FOLDER.iterdir()}
    assert named <= set(recipe_names())
    assert all(expected_of(name) for name in named)


def test_options_that_cannot_be_run_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--tasks: there is no task `calcs`.*did you mean `calc`"):
        MethodsOptions(tasks=("calcs",), out=tmp_path)
    with pytest.raises(InvalidInput, match="--seeds and --lags must be >= 0"):
        MethodsOptions(lags=(-1,), out=tmp_path)
    with pytest.raises(ConfigError, match="there is no recipe `grpoo`"):
        planned(MethodsOptions(methods=("grpoo",), out=tmp_path), {})
    with pytest.raises(InvalidInput, match="--seeds must be < 100"):
        MethodsOptions(seeds=(100,), out=tmp_path)
    with pytest.raises(InvalidInput, match="--confirm must name at most 20 methods, got 21"):
        MethodsOptions(confirm=tuple(map(str, range(21))), out=tmp_path)
    with pytest.raises(InvalidInput, match=r"--confirm-seeds must be one of \(5, 10, 20\), got 7"):
        MethodsOptions(confirm_seeds=7, out=tmp_path)
    with pytest.raises(InvalidInput, match="--confirm: `campo` has no expectation"):
        planned(MethodsOptions(methods=("grpo",), confirm=("campo",), out=tmp_path), {})
    wrong_key = user_recipe(tmp_path, "{baseline_settings: {learner: {los: []}}}")
    with pytest.raises(ConfigError, match="learner.los"):
        read_outcome(MethodsOptions(methods=(wrong_key,), out=tmp_path))
    result = CliRunner().invoke(app, ["methods", "--lags", "4,x", "--out", str(tmp_path)])
    assert (result.exit_code, "--lags must be integers" in result.output) == (2, True)


def test_every_task_that_a_recipe_may_name_exists_and_resolves_and_so_does_every_recipe() -> None:
    assert set(TASKS) == set(get_args(MethodTask))
    for task, of in TASKS.items():
        config = resolved(arm(task=task, seed=3))[0]
        if task != "gym":  # whose package is optional
            pools = build_pools(config.data)
            assert (len(pools[Split.TRAIN]), len(pools[Split.TEST])) == (1024, NUM_TEST)
            (source,) = demonstrated_sources(config_from_dict(MadeModelConfig, dict(of.model)))
            shown = [source.demonstration(key) for _, key in source.keys(Split.VALIDATION)]
            assert len(shown) == source.options.num_validation
    for method, task in zip(recipe_names(), itertools.cycle(TASKS)):
        resolved(arm(method, task=task, seed=3))
    for method in (name for name in recipe_names() if expected_of(name).baseline_settings):
        resolved(arm(expected_of(method).baseline, like=method))


def test_the_settings_digest_covers_recipe_and_task_but_not_the_seed(tmp_path: Path) -> None:
    assert settings_digest(arm(seed=1), TINY) == settings_digest(arm(seed=2), TINY)
    mine = user_recipe(tmp_path, "{}")
    others = [arm("dr_grpo"), arm(task="noisy"), arm(mine)]
    assert len({settings_digest(one, TINY) for one in [arm(), *others]}) == 4
    before = settings_digest(arm(mine), TINY)
    Path(mine).write_text("learner: {normalization: constant}\n")
    assert settings_digest(arm(mine), TINY) != before


def test_the_settings_digest_covers_the_files_of_a_user_that_the_recipe_names(tmp_path: Path) -> None:
    code, mine = tmp_path / "mine.py", tmp_path / "mine.yaml"
    for recipe in ("learner: {estimator: 'mine.py:Mine'}", "reward: {scorers: [{name: 'mine.py:Mine', reward: r}]}"):
        mine.write_text(recipe)
        code.write_text("class Mine: ...\n")
        before = settings_digest(arm(str(mine)), TINY)
        assert settings_digest(arm(str(mine), seed=1), TINY) == before
        code.write_text("class Mine: pass\n")
        assert settings_digest(arm(str(mine)), TINY) != before


def test_a_recipe_keeps_its_group_size_and_the_number_of_samples() -> None:
    sizes = {name: resolved(arm(name))[0].run for name in ("grpo", "mssr", "risk_po")}
    shape = {name: (run.batch_groups, run.group_size) for name, run in sizes.items()}
    assert shape == {"grpo": (8, 8), "mssr": (64, 1), "risk_po": (10, 10)}


# Scorers --------------------------------------------------------------------------------------------------------------


def item(answer: str, *, sample: str = "s", calls: tuple[str, ...] = ()) -> ScoreItem:
    texts = [*(f"<tool_call>{call}</tool_call>" for call in calls), f"<answer>{answer}</answer>"]
    none = np.zeros(0, np.int32)
    path = [JudgedSegment(index=0, role=Role.CONTEXT, source=Source.PROMPT, token_ids=none)]
    for text in texts:
        path += [
            JudgedSegment(index=len(path), role=Role.ACTION, source=Source.POLICY, token_ids=none, text=text),
            JudgedSegment(index=len(path) + 1, role=Role.OBSERVATION, source=Source.TOOL, token_ids=none),
        ]
    messages = (Message(role="user", content="12+7-3"), *(Message(role="assistant", content=text) for text in texts))
    return ScoreItem(
        key=EpisodeKey(run="r", task="t", group="g", episode="e"),
        task=TaskView(task_id="t", messages=messages[:1], labels={"level": "2"}),
        answer_key=AnswerKey(answers=("16",)),
        messages=messages,
        sample_id=sample,
        path=tuple(path),
    )


async def test_flips_are_a_share_of_the_samples_and_the_same_ones_every_time() -> None:
    scorer = FlippedExact(options=FlippedExactOptions(share=0.25))
    right = [(await scorer.score(item("16", sample=f"s{n}"))).value for n in range(400)]
    wrong = [(await scorer.score(item("17", sample=f"s{n}"))).value for n in range(400)]
    assert 0.19 < 1 - np.mean(right) < 0.31
    assert [1 - value for value in right] == wrong
    other = FlippedExact(options=FlippedExactOptions(share=0.25, seed=1))
    assert [(await other.score(item("16", sample=f"s{n}"))).value for n in range(400)] != right


async def test_turn_rewards_are_those_of_the_ideal_turns() -> None:
    scorer = IdealTurns(options=ExactOptions())
    whole, *turns = await scorer.score(item("16", calls=("12+7", "19-2")))
    assert (whole.value, whole.segment) == (1.0, -1)
    assert [(one.name, one.value, one.segment) for one in turns] == [
        ("turn", 1.0, 1),
        ("turn", 0.0, 3),
        ("turn", 1.0, 5),
    ]
    rewards = await scorer.score(item("19", calls=("12+7",)))
    assert [one.value for one in rewards] == [0.0, 1.0, 0.0]


async def test_a_call_that_is_made_again_is_rated_right_again_and_only_raw_ratings_pay_for_it() -> None:
    """The ideal episode of 12+7-3 has the calls 12+7 and 19-3, and the answer 16."""
    raw = RatedCalls(options=ProcessRewardOptions(form="raw"))

    async def sums(*calls: str) -> tuple[float, float]:
        scored = item("16", calls=calls)
        scored = replace(scored, leaf=scored.path[-2].index, path=tuple(stopped(scored.path)))
        found = []
        for scorer in (raw, RatedCalls(options=ProcessRewardOptions())):
            rewards = await scorer.score(scored)
            assert isinstance(rewards, list)
            found.append(float(sum(one.value for one in rewards)))
        return found[0], found[1]

    assert await sums("12+7", "19-3") == (3.0, 0.0)
    assert await sums("12+7", "12+7", "12+7", "19-3") == (5.0, 0.0)
    assert await sums("12+8", "19-3") == (2.0, -0.5)


def stopped(path: Sequence[JudgedSegment]) -> list[JudgedSegment]:
    """Return the path with turns that the model ended."""
    return [replace(one, finish=FinishReason.STOP) if one.role is Role.ACTION else one for one in path]


def test_answers_of_guess_are_the_largest_digit_or_one_that_the_prompt_does_not_tell() -> None:
    source = GuessSource(options=GuessSource.Options(level_max=2))
    rng, keys = random.Random(0), {1: list[str](), 2: list[str]()}
    for level, found in keys.items():
        found += [source.make(rng, level) for _ in range(400)]
    assert all(GuessOracle().resolve(key).answers == (max(key),) for key in keys[1])
    places = Counter(key.index(GuessOracle().resolve(key).answers[0]) for key in keys[2])
    assert set(places) == {1, 2, 3, 4}
    assert min(places.values()) > 60
    shown = [source.demonstration(key) for key in keys[1]]
    assert {len(one.calls) for one in shown} == {0, 1, 2}
    with pytest.raises(UnknownOracle, match="must get four digits from 1 to 9, or these after a question mark, got"):
        GuessOracle().resolve("!1234")


async def test_a_recipe_that_assumes_a_prediction_gets_it_from_the_level() -> None:
    scorers = {name: resolved(arm(name))[0].reward.scorers for name in ("grpo", "v05")}
    assert [[one.reward_name for one in of] for of in scorers.values()] == [["correct"], ["correct", "prior"]]
    scorer = LevelPrior(options=LevelPriorOptions(per_level=0.5))
    assert await scorer.score(item("16")) == 0.25


async def test_episode_0_of_a_training_group_is_given_to_recipes_that_learn_from_solutions() -> None:
    agents = {name: resolved(arm(name, task="given"))[0].rollout.agent.name for name in ("grpo", "red")}
    assert agents == {"grpo": "tool_calling", "red": "benchmarks.methods.agents:FirstGiven"}
    sources = {}
    for index, purpose in ((0, types_pb2.PURPOSE_TRAIN), (1, types_pb2.PURPOSE_TRAIN), (0, types_pb2.PURPOSE_EVAL)):
        mesh = LocalMesh(script=lambda text: "<answer>4</answer><|end|>")
        report = await mesh.runner(FirstGiven()).run(lease(["12+7-3"], index=index, purpose=purpose))
        (episode,) = mesh.samples.episodes
        sources[index, purpose] = {s.source for s in episode.segments if s.num_trainable}
        if not index and purpose == types_pb2.PURPOSE_TRAIN:
            assert [m.content for m in text_view(episode.segments)[1:]] == [
                "<tool_call>12+7</tool_call>", "19", "<tool_call>19-3</tool_call>", "16", "<answer>16</answer>"
            ]  # fmt: skip
        assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_COMPLETED
    assert list(sources.values()) == [{Source.DATASET}, {Source.POLICY}, {Source.POLICY}]


async def test_only_the_first_turn_decides_the_late_reward_and_an_answer_must_follow() -> None:
    scorer, key = FirstTurn(), LateOracle().resolve("2793")

    async def score(answer: str, *calls: str) -> float:
        return await scorer.score(replace(item(answer, calls=calls), answer_key=key))

    assert await score("0", "9", "1", "2", "1") == 1.0
    assert await score("5", "9", "7") == 1.0
    assert await score("0", "7", "9", "9", "9") == 0.0
    assert await score("9") == 0.0
    source = LateSource(options=LateSource.Options(level_max=1))
    shown = [source.demonstration(key) for key in ("2793", "1234", "8765", "5678")]
    assert [one.calls[0][0] for one in shown] == ["9", "4", "8", "8"]
    assert {call for one in shown for call, _ in one.calls[1:]} == {"1", "2"}
    with pytest.raises(UnknownOracle, match="must get four digits from 1 to 9, got '12a4'"):
        LateOracle().resolve("12a4")


def test_long_answers_have_hundreds_of_tokens_and_one_right_text() -> None:
    source = CountSource(options=CountSource.Options(level_max=3))
    key = source.make(random.Random(0), 3)
    answer = source.demonstration(key).answer
    numbers = [int(word) for word in answer.split(" ")]
    assert numbers == list(range(numbers[0], numbers[0] + 60))
    assert key == f"{numbers[0]} {numbers[-1]}"
    assert len(answer) == 239
    assert CountOracle().resolve(key).answers == (answer,)


def test_confident_demonstrations_swap_the_operands_of_most_leading_subtractions() -> None:
    source = ConfidentSource(options=ConfidentSource.Options())
    rng = random.Random(0)
    keys = [source.make(rng, 2) for _ in range(600)]
    wrong = {key for key in keys if source.demonstration(key) != demonstrate(key)}
    leading = {key for key in keys if re.match(r"\d+-", key)}
    assert wrong <= leading
    assert len(wrong) / len(leading) == pytest.approx(0.9, abs=0.05)
    assert source.demonstration(next(key for key in wrong if key in leading)).calls[0][0].count("-") == 1


async def test_the_drifting_reward_switches_its_levels_at_a_draw() -> None:
    scorer = DriftingExact(options=DriftingExactOptions(switch_draw=10, easy_level_max=2))
    right = item("16")
    found = {}
    for level, draw in itertools.product((2, 3), (9, 10)):
        labels = replace(right.task, labels={"level": str(level)})
        key = replace(right.key, group=f"g{draw:08d}")
        found[level, draw] = (await scorer.score(replace(right, task=labels, key=key))).value
    assert found == {(2, 9): 1.0, (2, 10): 0.0, (3, 9): 0.0, (3, 10): 1.0}


async def test_the_task_of_reasoning_gym_is_scored_by_its_verifier() -> None:
    pytest.importorskip("reasoning_gym")
    from benchmarks.methods.gym import ChainSumOracle, ChainSumScorer, ChainSumSource, entry_of

    source = ChainSumSource(options=ChainSumSource.Options())
    key = source.make(random.Random(0), 2)
    entry, shown = entry_of(key), source.demonstration(key)
    assert source.prompt(key) == entry["question"]
    assert (len(shown.calls), shown.answer) == (2, entry["answer"])
    answer_key = ChainSumOracle().resolve(key)
    scorer = ChainSumScorer(options=AnswerOptions())
    for answer, wanted in ((shown.answer, 1.0), (f"+{shown.answer}.0".replace("+-", "-"), 1.0), ("x", 0.0)):
        assert await scorer.score(replace(item(answer), answer_key=answer_key)) == wanted


def test_without_reasoning_gym_its_task_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.methods import gym

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    gym.chain_sum.cache_clear()
    with pytest.raises(ConfigError, match=r"needs reasoning-gym 0.1.25, found none; run `pip install reasoning-gym=="):
        gym.ChainSumSource(options=gym.ChainSumSource.Options()).prompt("1/0")


# Arms -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an untrained model in the place of the model of `calc`, which takes seconds to make."""
    folder = tmp_path_factory.mktemp("models")
    plan = config_from_dict(MadeModelConfig, dict(TASKS["calc"].model))
    digest = hashlib.sha256(msgspec.json.encode([msgspec.to_builtins(plan), MODEL_SEED])).hexdigest()[:16]
    model = build_tiny_model(TinyModelConfig(hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1), seed=0)
    (folder / digest).mkdir()
    write_model_folder(model, build_tokenizer(), folder / digest)
    return folder


def work(of: MethodArm, models: Path) -> ArmWork:
    return ArmWork(arm=of, commit="c", settings=settings_digest(of, TINY), size=TINY, models=str(models))


def test_turns_of_an_evaluation_are_counted_with_those_that_repeat_an_earlier_one() -> None:
    def segment(role: Role, *token_ids: int) -> Segment:
        source = Source.POLICY if role is Role.ACTION else Source.TOOL
        return Segment(parent=-1, role=role, source=source, token_ids=np.array(token_ids, np.int32))

    act, seen = partial(segment, Role.ACTION), segment(Role.OBSERVATION, 9)
    turns = turns_of([segment(Role.CONTEXT, 1, 2), act(1), act(2), seen, act(1, 2), seen, act(3)])
    assert turns == [(1, 2), (1, 2), (3,)]


def test_an_arm_records_its_curves(models: Path) -> None:
    made = run_work(work(arm(task="noisy", lag=1), models))
    found = made.record
    assert not found.error
    assert [point.update for point in found.evals] == [0, 1]
    assert found.samples == 64
    assert found.evals[0].kl == pytest.approx(0.0, abs=1e-6)
    assert 2 < found.evals[0].entropy < 5
    assert set(found.updates[0].metrics) >= {"reward/correct", "reward/truth", "entropy", "ess", "kl"}
    assert 0 < found.cpu_s <= made.cpu_s
    assert found.tokens > 0


def test_a_method_that_fails_is_recorded_with_its_cause(models: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from rollmesh.trainer.estimators.grpo import Grpo\n\n\nclass Broken(Grpo):\n"
        "    def __call__(self, batch):\n        raise LookupError('no such column')\n"
    )
    (tmp_path / "mine.yaml").write_text("learner: {estimator: 'broken.py:Broken'}\n")
    found = run_work(work(arm(str(tmp_path / "mine.yaml")), models)).record
    assert "the estimator Broken failed: LookupError: no such column" in found.error
    assert "broken.py" in found.error


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return a folder with a recipe and its records and those of `grpo` on calc with two seeds, of which one failed."""
    mine = user_recipe(tmp_path, "{expected: [{task: calc}]}")
    for seed in (0, 1):
        for method, success in (("grpo", (0.2, 0.4)), (mine, (0.2, 0.7))):
            of = arm(method, seed=seed)
            error = "ValueError: no\n  in line 3" if seed and method == mine else ""
            settings = settings_digest(of, Size())
            append_record(
                tmp_path / "records.jsonl",
                record(of, success, commit=methods.commit(), settings=settings, error=error),
            )
    return tmp_path


def test_a_resumed_call_skips_arms_with_a_record(out: Path) -> None:
    mine = str(out / "mine.yaml")
    outcome = read_outcome(MethodsOptions(methods=(mine,), tasks=("calc",), seeds=(0, 1, 2), lrs=(5e-4,), out=out))
    assert outcome.missing == [arm(name, seed=2) for name in ("grpo", str(out / "mine.yaml"))]
    assert len(outcome.records) == 4
    quick = read_outcome(MethodsOptions(methods=(mine,), tasks=("calc",), seeds=(0,), lrs=(5e-4,), out=out, quick=True))
    assert len(quick.missing) == 2, "a record of another size is not the record of this arm"


def test_the_report_has_verdicts_means_curves_and_failures(out: Path) -> None:
    mine = str(out / "mine.yaml")
    options = [
        "--methods",
        mine,
        "--tasks",
        "calc",
        "--lr",
        "5e-4",
        "--out",
        str(out),
        "--json",
        str(out / "rows.json"),
    ]
    result = CliRunner().invoke(app, ["methods", "--report", *options])
    assert result.exit_code == 0, result.output
    text = (out / "report" / "methods.md").read_text()
    assert "4 arms" in text
    assert "2 arms have no record" in text
    assert f"| {mine} | grpo | calc | 0 | 0.0005 | success | 0.450 | 0.300 | +0.150 | 1 | up |" in text
    assert "None: no method was confirmed" in text
    assert "| calc | 0 | 0.0005 | grpo | 2 | 0.300 |" in text
    assert f"- {mine} on calc at lag 0, seed 1, lr 0.0005: ValueError: no\n" in text
    assert "![Curves of calc](calc.svg)" in text
    assert (out / "report" / "calc.svg").read_text().startswith("<svg")
    (row,) = json.loads((out / "rows.json").read_text())["rows"]
    assert row["difference"] == pytest.approx(0.15)


def test_the_bench_of_methods_is_a_command_of_its_own(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["engine", "methods"])
    assert (result.exit_code, "NAME must be `methods` alone" in result.output) == (2, True)
