"""Run the scorers on samples and the finalizers on groups."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby

from msgspec import structs

from rollmesh.services.reward.batcher import Batcher
from rollmesh.services.reward.finalizer import Group, Verdict
from rollmesh.services.reward.finalizer_list import ConfiguredFinalizer, call_group_code, decide
from rollmesh.services.reward.graph import ScorerGraph
from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.oracles import Oracles
from rollmesh.services.reward.scorer import BatchScorer
from rollmesh.services.reward.scorer_run import ConfiguredScorer, Scored, Uses, joined, run_scorer
from rollmesh.shared.domain.trajectory import GroupContext, Outcome, Reward
from rollmesh.shared.errors import Overloaded
from rollmesh.trainer.estimators import Estimator


class RewardEngine:
    """Scorers, finalizers and oracles of one service."""

    def __init__(
        self,
        *,
        scorers: Sequence[ConfiguredScorer],
        finalizers: Sequence[ConfiguredFinalizer],
        oracles: Oracles,
        estimator: Estimator,
        estimator_name: str = "",
        concurrency_max: int,
        queue_samples_max: int,
    ) -> None:
        self.graph = ScorerGraph(scorers)
        self.finalizers = tuple(finalizers)
        self.oracles = oracles
        self.estimator = estimator
        self.estimator_name = estimator_name
        self._slots = asyncio.Semaphore(concurrency_max)
        self._batchers = {
            number: Batcher(partial(self._call, scorer), size_max=scorer.batch_max, wait_s=scorer.batch_wait_s)
            for number, scorer in enumerate(scorers)
            if isinstance(scorer.scorer, BatchScorer) and scorer.sees == "path"
        }
        self._queue_samples_max = queue_samples_max
        self._num_queued = 0

    @property
    def scorers(self) -> tuple[ConfiguredScorer, ...]:
        """The scorers, in the order of the configuration."""
        return self.graph.scorers

    @property
    def num_queued(self) -> int:
        """Number of samples that wait or are scored."""
        return self._num_queued

    async def score(self, items: Sequence[ScoreItem], uses: Uses | None = None) -> list[tuple[Reward, ...]]:
        """Return the rewards of each item, in order. The samples of one request for an episode must be one after the
        other.

        What the scorers asked of endpoints is added to `uses`, by the id of the sample. Raise Overloaded if more
        samples than `queue_samples_max` wait, or InvalidInput for an unknown name of a reward in an item or its task.
        """
        episodes = [list(found) for _, found in groupby(items, key=lambda item: (item.key, item.request, item.scorers))]
        named = [(episode[0].scorers, episode[0].task.scorers) for episode in episodes]
        orders = [self.graph.chosen(asked or of_task, of_task) for asked, of_task in named]
        if self._num_queued + len(items) > self._queue_samples_max:
            raise Overloaded(
                f"the queue holds {self._num_queued} of at most {self._queue_samples_max} samples; retry, or add "
                "reward nodes"
            )
        self._num_queued += len(items)
        try:
            async with asyncio.TaskGroup() as group:
                scored = map(self._score_episode, orders, episodes)
                tasks = [group.create_task(one) for one in scored]
        finally:
            self._num_queued -= len(items)
        results = [result for task in tasks for result in task.result()]
        for item, result in zip(items, results, strict=True):
            if uses is not None and result.uses:
                uses.setdefault(item.sample_id, []).extend(result.uses)
        return [result.rewards for result in results]

    def finalize(self, group: Group) -> Verdict:
        """Return the verdict of the finalizers on a group. Raise GroupCodeFailed if one of them or the estimator
        raises, or if a verdict is invalid."""
        return decide(self.finalizers, group, self.advantages)

    def advantages(self, group: GroupContext) -> dict[str, float]:
        """Return the advantages that the estimator gives the members of a group. Raise GroupCodeFailed if it raises."""
        return call_group_code(f"estimator {self.estimator_name}", self.estimator.of_group, group)

    async def close(self) -> None:
        """Cancel the calls in progress, and release resources of scorers, such as worker processes and connections."""
        for batcher in self._batchers.values():
            await batcher.close()
        for configured in self.scorers:
            await configured.scorer.close()

    async def _score_episode(self, order: Sequence[int], items: Sequence[ScoreItem]) -> list[Scored]:
        """Return the results of the scorers `order` for the samples of one episode."""
        if len(order) == 1:  # the common case, without further tasks
            return await self._score_by(order[0], items, {})
        running: dict[int, asyncio.Task[list[Scored]]] = {}

        async def run(number: int) -> list[Scored]:
            reads = self.graph.read_for(number, items[0].task.scorers)
            return await self._score_by(number, items, {read: await running[read] for read in reads})

        async with asyncio.TaskGroup() as group:
            for number in order:
                running[number] = group.create_task(run(number))
        results = [running[number].result() for number in sorted(order)]
        return [joined(of_sample) for of_sample in zip(*results, strict=True)]

    async def _score_by(
        self, number: int, items: Sequence[ScoreItem], found: Mapping[int, Sequence[Scored]]
    ) -> list[Scored]:
        """Return the results of one scorer for the samples of an episode, after those that it reads. A sample has none
        if one of those has failed."""
        scorer = self.graph.scorers[number]
        ready: dict[int, ScoreItem] = {}
        for place, item in enumerate(items):
            given = [scored[place].rewards for scored in found.values()]
            read = [reward for rewards in given for reward in rewards]
            if all(given) and not any(reward.outcome is Outcome.INFRA_FAILURE for reward in read):
                named = {name: tuple(reward for reward in read if reward.name == name) for name in scorer.reads}
                ready[place] = structs.replace(item, rewards=named) if named else item
        if scorer.sees == "episode":
            # A sample that is not ready fails the episode, whose other samples then need no score.
            results = await self._call(scorer, list(ready.values())) if len(ready) == len(items) else []
        elif number in self._batchers:
            results = await asyncio.gather(*map(self._batchers[number].submit, ready.values()))
        else:
            calls = [self._call(scorer, [item]) for item in ready.values()]
            results = [result for (result,) in await asyncio.gather(*calls)]
        of_place = dict(zip(ready, results, strict=False))
        return [of_place.get(place, Scored()) for place in range(len(items))]

    async def _call(self, scorer: ConfiguredScorer, items: Sequence[ScoreItem]) -> list[Scored]:
        async with self._slots:
            return await run_scorer(scorer, items)
