"""`rollmesh score`: the lines that it accepts, their rewards, and the errors of malformed lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollmesh.app.samples.scoring import ScoreReport, score_file
from rollmesh.cli.__main__ import app
from rollmesh.demo.families.calc import CalcOracle
from rollmesh.services.data.config import DataConfig, build_pools
from rollmesh.services.data.task import Split
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.store.records import RecordError

CALC = "data: {source: {name: calc, options: {num_train: 4, num_test: 4, num_validation: 2}}}\n"
FAILING = """
class Scorer:
    async def score(self, item):
        raise RuntimeError("no judge answers")
"""
PRICE = """
class Scorer:
    async def score(self, item):
        return sum(use.price for use in item.endpoints)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "calc.yaml"
    path.write_text(CALC)
    return path


def write(folder: Path, *lines: Mapping[str, Any] | str) -> Path:
    path = folder / "lines.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def score(config: Path, *lines: Mapping[str, Any] | str) -> ScoreReport:
    return score_file(write(config.parent, *lines), config, [])


def values(report: ScoreReport) -> list[tuple[int, float]]:
    return [(line.line, line.rewards[0].value) for line in report.lines]


SAMPLE = {
    "sample_id": "g0.0-0",
    "run": "r",
    "task": "elsewhere-7",
    "group": "g0",
    "episode": "g0.0",
    "oracle_ref": "calc:2+3",
    "messages": [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "<answer>5</answer>"}],
    "later_field": 1,
}


def test_answers_are_scored_against_the_configurations_tasks_and_blank_lines_keep_their_numbers(config: Path) -> None:
    options = {"num_train": 4, "num_test": 4, "num_validation": 2}
    task = build_pools(DataConfig(source=Extension("calc", options)))[Split.TEST].task(0)
    right = CalcOracle().resolve(task.messages[0].content).answers[0]
    answers = (
        {"task": task.task_id, "response": f"<answer>{right}</answer>"},
        {"task": task.task_id, "answer": f"<answer>{right}1</answer>"},
    )
    report = score(config, answers[0], "", answers[1])
    assert values(report) == [(1, 1.0), (3, 0.0)]
    assert report.mean_rewards == {"correct": 0.5}


def test_a_sample_of_another_source_brings_its_own_oracle_and_fields_of_a_later_version_are_passed_by(
    config: Path,
) -> None:
    assert values(score(config, SAMPLE)) == [(1, 1.0)]


def test_only_the_scorers_that_the_task_or_the_line_names_score_it(config: Path) -> None:
    scorers = "reward: {scorers: [{name: exact, reward: correct}, {name: length, reward: short}]}\n"
    config.write_text(CALC.replace("num_train: 4", "num_train: 4, scorers: [short]") + scorers)
    of_task, of_line = {"task": "calc-0-test-0", "response": "5"}, {**SAMPLE, "scorers": ["correct"]}
    report = score(config, of_task, of_line)
    assert [[reward.name for reward in line.rewards] for line in report.lines] == [["short"], ["correct"]]


def test_scorers_that_the_task_or_the_line_names_must_exist(config: Path) -> None:
    assert values(score(config, {**SAMPLE, "scorers": ["correct"]})) == [(1, 1.0)]
    with pytest.raises(RecordError, match=r'field "scorers": .*names of rewards among \[correct\], got .short'):
        score(config, {**SAMPLE, "scorers": ["short"]})
    config.write_text(CALC.replace("num_train: 4", "num_train: 4, scorers: [short]"))
    with pytest.raises(RecordError, match=r'field "task": .*names of rewards among \[correct\], got .short'):
        score(config, {"task": "calc-0-test-0", "response": "5"})


@pytest.mark.parametrize(
    ("line", "field", "cause"),
    [
        ({"response": "5"}, "task", "is missing"),
        ({"task": "calc-0-test-0"}, "response", "is missing"),
        ({"task": "calc-0-test-0", "response": 5}, "response", "must be a string"),
        ({"task": "unheard", "response": "5"}, "task", "is not a task of the configured source"),
        ({**SAMPLE, "oracle_ref": "calc:rm -rf"}, "oracle_ref", "not an arithmetic expression"),
        ({**SAMPLE, "group": 3}, "group", "expected `str`, got `int`"),
        ({**SAMPLE, "messages": [{"role": "user"}]}, "messages[0]", "missing required field `content`"),
        ({k: v for k, v in SAMPLE.items() if k != "run"}, "run", "missing required field"),
        (
            {**SAMPLE, "segments": [{"role": "action", "source": "policy", "token_ids": [], "finish": "tired"}]},
            "segments[0].finish",
            "must be one of unfinished, stop, length, cancelled, error; got 'tired'",
        ),
    ],
)
def test_a_malformed_line_is_named_by_number_and_field_before_anything_is_scored(
    config: Path, line: dict[str, Any], field: str, cause: str
) -> None:
    with pytest.raises(RecordError) as caught:
        score(config, SAMPLE, line)
    assert "lines.jsonl:2: " in str(caught.value)
    assert f'field "{field}"' in str(caught.value)
    assert cause in str(caught.value)


def test_a_line_that_is_no_json_is_named(config: Path) -> None:
    with pytest.raises(RecordError, match=r"lines.jsonl:2: is not JSON"):
        score(config, SAMPLE, "{")


def test_a_scorer_that_fails_is_in_no_mean_and_makes_the_command_fail(config: Path) -> None:
    (config.parent / "scorer.py").write_text(FAILING)
    config.write_text(CALC + 'reward: {scorers: [{name: "scorer.py:Scorer", reward: correct}]}\n')
    file = write(config.parent, SAMPLE)
    done = CliRunner().invoke(app, ["score", str(file), "--config", str(config)])
    assert done.exit_code == 1
    assert "infra_failure: RuntimeError: no judge answers" in done.stdout
    assert "1 lines, 1 with a scorer that failed; mean none" in done.stdout


def test_scorers_read_what_the_agent_of_a_stored_sample_asked_of_endpoints(config: Path) -> None:
    (config.parent / "own.py").write_text(PRICE)
    config.write_text(CALC + "reward: {scorers: [{name: 'own.py:Scorer', reward: price}]}\n")
    uses = [{"endpoint": "m", "caller": caller, "price": price} for caller, price in (("agent", 0.5), ("judge@1", 2.0))]
    assert values(score(config, {**SAMPLE, "endpoints": uses})) == [(1, 0.5)]


def test_without_a_configuration_the_command_names_what_is_missing(config: Path) -> None:
    done = CliRunner().invoke(app, ["score", str(write(config.parent, SAMPLE)), "--json"])
    assert done.exit_code == 2
    assert "--config is missing" in done.output
