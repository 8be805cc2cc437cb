"""Run the scorers on samples and the finalizer on groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from rollmesh.services.reward.finalizer import Finalizer, Group, Verdict, checked_verdict
from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.oracles import Oracles
from rollmesh.services.reward.scorer_run import CAUSE_CHARS_MAX, ConfiguredScorer, Uses, run_scorer
from rollmesh.shared.config.user_code import explain, user_traceback
from rollmesh.shared.domain.trajectory import GroupContext, Reward
from rollmesh.shared.errors import GroupCodeFailed, Overloaded
from rollmesh.trainer.estimators import Estimator

FRAMES_CHARS_MAX = 900
"""Cause and frames of a GroupCodeFailed fit in the message of a gRPC status."""

A = TypeVar("A")
R = TypeVar("R")


class RewardEngine:
    """Scorers, finalizer and oracles of one service."""

    def __init__(
        self,
        *,
        scorers: Sequence[ConfiguredScorer],
        finalizer: Finalizer,
        oracles: Oracles,
        estimator: Estimator,
        finalizer_name: str = "",
        estimator_name: str = "",
        concurrency_max: int,
        queue_samples_max: int,
    ) -> None:
        self.scorers = tuple(scorers)
        self.finalizer = finalizer
        self.oracles = oracles
        self.estimator = estimator
        self.finalizer_name = finalizer_name
        self.estimator_name = estimator_name
        self._slots = asyncio.Semaphore(concurrency_max)
        self._queue_samples_max = queue_samples_max
        self._num_queued = 0

    @property
    def num_queued(self) -> int:
        """Number of samples that wait or are scored."""
        return self._num_queued

    async def score(self, items: Sequence[ScoreItem], uses: Uses | None = None) -> list[tuple[Reward, ...]]:
        """Return the rewards of each item, in order. Raise Overloaded if more samples than `queue_samples_max` wait.

        What the scorers asked of endpoints is added to `uses`, by the id of the sample.
        """
        if self._num_queued + len(items) > self._queue_samples_max:
            raise Overloaded(
                f"the queue holds {self._num_queued} of at most {self._queue_samples_max} samples; retry, or add "
                "reward nodes"
            )
        self._num_queued += len(items)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._score_one(item, uses)) for item in items]
        finally:
            self._num_queued -= len(items)
        return [task.result() for task in tasks]

    def finalize(self, group: Group) -> Verdict:
        """Return the verdict of the finalizer on a group. Raise GroupCodeFailed if it raises, or returns an invalid
        verdict."""
        decide = self.finalizer.decide
        return call_group_code(f"finalizer {self.finalizer_name}", lambda group: checked_verdict(decide(group)), group)

    def advantages(self, group: GroupContext) -> dict[str, float]:
        """Return the advantages that the estimator gives the members of a group. Raise GroupCodeFailed if it raises."""
        return call_group_code(f"estimator {self.estimator_name}", self.estimator.of_group, group)

    async def close(self) -> None:
        """Release resources of scorers, such as worker processes and connections."""
        for configured in self.scorers:
            await configured.scorer.close()

    async def _score_one(self, item: ScoreItem, uses: Uses | None) -> tuple[Reward, ...]:
        async with self._slots:
            return tuple([reward for scorer in self.scorers for reward in await run_scorer(scorer, item, uses)])


def call_group_code(what: str, function: Callable[[A], R], group: A) -> R:
    """Return the result of a user's function of a group. Raise GroupCodeFailed with the error and the user's lines if
    it raises."""
    try:
        return function(group)
    except Exception as error:
        frames = user_traceback(error)[-FRAMES_CHARS_MAX:]
        raise GroupCodeFailed(f"{what}: {' '.join(explain(error).split())[:CAUSE_CHARS_MAX]}\n{frames}") from error
