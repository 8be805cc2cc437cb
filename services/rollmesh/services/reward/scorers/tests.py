"""Run hidden tests on the code of the model: 1 if every test accepts it, else 0, and the share of accepting tests.

With `per: turn` the code of each turn is judged, and the rewards are those of the turns: for trajectories that are cut
at a turn (source `trajectories`). A turn without code has 0, and so has one for which no time is left.

The tests run on sandbox nodes in another jail than the candidate, so its output and side effects cannot become a
verdict. A failure of a jail or a node is an infra failure of the sample, never a reward of 0. The time that the
candidate takes is limited by `timeout_s` of the entry. A wait for a sandbox is not: the client of the sandbox nodes
limits it.

Source: execution-based scoring by hidden unit tests, as in HumanEval (2021) and APPS (2021).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec
from msgspec.structs import replace

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Sandbox, Scorer, not_applicable
from rollmesh.services.reward.scorers.extract import AnswerOptions, Extractor, shorten
from rollmesh.shared.clients.hidden_tests import TestOutcome, TestReport
from rollmesh.shared.config.settings import NonEmptyStr, NonNegativeFloat
from rollmesh.shared.domain.trajectory import Reward
from rollmesh.shared.errors import ScorerFailed

CODE_BLOCK = r"```[\w+-]*[ \t]*\n(.*?)```"
SHARE = "tests_share"


class TestsOptions(AnswerOptions):
    """Settings of the tests scorer."""

    pattern: str = CODE_BLOCK
    """Regular expression of the code. The last match counts, and its group 1 if the expression has one. Empty means the
    whole text."""
    path: NonEmptyStr = "solution.py"
    """Name of the file with the code, which is the `entry` of the manifests."""
    wall_s: NonNegativeFloat = 0.0
    """Limit of one test, in wall seconds, if it is lower than that of the manifest. 0 means the limit of the
    manifest."""
    per: Literal["sample", "turn"] = "sample"
    """What is judged: the answer of the sample, or the text of each of its turns. The turns share `timeout_s`."""


class TestsScorer(Scorer):
    """See the module. It does not apply to a task without hidden tests in its answer key."""

    Options: ClassVar[type[msgspec.Struct]] = TestsOptions
    version = "1"
    rewards = (SHARE,)

    def __init__(self, *, options: TestsOptions) -> None:
        self._extractor = Extractor(options)
        self._options = options
        self._sandbox: Sandbox | None = None
        self._timeout_s = 0.0

    def use_timeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def use_sandbox(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def score(self, item: ScoreItem) -> list[Reward]:
        tests = item.answer_key.tests if item.answer_key is not None else ""
        if not tests:
            return [not_applicable("the task has no hidden tests")]
        if self._options.per == "sample":
            return (await self._judge(item, tests, self._extractor.find(item), self._timeout_s))[0]
        if not item.turns:
            return [not_applicable("the sample has no turn")]
        rewards, spent_s = [], 0.0
        for turn in item.turns:
            code = self._extractor.find_in(turn.text)
            if code is not None and 0 < self._timeout_s <= spent_s:
                judged = _rewards(0.0, 0.0, f"earlier turns took the {self._timeout_s:g} s of `timeout_s`")
            else:
                judged, took_s = await self._judge(item, tests, code, max(self._timeout_s - spent_s, 0.0))
                spent_s += took_s
            rewards += [replace(reward, segment=turn.segment) for reward in judged]
        return rewards

    async def _judge(
        self, item: ScoreItem, tests: str | Mapping[str, object], code: str | None, budget_s: float
    ) -> tuple[list[Reward], float]:
        """Return the rewards of the code, and the seconds that it took."""
        if code is None:
            return _rewards(0.0, 0.0, "no code found"), 0.0
        if self._sandbox is None:
            raise ScorerFailed("the tests scorer needs sandbox nodes: start one, or name it in `sandboxes`")
        report = await self._sandbox.run_tests(
            {self._options.path: code.encode("utf-8", "replace")},
            oracle_ref=tests if isinstance(tests, str) else "",
            manifest="" if isinstance(tests, str) else json.dumps(tests),
            limits={"wall_s": self._options.wall_s},
            owner=f"{item.key.run}/{item.key.episode}.{item.key.attempt}/tests",
            budget_s=budget_s,
        )
        took_s = sum(verdict.wall_s for verdict in report.verdicts)
        return _rewards(float(report.accepted), report.accepted_share, describe(report)), took_s


def describe(report: TestReport) -> str:
    """Return the verdicts in one line: `5/8 accepted: AC 5, WA 3; first failure: test 2 WA the result differs ...`."""
    counts = Counter(verdict.outcome.name for verdict in report.verdicts)
    text = f"{report.num_accepted}/{report.num_tests} accepted: " + ", ".join(f"{k} {n}" for k, n in counts.items())
    for verdict in report.verdicts:
        if verdict.outcome is not TestOutcome.AC:
            return shorten(f"{text}; first failure: test {verdict.name} {verdict.outcome.name} {verdict.message}")
    return text


def _rewards(accepted: float, share: float, evidence: str) -> list[Reward]:
    return [Reward(name="", value=accepted, evidence=evidence), Reward(name=SHARE, value=share, evidence=evidence)]
