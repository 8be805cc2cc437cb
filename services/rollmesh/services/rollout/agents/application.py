"""The agent that serves the model to an application of the user, which opens the episode itself: live traffic.

    run: {submitted_tasks: true}
    rollout: {agent: application}
    reward: {scorers: [{name: environment, reward: score, options: {min: 0, max: 1}}]}

The application calls OpenEpisode at the gateway, its requests in the OpenAI protocol at the returned address become the
samples, and FinishEpisode brings the rewards, also from another process. An episode that no application uses or
finishes in time is dropped with a reason, and never scored 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rollmesh.services.rollout.agent import Agent, Task
from rollmesh.services.rollout.agent_types import LimitReached
from rollmesh.services.rollout.environment import Environment, ServedEpisode
from rollmesh.shared.config.extras import libraries_needed
from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.shared.domain.application_reasons import DISCARDED, NOT_USED, REWARD_LATE

_WAIT_S_MAX = 10.0
"""Longest wait of a call to the coordinator, seconds."""


class ApplicationOptions(Settings):
    """Options of the agent `application`."""

    idle_s_max: PositiveFloat = 60.0
    """Time in which the first request has to begin, seconds. Otherwise the episode is dropped as NOT_USED."""
    reward_s_max: PositiveFloat = 300.0
    """Time from the end of a request in which the next one has to begin or the application has to finish the episode,
    seconds. Otherwise the episode is dropped as REWARD_LATE. `rollout.limits.run_s_max` and `run.group_s_max` are
    limits of the whole episode, and an open one takes a place of `rollout.worker.episodes_max` and
    `rollout.stages.run_max`."""


class ApplicationAgent(Agent):
    """Serve the model until the application finishes the episode."""

    Options = ApplicationOptions
    runs_elsewhere = True

    def __init__(self, *, options: ApplicationOptions) -> None:
        with libraries_needed("the agent `application`"):
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        self._options = options

    async def run(self, task: Task, env: Environment) -> None:
        async with env.serve() as api:
            ended = asyncio.ensure_future(api.wait_ended())
            try:
                rewards = await self._end(env, api, ended)
            except asyncio.CancelledError:  # at the time limit, which would score the episode without its rewards
                env.drop(_reason(api))
                raise
            finally:
                ended.cancel()
            if rewards is None:
                return
            if not rewards:
                env.drop(DISCARDED)
                return
            for name, value in rewards.items():
                env.reward(name, value, episode=True)
            api.check()

    async def _end(
        self, env: Environment, api: ServedEpisode, ended: asyncio.Future[None]
    ) -> Mapping[str, float] | None:
        """Return the rewards of the application. None: it was dropped for the lack of them. A limit of the model ends
        its turns, but not the wait for the rewards; a failure of the mesh raises."""
        limits = {"idle_s_max": self._options.idle_s_max, "reward_s_max": self._options.reward_s_max}
        watched: set[asyncio.Future[Any]] = {ended}
        while True:
            left_s = self._left_s(api)
            wait_s = min(max(left_s, 0.0), _WAIT_S_MAX)
            asking = asyncio.ensure_future(env.announce(api, **limits, wait_s=wait_s))
            try:
                await asyncio.wait({asking, *watched}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    watched.clear()
                    with suppress(LimitReached):
                        env.check()
                if (rewards := await asking) is not None:
                    return rewards
            finally:
                asking.cancel()
            if left_s <= 0.0 and self._left_s(api) <= 0.0:  # it was asked after its time
                env.drop(_reason(api))
                return None

    def _left_s(self, api: ServedEpisode) -> float:
        """Return the time that the application has for its next call, seconds; not positive if it is over."""
        return (self._options.reward_s_max if api.num_requests else self._options.idle_s_max) - api.idle_s


def _reason(api: ServedEpisode) -> str:
    return REWARD_LATE if api.num_requests else NOT_USED
