"""`python -m benchmarks methods`: arms, records, budget, verdicts and the report."""

from __future__ import annotations

import hashlib
import json
import math
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
from benchmarks.methods.arm import MODEL_SEED, ArmWork, Size, resolved, run_work, settings_digest
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
from benchmarks.methods.scorers import FlippedExact, FlippedExactOptions, IdealTurns, LevelPrior, LevelPriorOptions
from benchmarks.methods.tasks import TASKS
from benchmarks.methods.verdict import compare, finding
from rollmesh.demo.config import MadeModelConfig
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.services.reward.item import AnswerKey, JudgedSegment, ScoreItem, TaskView
from rollmesh.services.reward.scorers.exact import ExactOptions
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import EpisodeKey, Message, Role, Source, text_view
from rollmesh.shared.errors import ConfigError, InvalidInput
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.trainer.model_files import write_model_folder
from rollmesh.trainer.recipe import recipe_names
from rollmesh.v1 import coordinator_pb2, types_pb2

TINY = Size(updates=1, evals=1, eval_tasks=2)


def arm(method: str = "grpo", *, task: str = "calc", lag: int = 0, seed: int = 0) -> MethodArm:
    return MethodArm(method=method, task=task, lag=lag, seed=seed)


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


def test_a_verdict_equals_the_hand_computed_value() -> None:
    """Differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, standard error 0.1 / sqrt 3 = 0.0577; 0.2 exceeds 0.115."""
    records = {
        arm(name, lag=16, seed=seed): record(arm(name, lag=16, seed=seed), (value,))
        for name, values in (("grpo", (0.4, 0.5, 0.3)), ("mine", (0.5, 0.7, 0.6)))
        for seed, value in enumerate(values)
    }
    expected = (
        Expectation(task="calc", direction="up", lag_min=4),
        Expectation(task="calc", measure="ess", lag_min=64),
    )
    (row,) = compare("mine", Expected(expected=expected), records, [("calc", 16), ("noisy", 0)])
    assert (row.seeds, row.measure, row.verdict) == (3, "success", "agrees")
    assert row.difference == pytest.approx(0.2)
    assert row.error == pytest.approx(0.1 / math.sqrt(3))
    assert (row.value, row.baseline_value) == pytest.approx((0.6, 0.4))
    (row,) = compare("mine", Expected(expected=(Expectation(task="calc", direction="down"),)), records, [("calc", 16)])
    assert row.verdict == "contradicts"
    (row,) = compare("mine", Expected(), records, [("calc", 16)])
    assert (row.measure, row.verdict) == ("success", "no expectation")
    del records[arm("mine", lag=16, seed=1)]
    records[arm("mine", lag=16, seed=2)] = record(arm("mine", lag=16, seed=2), error="ValueError")
    (row,) = compare("mine", Expected(expected=expected), records, [("calc", 16)])
    assert (row.seeds, row.error, row.verdict) == (1, None, "not shown")


def test_each_learning_rate_is_compared_with_the_baseline_at_the_same_rate() -> None:
    records = {
        one: record(one, (value,))
        for name, lr, value in (("grpo", 5e-4, 0.4), ("mine", 5e-4, 0.6), ("grpo", 1e-4, 0.7), ("mine", 1e-4, 0.5))
        for one in (replace(arm(name), lr=lr),)
    }
    rows = compare("mine", Expected(), records, [("calc", 0)])
    assert [row.lr for row in rows] == [5e-4, 1e-4]
    assert [row.difference for row in rows] == pytest.approx([0.2, -0.2])


def test_a_difference_of_two_standard_errors_is_not_shown() -> None:
    assert finding(0.2, 0.1, "up") == "not shown"
    assert finding(0.21, 0.1, "up") == "agrees"
    assert finding(0.21, 0.1, "down") == "contradicts"
    assert finding(0.0, 0.0, "up") == "not shown"
    assert finding(-0.1, 0.0, "down") == "agrees", "all pairs have the same difference"


# The plan -------------------------------------------------------------------------------------------------------------


def user_recipe(folder: Path, expected: str = "{}") -> str:
    file = folder / "mine.yaml"
    file.write_text("learner: {estimator: {options: {std: none}}}\n")
    file.with_suffix(".expected.yaml").write_text(expected)
    return str(file)


def test_the_plan_has_whole_pairs_seed_by_seed(tmp_path: Path) -> None:
    mine = user_recipe(tmp_path, "{baseline: grpo_tis, expected: [{task: noisy}, {task: calc, lag_min: 4}]}")
    arms = planned(MethodsOptions(methods=(mine,), seeds=(3, 5), out=tmp_path))
    cases = [("noisy", 0), ("calc", 0), ("calc", 4), ("calc", 16)]
    assert arms == [
        arm(name, task=task, lag=lag, seed=seed)
        for seed in (3, 5)
        for task, lag in cases
        for name in ("grpo_tis", mine)
    ]
    (one,) = planned(MethodsOptions(methods=("grpo",), tasks=("sparse",), lags=(64,), seeds=(0,), out=tmp_path))
    assert one == arm(task="sparse", lag=64)


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
        planned(MethodsOptions(methods=("grpoo",), out=tmp_path))
    result = CliRunner().invoke(app, ["methods", "--lags", "4,x", "--out", str(tmp_path)])
    assert (result.exit_code, "--lags must be integers" in result.output) == (2, True)


def test_every_task_that_a_recipe_may_name_exists_and_resolves_with_every_recipe() -> None:
    assert set(TASKS) == set(get_args(MethodTask))
    for method in recipe_names():
        for task in TASKS:
            resolved(arm(method, task=task, seed=3))


def test_the_settings_digest_covers_recipe_and_task_but_not_the_seed(tmp_path: Path) -> None:
    assert settings_digest(arm(seed=1), TINY) == settings_digest(arm(seed=2), TINY)
    mine = user_recipe(tmp_path, "{}")
    others = [arm("dr_grpo"), arm(task="noisy"), arm(mine)]
    assert len({settings_digest(one, TINY) for one in [arm(), *others]}) == 4
    before = settings_digest(arm(mine), TINY)
    Path(mine).write_text("learner: {normalization: constant}\n")
    assert settings_digest(arm(mine), TINY) != before


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
    outcome = read_outcome(MethodsOptions(methods=(str(out / "mine.yaml"),), tasks=("calc",), seeds=(0, 1, 2), out=out))
    assert outcome.missing == [arm(name, seed=2) for name in ("grpo", str(out / "mine.yaml"))]
    assert len(outcome.records) == 4
    quick = read_outcome(
        MethodsOptions(methods=(str(out / "mine.yaml"),), tasks=("calc",), seeds=(0,), out=out, quick=True)
    )
    assert len(quick.missing) == 2, "a record of another size is not the record of this arm"


def test_the_report_has_verdicts_means_curves_and_failures(out: Path) -> None:
    mine = str(out / "mine.yaml")
    options = ["--methods", mine, "--tasks", "calc", "--out", str(out), "--json", str(out / "rows.json")]
    result = CliRunner().invoke(app, ["methods", "--report", *options])
    assert result.exit_code == 0, result.output
    text = (out / "report" / "methods.md").read_text()
    assert "4 arms" in text
    assert "2 arms have no record" in text
    assert f"| {mine} | grpo | calc | 0 | 0.0005 | success | 0.450 | 0.300 | +0.150 | 1 | up | not shown |" in text
    assert "| calc | 0 | 0.0005 | grpo | 2 | 0.300 |" in text
    assert f"- {mine} on calc at lag 0, seed 1, lr 0.0005: ValueError: no\n" in text
    assert "![Curves of calc](calc.svg)" in text
    assert (out / "report" / "calc.svg").read_text().startswith("<svg")
    (row,) = json.loads((out / "rows.json").read_text())["rows"]
    assert row["difference"] == pytest.approx(0.15)


def test_the_bench_of_methods_is_a_command_of_its_own(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["engine", "methods"])
    assert (result.exit_code, "NAME must be `methods` alone" in result.output) == (2, True)
