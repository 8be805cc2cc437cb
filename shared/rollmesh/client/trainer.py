"""`Trainer`: the session of one trainer in a run, from its attach until another trainer attaches.

The caller decides the order of calls (docs/trainers.md). The session keeps one lease at a time, renews it in the
background until it is committed, released or lost, and releases it when the caller leaves a batch without a commit.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from rollmesh.client.batch import Batch, BatchAssembler, BatchLease
from rollmesh.client.calls import RunCalls
from rollmesh.client.local_payloads import add_local
from rollmesh.client.prefetch import Prefetch
from rollmesh.client.renewal import Renewal
from rollmesh.client.tensors import Array, write_safetensors
from rollmesh.shared.domain.ledger_head import EMPTY, LedgerHead
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import FailedPrecondition, MeshError, NotUploaded, RunEnded, WeightsRejected
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.store.payload_files import PayloadFiles
from rollmesh.shared.weights.finite import first_not_finite
from rollmesh.shared.weights.manifest import BuiltManifest, build_manifest, version_owner
from rollmesh.shared.weights.transfer import TransferConfig, upload
from rollmesh.v1 import events_pb2, run_pb2, types_pb2, weights_pb2

WAIT_S = 20.0
WEIGHTS_NAME = "model.safetensors"


class NoBatch(FailedPrecondition):
    """There is no leased batch to commit or release."""

    reason = "NO_BATCH"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """The reply to an attach; see AttachTrainerResponse."""

    trainer_epoch: int
    next_update: int
    incarnation: int
    resolution: str
    """CONTINUED, ROLLED_FORWARD or ROLLED_BACK."""
    lease_s: float
    spec: events_pb2.RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    """Digest after the update, and the head of the ledger that contains its commit: store both in the checkpoint."""

    digest: str
    head: LedgerHead


class Trainer:
    """A trainer session, created by `Run.attach`. Use it as an async context, in one task."""

    def __init__(
        self, run: RunCalls, attached: Attachment, *, digest: str, depot: str, prefetch_bytes_max: int = 0
    ) -> None:
        self.attached = attached
        """Epoch, incarnation, resolution of samples in doubt, spec of the run."""
        self.update = attached.next_update - 1
        """Last committed update."""
        self.digest = digest
        """Commit digest after it."""
        self.head = EMPTY
        """Head of the ledger at the last commit of this trainer; store it beside the digest, for `rollmesh audit
        --head`."""
        self._run = run
        self._gateway = run.gateway
        self._depot = depot
        self._depot_channel: grpc.aio.Channel | None = None
        """The connection for uploads, open from the first one."""
        self._lease_id = ""
        self._renewal: Renewal | None = None
        self._files: PayloadFiles | None = None
        if self._gateway.payloads is not None:
            self._files = PayloadFiles(self._gateway.payloads / run.name)
            prefetch_bytes_max = 0  # reading the files of this host costs less than loading them ahead from the gateway
        self._prefetch = Prefetch(run, trainer_epoch=attached.trainer_epoch, bytes_max=prefetch_bytes_max)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with suppress(MeshError):  # a lease that cannot be released is in doubt until the next attach
                if self._lease_id:
                    await self.release()
        finally:
            await self.close()

    # Batches ----------------------------------------------------------------------------------------------------------

    async def batches(self, *, on_wait: Callable[[str], None] | None = None) -> AsyncGenerator[Batch]:
        """Yield the batch of one update after the other, until the run ends. `on_wait` gets the reason of a wait.

        Commit or release a batch before the next; an open one is released. Raises `Fenced`, `LeaseExpired`.
        """
        with suppress(RunEnded):
            while True:
                if (batch := await self.batch(wait_s=WAIT_S, on_wait=on_wait)) is not None:
                    yield batch

    async def batch(
        self,
        *,
        wait_s: float = WAIT_S,
        on_wait: Callable[[str], None] | None = None,
        geometry: run_pb2.BatchGeometry | None = None,
    ) -> Batch | None:
        """Lease and fetch the next update's batch, or return None after `wait_s` seconds (at most 60). Raises like
        `lease` and `fetch`."""
        lease = await self.lease(wait_s=wait_s, geometry=geometry)
        if isinstance(lease, BatchLease):
            return await self.fetch(lease)
        if on_wait is not None:
            on_wait(lease)
        return None

    async def lease(self, *, wait_s: float, geometry: run_pb2.BatchGeometry | None = None) -> BatchLease | str:
        """Lease the next update's batch, or return what it waits for after `wait_s` seconds (at most 60).

        Raises `RunEnded`, `Fenced`, `LeaseExpired`, `NotPublished`.
        """
        if self._lease_id:
            await self.release()
        self._prefetch.start()
        update, limit_s = self.update + 1, wait_s + self._gateway.config.call_s
        request = run_pb2.LeaseBatchRequest(**self._holding(), update=update, wait_s=wait_s, geometry=geometry)
        reply: run_pb2.LeaseBatchResponse = await self._run.ask("LeaseBatch", request, limit_s)
        if not reply.lease_id:
            return reply.waiting_for or "a batch"
        self._lease_id = reply.lease_id
        self._renewal = Renewal(self._renew, reply.lease_id, lease_s=reply.lease_s, clock=self._gateway.clock)
        await self._renewal.__aenter__()
        return BatchLease(
            update=update, lease_id=reply.lease_id, samples=list(reply.samples), groups=list(reply.groups)
        )

    @property
    def num_ahead(self) -> int:
        """Number of payloads that have arrived ahead of their lease."""
        return len(self._prefetch)

    async def fetch(self, lease: BatchLease, *, on_first: Callable[[], Awaitable[None]] | None = None) -> Batch:
        """Fetch the episodes of a lease. `on_first` is awaited when the first has arrived. Raises `PayloadLost`,
        `UnknownLease`."""
        ahead = self._prefetch.take([sample.meta.sample_id for sample in lease.samples])
        if ahead and on_first is not None:
            await on_first()

        async def receive() -> Batch:
            batch = BatchAssembler(lease)
            for loaded in ahead:
                batch.add_ahead(loaded)
            if self._files is not None:
                await asyncio.to_thread(add_local, batch, lease, self._files)
            missing = batch.missing()
            num = len(lease.samples) - len(missing)
            if num and not ahead and on_first is not None:
                await on_first()
            if missing:
                request = run_pb2.FetchSamplesRequest(
                    run=self._run.name,
                    trainer_epoch=self.attached.trainer_epoch,
                    lease_id=lease.lease_id,
                    num_shards=1,
                    sample_ids=missing if num else (),
                )
                stream = self._gateway.stream("FetchSamples", request, self._gateway.config.fetch_s)
                async with aclosing(stream) as episodes:
                    async for message in episodes:
                        batch.add(message)
                        num += 1
                        if num == 1 and on_first is not None:
                            await on_first()
            return batch.finish()

        return await self._run.retry(receive)

    async def commit(
        self,
        batch: Batch,
        *,
        dropped: Mapping[str, str] | None = None,
        applied: bool = True,
        groups: Sequence[events_pb2.TrainedGroup] = (),
    ) -> CommitResult:
        """Commit the update of the batch. `dropped` gives the reason for each unused sample; `applied=False` means
        unchanged weights. `groups` are measurements on groups of the batch, which the selector of the run may read.

        Store digest and head in the checkpoint. Raises `LeaseExpired`, `UnknownLease`, `Fenced`, `BeyondBound`,
        `CommitConflict`: the update does not count then; return to the checkpoint and attach again.
        """
        self._check_open(batch.lease_id)
        used: dict[str, str | None] = {sample.sample_id: None for sample in batch.samples}
        request = run_pb2.CommitUpdateRequest(
            **self._holding(),
            update=batch.update,
            lease_ids=[batch.lease_id],
            samples=disposed_samples({**used, **batch.unreadable, **(dropped or {})}),
            outcome=outcome_of(applied),
            groups=groups,
        )
        reply: run_pb2.CommitUpdateResponse = await self._run.ask("CommitUpdate", request)
        await self.abandon()
        self.update, self.digest = batch.update, reply.digest
        self.head = LedgerHead(position=reply.ledger_position, hash=reply.ledger_hash)
        return CommitResult(digest=self.digest, head=self.head)

    async def release(self) -> None:
        """Release the open batch unused."""
        lease_id = self._lease_id
        self._check_open(lease_id)
        await self.abandon()
        await self._run.ask("ReleaseBatch", run_pb2.ReleaseBatchRequest(**self._holding(), lease_id=lease_id))

    async def abandon(self) -> None:
        """Stop renewing the open batch without a release, as a crash does: its samples are in doubt until the next
        attach."""
        self._lease_id = ""
        renewal, self._renewal = self._renewal, None
        if renewal is not None:
            await renewal.__aexit__(None, None, None)

    async def close(self) -> None:
        """End the session as a crash does: `abandon`, and load nothing ahead of its lease."""
        await self.abandon()
        await self._leave_depot()
        await self._prefetch.close()

    def check(self) -> None:
        """Raise the cause if the lease of the open batch is lost, so that a long update can stop early."""
        if self._renewal is not None:
            self._renewal.check()

    def _check_open(self, lease_id: str) -> None:
        if not self._lease_id or lease_id != self._lease_id:
            raise NoBatch(f"batch {lease_id or '(none)'} is not open; commit the last one that `batches` yielded")

    async def _renew(self, lease_id: str) -> float:
        """Return the seconds until the lease expires now. Raises `UnknownLease`, `Fenced`, `LeaseExpired`."""
        request = run_pb2.RenewBatchRequest(**self._holding(), lease_id=lease_id)
        reply: run_pb2.RenewBatchResponse = await self._run.ask("RenewBatch", request)
        return reply.lease_s

    # Checkpoints and weights ------------------------------------------------------------------------------------------

    @property
    def version(self) -> PolicyVersion:
        """The version of the weights after the last committed update, without digest."""
        return PolicyVersion(policy=self._run.policy, step=self.update, incarnation=self.attached.incarnation)

    async def report_checkpoint(self, update: int | None = None, digest: str | None = None) -> None:
        """Report that a checkpoint with an update and the digest after it is durable. By default it is the last
        committed update.

        Raises `Fenced`, `DigestMismatch`, `UnknownUpdate`.
        """
        request = run_pb2.ReportCheckpointRequest(
            **self._holding(),
            update=self.update if update is None else update,
            digest=self.digest if digest is None else digest,
        )
        await self._run.ask("ReportCheckpoint", request)

    async def publish(
        self, weights: Mapping[str, Array] | Path, *, probes: tuple[weights_pb2.WeightProbe, ...] = ()
    ) -> PolicyVersion:
        """Upload the weights after the last committed update and announce them. Repeatable.

        `weights` are tensors by name, as `Tensor` or numpy array, or a safetensors file. Raises like
        `publish_manifest`, and `WeightsRejected` for a tensor with a value that is NaN or infinite, before anything is
        sent.
        """
        with tempfile.TemporaryDirectory(prefix="rollmesh-") as folder:
            path = Path(folder) / WEIGHTS_NAME
            if isinstance(weights, Path):
                path = weights
            else:
                await asyncio.to_thread(write_safetensors, weights, path)
            if name := await asyncio.to_thread(first_not_finite, path):
                raise WeightsRejected(
                    f"tensor {name} of {self.version} has a value that is NaN or infinite, so nothing was sent; return "
                    "to a checkpoint, lower the learning rate, and attach again",
                    version=self.version,
                )
            built = await asyncio.to_thread(build_manifest, {WEIGHTS_NAME: path}, probes=probes)
            return await self.publish_manifest(built)

    async def publish_manifest(
        self,
        built: BuiltManifest,
        *,
        version: PolicyVersion | None = None,
        transfer: TransferConfig | None = None,
        attempts_max: int = 3,
        before_announcement: asyncio.Future[None] | None = None,
    ) -> PolicyVersion:
        """Upload the weights in `built` and announce them, when `before_announcement` is done too. Repeatable.

        `version` (default: the one after the last committed update) may belong to an update whose commit
        `before_announcement` waits for.

        Raises `Fenced`, `WrongVersion`, `VersionConflict`, `DiskFull`; `NotUploaded` if the depot loses them
        `attempts_max` times.
        """
        now = version or self.version
        announced = types_pb2.PolicyVersion(
            policy=now.policy, step=now.step, incarnation=now.incarnation, weights_digest=built.weights_digest
        )
        request = run_pb2.PublishVersionRequest(
            run=self._run.name,
            learner=self._run.learner,
            trainer_epoch=self.attached.trainer_epoch,
            version=announced,
        )
        for attempt in range(1, attempts_max + 1):
            await self._run.retry(lambda: self._upload(now, built, transfer))
            if before_announcement is not None:
                await before_announcement
            try:
                await self._run.ask("PublishVersion", request)
                break
            except NotUploaded:
                if attempt == attempts_max:
                    raise
        return PolicyVersion(
            policy=now.policy, step=now.step, incarnation=now.incarnation, weights_digest=built.weights_digest
        )

    async def _upload(self, version: PolicyVersion, built: BuiltManifest, transfer: TransferConfig | None) -> None:
        try:
            await self._upload_once(version, built, transfer)
        except MeshError:
            # The depot may have moved. Until it reconnects to the coordinator, its last address is used.
            depot = (await self._run.state_now()).weights_address
            if depot in ("", self._depot):
                raise
            await self._leave_depot()
            self._depot = depot
            await self._upload_once(version, built, transfer)

    async def _upload_once(self, version: PolicyVersion, built: BuiltManifest, transfer: TransferConfig | None) -> None:
        if self._depot_channel is None:
            self._depot_channel = open_channel(self._depot, access=self._gateway.access)
        await upload(self._depot_channel, built, owner=version_owner(version, self._run.name), config=transfer)

    async def _leave_depot(self) -> None:
        channel, self._depot_channel = self._depot_channel, None
        if channel is not None:
            await channel.close(None)

    def _holding(self) -> dict[str, Any]:
        return {**self._run.names(), "trainer_epoch": self.attached.trainer_epoch}


def disposed_samples(dispositions: Mapping[str, str | None]) -> list[run_pb2.DisposedSample]:
    """Encode sample id -> reason for dropping it, or None for a sample that was used."""
    used, dropped = run_pb2.SAMPLE_DISPOSITION_USED, run_pb2.SAMPLE_DISPOSITION_DROPPED
    return [
        run_pb2.DisposedSample(sample_id=name, disposition=used if reason is None else dropped, reason=reason or "")
        for name, reason in dispositions.items()
    ]


def outcome_of(applied: bool) -> run_pb2.UpdateOutcome.ValueType:
    return run_pb2.UPDATE_OUTCOME_APPLIED if applied else run_pb2.UPDATE_OUTCOME_SKIPPED
