"""Apply a policy: every request of its sessions is rate-limited, answered, counted and logged here, refused ones
included.

Requests for absolute URLs go outside; paths are services of the proxy. The log contains the digest of each reply under
the session's id, so that the data that a sample saw can be verified later.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollmesh.services.sandbox.egress.budget import Rates
from rollmesh.services.sandbox.egress.config import EgressConfig
from rollmesh.services.sandbox.egress.exchange import EgressRefused, EgressReply, EgressRequest, refusal
from rollmesh.services.sandbox.egress.metrics import BYTES, REQUESTS
from rollmesh.services.sandbox.egress.retrieval.cache import Cache
from rollmesh.services.sandbox.egress.retrieval.service import Retrieval
from rollmesh.services.sandbox.egress.upstream import Upstream
from rollmesh.shared.clock import Clock
from rollmesh.shared.telemetry.metrics import count

_log = logging.getLogger(__name__)
_SHOWN_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressClient:
    """The session and tenant of a request."""

    session: str
    tenant: str = ""


class Proxy:
    """The proxy of one policy. `retrieval` serves paths; without it only absolute URLs are served."""

    def __init__(
        self,
        name: str,
        config: EgressConfig,
        *,
        clock: Clock,
        upstream: Upstream,
        retrieval: Retrieval | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self._clock = clock
        self._upstream = upstream
        self._retrieval = retrieval
        self._cache = cache
        self._digest = upstream.digest + (retrieval.digest if retrieval is not None else "")
        self._rates = Rates(config.rate_per_s, config.burst, clock)
        self._untaken_bytes = 0
        self._permits = asyncio.Semaphore(config.inflight_max)

    def close(self) -> None:
        """Close retrieval and cache. No request may be in progress."""
        if self._retrieval is not None:
            self._retrieval.close()
        if self._cache is not None:
            self._cache.close()

    @asynccontextmanager
    async def answering(self, client: EgressClient, request: EgressRequest) -> AsyncIterator[EgressReply]:
        """Yield the reply, which may be a refusal, after at most the policy's `timeout_s`. It is held in memory until
        the block ends."""
        began_s = self._clock.monotonic_s()
        try:
            reply = await self._answer(client, request)
            if self._untaken_bytes + len(reply.body) > self.config.untaken_bytes_max:
                raise EgressRefused("busy", "too many responses wait for their sessions; retry later")
        except EgressRefused as error:
            reply = refusal(error, self.name)
        self._record(client, request, reply, self._clock.monotonic_s() - began_s)
        self._untaken_bytes += len(reply.body)
        try:
            yield reply
        finally:
            self._untaken_bytes -= len(reply.body)

    def refuse(self, client: EgressClient, error: EgressRefused) -> EgressReply:
        """Return the reply to data that is not a valid request."""
        reply = refusal(error, self.name)
        self._record(client, EgressRequest(method="", target=""), reply, 0.0)
        return reply

    async def _answer(self, client: EgressClient, request: EgressRequest) -> EgressReply:
        self._rates.spend(client.tenant)
        try:
            async with asyncio.timeout(self.config.timeout_s), self._permits:
                if self._cache is None:
                    return await self._fresh(request)
                return await self._cache.answer(self._digest, request, lambda: self._recordable(request))
        except TimeoutError:
            raise EgressRefused("timeout", f"no response within {self.config.timeout_s:g} s") from None

    async def _fresh(self, request: EgressRequest) -> EgressReply:
        if not request.target.startswith("/"):
            return await self._upstream.ask(request)
        if self._retrieval is None:
            raise EgressRefused("not_found", "this policy has no search; request absolute URLs")
        return await self._retrieval.answer(request)

    async def _recordable(self, request: EgressRequest) -> EgressReply:
        """Return a reply to be recorded. `not_found` is recorded too, so that a repeated request gets the same
        reply."""
        try:
            return await self._fresh(request)
        except EgressRefused as error:
            if error.rule != "not_found":
                raise
            return refusal(error, self.name)

    def _record(self, client: EgressClient, request: EgressRequest, reply: EgressReply, wall_s: float) -> None:
        outcome = reply.refused_by or ("cached" if reply.cached else "answered")
        count(REQUESTS, self.name, outcome)
        count(BYTES, self.name, amount=len(reply.body))
        line = {
            "policy": self.name,
            "session": client.session,
            "tenant": client.tenant,
            "method": request.method[:20],
            "url": request.target[:_SHOWN_CHARS],
            "request_sha256": hashlib.sha256(request.body).hexdigest() if request.body else "",
            "status": reply.status,
            "outcome": outcome,
            "bytes": len(reply.body),
            "sha256": hashlib.sha256(reply.body).hexdigest(),
            "wall_s": round(wall_s, 4),
        }
        _log.info("egress %s", json.dumps(line))
