"""RunService as a trainer uses it, in messages: the words that the built-in learner and `services/client` share.

Every verb used here is idempotent, or repeatable, and is repeated while nobody answers: for `retry_s`, and at least for the
term of a batch lease, within which a restarted coordinator is expected back. The client remembers the trainer epoch of its last
attach, and the depot's address until it is told another; it decides nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from rollmesh.shared.clock import Clock
from rollmesh.shared.codec.failure import encode_failure
from rollmesh.shared.codec.metadata import check_metadata
from rollmesh.shared.errors import MetadataMismatch, NotReady, NotUploaded
from rollmesh.shared.ledger_head import LedgerHead
from rollmesh.shared.retry import RetryConfig, retry
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.versions import PolicyVersion
from rollmesh.shared.weights.manifest import BuiltManifest, version_owner
from rollmesh.shared.weights.transfer import TransferConfig, upload
from rollmesh.v1 import events_pb2, run_pb2, run_pb2_grpc, types_pb2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAddress:
    """Which run, where, and as whom."""

    address: str
    """host:port of the gateway."""
    access: Access
    run: str
    policy: str = "main"
    learner: str = "main"
    holder: str = ""
    """For messages: host, process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """The caller is the trainer now; see AttachTrainerResponse."""

    trainer_epoch: int
    next_update: int
    incarnation: int
    resolution: str
    """CONTINUED, ROLLED_FORWARD or ROLLED_BACK."""
    lease_s: float
    spec: events_pb2.RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Digest after the update, and the head of the ledger that contains its commit: keep both in the checkpoint."""

    digest: str
    head: LedgerHead


class TrainerClient:
    """One trainer's view of one run; an async context that owns the channel."""

    def __init__(self, where: RunAddress, config: RetryConfig, clock: Clock) -> None:
        self.where = where
        self.weights_address = ""
        """The depot, once attached."""
        self._config = config
        self._clock = clock
        self._epoch = 0
        self._lease_s = 0.0
        self._channel = open_channel(where.address, access=where.access)
        self._stub: Any = run_pb2_grpc.RunServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    # Attaching --------------------------------------------------------------------------------------------------------

    async def attach(
        self,
        *,
        last_update: int,
        digest: str,
        keeps_no_checkpoints: bool = False,
        dropped: Mapping[str, str] | None = None,
        applied: bool = True,
    ) -> Attached:
        """Makes this the one trainer. Raises `UnknownRun`, `DigestMismatch`, `UnknownUpdate`.

        `dropped` (sample id -> reason) and `applied` are those of `last_update`: without them an update that dropped samples or was
        skipped cannot be rolled forward.
        """
        request = run_pb2.AttachTrainerRequest(**self._names(), last_update=last_update, digest=digest)
        request.holder = self.where.holder
        request.keeps_no_checkpoints = keeps_no_checkpoints
        request.samples.extend(_disposed(sample_id, reason) for sample_id, reason in (dropped or {}).items())
        request.outcome = run_pb2.UPDATE_OUTCOME_APPLIED if applied else run_pb2.UPDATE_OUTCOME_SKIPPED
        return await self.persist(lambda: self._attach(request))

    async def _attach(self, request: run_pb2.AttachTrainerRequest) -> Attached:
        reply: run_pb2.AttachTrainerResponse = await self._call(self._stub.AttachTrainer, request)
        if not reply.weights_address:
            # Kept back until there is a depot: without one nothing can be published, hence nothing leased.
            raise NotReady(f"run {self.where.run} has no depot yet; start one (rollmesh serve weights)")
        self._epoch = reply.trainer_epoch
        self._lease_s = reply.lease_s
        self.weights_address = reply.weights_address
        resolution = run_pb2.AttachResolution.Name(reply.resolution).removeprefix("ATTACH_RESOLUTION_")
        return Attached(
            trainer_epoch=reply.trainer_epoch,
            next_update=reply.next_update,
            incarnation=reply.incarnation,
            resolution=resolution,
            lease_s=reply.lease_s,
            spec=reply.spec,
        )

    # Batches ----------------------------------------------------------------------------------------------------------

    async def ask_batch(
        self, update: int, *, wait_s: float, geometry: run_pb2.BatchGeometry | None = None
    ) -> run_pb2.LeaseBatchResponse:
        """The batch of `update`, or after `wait_s` what it waits for. Raises `Fenced`, `LeaseExpired`, `RunEnded`."""
        request = run_pb2.LeaseBatchRequest(**self._holding(), update=update, wait_s=wait_s, geometry=geometry)
        limit_s = wait_s + self._config.call_s
        reply: run_pb2.LeaseBatchResponse = await self.persist(
            lambda: self._call(self._stub.LeaseBatch, request, limit_s)
        )
        return reply

    async def episodes(
        self, lease_id: str, leased: Iterable[run_pb2.LeasedSample]
    ) -> AsyncGenerator[run_pb2.FetchSamplesResponse]:
        """The lease's episodes, in any order; one try, to be repeated from the start. Raises `PayloadLost`, `UnknownLease`.

        `leased` are the samples of the lease. An episode that contradicts their metadata comes as a failure, also if the gateway did
        not notice.
        """
        metas = {sample.meta.sample_id: sample.meta for sample in leased}
        request = run_pb2.FetchSamplesRequest(
            run=self.where.run, trainer_epoch=self._epoch, lease_id=lease_id, num_shards=1
        )
        call = self._stub.FetchSamples(request, timeout=self._config.fetch_s)
        try:
            with typed_errors():
                async for message in call:
                    yield _checked(message, metas)
        finally:
            call.cancel()

    async def renew(self, lease_id: str) -> float:
        """Seconds until the lease expires now. Raises `UnknownLease`, `Fenced`, `LeaseExpired`."""
        request = run_pb2.RenewBatchRequest(**self._holding(), lease_id=lease_id)
        reply: run_pb2.RenewBatchResponse = await self.persist(lambda: self._call(self._stub.RenewBatch, request))
        return reply.lease_s

    async def release(self, lease_id: str) -> None:
        """Gives a batch back unused."""
        request = run_pb2.ReleaseBatchRequest(**self._holding(), lease_id=lease_id)
        await self.persist(lambda: self._call(self._stub.ReleaseBatch, request))

    async def commit_update(
        self, update: int, lease_id: str, fates: Mapping[str, str | None], *, applied: bool
    ) -> Committed:
        """Commits an update. `fates`: sample id -> why it was left out, None if it was used.

        Raises `Fenced`, `LeaseExpired`, `BeyondBound`, `CommitConflict`.
        """
        request = run_pb2.CommitUpdateRequest(
            **self._holding(),
            update=update,
            lease_ids=[lease_id],
            samples=[_disposed(sample_id, reason) for sample_id, reason in fates.items()],
            outcome=run_pb2.UPDATE_OUTCOME_APPLIED if applied else run_pb2.UPDATE_OUTCOME_SKIPPED,
        )
        reply: run_pb2.CommitUpdateResponse = await self.persist(lambda: self._call(self._stub.CommitUpdate, request))
        head = LedgerHead(position=reply.ledger_position, hash=reply.ledger_hash)
        return Committed(digest=reply.digest, head=head)

    # Checkpoints, versions, progress ----------------------------------------------------------------------------------

    async def report_checkpoint(self, *, update: int, digest: str) -> None:
        """Says that a checkpoint with `update` is durable. Raises `Fenced`, `DigestMismatch`, `UnknownUpdate`."""
        request = run_pb2.ReportCheckpointRequest(**self._holding(), update=update, digest=digest)
        await self.persist(lambda: self._call(self._stub.ReportCheckpoint, request))

    async def publish(self, version: PolicyVersion) -> None:
        """Announces an uploaded version. Raises `Fenced`, `WrongVersion`, `VersionConflict`, `NotUploaded`."""
        request = run_pb2.PublishVersionRequest(
            run=self.where.run, learner=self.where.learner, trainer_epoch=self._epoch, version=_message(version)
        )
        await self.persist(lambda: self._call(self._stub.PublishVersion, request))

    async def publish_weights(
        self,
        version: PolicyVersion,
        built: BuiltManifest,
        *,
        transfer: TransferConfig | None = None,
        attempts_max: int = 3,
    ) -> None:
        """Uploads a version and announces it. Repeatable. Raises `NotUploaded` if the depot keeps losing it, `DiskFull`."""
        for attempt in range(1, attempts_max + 1):
            await self.persist(lambda: self._upload(version, built, transfer))
            try:
                return await self.publish(version)
            except NotUploaded:
                if attempt == attempts_max:
                    raise

    async def _upload(self, version: PolicyVersion, built: BuiltManifest, transfer: TransferConfig | None) -> None:
        await self.find_depot()
        async with self.open_depot() as channel:
            await upload(channel, built, owner=version_owner(version, self.where.run), config=transfer)

    async def watch(self) -> AsyncGenerator[run_pb2.WatchRunResponse]:
        """News of the run until the stream breaks, which raises; no deadline and no retry."""
        call = self._stub.WatchRun(run_pb2.WatchRunRequest(run=self.where.run))
        try:
            with typed_errors():
                async for message in call:
                    yield message
        finally:
            call.cancel()

    async def find_depot(self) -> None:
        """Asks where the depot is now. One that is away is expected back where it was."""
        reply: run_pb2.GetRunResponse = await self._call(self._stub.GetRun, run_pb2.GetRunRequest(run=self.where.run))
        self.weights_address = reply.state.weights_address or self.weights_address

    def open_depot(self) -> grpc.aio.Channel:
        """A channel to the depot, with the run's token."""
        return open_channel(self.weights_address, access=self.where.access)

    async def persist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """`ask()` repeated while nobody answers, within the client's limit."""
        limit_s = max(self._config.retry_s, self._lease_s)
        return await retry(ask, limit_s=limit_s, config=self._config, clock=self._clock)

    async def _call(self, verb: Callable[..., Awaitable[Any]], request: Any, limit_s: float | None = None) -> Any:
        with typed_errors():
            return await verb(request, timeout=limit_s or self._config.call_s)

    def _names(self) -> dict[str, Any]:
        return {"run": self.where.run, "policy": self.where.policy, "learner": self.where.learner}

    def _holding(self) -> dict[str, Any]:
        return {**self._names(), "trainer_epoch": self._epoch}


def _checked(
    message: run_pb2.FetchSamplesResponse, metas: Mapping[str, types_pb2.SampleMeta]
) -> run_pb2.FetchSamplesResponse:
    """The message, or a failure in its place if its episode contradicts the metadata of a leased sample."""
    if message.HasField("failure"):
        return message
    try:
        for sample_id in message.sample_ids:
            if sample_id in metas:
                check_metadata(message.episode, metas[sample_id])
    except MetadataMismatch as error:
        return run_pb2.FetchSamplesResponse(sample_ids=message.sample_ids, failure=encode_failure(error))
    return message


def _disposed(sample_id: str, reason: str | None) -> run_pb2.DisposedSample:
    if reason is None:
        return run_pb2.DisposedSample(sample_id=sample_id, disposition=run_pb2.SAMPLE_DISPOSITION_USED)
    return run_pb2.DisposedSample(sample_id=sample_id, disposition=run_pb2.SAMPLE_DISPOSITION_DROPPED, reason=reason)


def _message(version: PolicyVersion) -> types_pb2.PolicyVersion:
    return types_pb2.PolicyVersion(
        policy=version.policy,
        step=version.step,
        incarnation=version.incarnation,
        weights_digest=version.weights_digest,
    )
