"""GRPO with a penalty for text that ends in a loop (CAMPO of MiroMind-M1, 2025-07, arXiv:2507.14683; code:
MiroMindAsia/MiroMind-M1).

    f_i = share of the tokens of the last turn that are in a loop at its end, if the turn reached its limit, else 0
    R_i <- R_i - loop_weight f_i,   then the advantages of `grpo`

A loop is a suffix of the turn that repeats exactly with some period, at least `repeats_min` times; the last repetition
may be cut. An earlier start gives a larger share, so that samples which waste less of their budget have higher rewards.
The search takes time linear in the length (Z-function of the reversed tokens).

The method also has stages, which raise the limit of the response and have clip bounds each; they are separate runs
here. Deviations: the code subtracts a constant where a loop is found, the paper and this file its share. The code takes
the longest period that repeats, this file the longest suffix. Only leased samples have tokens, so a member that is not
leased gets the mean penalty of those of its group. A group whose rewards are all equal is filtered by its rewards
alone, as in the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from msgspec import Meta

from rollmesh.shared.config.settings import NonNegativeFloat, Settings
from rollmesh.shared.domain.trajectory import FinishReason, Role, Segment, TrainingSample
from rollmesh.trainer.estimators.base import Estimate, adjusted_sums, spread
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch


class CampoOptions(GrpoOptions):
    """Settings of the estimator `campo`: those of `grpo`, and the penalty of loops."""

    loop_weight: NonNegativeFloat = 1.0
    """Reward that a turn loses which is one loop from its begin to its end."""
    repeats_min: Annotated[int, Meta(ge=2)] = 2
    """Least number of exact repetitions of a loop."""
    only_truncated: bool = True
    """Look for loops only in turns that reached their limit of tokens."""


class Campo(Grpo):
    """Subtract the share of the loop from the reward."""

    Options: ClassVar[type[Settings]] = CampoOptions

    def __call__(self, batch: UpdateBatch) -> Estimate:
        options: CampoOptions = self.options
        shares = np.array([loop_of(sample, options) for sample in batch.samples])
        found = spread(
            batch, self.of_sums(adjusted_sums(batch, self.weights, -options.loop_weight * shares), self.given(batch))
        )
        metrics = {"loops": float((shares > 0).mean()), "loop_share_mean": float(shares.mean())}
        return Estimate(advantages=found.advantages, dropped=found.dropped, metrics=metrics)


def loop_of(sample: TrainingSample, options: CampoOptions) -> float:
    """Return the share of the last turn that is a loop; 0 if it did not reach its limit and `only_truncated` is set."""
    turn: list[Segment] = []
    for segment in reversed(sample.segments):
        if segment.role is not Role.ACTION or (turn and segment.finish is not FinishReason.UNFINISHED):
            break
        turn.append(segment)
    if not turn or (options.only_truncated and turn[0].finish is not FinishReason.LENGTH):
        return 0.0
    return loop_share(np.concatenate([segment.token_ids for segment in reversed(turn)]).tolist(), options.repeats_min)


def loop_share(tokens: Sequence[int], repeats_min: int) -> float:
    """Return the share of `tokens` [n] in the longest suffix that repeats exactly with one period at least
    `repeats_min` times."""
    matches = prefix_matches(tokens[::-1])
    longest = max((p + matches[p] for p in range(1, len(tokens)) if p + matches[p] >= repeats_min * p), default=0)
    return longest / len(tokens) if tokens else 0.0


def prefix_matches(tokens: Sequence[int]) -> list[int]:
    """Return [n]: at each place, how many tokens from there on equal those from the begin on (the Z-function)."""
    found = [0] * len(tokens)
    left = right = 0  # the match that ends last
    for place in range(1, len(tokens)):
        length = min(found[place - left], right - place) if place < right else 0
        while place + length < len(tokens) and tokens[length] == tokens[place + length]:
            length += 1
        found[place] = length
        if place + length > right:
            left, right = place, place + length
    return found
