"""Hidden tests on the code the model wrote: 1 if every test accepts it, else 0; and the share of the tests that do.

The tests run on sandbox nodes, apart from the candidate: nothing that it prints, patches or leaves behind is a verdict. A jail or a
node that fails is an infra failure of the sample, never a 0.

Source: execution-based scoring by hidden unit tests, as in HumanEval (2021) and APPS (2021).
"""

from __future__ import annotations

import json
from collections import Counter
from typing import ClassVar

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Sandbox
from rollmesh.services.reward.scorers.extract import AnswerOptions, Extractor, not_applicable, shorten
from rollmesh.shared.clients.hidden_tests import TestOutcome, TestReport
from rollmesh.shared.errors import ScorerFailed
from rollmesh.shared.settings import NonEmptyStr, NonNegativeFloat
from rollmesh.shared.trajectory import Reward

CODE_BLOCK = r"```[\w+-]*[ \t]*\n(.*?)```"
SHARE = "tests_share"


class TestsOptions(AnswerOptions):
    """Settings of the tests scorer."""

    pattern: str = CODE_BLOCK
    """Regular expression that finds the code: the last match counts, group 1 if it has one. Empty = the whole text."""
    path: NonEmptyStr = "solution.py"
    """Name of the file that the code becomes: the `entry` of the manifests."""
    wall_s: NonNegativeFloat = 0.0
    """Wall seconds of one test, below the manifest's; 0 = the manifest's."""


class TestsScorer:
    """See the module. Without hidden tests in the answer key it does not apply."""

    Options: ClassVar[type[msgspec.Struct]] = TestsOptions
    version: ClassVar[str] = "1"
    rewards: ClassVar[tuple[str, ...]] = (SHARE,)

    def __init__(self, *, options: TestsOptions) -> None:
        self._extractor = Extractor(options)
        self._options = options
        self._sandbox: Sandbox | None = None

    def use_sandbox(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def score(self, item: ScoreItem) -> list[Reward]:
        tests = item.answer_key.tests if item.answer_key is not None else ""
        if not tests:
            return [not_applicable("the task has no hidden tests")]
        code = self._extractor.find(item)
        if code is None:
            return _rewards(0.0, 0.0, "no code found")
        if self._sandbox is None:
            raise ScorerFailed("the tests scorer needs sandbox nodes: start one, or name it in `sandboxes`")
        report = await self._sandbox.run_tests(
            {self._options.path: code.encode("utf-8", "replace")},
            oracle_ref=tests if isinstance(tests, str) else "",
            manifest="" if isinstance(tests, str) else json.dumps(tests),
            limits={"wall_s": self._options.wall_s},
            owner=f"{item.key.run}/{item.key.episode}.{item.key.attempt}/tests",
        )
        return _rewards(float(report.accepted), report.accepted_share, describe(report))


def describe(report: TestReport) -> str:
    """Verdicts in one line: `5/8 accepted: AC 5, WA 3; first failure: test 2 WA the result differs ...`."""
    counts = Counter(verdict.outcome.name for verdict in report.verdicts)
    text = f"{report.num_accepted}/{report.num_tests} accepted: " + ", ".join(f"{k} {n}" for k, n in counts.items())
    for verdict in report.verdicts:
        if verdict.outcome is not TestOutcome.AC:
            return shorten(f"{text}; first failure: test {verdict.name} {verdict.outcome.name} {verdict.message}")
    return text


def _rewards(accepted: float, share: float, evidence: str) -> list[Reward]:
    return [Reward(name="", value=accepted, evidence=evidence), Reward(name=SHARE, value=share, evidence=evidence)]
