"""The agent that is a running service of the user. It gets the task by POST and calls the model over the OpenAI
protocol.

    rollout:
      agent: {name: url, options: {url: "http://127.0.0.1:9000/run"}}

The body has the task, and `base_url`, `api_key` and `model` of the episode. The service replies with status 200 when it
has finished. A reply that is a JSON object may contain rewards that only the service knows, see `reply_rewards`. Any
other reply has no rewards.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from msgspec import Meta

from rollmesh.services.rollout.agent import Agent, Task
from rollmesh.services.rollout.agents.program import task_fields
from rollmesh.services.rollout.agents.reply_rewards import REWARD_BYTES_MAX, give_reply
from rollmesh.services.rollout.environment import Environment, ServedEpisode
from rollmesh.shared.config.extras import libraries_needed
from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.shared.errors import InfraFailure

_BODY_BYTES_MAX = 1000


class AgentServiceFailed(InfraFailure):
    """The service that works on the episode was not reachable, or failed."""

    reason = "AGENT_SERVICE_FAILED"


class UrlOptions(Settings):
    """Options of the agent `url`."""

    url: Annotated[str, Meta(pattern=r"^https?://\S+$")]
    """The URL to which each task is posted."""
    headers: dict[str, str] = {}
    """Headers of the request."""
    stop_s: PositiveFloat = 5.0
    """Time that the service has to reply after a limit of the episode, seconds. Then the connection is closed."""


class UrlAgent(Agent):
    """Post the task to the service, and wait for its reply."""

    Options = UrlOptions
    runs_elsewhere = True

    def __init__(self, *, options: UrlOptions) -> None:
        with libraries_needed("the agent `url`"):
            import aiohttp  # noqa: F401
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        self._options = options

    async def run(self, task: Task, env: Environment) -> None:
        async with env.serve() as api:
            posting = asyncio.ensure_future(self._post(task, env, api))
            ending = asyncio.ensure_future(api.wait_ended())
            try:
                await asyncio.wait({posting, ending}, return_when=asyncio.FIRST_COMPLETED)
                if not posting.done():  # the episode has ended, so its requests fail from now on
                    await asyncio.wait({posting}, timeout=self._options.stop_s)
                if posting.done() and posting.exception() is None:
                    self._give(posting.result(), env, api)
                api.check()
                await posting
                if not api.num_turns:
                    raise AgentServiceFailed(
                        f"{self._options.url} replied without a turn of the model; it must call the model at "
                        "`base_url` before it replies"
                    )
            finally:
                ending.cancel()
                posting.cancel()
                await asyncio.gather(posting, return_exceptions=True)

    def _give(self, reply: bytes, env: Environment, api: ServedEpisode) -> None:
        """Give the rewards of a reply in JSON."""
        url = self._options.url
        try:
            give_reply(reply, env, api)
        except ValueError as err:
            api.check()  # a limit that has ended the episode is not a failure of the service
            raise AgentServiceFailed(f"{url} replied with a wrong reward: {err}", url=url) from err

    async def _post(self, task: Task, env: Environment, api: ServedEpisode) -> bytes:
        """Post the task, and return the reply, of a longer one the beginning. The time limit is that of the episode."""
        import aiohttp

        body = {"task": task_fields(task, env), "base_url": api.base_url, "api_key": api.key, "model": "policy"}
        url = self._options.url
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)) as session,
                session.post(url, json=body, headers=self._options.headers, allow_redirects=False) as reply,
            ):
                if reply.status != 200:
                    said = (await reply.content.read(_BODY_BYTES_MAX)).decode(errors="replace").strip()
                    raise AgentServiceFailed(
                        f"{url} replied with status {reply.status}, expected 200: {said or 'an empty body'}", url=url
                    )
                found = b""
                async for chunk in reply.content.iter_any():
                    found += chunk
                    if len(found) > REWARD_BYTES_MAX:
                        break
                return found
        except (aiohttp.ClientError, OSError) as err:
            raise AgentServiceFailed(
                f"{url} is not reachable, or closed the connection: {err or type(err).__name__}; check that the "
                "service runs",
                url=url,
            ) from err
