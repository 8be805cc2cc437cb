"""Reward a solver by its answer, and the proposer of the question by the failures of the solvers of its episode.

    solver      R = r                                      r: the reward of the answer
    proposer    R = 1 - a                                  a: share of the solvers of the episode with r > 0
                R = 4 a (1 - a)                            with `form: intermediate`: questions of medium difficulty
                R = rejected                               if the episode has no solver: the question was not accepted,
                                                           or if a limit ended it, since the roles share its limits

Source: SSP (2025-10, arXiv:2510.18821; code: Alibaba-Quark/SSP), in which `rejected` is 0: a question that cannot be
answered earns nothing. The agent `search_self_play` gives the roles. A sample with another role has the reward r.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import BatchScorer, Sees, not_applicable
from rollmesh.shared.config.settings import NonEmptyStr, Settings
from rollmesh.shared.domain.trajectory import FinishReason, Reward


class SelfPlayOptions(Settings):
    """Settings of the scorer `self_play`."""

    reward: NonEmptyStr = "correct"
    """Name of the reward of an answer."""
    form: Literal["failures", "intermediate"] = "failures"
    """`failures`: 1 - a; `intermediate`: 4 a (1 - a)."""
    rejected: float = 0.0
    """Reward of a proposer whose question was not accepted, or whose episode a limit ended."""
    proposer: NonEmptyStr = "proposer"
    """Role of the proposer."""
    solver: NonEmptyStr = "solver"
    """Role of the solvers."""


class SelfPlayScorer(BatchScorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = SelfPlayOptions
    version = "1"
    sees: Sees = "episode"

    def __init__(self, *, options: SelfPlayOptions) -> None:
        self._options = options
        self.reads = (options.reward,)

    async def score_batch(self, items: Sequence[ScoreItem]) -> Sequence[Reward]:
        options = self._options
        solved = [item.reward(options.reward) for item in items if item.role == options.solver]
        return [
            self._of_proposer(item, solved)
            if item.role == options.proposer
            else _known(item.reward(options.reward), options.reward)
            for item in items
        ]

    def _of_proposer(self, item: ScoreItem, solved: Sequence[float | None]) -> Reward:
        if not solved or item.finish is FinishReason.LENGTH:
            evidence = "a limit ended the episode" if solved else "the question was not accepted"
            return Reward(name="", value=self._options.rejected, evidence=evidence)
        known = [value for value in solved if value is not None]
        if len(known) < len(solved):
            return _known(None, self._options.reward)
        share = sum(value > 0 for value in known) / len(known)
        value = 1 - share if self._options.form == "failures" else 4 * share * (1 - share)
        return Reward(name="", value=value, evidence=f"{share:.2f} of {len(known)} solvers were right")


def _known(value: float | None, name: str) -> Reward:
    return not_applicable(f"the reward {name} is not applicable") if value is None else Reward(name="", value=value)
