"""The scorer port: named rewards with the evidence they rest on.

Scorers are found by name, or loaded from a user's file as `file.py:Name`. What a scorer raises, a time limit it exceeds or a
return value that is no reward becomes an INFRA_FAILURE (see `engine`), so a scorer raises rather than guessing a 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rollmesh.services.reward.item import ScoreItem
from rollmesh.shared.registry import Registry
from rollmesh.shared.trajectory import Reward

ScorerResult = float | Reward | Sequence[Reward]
"""A bare number is one reward with neither evidence nor segment."""


class Scorer(Protocol):
    """Scores one sample at a time, concurrently with others.

    Constructed as `cls(options=...)`, where `options` is an instance of its class attribute `Options` (a msgspec struct,
    converted strictly from the configuration), or as `cls()` if it has none. Optional attributes: `version` (grows when the
    same input may score otherwise), `rewards` (names it gives besides the configured one), `async close()`.
    """

    async def score(self, item: ScoreItem) -> ScorerResult:
        """Rewards of one sample. An empty `Reward.name` stands for the name in the configuration."""


SCORERS = Registry(
    "scorer",
    {
        "exact": "rollmesh.services.reward.scorers.exact:ExactScorer",
        "math": "rollmesh.services.reward.scorers.math:MathScorer",
        "format": "rollmesh.services.reward.scorers.format:FormatScorer",
        "length": "rollmesh.services.reward.scorers.length:LengthScorer",
    },
)
