"""Renew all leases of a worker with one request per round, and report the leases that are gone.

A round starts every third of the shortest term, so two rounds may be lost. If the coordinator cannot be reached, the
request is retried after a back-off. Episodes are not dropped, because a recovered coordinator grants every lease a full
term of grace and accepts late reports.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection

from rollmesh.services.rollout.config import WorkerConfig
from rollmesh.services.rollout.failures import retry_call
from rollmesh.services.rollout.ports import Coordinator
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import MeshError

TERM_SHARE = 1 / 3


class Renewer:
    """Renew the leases that `held` returns; call `on_gone` for each lease that no longer exists."""

    def __init__(
        self,
        coordinator: Coordinator,
        config: WorkerConfig,
        clock: Clock,
        held: Callable[[], Collection[str]],
        on_gone: Callable[[str], None],
    ) -> None:
        self._coordinator = coordinator
        self._config = config
        self._clock = clock
        self._held = held
        self._on_gone = on_gone
        self._every_s = math.inf
        self._task: asyncio.Task[None] | None = None
        self.last_error = ""
        """Why the last round failed; empty if it did not."""

    def watch(self, term_s: float) -> None:
        """Register a lease with this term. If it is the shortest so far, the next round starts earlier."""
        every_s = min(TERM_SHARE * term_s, self._config.renew_every_s_max)
        if self._task is None or self._task.done() or every_s < self._every_s:
            if self._task is not None:
                self._task.cancel()
            self._every_s = every_s
            self._task = asyncio.ensure_future(self._renew_while_held())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _renew_while_held(self) -> None:
        while True:
            await self._clock.sleep(self._every_s)
            lease_ids = list(self._held())
            if not lease_ids:
                return
            await self._round(lease_ids)

    async def _round(self, lease_ids: list[str]) -> None:
        try:
            answer = await retry_call(lambda: self._coordinator.renew(lease_ids), self._config, self._clock)
        except MeshError as err:
            self.last_error = f"renewing {len(lease_ids)} leases: {err}"
            return
        self.last_error = ""
        if answer.lease_s > 0:
            self._every_s = min(TERM_SHARE * answer.lease_s, self._config.renew_every_s_max)
        for lease_id in answer.gone:
            self._on_gone(lease_id)
