"""Give every sample of an episode the reward of its last one.

For episodes whose samples are parts of one piece of work, such as the contexts between two summaries (SUPO,
arXiv:2510.06727): only the last part has the answer, and all share its reward, so that they have one advantage. A
baseline counts the episode once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import BatchScorer, Sees, not_applicable
from rollmesh.shared.config.settings import NonEmptyStr, Settings
from rollmesh.shared.domain.trajectory import Reward


class OutcomeOptions(Settings):
    """Settings of the scorer `outcome`."""

    reward: NonEmptyStr = "correct"
    """Name of the reward of the last sample that all get."""


class OutcomeScorer(BatchScorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = OutcomeOptions
    version = "1"
    sees: Sees = "episode"

    def __init__(self, *, options: OutcomeOptions) -> None:
        self.reads = (options.reward,)

    async def score_batch(self, items: Sequence[ScoreItem]) -> Sequence[Reward]:
        (name,) = self.reads
        last = items[-1]
        value = last.reward(name)
        if value is None:
            return [not_applicable(f"the reward {name} of sample {last.sample_id} is not applicable")] * len(items)
        return [Reward(name="", value=value, evidence=f"that of sample {last.sample_id}")] * len(items)
