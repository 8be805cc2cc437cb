"""Turn the rewards that the environment of an episode gave into rewards of its samples.

    scorers: [{name: environment, reward: score, options: {min: 0, max: 1}}]

The agent gives the value with `env.reward("score", value)`. An entry declares one name with its range. A value outside
the range, and a sample without the value, are mistakes of the environment and not of the model, so they are infra
failures and never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from rollmesh.services.reward.item import JudgedTurn, ScoreItem
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.domain.environment_reward import EnvironmentReward
from rollmesh.shared.domain.reward_range import RANGE_FORM, in_reward_range
from rollmesh.shared.domain.trajectory import WHOLE_SAMPLE, FinishReason, Reward


class EnvironmentOptions(Settings):
    """Settings of the scorer of an environment."""

    min: float
    """Least value."""
    max: float
    """Greatest value."""
    per: Literal["sample", "turn"] = "sample"
    """What has a value: each sample, or each turn of it, for methods with rewards of turns."""
    required: bool = True
    """Whether a sample, or each of its turns, must have a value. Otherwise a sample without one is not judged, and a
    turn without one has no reward."""
    at_limit: float | None = None
    """Value of a sample, or of its last turn, that has none because a limit cut it. None: such a sample is like any
    other."""

    def check_fields(self) -> None:
        for name in ("min", "max"):
            if not in_reward_range(getattr(self, name)):
                raise ValueError(f"`{name}` must {RANGE_FORM}, got {getattr(self, name)}")
        if self.min > self.max:
            raise ValueError(f"`min` must be <= max = {self.max:g}, got {self.min:g}")
        if self.at_limit is not None and not self.min <= self.at_limit <= self.max:
            raise ValueError(f"`at_limit` must be in [{self.min:g}, {self.max:g}], got {self.at_limit:g}")


class EnvironmentScorer(Scorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = EnvironmentOptions
    version = "1"

    def __init__(self, *, options: EnvironmentOptions) -> None:
        self._options = options
        self._name = ""

    def use_reward_name(self, name: str) -> None:
        self._name = name
        self.environment_rewards = (name,)

    async def score(self, item: ScoreItem) -> Reward | Sequence[Reward]:
        given = [reward for reward in item.environment if reward.name == self._name]
        for reward in given:
            self._check(reward)
        if self._options.per == "turn":
            return self._of_turns(item, given)
        if given:  # the engine rejects two of them
            return [Reward(name="", value=one.value, evidence=one.evidence) for one in given]
        if self._options.at_limit is not None and item.finish is FinishReason.LENGTH:
            return self._at_limit(WHOLE_SAMPLE)
        if self._options.required:
            raise ValueError(self._missing("this sample"))
        return not_applicable("the environment gave no value")

    def _of_turns(self, item: ScoreItem, given: Sequence[EnvironmentReward]) -> Reward | Sequence[Reward]:
        turns = item.turns
        rewards = [
            Reward(name="", value=one.value, segment=_turn_of(turns, one.segment), evidence=one.evidence)
            for one in given
        ]
        rewarded = {reward.segment for reward in rewards}
        missing = [number for number, turn in enumerate(turns) if turn.segment not in rewarded]
        is_cut = item.finish is FinishReason.LENGTH and missing == [len(turns) - 1]
        if is_cut and self._options.at_limit is not None:
            return [*rewards, self._at_limit(turns[-1].segment)]
        if missing and self._options.required:
            raise ValueError(self._missing(f"turn {missing[0]} of {len(turns)}"))
        return rewards or not_applicable("the environment gave no value")

    def _check(self, reward: EnvironmentReward) -> None:
        options = self._options
        if not options.min <= reward.value <= options.max:
            raise ValueError(
                f"the reward `{self._name}` of the environment must be in [{options.min:g}, {options.max:g}], got "
                f"{reward.value:g}; change the value, or `min` and `max` of its scorer"
            )
        if (reward.segment == WHOLE_SAMPLE) == (options.per == "turn"):
            got = "the whole sample" if reward.segment == WHOLE_SAMPLE else "a turn"
            raise ValueError(
                f"the reward `{self._name}` of the environment must be one of each {options.per}, got one of {got}; "
                "change `turn` of env.reward, or `per` of its scorer"
            )

    def _missing(self, what: str) -> str:
        turn = "" if self._options.per == "sample" else ", turn=-1"
        return (
            f"the environment gave no reward `{self._name}` for {what}; call env.reward({self._name!r}, VALUE{turn}) "
            "on every path of the agent, or set `at_limit` or `required: false`"
        )

    def _at_limit(self, segment: int) -> Reward:
        assert self._options.at_limit is not None
        return Reward(name="", value=self._options.at_limit, segment=segment, evidence="a limit cut the sample")


def _turn_of(turns: Sequence[JudgedTurn], segment: int) -> int:
    """Return the last segment of the turn that contains `segment`."""
    return next((turn.segment for turn in turns if turn.segment >= segment), segment)
