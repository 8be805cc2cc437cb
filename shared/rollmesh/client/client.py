"""`Client` and `Run`: from the address of a gateway to a `Trainer`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rollmesh.client.calls import GatewayCalls, RunCalls
from rollmesh.client.trainer import Attachment, Trainer, disposed_samples, outcome_of
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.errors import NotReady
from rollmesh.shared.net.retry import RetryConfig
from rollmesh.shared.rpc.access import Access, Tls
from rollmesh.v1 import events_pb2, run_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAddress:
    """Names one trainer of one run, for components that open a `Client` themselves."""

    address: str
    """host:port of the gateway."""
    access: Access
    run: str
    policy: str = "main"
    learner: str = "main"
    holder: str = ""
    """Host and process, for messages."""
    payloads: Path | None = None
    """Folder of the payload files, on the host that has them."""


class Client:
    """A mesh, reached through its gateway. An async context; its runs and trainers end with it."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        tls: Tls | None = None,
        retry: RetryConfig | None = None,
        clock: Clock | None = None,
        payloads: Path | None = None,
    ) -> None:
        """`tls` is for gateways on other machines. Connects on the first call. ConfigError for unreadable TLS files.

        `payloads` is the folder `payloads` of the run folder: a trainer on its host reads the episodes there, and not
        from the gateway.
        """
        self._calls = GatewayCalls(
            address, Access(token, tls), retry or RetryConfig(), clock or SystemClock(), payloads
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._calls.close()

    async def create_run(self, spec: events_pb2.RunSpec) -> Run:
        """Create a run, or continue the one with the same spec. Raises `InvalidSpec` naming the field, `RunExists`."""
        run = self.run(spec.run, policy=spec.policy or "main", learner=spec.learner or "main")
        await run.ask("CreateRun", run_pb2.CreateRunRequest(spec=spec))
        return run

    def run(self, name: str, *, policy: str = "main", learner: str = "main") -> Run:
        """Return a run by name. If it does not exist, the first call raises `UnknownRun`."""
        return Run(self._calls, name, policy, learner)


class Run(RunCalls):
    """One run of a mesh, created by `Client.run`."""

    async def attach(
        self,
        *,
        last_update: int = 0,
        digest: str = "",
        keeps_no_checkpoints: bool = False,
        holder: str = "",
        dropped: Mapping[str, str] | None = None,
        applied: bool = True,
        prefetch_bytes_max: int = 0,
    ) -> Trainer:
        """Attach as the only trainer of the run, with the state of the caller's checkpoint: its last update and the
        digest after it.

        `dropped` (sample id -> reason) and `applied` are those of the commit of `last_update`, whose reply may be lost.
        Without them an update that dropped samples or was skipped cannot be rolled forward. Use the trainer as a
        context.

        With `prefetch_bytes_max`, up to so many bytes of payloads are loaded while the trainer waits or trains, so that
        `fetch` finds them.

        Raises `UnknownRun`, `DigestMismatch` (the checkpoint belongs to another history), `UnknownUpdate`.
        """
        request = run_pb2.AttachTrainerRequest(
            **self.names(),
            last_update=last_update,
            digest=digest,
            holder=holder,
            keeps_no_checkpoints=keeps_no_checkpoints,
            samples=disposed_samples(dropped or {}),
            outcome=outcome_of(applied),
        )

        async def attach() -> run_pb2.AttachTrainerResponse:
            reply: run_pb2.AttachTrainerResponse = await self.gateway.once("AttachTrainer", request)
            if not reply.weights_address:
                # Without a depot the trainer cannot publish weights, hence cannot lease a batch.
                raise NotReady(f"run {self.name} has no depot yet; start one (rollmesh serve depot)")
            return reply

        reply = await self.retry(attach)
        self.lease_s = reply.lease_s
        attached = Attachment(
            trainer_epoch=reply.trainer_epoch,
            next_update=reply.next_update,
            incarnation=reply.incarnation,
            resolution=run_pb2.AttachResolution.Name(reply.resolution).removeprefix("ATTACH_RESOLUTION_"),
            lease_s=reply.lease_s,
            spec=reply.spec,
        )
        return Trainer(
            self, attached, digest=digest, depot=reply.weights_address, prefetch_bytes_max=prefetch_bytes_max
        )

    async def state(self) -> run_pb2.RunState:
        """Return the current state: sample counts, evaluations, waiting components and their reasons."""
        return await self.retry(self.state_now)

    async def watch(self) -> AsyncGenerator[run_pb2.WatchRunResponse]:
        """Yield states and commands when they arrive. Raise when the stream breaks; then call it again."""
        async with aclosing(self.gateway.stream("WatchRun", run_pb2.WatchRunRequest(run=self.name))) as messages:
            async for message in messages:
                yield message

    async def samples(self, cursor: str = "") -> AsyncGenerator[run_pb2.StreamSamplesResponse]:
        """Yield scored episodes of a run that exports, after the one at `cursor`. Raises `HasLearner` for any other
        run."""
        request = run_pb2.StreamSamplesRequest(run=self.name, cursor=cursor)
        async with aclosing(self.gateway.stream("StreamSamples", request)) as messages:
            async for message in messages:
                yield message

    async def stop(self, reason: str = "") -> None:
        """Stop the run. The coordinator does not admit new groups and sends trainers the command to stop."""
        request = run_pb2.StopRunRequest(run=self.name, reason=reason)
        await self.ask("StopRun", request)
