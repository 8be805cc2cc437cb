"""Add latency to tool calls for experiments, as a decorator of the sandbox port.

Draws are keyed by (seed, session, call), or (seed, key of the call) without a session, so they do not depend on the
order of the episodes' calls.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import NormalDist
from zlib import crc32

from rollmesh.services.rollout.config import ToolLatencyConfig
from rollmesh.services.rollout.ports import SandboxPort, SandboxSession
from rollmesh.services.rollout.recorder import mix64
from rollmesh.shared.clients.sandbox import ExecResult, RemoteSnapshot
from rollmesh.shared.clock import Clock


class SlowSandbox:
    """Wait before each call for a time drawn from the configured distribution."""

    def __init__(self, inner: SandboxPort, config: ToolLatencyConfig, clock: Clock) -> None:
        self._inner = inner
        self._config = config
        self._clock = clock

    @asynccontextmanager
    async def session(
        self, profile: str, *, session_id: str, owner: str = "", ttl_s: float = 0.0, tenant: str = ""
    ) -> AsyncIterator[SandboxSession]:
        opening = self._inner.session(profile, session_id=session_id, owner=owner, ttl_s=ttl_s, tenant=tenant)
        async with opening as session:
            yield _SlowSession(session, session_id, self._config, self._clock)

    @asynccontextmanager
    async def fork(
        self, snapshot: RemoteSnapshot, *, session_id: str, owner: str = "", ttl_s: float = 0.0
    ) -> AsyncIterator[SandboxSession]:
        async with self._inner.fork(snapshot, session_id=session_id, owner=owner, ttl_s=ttl_s) as session:
            yield _SlowSession(session, session_id, self._config, self._clock)

    async def call_stateless(
        self, profile: str, function: str, *arguments: str, tenant: str, call_key: str = "", wall_s: float = 0.0
    ) -> ExecResult:
        await self._clock.sleep(latency_s(self._config, _uniform(self._config.seed, call_key, 1)))
        return await self._inner.call_stateless(
            profile, function, *arguments, tenant=tenant, call_key=call_key, wall_s=wall_s
        )

    async def drop(self, snapshot: RemoteSnapshot) -> None:
        await self._inner.drop(snapshot)


class _SlowSession:
    def __init__(self, inner: SandboxSession, session_id: str, config: ToolLatencyConfig, clock: Clock) -> None:
        self._inner = inner
        self._config = config
        self._clock = clock
        self._session_id = session_id
        self._num_calls = 0

    async def call(self, function: str, *arguments: str, wall_s: float = 0.0) -> ExecResult:
        await self._wait()
        return await self._inner.call(function, *arguments, wall_s=wall_s)

    async def run(
        self, code: str, *, language: str = "python", arguments: Sequence[str] = (), wall_s: float = 0.0
    ) -> ExecResult:
        await self._wait()
        return await self._inner.run(code, language=language, arguments=arguments, wall_s=wall_s)

    async def snapshot(self, *, ttl_s: float = 0.0) -> RemoteSnapshot:
        return await self._inner.snapshot(ttl_s=ttl_s)

    async def _wait(self) -> None:
        self._num_calls += 1
        uniform = _uniform(self._config.seed, self._session_id, self._num_calls)
        await self._clock.sleep(latency_s(self._config, uniform))


def _uniform(seed: int, key: str, number: int) -> float:
    """Return the middle of one of 2**53 equal intervals, which is never 0 or 1, where the quantiles are infinite."""
    return ((mix64(mix64(seed ^ crc32(key.encode())) + number) >> 11) + 0.5) / 2**53


def latency_s(config: ToolLatencyConfig, uniform: float) -> float:
    """Return the quantile at `uniform` in (0, 1), seconds, at most `max_s`.

    Pareto (type I) with tail index a has mean x_min a / (a - 1); the lognormal has mean exp(mu + sigma^2 / 2).
    """
    if config.distribution == "none" or config.mean_s == 0:
        return 0.0
    if config.distribution == "pareto":
        smallest_s = config.mean_s * (config.shape - 1) / config.shape
        drawn_s = smallest_s * math.pow(1 - uniform, -1 / config.shape)
    else:
        mu = math.log(config.mean_s) - config.shape**2 / 2
        drawn_s = math.exp(mu + config.shape * NormalDist().inv_cdf(uniform))
    return min(drawn_s, config.max_s)
