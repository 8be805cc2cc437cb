"""Controls: rewards that are not higher for a right answer, with which a gain of another run is compared.

    random:   1 with probability `share`, else 0, by a hash of the sample
    constant: `value`
    inverted: 1 - r, of the reward `reward`

A method that improves held-out success with a random or inverted reward does not learn from the reward (Spurious
Rewards, arXiv:2506.10947). Keep the true reward in `reward.scorers` without a weight, to see it.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.shared.config.settings import NonEmptyStr, Settings
from rollmesh.shared.domain.trajectory import Reward


class ControlOptions(Settings):
    """Settings of the scorer `control`."""

    form: Literal["random", "constant", "inverted"]
    """The formula."""
    share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Probability of a random reward of 1."""
    value: float = 1.0
    """The constant reward."""
    reward: NonEmptyStr = "correct"
    """Name of the reward that is inverted."""


class ControlScorer(Scorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = ControlOptions
    version = "1"

    def __init__(self, *, options: ControlOptions) -> None:
        self._options = options
        self.reads = (options.reward,) if options.form == "inverted" else ()

    async def score(self, item: ScoreItem) -> float | Reward:
        options = self._options
        if options.form == "constant":
            return options.value
        if options.form == "random":
            drawn = hashlib.sha256(f"{item.key.run}/{item.sample_id}".encode()).digest()
            return float(int.from_bytes(drawn[:8], "big") < options.share * 2**64)
        true = item.reward(options.reward)
        return not_applicable(f"the reward {options.reward} is not applicable") if true is None else 1.0 - true
