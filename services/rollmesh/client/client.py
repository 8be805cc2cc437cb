"""`Client` and `Run`: from an address to a trainer. Collaborators: `trainer`, `shared.clients.trainer`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Any, Self

from rollmesh.client.trainer import Trainer
from rollmesh.shared.clients.trainer import RunAddress, TrainerClient
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.retry import RetryConfig, retry
from rollmesh.shared.rpc.access import Access, Tls
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import events_pb2, run_pb2, run_pb2_grpc


class Client:
    """A mesh, by its gateway. An async context; runs and trainers of it end with it."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        tls: Tls | None = None,
        retry: RetryConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`tls` is for gateways beyond this machine. Connects on the first call. ConfigError for unreadable TLS files."""
        self.address = address
        self.access = Access(token, tls)
        self.retry = retry or RetryConfig()
        self.clock = clock or SystemClock()
        self._channel = open_channel(address, access=self.access)
        self._stub: Any = run_pb2_grpc.RunServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def create_run(self, spec: events_pb2.RunSpec) -> Run:
        """Makes a run; one of the same spec goes on. Raises `InvalidSpec` naming the field, `RunExists`."""
        await self.ask("CreateRun", run_pb2.CreateRunRequest(spec=spec))
        return self.run(spec.run, policy=spec.policy or "main", learner=spec.learner or "main")

    def run(self, name: str, *, policy: str = "main", learner: str = "main") -> Run:
        """A run that exists; the first call to it says if it does not."""
        return Run(self, name, policy, learner)

    async def ask(self, verb: str, request: Any) -> Any:
        """One verb of RunService with one answer, repeated while nobody answers. Raises the typed error."""

        async def once() -> Any:
            with typed_errors():
                return await getattr(self._stub, verb)(request, timeout=self.retry.call_s)

        return await retry(once, limit_s=self.retry.retry_s, config=self.retry, clock=self.clock)

    async def stream(self, verb: str, request: Any) -> AsyncGenerator[Any]:
        """One verb that streams, until the stream ends or breaks, which raises the typed error; without a deadline."""
        call = getattr(self._stub, verb)(request)
        try:
            with typed_errors():
                async for message in call:
                    yield message
        finally:
            call.cancel()


class Run:
    """One run of a mesh. Made by `Client`."""

    def __init__(self, client: Client, name: str, policy: str, learner: str) -> None:
        self.name = name
        self._client = client
        self._policy = policy
        self._learner = learner

    async def attach(
        self,
        *,
        last_update: int = 0,
        digest: str = "",
        keeps_no_checkpoints: bool = False,
        holder: str = "",
        dropped: Mapping[str, str] | None = None,
        applied: bool = True,
    ) -> Trainer:
        """Becomes the run's one trainer, with what the caller's checkpoint holds: its last update and the digest after it.

        `dropped` and `applied` as in the commit of that update, which may not have been answered: see AttachTrainerRequest.
        Raises `UnknownRun`, `DigestMismatch` (a checkpoint of another history), `UnknownUpdate`. Use the trainer as a context.
        """
        client = self._client
        where = RunAddress(
            address=client.address,
            access=client.access,
            run=self.name,
            policy=self._policy,
            learner=self._learner,
            holder=holder,
        )
        verbs = TrainerClient(where, client.retry, client.clock)
        try:
            attached = await verbs.attach(
                last_update=last_update,
                digest=digest,
                keeps_no_checkpoints=keeps_no_checkpoints,
                dropped=dropped,
                applied=applied,
            )
        except BaseException:
            await verbs.__aexit__(None, None, None)
            raise
        return Trainer(verbs, attached, digest=digest, clock=client.clock)

    async def state(self) -> run_pb2.RunState:
        """Where the run stands: accounts, evaluations, who waits for what."""
        reply: run_pb2.GetRunResponse = await self._client.ask("GetRun", run_pb2.GetRunRequest(run=self.name))
        return reply.state

    async def watch(self) -> AsyncGenerator[run_pb2.WatchRunResponse]:
        """States and commands as they come; raises when the stream breaks, and may be called again."""
        async for news in self._client.stream("WatchRun", run_pb2.WatchRunRequest(run=self.name)):
            yield news

    async def samples(self, cursor: str = "") -> AsyncGenerator[run_pb2.StreamSamplesResponse]:
        """Scored episodes of a run that exports, from the one after `cursor`. Raises `HasLearner` for any other run."""
        request = run_pb2.StreamSamplesRequest(run=self.name, cursor=cursor)
        async for message in self._client.stream("StreamSamples", request):
            yield message

    async def stop(self, reason: str = "") -> None:
        """Stops the run: nothing new is admitted, trainers are told."""
        await self._client.ask("StopRun", run_pb2.StopRunRequest(run=self.name, reason=reason))
