"""Rewards of code after earlier turns: values by hand, copied wrong tests, and turns that the scorer tests judges."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Mapping
from dataclasses import replace as replace_
from typing import Any

import pytest
from msgspec.structs import replace

from rollmesh.services.reward.item import AnswerKey, ScoreItem, TaskView
from rollmesh.services.reward.scorer import SCORERS
from rollmesh.services.reward.scorers.improvement import improvement
from rollmesh.shared.clients import hidden_tests
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Outcome, Reward
from rollmesh.shared.errors import ConfigError

from . import builders
from .test_row_scorers import conversation

DOUBLE = "```python\nprint(2 * int(input()))\n```"
COPY = "```python\nn = int(input())\nprint({1: 6, 3: 2}.get(n, 2 * n))\n```"
HIDDEN = {"kind": "stdio", "tests": [{"stdin": str(n), "stdout": str(2 * n)} for n in (1, 2, 4, 5)]}


class RunningSandbox:
    """Runs the programs of the test in this process."""

    def __init__(self) -> None:
        self.manifests: list[Any] = []

    async def run_tests(self, files: Mapping[str, bytes], *, manifest: str = "", **_: Any) -> hidden_tests.TestReport:
        tests = json.loads(manifest)["tests"]
        self.manifests.append(tests)
        verdicts = [self._verdict(files["solution.py"].decode(), test) for test in tests]
        num = sum(verdict.outcome is hidden_tests.TestOutcome.AC for verdict in verdicts)
        return hidden_tests.TestReport(
            verdicts=tuple(verdicts), num_tests=len(tests), num_accepted=num, accepted_share=num / len(tests)
        )

    @staticmethod
    def _verdict(source: str, test: Mapping[str, str]) -> hidden_tests.JudgedTest:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO(test["stdin"]))
            exec(source, {})  # noqa: S102
        right = printed.getvalue().split() == test["stdout"].split()
        return hidden_tests.JudgedTest(
            name="t", outcome=hidden_tests.TestOutcome.AC if right else hidden_tests.TestOutcome.WA
        )


def item(text: str, share: float | None, **labels: str) -> ScoreItem:
    outcome = Outcome.NOT_APPLICABLE if share is None else Outcome.OK
    read = Reward(name="tests_share", value=share or 0.0, outcome=outcome)
    return replace(builders.item(text), task=TaskView(task_id="t", labels=labels), rewards={"tests_share": (read,)})


async def score(scored: ScoreItem, sandbox: RunningSandbox | None = None) -> dict[str, float]:
    scorer = SCORERS.make(Extension("improvement"))
    scorer.use_sandbox(sandbox or RunningSandbox())
    return {reward.name: reward.value for reward in await scorer.score(scored) if reward.outcome is Outcome.OK}


@pytest.mark.row("S072")
@pytest.mark.parametrize(
    ("share", "best", "value"),
    [
        (1.0, 0.0, 1.0),
        (1.0, 0.8, 1.0),
        (0.5, 0.0, 0.2),
        (0.25, 0.0, 0.0),
        (0.0, 0.0, -0.1),
        (0.6, 0.8, -0.125),  # a regression: -0.1 + 0.1 * -0.2 / 0.8
        (0.8, 0.8, -0.1),
        (0.8, 0.6, 0.25),  # 0.2 + 0.1 * 0.2 / 0.4
        (0.4, 0.2, 0.025),  # 0 + 0.1 * 0.2 / 0.8
        (0.0, 0.5, -0.2),
        (0.5, 1.0, -0.15),
    ],
)
async def test_a_share_of_tests_is_rewarded_by_its_improvement(share: float, best: float, value: float) -> None:
    """A regression has a negative reward. `tests/unit/data/test_trajectories.py` has the clause of the source."""
    assert improvement(share, best) == pytest.approx(value)
    assert await score(item(DOUBLE, share, best=repr(best))) == {"": pytest.approx(value)}


@pytest.mark.row("S072")
async def test_a_model_that_copies_a_wrong_test_of_its_prompt_is_detected() -> None:
    wrong = json.dumps([["1", "6"], ["3", "2"]])
    sandbox = RunningSandbox()
    assert await score(item(COPY, 0.75, best="0.5", wrong_tests=wrong), sandbox) == {
        "": pytest.approx(0.2 + 0.1 * 0.25 / 0.5),
        "copied_tests": 1.0,
    }
    assert sandbox.manifests == [[{"stdin": "1", "stdout": "6"}, {"stdin": "3", "stdout": "2"}]]
    assert (await score(item(DOUBLE, 1.0, wrong_tests=wrong)))["copied_tests"] == 0.0
    assert "copied_tests" not in await score(item(COPY, 1.0))


async def test_no_code_is_worth_less_than_any_code_and_an_unknown_share_is_not_judged() -> None:
    assert await score(item("I do not know.", 0.0, best="0.5")) == {"": -1.0}
    assert await score(item(DOUBLE, None)) == {}


@pytest.mark.parametrize("best", ["1.5", "-0.1", "many", "nan"])
async def test_a_label_that_is_not_a_share_is_an_error_of_the_task(best: str) -> None:
    with pytest.raises(ValueError, match=f"the label `best` of the task must be in .0, 1., got '{best}'"):
        await score(item(DOUBLE, 0.5, best=best))


def test_improvement_judges_samples_only() -> None:
    with pytest.raises(ConfigError, match="`per` must be sample, got 'turn', because earlier turns are part"):
        SCORERS.make(Extension("improvement", {"per": "turn"}))


async def test_the_scorer_tests_judges_the_code_of_each_turn() -> None:
    scorer = SCORERS.make(Extension("tests", {"per": "turn"}))
    scorer.use_sandbox(RunningSandbox())
    said = conversation((COPY, "1 failed"), ("Which one?", "?"), (DOUBLE, ""))
    scored = replace(said, answer_key=AnswerKey(tests=HIDDEN))
    found = [(reward.name, reward.segment, reward.value) for reward in await scorer.score(scored)]
    turns = [turn.segment for turn in scored.turns]
    assert [value for name, _, value in found if name == "tests_share"] == [0.75, 0.0, 1.0]
    assert [value for name, _, value in found if name == ""] == [0.0, 0.0, 1.0]
    assert [place for name, place, _ in found if name == ""] == turns == [1, 3, 5]
    (reward,) = await scorer.score(replace(scored, path=()))
    assert reward.outcome is Outcome.NOT_APPLICABLE


async def test_turns_share_the_time_of_the_scorer_tests() -> None:
    class SlowSandbox(RunningSandbox):
        async def run_tests(self, files: Mapping[str, bytes], *, budget_s: float = 0.0, **values: Any) -> Any:
            budgets.append(budget_s)
            report = await super().run_tests(files, **values)
            return replace_(report, verdicts=tuple(replace_(one, wall_s=4.0) for one in report.verdicts))

    budgets: list[float] = []
    scorer = SCORERS.make(Extension("tests", {"per": "turn"}))
    scorer.use_sandbox(SlowSandbox())
    scorer.use_timeout(30.0)
    turns = [(DOUBLE, "more"), ("no code", "more"), *[(DOUBLE, "more")] * 3]
    found = await scorer.score(replace(conversation(*turns), answer_key=AnswerKey(tests=HIDDEN)))
    assert budgets == [30.0, 14.0], "4 tests of 4 s each"
    assert [reward.value for reward in found if reward.name == ""] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert "earlier turns took the 30 s of `timeout_s`" in found[-1].evidence
