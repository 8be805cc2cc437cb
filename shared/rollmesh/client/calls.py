"""Calls of RunService with deadlines, typed errors and retries. Every unary call of RunService is idempotent and may be
repeated."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from rollmesh.shared.clock import Clock
from rollmesh.shared.net.retry import RetryConfig, retry
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import run_pb2, run_pb2_grpc

T = TypeVar("T")


class GatewayCalls:
    """One connection to a gateway. Connects on the first call."""

    def __init__(
        self, address: str, access: Access, config: RetryConfig, clock: Clock, payloads: Path | None = None
    ) -> None:
        self.payloads = payloads
        """Folder of the payload files of all runs, on their host."""
        self.access = access
        self.config = config
        self.clock = clock
        self._channel = open_channel(address, access=access)
        self._stub: Any = run_pb2_grpc.RunServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def once(self, verb: str, request: Any, limit_s: float | None = None) -> Any:
        """Make one attempt at a unary call, within `limit_s` or `call_s`. Raises the typed error."""
        with typed_errors():
            return await getattr(self._stub, verb)(request, timeout=limit_s or self.config.call_s)

    async def stream(self, verb: str, request: Any, limit_s: float | None = None) -> AsyncGenerator[Any]:
        """Yield the messages of a streaming call until it ends; a broken stream raises the typed error."""
        call = getattr(self._stub, verb)(request, timeout=limit_s)
        try:
            with typed_errors():
                async for message in call:
                    yield message
        finally:
            call.cancel()

    async def retry(self, ask: Callable[[], Awaitable[T]], at_least_s: float = 0.0) -> T:
        """Repeat `ask` while the gateway is unreachable, for `retry_s` or `at_least_s`, whichever is longer."""
        limit_s = max(self.config.retry_s, at_least_s)
        return await retry(ask, limit_s=limit_s, config=self.config, clock=self.clock)


class RunCalls:
    """The calls of one learner about one run."""

    def __init__(self, gateway: GatewayCalls, name: str, policy: str, learner: str) -> None:
        self.gateway = gateway
        self.name = name
        self.policy = policy
        self.learner = learner
        self.lease_s = 0.0
        """Term of a batch lease in seconds, set by the attach. A restarted coordinator recovers within it."""

    async def ask(self, verb: str, request: Any, limit_s: float | None = None) -> Any:
        """Make a unary call, repeated as by `retry`. Raises the typed error."""
        return await self.retry(lambda: self.gateway.once(verb, request, limit_s))

    async def retry(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Repeat `ask` while the gateway is unreachable, for `retry_s` and at least for the term of a batch lease."""
        return await self.gateway.retry(ask, self.lease_s)

    async def state_now(self) -> run_pb2.RunState:
        """Return the current state of the run, in one attempt."""
        reply: run_pb2.GetRunResponse = await self.gateway.once("GetRun", run_pb2.GetRunRequest(run=self.name))
        return reply.state

    def names(self) -> dict[str, Any]:
        """Return the fields that name run, policy and learner in a request."""
        return {"run": self.name, "policy": self.policy, "learner": self.learner}
