"""Scorers of the tasks of `python -m benchmarks methods`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import groupby
from typing import ClassVar, Unpack

import msgspec
from msgspec.structs import replace

from rollmesh.demo.families.calc import demonstrate
from rollmesh.services.reward.item import JudgedSegment, ScoreItem
from rollmesh.services.reward.scorer import Scorer
from rollmesh.services.reward.scorers.exact import ExactOptions, ExactScorer
from rollmesh.services.reward.scorers.extract import ANSWER_TAG
from rollmesh.services.reward.scorers.process_reward import ProcessRewardOptions, ProcessRewardScorer
from rollmesh.shared.config.settings import NonNegativeInt, Settings, Share
from rollmesh.shared.domain.trajectory import FinishReason, Outcome, Reward, Role
from rollmesh.shared.endpoints.answer import AskOptions, EndpointAnswer, Messages

TRAINING_GROUP = re.compile(r"g(\d+)")
"""Name of a training group of `race.bare_loop`, with its draw."""


class FlippedExactOptions(ExactOptions):
    """Settings of the scorer with flips."""

    share: Share = 0.2
    """Share of the rewards that are flipped."""
    seed: int = 0
    """Seed of the choice."""


class FlippedExact(ExactScorer):
    """The exact scorer, whose result is flipped for a share of the samples: 1 becomes 0 and 0 becomes 1.

    The choice is a hash of seed, task and sample, so that two methods have flips at the same samples.
    """

    Options: ClassVar[type[msgspec.Struct]] = FlippedExactOptions

    def __init__(self, *, options: FlippedExactOptions) -> None:
        super().__init__(options=options)
        self._share, self._seed = options.share, options.seed

    async def score(self, item: ScoreItem) -> Reward:
        reward = await super().score(item)
        digest = hashlib.sha256(f"{self._seed}/{item.task.task_id}/{item.sample_id}".encode()).digest()
        if reward.outcome is not Outcome.OK or int.from_bytes(digest[:8], "big") / 2.0**64 >= self._share:
            return reward
        return replace(reward, value=1.0 - reward.value, evidence=f"flipped: {reward.evidence}")


class IdealTurns(ExactScorer):
    """The exact scorer, and a reward `turn` for the last segment of each turn: 1 if it is the turn of the ideal
    episode, else 0.

    The ideal episode has one call for each operator of the expression, from left to right, and then the answer.
    """

    rewards = ("turn",)

    async def score(self, item: ScoreItem) -> list[Reward]:  # type: ignore[override]
        shown = demonstrate(item.task.messages[-1].content)
        ideal = [f"<tool_call>{call}</tool_call>" for call, _ in shown.calls] + [f"<answer>{shown.answer}</answer>"]
        rewards = [await super().score(item)]
        for number, turn in enumerate(_turns(item.path)):
            is_ideal = number < len(ideal) and "".join(segment.text for segment in turn).strip() == ideal[number]
            rewards.append(Reward(name="turn", value=float(is_ideal), segment=turn[-1].index))
        return rewards


class FirstTurn(Scorer):
    """1 for an episode that ends with an answer, if its first turn calls the tool with the accepted answer of the task,
    else 0."""

    async def score(self, item: ScoreItem) -> float:
        assert item.answer_key is not None
        turns = ["".join(segment.text for segment in turn).strip() for turn in _turns(item.path)]
        calls = [f"<tool_call>{answer}</tool_call>" for answer in item.answer_key.answers]
        return float(len(turns) > 1 and turns[0] in calls and re.fullmatch(ANSWER_TAG, turns[-1]) is not None)


class DriftingExactOptions(ExactOptions):
    """Settings of the drifting scorer."""

    switch_draw: NonNegativeInt = 256
    """The first draw of the second half."""
    easy_level_max: NonNegativeInt = 1
    """Largest level of the tasks whose reward is 0 in the second half. The others have reward 0 in the first one."""


class DriftingExact(ExactScorer):
    """The exact scorer, whose reward is 0 for hard tasks in the first draws of a run and for easy ones afterwards.

    The draw is in the name of the group that `race.bare_loop` makes, so the switch is exact at any order of calls.
    Groups of an evaluation count as the first half.
    """

    Options: ClassVar[type[msgspec.Struct]] = DriftingExactOptions

    def __init__(self, *, options: DriftingExactOptions) -> None:
        super().__init__(options=options)
        self._switch_draw, self._easy_level_max = options.switch_draw, options.easy_level_max

    async def score(self, item: ScoreItem) -> Reward:
        reward = await super().score(item)
        draw = TRAINING_GROUP.fullmatch(item.key.group)
        late = draw is not None and int(draw[1]) >= self._switch_draw
        easy = int(item.task.labels["level"]) <= self._easy_level_max
        return replace(reward, value=0.0, evidence=f"no reward now: {reward.evidence}") if late == easy else reward


class LevelPriorOptions(Settings):
    """Settings of the predicted success."""

    per_level: Share = 0.65
    """Predicted success of a task of level 1. That of level n is its n-th power."""


class LevelPrior(Scorer):
    """The success that the level of a task alone predicts, for recipes that assume a prediction of the reward from the
    prompt."""

    Options: ClassVar[type[msgspec.Struct]] = LevelPriorOptions

    def __init__(self, *, options: LevelPriorOptions) -> None:
        self._per_level = options.per_level

    async def score(self, item: ScoreItem) -> float:
        return float(self._per_level ** int(item.task.labels["level"]))


class CallRater:
    """A process reward model that knows calculator tasks: a step has the rating 1 if it is one of the calls of the
    ideal episode, or its answer, and 0 otherwise. A call that is made again is right again."""

    async def ask(self, endpoint: str, messages: Messages, **options: Unpack[AskOptions]) -> EndpointAnswer:
        assert isinstance(messages, str)
        _, task, listed = (text.partition("\n")[2] for text in re.split(r"(?m)^DATA-\w+ (?:task|steps)$", messages))
        steps = re.split(r"(?m)^\[\d+\] ", re.split(r"(?m)^DATA-\w+ end$", listed)[0])[1:]
        shown = demonstrate(task.strip())
        ideal = {*(f"<tool_call>{call}</tool_call>" for call, _ in shown.calls), f"<answer>{shown.answer}</answer>"}
        ratings = [float(step.strip() in ideal) for step in steps]
        return EndpointAnswer(text="", value=ratings, finish=FinishReason.STOP, model=endpoint)


class RatedCalls(ProcessRewardScorer):
    """The process reward of calculator tasks, whose endpoint is `CallRater`."""

    def __init__(self, *, options: ProcessRewardOptions) -> None:
        super().__init__(options=options)
        self.use_endpoints(CallRater())


def _turns(path: Sequence[JudgedSegment]) -> list[list[JudgedSegment]]:
    """Return the segments of each turn of the model. Observations separate turns."""
    found = [(acts, list(segments)) for acts, segments in groupby(path, lambda segment: segment.role is Role.ACTION)]
    return [segments for acts, segments in found if acts]
