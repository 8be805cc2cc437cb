"""The episodes that workers serve to applications: the place where OpenEpisode and FinishEpisode meet ServeEpisode.

    application: OpenEpisode    waits for    a worker's ServeEpisode
    worker:      ServeEpisode   waits for    the application's FinishEpisode
    application: FinishEpisode  waits for    the worker's report, in the ledger

All of it is in memory, and none of it is a fact: after a restart of the coordinator each side repeats its call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from rollmesh.services.coordinator.core import application_episodes as episodes
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.facts import Task
from rollmesh.services.coordinator.core.state import EpisodeResult, EpisodeStatus
from rollmesh.services.coordinator.driver import RunDriver
from rollmesh.shared.clock import Clock, time_limit
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.errors import NotReady, UnknownLease
from rollmesh.v1 import coordinator_pb2, run_pb2

INTERVAL_S = 0.05
"""Minimum time between two reads of the state for one waiting call, in seconds."""
KEPT_S = 150.0
"""Time after which a worker that has not repeated its call is forgotten, in seconds. It exceeds two of the longest
waits of a call."""


@dataclass(slots=True, eq=False)
class _Served:
    """An episode that a worker serves."""

    answer: run_pb2.OpenEpisodeResponse
    seen_s: float
    """Time of the worker's newest call."""
    rewards: dict[str, float] | None = None
    """As its application has finished it; None before."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)


class Applications:
    """The served episodes of all runs of a coordinator, by run and lease."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._served: WeakKeyDictionary[RunDriver, dict[str, _Served]] = WeakKeyDictionary()
        """By driver, because a run that is created again has the lease ids of the deleted one."""

    async def open(
        self, driver: RunDriver, key: str, index: int, wait_s: float, check_agent: Callable[[Task], None]
    ) -> run_pb2.OpenEpisodeResponse:
        """Return the served episode of a key. Raises EpisodeOver, RunEnded, what `check_agent` raises for its task, and
        NotReady if no worker serves it within `wait_s`."""

        search = episodes.Search(key, index)

        def read(core: Core, _: LedgerHead) -> run_pb2.OpenEpisodeResponse | None:
            if (task := search.task(core.state)) is not None:
                check_agent(task)
            served = self._served.get(driver, {}).get(search.lease(core.state))
            return served.answer if served is not None else None

        with suppress(TimeoutError):
            async with time_limit(self._clock, wait_s), aclosing(driver.watch(read, interval_s=INTERVAL_S)) as answers:
                async for answer in answers:
                    if answer is not None:
                        return answer
        if (answer := await driver.read(read)) is not None:
            return answer
        why = await driver.read(lambda core, _: "its worker" if search.lease(core.state) else core.why_no_work())
        raise NotReady(
            f"no worker serves the episode of key {key!r} yet: it waits for {why}; repeat the call", run=driver.run
        )

    async def serve(
        self, driver: RunDriver, lease_id: str, request: coordinator_pb2.ServeEpisodeRequest, wait_s: float
    ) -> coordinator_pb2.ServeEpisodeResponse:
        """Announce a served episode, and wait for its end up to `wait_s`. Raises UnknownLease."""

        def holds(core: Core, _: LedgerHead) -> bool:
            name = lease_id.rpartition("#")[0]
            group = core.state.groups.get(name.rpartition(".")[0])
            episode = group.episodes.get(name) if group is not None else None
            if episode is None or episode.status is not EpisodeStatus.LEASED:
                return False
            return (episode.lease_id, episode.node_id) == (lease_id, request.node_id)

        if not await driver.read(holds):
            raise UnknownLease(f"{request.node_id} does not hold the lease {lease_id}; end the episode")
        answer = run_pb2.OpenEpisodeResponse()
        answer.CopyFrom(request.served)
        answer.lease_id = lease_id
        now_s = self._clock.monotonic_s()
        known = {name: one for name, one in self._served.get(driver, {}).items() if now_s - one.seen_s < KEPT_S}
        self._served[driver] = known
        served = known.setdefault(lease_id, _Served(answer, now_s))
        served.answer, served.seen_s = answer, now_s
        driver.note_change()
        with suppress(TimeoutError):
            async with time_limit(self._clock, wait_s):
                await served.finished.wait()
        return coordinator_pb2.ServeEpisodeResponse(finished=served.rewards is not None, rewards=served.rewards or {})

    async def finish(
        self, driver: RunDriver, lease_id: str, rewards: dict[str, float], wait_s: float
    ) -> run_pb2.FinishEpisodeResponse:
        """End an episode, and return when the ledger has its end. Raises as `application_episodes`, and NotReady after
        `wait_s`."""

        def read(core: Core, _: LedgerHead) -> EpisodeResult | None:
            return episodes.result_of(core.state, lease_id)

        with suppress(TimeoutError):
            async with time_limit(self._clock, wait_s), aclosing(driver.watch(read, interval_s=INTERVAL_S)) as results:
                async for result in results:
                    if result is not None:
                        return run_pb2.FinishEpisodeResponse(sample_ids=episodes.check_result(result, rewards))
                    self._give(driver, lease_id, rewards)
        raise NotReady(f"the worker of the episode {lease_id} has not reported it yet; repeat the call", run=driver.run)

    def _give(self, driver: RunDriver, lease_id: str, rewards: dict[str, float]) -> None:
        """Pass the rewards to the worker, if it has announced the episode to this coordinator."""
        served = self._served.get(driver, {}).get(lease_id)
        if served is None:
            return
        if served.rewards is not None and served.rewards != rewards:
            raise episodes.conflict(lease_id)
        served.rewards = rewards
        served.finished.set()
