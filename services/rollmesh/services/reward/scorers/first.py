"""Give a sample the first of several rewards that is applicable to it.

For a mixture of task sources that different scorers judge: a run has one success reward, and an evaluation counts a
sample without it as a failure. If the task names scorers, and some of them are among `rewards`, the others do not run
for it, so a scorer of another source cannot judge its answers.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.domain.trajectory import Reward


class FirstOptions(Settings):
    """Settings of the scorer `first`."""

    rewards: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Names of the rewards, the first choice first."""


class FirstScorer(Scorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = FirstOptions
    version = "2"
    reads_of_task = True

    def __init__(self, *, options: FirstOptions) -> None:
        self.reads = options.rewards

    async def score(self, item: ScoreItem) -> Reward:
        for name in self.reads:
            if (value := item.reward(name)) is not None:
                return Reward(name="", value=value, evidence=f"that of {name}")
        return not_applicable(f"none of {', '.join(self.reads)} is applicable")
