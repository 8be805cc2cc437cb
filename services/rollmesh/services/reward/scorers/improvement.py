"""Reward code by the share p of the hidden tests that it passes, and by its improvement on the best share b of earlier
turns, which are part of the prompt (source `trajectories`):

    R = 1      if p = 1                       else
    R = 0.2    if p >= 0.5,   0 if p > 0,   -0.1 if p = 0
    R = R + 0.1 (p - b) / (1 - b)             if b > 0 and p > b
    R = -0.1 + 0.1 (p - b) / b                if b > 0 and p <= b
    R = -1     without code;                  R is in [-1, 1]

p is the reward `share` of this sample, and b the label `best` of the task, or 0 without it. The reward `copied_tests`
is the share of the wrong tests of a perturbed prompt that the code passes: a right program passes none of them, and one
that copies what the prompt shows does. It does not apply to other prompts. Its weight is the choice of the run.

Source: Cobalt (2026-02; code: OSU-NLP-Group/cobalt, verl/code_reward_func_think.py). Deviation: the small terms for the
form of the text, such as its length and words of reflection, are left to the scorers `format` and `length`.
"""

from __future__ import annotations

import json
from typing import ClassVar

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Sandbox, Scorer, not_applicable
from rollmesh.services.reward.scorers.extract import Extractor
from rollmesh.services.reward.scorers.tests import SHARE, TestsOptions, describe
from rollmesh.shared.config.settings import NonEmptyStr
from rollmesh.shared.domain.trajectory import Reward
from rollmesh.shared.errors import ScorerFailed

COPIED = "copied_tests"
BEST, WRONG_TESTS = "best", "wrong_tests"


class ImprovementOptions(TestsOptions):
    """Settings of the scorer of improvement. `pattern`, `path` and `wall_s` are those of the scorer `tests`."""

    share: NonEmptyStr = SHARE
    """Name of the reward that is the share of passed hidden tests."""

    def check_fields(self) -> None:
        super().check_fields()
        if self.per != "sample":
            raise ValueError(f"`per` must be sample, got {self.per!r}, because earlier turns are part of the prompt")


class ImprovementScorer(Scorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = ImprovementOptions
    version = "1"
    rewards = diagnostics = (COPIED,)

    def __init__(self, *, options: ImprovementOptions) -> None:
        self._options = options
        self._extractor = Extractor(options)
        self._sandbox: Sandbox | None = None
        self._timeout_s = 0.0
        self.reads = (options.share,)

    def use_timeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def use_sandbox(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def score(self, item: ScoreItem) -> list[Reward]:
        share = item.reward(self._options.share)
        if share is None:
            return [not_applicable(f"the reward {self._options.share} is not applicable")]
        code = self._extractor.find(item)
        if code is None:
            return [Reward(name="", value=-1.0, evidence="no code found")]
        best = _best(item)
        value = improvement(share, best)
        rewards = [Reward(name="", value=value, evidence=f"share {share:g} after {best:g}")]
        if wrong := item.task.labels.get(WRONG_TESTS):
            rewards.append(await self._copied(item, code, wrong))
        return rewards

    async def _copied(self, item: ScoreItem, code: str, wrong: str) -> Reward:
        if self._sandbox is None:
            raise ScorerFailed("the scorer improvement needs sandbox nodes: start one, or name it in `sandboxes`")
        tests = [{"stdin": given, "stdout": output} for given, output in json.loads(wrong)]
        report = await self._sandbox.run_tests(
            {self._options.path: code.encode("utf-8", "replace")},
            manifest=json.dumps({"kind": "stdio", "compare": "lines", "tests": tests}),
            limits={"wall_s": self._options.wall_s},
            owner=f"{item.key.run}/{item.key.episode}.{item.key.attempt}/improvement",
            budget_s=self._timeout_s,
        )
        return Reward(name=COPIED, value=report.accepted_share, evidence=f"wrong tests: {describe(report)}")


def improvement(share: float, best: float) -> float:
    """Return the reward of a share of passed tests after turns with the best share `best`."""
    if share == 1.0:
        return 1.0
    value = 0.2 if share >= 0.5 else 0.0 if share > 0.0 else -0.1
    if best > 0.0:
        if share > best:
            value += 0.1 * (share - best) / (1.0 - best)
        else:
            value = -0.1 + 0.1 * (share - best) / best
    return min(max(value, -1.0), 1.0)


def _best(item: ScoreItem) -> float:
    """Raise ValueError if the label is not a share."""
    text = item.task.labels.get(BEST, "0")
    try:
        best = float(text)
    except ValueError:
        best = -1.0
    if not 0.0 <= best <= 1.0:
        raise ValueError(f"the label `{BEST}` of the task must be in [0, 1], got {text!r}; correct the task source")
    return best
