"""The server of a rollout worker for the models of its episodes. It starts with the first episode that needs it.

It runs on the event loop of the worker, so the end of the worker ends its keys and requests. A key is 256 random bits;
the server stores its SHA-256, by which it finds the episode.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollmesh.services.rollout.config import RolloutConfig
from rollmesh.services.rollout.environment import Environment
from rollmesh.services.rollout.openai.chains import Chains
from rollmesh.services.rollout.openai.served import Served, expired_key
from rollmesh.services.rollout.tokenizer import Tokenizer
from rollmesh.services.rollout.tool_calls.choice import tool_call_parser, why_unread
from rollmesh.shared.clock import Clock
from rollmesh.shared.config.extras import libraries_needed
from rollmesh.shared.errors import ConfigError, FailedPrecondition
from rollmesh.shared.net.asgi_server import AsgiServer, bind_http
from rollmesh.shared.rpc.addresses import advertised

KEY_PREFIX = "rm-"


class OpenAiServer:
    """Serve episodes. It implements `environment.ModelServer`."""

    def __init__(
        self, config: RolloutConfig, tokenizer: Tokenizer, clock: Clock, base_dir: str | Path | None = None
    ) -> None:
        """Nothing is started. `base_dir` is the folder of a custom parser of tool calls."""
        self._config = config
        self._tokenizer = tokenizer
        self._clock = clock
        self._base_dir = base_dir
        self._episodes: dict[bytes, Served] = {}
        self._starting = asyncio.Lock()
        self._server: AsgiServer | None = None
        self._url = ""
        self._closed = False

    @asynccontextmanager
    async def open(self, env: Environment) -> AsyncIterator[Served]:
        """Serve the model of an episode until the context ends. Raise ConfigError if the server cannot start."""
        await self._start()
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        chains = Chains(env, self._tokenizer, self._config.limits.context_tokens_max)
        served = Served(env, chains, base_url=self._url, key=key, clock=self._clock)
        self._episodes[_digest(key)] = served
        try:
            yield served
        finally:
            del self._episodes[_digest(key)]
            await served.close()

    @property
    def num_episodes(self) -> int:
        """Number of episodes that are served now."""
        return len(self._episodes)

    async def close(self) -> None:
        """Stop the server. Its connections are closed."""
        self._closed = True
        async with self._starting:
            if self._server is None:
                return
        await self._server.close()

    def _find(self, key: str) -> Served:
        served = self._episodes.get(_digest(key))
        if served is None:
            raise expired_key()
        return served

    async def _start(self) -> None:
        async with self._starting:
            if self._closed:
                raise FailedPrecondition("the server has been closed with its worker")
            if self._server is not None and not self._server.ended:
                return
            with libraries_needed("the server for agents that are programs"):
                import uvicorn  # noqa: F401

                from rollmesh.services.rollout.openai.app import OpenAiApp

            config = self._config.openai
            parser = tool_call_parser(self._tokenizer.format, config.tool_calls, self._base_dir)
            app = OpenAiApp(
                self._find,
                tokenizer=self._tokenizer,
                parser=parser,
                unread=why_unread(self._tokenizer, parser),
                opens_calls=config.tool_calls is None,
                request_bytes_max=config.request_mb_max << 20,
                clock=self._clock,
            ).asgi()
            listener = bind_http(config.address, "rollout.openai.address")
            try:
                address = advertised(config.address, config.advertise, listener.getsockname()[1])
            except ConfigError:
                listener.close()
                raise
            self._server, self._url = await AsgiServer.start(app, listener), f"http://{address}/v1"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
