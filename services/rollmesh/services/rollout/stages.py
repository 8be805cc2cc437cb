"""The stages of an episode, each with a separate number of slots.

    leased -> | INIT: prompt, sessions | -> | RUN: the agent | -> | SCORE: rewards, payload | -> reported

  stage   consumes             produces              waits for            unblocked by
  INIT    a lease              prompt, open sessions init_max slots       an episode that enters RUN, or fails
  RUN     an open episode      segments, samples     run_max slots        an agent that returns
  SCORE   samples              rewards, a payload    score_max slots      an episode that has its rewards

Slow rewards therefore do not idle engines, and a burst of leases starts at most `init_max` jails concurrently.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum

from rollmesh.services.rollout.config import StagesConfig
from rollmesh.services.rollout.episode_trace import SERVICE
from rollmesh.shared.clock import Clock
from rollmesh.shared.telemetry import tracing


class Stage(StrEnum):
    """The current stage of an episode."""

    INIT = "init"
    RUN = "run"
    SCORE = "score"


class Stages:
    """The slots of each stage, with counts of the episodes inside and waiting."""

    def __init__(self, config: StagesConfig, clock: Clock) -> None:
        self._clock = clock
        self._slots = {
            Stage.INIT: asyncio.Semaphore(config.init_max),
            Stage.RUN: asyncio.Semaphore(config.run_max),
            Stage.SCORE: asyncio.Semaphore(config.score_max),
        }
        self.num_inside = dict.fromkeys(Stage, 0)
        self.num_waiting = dict.fromkeys(Stage, 0)

    @asynccontextmanager
    async def enter(self, stage: Stage, stage_s: dict[str, float]) -> AsyncIterator[None]:
        """Hold a slot of `stage`. Add the seconds inside to `stage_s[stage]` and the seconds of waiting to "queue"."""
        asked_s = self._clock.monotonic_s()
        with tracing.span(stage.value, SERVICE) as span:
            await self._wait(stage)
            entered_s = self._clock.monotonic_s()
            _add(stage_s, "queue", entered_s - asked_s)
            if span is not None:
                span.set_attribute("queue_s", entered_s - asked_s)
            self.num_inside[stage] += 1
            try:
                yield
            finally:
                self.num_inside[stage] -= 1
                self._slots[stage].release()
                _add(stage_s, stage.value, self._clock.monotonic_s() - entered_s)

    async def _wait(self, stage: Stage) -> None:
        self.num_waiting[stage] += 1
        try:
            await self._slots[stage].acquire()
        finally:
            self.num_waiting[stage] -= 1


def _add(stage_s: dict[str, float], name: str, seconds: float) -> None:
    stage_s[name] = stage_s.get(name, 0.0) + seconds
