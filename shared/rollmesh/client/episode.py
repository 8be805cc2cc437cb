"""An episode that an application opens itself: its address for a client of the OpenAI protocol, and its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollmesh.client.calls import RunCalls
from rollmesh.v1 import run_pb2

OPEN_WAIT_S = 10.0
"""Longest wait of one call of OpenEpisode, in seconds. It is below `RetryConfig.call_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEpisode:
    """An open episode, created by `Run.episode`."""

    run: RunCalls
    key: str
    lease_id: str
    """Names it for `Run.finish_episode`, also in another process."""
    base_url: str
    api_key: str = field(repr=False)
    """A secret, so that it is not in the text of the object, as in a log line."""
    model: str
    idle_s_max: float
    """Time in which its first request has to begin, in seconds."""
    reward_s_max: float
    """Time from the end of a request in which the next one has to begin or the rewards have to arrive, in seconds."""

    async def finish(self, rewards: Mapping[str, float]) -> list[str]:
        """As `Run.finish_episode`."""
        return await finish(self.run, self.lease_id, rewards)


async def opened(run: RunCalls, request: run_pb2.OpenEpisodeRequest) -> OpenEpisode:
    """Open an episode. Waits for a worker up to the limit of retries."""
    reply: run_pb2.OpenEpisodeResponse = await run.ask("OpenEpisode", request)
    return OpenEpisode(
        run=run,
        key=request.key,
        lease_id=reply.lease_id,
        base_url=reply.base_url,
        api_key=reply.api_key,
        model=reply.model,
        idle_s_max=reply.idle_s_max,
        reward_s_max=reply.reward_s_max,
    )


async def finish(run: RunCalls, lease_id: str, rewards: Mapping[str, float]) -> list[str]:
    """End an episode, and return the ids of its samples."""
    request = run_pb2.FinishEpisodeRequest(run=run.name, lease_id=lease_id, rewards=rewards)
    reply: run_pb2.FinishEpisodeResponse = await run.ask("FinishEpisode", request)
    return list(reply.sample_ids)
