"""GRPO on a half of the episodes: of the right ones those with the fewest tool errors (GRPO-RoC, resample on correct,
of rStar2-Agent, 2025-08, arXiv:2508.20722; code: microsoft/rStar, rstar2_agent/down_sample/roc.py).

A group has more episodes than are trained, usually 2 `keep`. `keep` of them stay, in the proportion of right and wrong
ones, but at least `positive_min` right and `negative_min` wrong ones if there are as many:

    p_i = failed calls / calls, 1 / 2 without a call,   plus the format penalty
    format penalty = 1 without a well-formed answer, else min((answers - 1) / turns, 1)

The right ones with the smallest p stay. Wrong ones stay whatever their p, because they show ways to fail. Then the
advantages of `grpo` of those that stay: the others are in no mean. Why: the outcome alone rewards a right answer after
failed calls as much as one without, and tools fail often at the beginning.

A call is a turn with the reward `tool_reward`, such as that of `turn_success`; it failed if the reward is at most
`failure_max`. Answers are counted in the texts of the summaries, which `rollout.summary_text_chars` enables; without a
text, the penalty is 1 if no scorer found an answer, else 0.

Deviations: the code also takes the wrong ones with the smallest p, which `negatives: best` does; the paper, and this
file by default, take any, by a hash of their names. It requires complete groups, and here a group of at most `keep`
episodes stays whole. Episodes stay or not as a whole, by the means of their samples. A member that stays and is not
leased is in the mean, and no other one takes its place.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, ClassVar, Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.settings import NonEmptyStr, NonNegativeInt, PositiveInt, Settings
from rollmesh.shared.domain.trajectory import WHOLE_SAMPLE, GroupContext, MemberOutcome, Outcome, Reward
from rollmesh.trainer.estimators.base import DOWN_SAMPLED, Estimate, episode_means
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch


class RocOptions(GrpoOptions):
    """Settings of the estimator `roc`: those of `grpo`, and the choice of episodes."""

    keep: PositiveInt = 16
    """Number of episodes of a group that are trained, usually half of `run.group_size`."""
    positive_min: NonNegativeInt = 2
    """Least number of right episodes among them, if there are as many."""
    negative_min: NonNegativeInt = 2
    """Least number of wrong episodes among them, if there are as many."""
    threshold: float = 0.0
    """An episode is right if its weighted reward sum is larger."""
    tool_reward: NonEmptyStr = "called"
    """Name of the reward of a turn with a tool call."""
    failure_max: float = 0.0
    """Largest value of this reward with which the call has failed."""
    format_penalty: bool = True
    """Whether right episodes are also chosen by the form of their answer."""
    answer_tags: tuple[NonEmptyStr, NonEmptyStr] = ("<answer>", "</answer>")
    """Begin and end of an answer in the text."""
    negatives: Literal["any", "best"] = "any"
    """Wrong episodes that stay: `any`, or the `best`, with the smallest penalty, as the code does."""

    def check_fields(self) -> None:
        super().check_fields()
        if self.positive_min + self.negative_min > self.keep:
            raise ValueError(
                f"`keep` must be >= positive_min + negative_min = {self.positive_min + self.negative_min}, got "
                f"{self.keep}"
            )


class Roc(Grpo):
    """Keep the cleanest right episodes, and any wrong ones, in their proportion."""

    Options: ClassVar[type[Settings]] = RocOptions

    @property
    def rewards(self) -> tuple[str, ...]:
        return (self.options.tool_reward,)

    def __call__(self, batch: UpdateBatch) -> Estimate:
        scored, out, errors = [], set[str](), list[tuple[float, bool]]()
        for group in batch.groups:
            members, sums = super().reward_sums(group)
            stays = self._stays(group.group, members, sums)
            scored.append(self._kept(members, sums, stays))
            out |= {m.sample_id for m, kept in zip(members, stays, strict=True) if not kept}
            right = sums > self.options.threshold
            errors += [(self._error_share(m), bool(stays[i])) for i, m in enumerate(members) if right[i]]
        found = self.spread(batch, {**self.of_sums(scored, self.given(batch)), **dict.fromkeys(out, 0.0)})
        at = [n for n, sample in enumerate(batch.samples) if sample.sample.sample_id in out]
        metrics = {
            "down_sampled_share": len(at) / max(1, len(batch.samples)),
            "error_share": _mean([share for share, _ in errors]),
            "error_share_kept": _mean([share for share, kept in errors if kept]),
        }
        return replace(
            found,
            dropped={**dict.fromkeys(at, DOWN_SAMPLED), **found.dropped},
            metrics={**found.metrics, **metrics},
        )

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage; 0 for an episode that does not stay."""
        members, sums = super().reward_sums(group)
        kept = self._kept(members, sums, self._stays(group.group, members, sums))
        return {**{m.sample_id: 0.0 for m in members}, **self.of_rewards(*kept)}

    def _kept(
        self, members: list[MemberOutcome], sums: NDArray[np.float64], stays: NDArray[np.bool_]
    ) -> tuple[list[MemberOutcome], NDArray[np.float64]]:
        return [m for m, kept in zip(members, stays, strict=True) if kept], sums[stays]

    def _stays(self, group: str, members: list[MemberOutcome], sums: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return [n]: whether the episode of each member stays."""
        options: RocOptions = self.options
        rewards = episode_means(members, sums)
        if len(rewards) <= options.keep:
            return np.ones(len(members), dtype=bool)
        penalties = episode_means(members, np.array([self._penalty(m) for m in members]))
        positive = [e for e in rewards if rewards[e] > options.threshold]
        negative = [e for e in rewards if rewards[e] <= options.threshold]
        num = num_negative(len(positive), len(negative), options)
        by_name = {e: crc32(f"{group}/{e}".encode()) for e in negative}
        order = penalties if options.negatives == "best" else by_name
        chosen = {
            *sorted(positive, key=lambda e: penalties[e])[: options.keep - num],
            *sorted(negative, key=lambda e: order[e])[:num],
        }
        return np.array([(m.episode or m.sample_id) in chosen for m in members], dtype=bool)

    def _penalty(self, member: MemberOutcome) -> float:
        penalty, options = self._error_share(member), self.options
        return penalty + format_penalty(member, *options.answer_tags) if options.format_penalty else penalty

    def _error_share(self, member: MemberOutcome) -> float:
        """Return the share of the calls that failed; 1 / 2 without a call."""
        name, largest = self.options.tool_reward, self.options.failure_max
        calls = [r.value for r in member.rewards if r.name == name and r.segment != WHOLE_SAMPLE and _is_usable(r)]
        return sum(value <= largest for value in calls) / len(calls) if calls else 0.5


def format_penalty(member: MemberOutcome, begin: str, end: str) -> float:
    """Return 0 for one well-formed answer, more for further ones, and 1 for none. Without a text, the answer that a
    scorer found counts."""
    text = member.summary.text
    if not text:
        return 0.0 if member.answer else 1.0
    marks = re.findall(f"{re.escape(begin)}|{re.escape(end)}", text)
    answers = len(marks) // 2
    if not answers or marks != [begin, end] * answers:
        return 1.0
    return min((answers - 1) / max(1, len(member.summary.turns)), 1.0)


def num_negative(positive: int, negative: int, options: RocOptions) -> int:
    """Return how many of `negative` wrong episodes stay, so that `keep` of all do and the proportion is that before."""
    in_proportion = round(options.keep * negative / (positive + negative))
    least = max(options.keep - positive, min(options.negative_min, negative))
    return min(max(in_proportion, least), options.keep - min(options.positive_min, positive), negative)


def _is_usable(reward: Reward) -> bool:
    return reward.outcome is Outcome.OK and isfinite(reward.value)


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0
