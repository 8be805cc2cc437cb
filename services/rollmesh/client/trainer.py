"""One trainer's place in a run, from its attach until another takes it.

The order of calls is the caller's (docs/trainers.md); what it must not forget is done here: one lease at a time, renewed in the
background until it is committed, released or lost, and given back when the caller leaves a batch without committing it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from rollmesh.client.batch import Batch, BatchSample
from rollmesh.client.tensors import Array, write_safetensors
from rollmesh.shared.clients.renewal import Renewal
from rollmesh.shared.clients.trainer import Attached, Committed, TrainerClient
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import FailedPrecondition, MeshError, PayloadLost, RunEnded
from rollmesh.shared.ledger_head import EMPTY
from rollmesh.shared.versions import PolicyVersion
from rollmesh.shared.weights.manifest import build_manifest
from rollmesh.v1 import run_pb2, weights_pb2

WAIT_S = 20.0
WEIGHTS_NAME = "model.safetensors"


class NoBatch(FailedPrecondition):
    """There is no leased batch to commit or release."""

    reason = "NO_BATCH"


class Trainer:
    """Made by `Run.attach`; an async context. Used by one task."""

    def __init__(self, verbs: TrainerClient, attached: Attached, *, digest: str, clock: Clock) -> None:
        self.attached = attached
        """Epoch, incarnation, how the past was resolved, the run's spec."""
        self.update = attached.next_update - 1
        """Last committed update."""
        self.digest = digest
        """Commit digest after it."""
        self.head = EMPTY
        """Head of the ledger at the last commit of this trainer; store it beside the digest, for `rollmesh audit --head`."""
        self._verbs = verbs
        self._clock = clock
        self._lease_id = ""
        self._renewal: Renewal | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with suppress(
                MeshError
            ):  # a lease that is not given back is in doubt until the next attach, which returns it
                if self._lease_id:
                    await self.release()
        finally:
            await self._end_renewal()
            await self._verbs.__aexit__(kind, err, trace)

    # Batches ----------------------------------------------------------------------------------------------------------

    async def batches(self, *, on_wait: Callable[[str], None] | None = None) -> AsyncGenerator[Batch]:
        """The batch of one update after the other, until the run ends. `on_wait` is told what a batch waits for.

        Commit or release a batch before asking for the next; one left open is released. Raises `Fenced`, `LeaseExpired`.
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
        """The next update's batch, or None after `wait_s` seconds (at most 60). Raises `RunEnded`, `Fenced`, `LeaseExpired`."""
        if self._lease_id:
            await self.release()
        reply = await self._verbs.ask_batch(self.update + 1, wait_s=wait_s, geometry=geometry)
        if not reply.lease_id:
            if on_wait is not None:
                on_wait(reply.waiting_for)
            return None
        self._lease_id = reply.lease_id
        self._renewal = Renewal(self._verbs.renew, reply.lease_id, lease_s=reply.lease_s, clock=self._clock)
        await self._renewal.__aenter__()
        return await self._fetch(reply)

    async def _fetch(self, lease: run_pb2.LeaseBatchResponse) -> Batch:
        found: dict[str, BatchSample] = {}
        unreadable: dict[str, str] = {}

        async def receive() -> None:
            leased = {sample.meta.sample_id: sample for sample in lease.samples}
            async with aclosing(self._verbs.episodes(lease.lease_id, lease.samples)) as episodes:
                async for message in episodes:
                    if message.HasField("failure"):
                        unreadable.update(dict.fromkeys(message.sample_ids, message.failure.reason))
                        continue
                    found.update({name: BatchSample(leased[name], message.episode) for name in message.sample_ids})

        await self._verbs.persist(receive)
        names = [sample.meta.sample_id for sample in lease.samples]
        if missing := [name for name in names if name not in found and name not in unreadable]:
            raise PayloadLost(
                f"{len(missing)} leased samples did not arrive, first {missing[0]}; release and lease again"
            )
        return Batch(
            update=self.update + 1,
            lease_id=lease.lease_id,
            samples=[found[name] for name in names if name in found],
            unreadable=unreadable,
            groups=list(lease.groups),
        )

    async def commit(
        self, batch: Batch, *, dropped: Mapping[str, str] | None = None, applied: bool = True
    ) -> Committed:
        """Commits the batch's update; `dropped` says why samples were left out, `applied=False` that no weight changed.

        Keep digest and head in the checkpoint. Raises `LeaseExpired`, `UnknownLease`, `Fenced`, `BeyondBound`, `CommitConflict`: the update
        does not count then, go back to the checkpoint and attach again.
        """
        self._check_open(batch.lease_id)
        fates: dict[str, str | None] = {sample.sample_id: None for sample in batch.samples}
        fates |= batch.unreadable
        fates |= dict(dropped or {})
        committed = await self._verbs.commit_update(batch.update, batch.lease_id, fates, applied=applied)
        self._lease_id = ""
        await self._end_renewal()
        self.update, self.digest, self.head = batch.update, committed.digest, committed.head
        return committed

    async def release(self) -> None:
        """Gives the open batch back unused."""
        self._check_open(self._lease_id)
        lease_id, self._lease_id = self._lease_id, ""
        await self._end_renewal()
        await self._verbs.release(lease_id)

    def check(self) -> None:
        """Raises why the open batch is lost, if it is: a long update need not be finished then."""
        if self._renewal is not None:
            self._renewal.check()

    def _check_open(self, lease_id: str) -> None:
        if not self._lease_id or lease_id != self._lease_id:
            raise NoBatch(f"batch {lease_id or '(none)'} is not open; commit what `batches` gave last")

    async def _end_renewal(self) -> None:
        renewal, self._renewal = self._renewal, None
        if renewal is not None:
            await renewal.__aexit__(None, None, None)

    # Checkpoints and weights ------------------------------------------------------------------------------------------

    async def report_checkpoint(self) -> None:
        """Says that a checkpoint with the last committed update and its digest is durable."""
        await self._verbs.report_checkpoint(update=self.update, digest=self.digest)

    async def publish(
        self, weights: Mapping[str, Array] | Path, *, probes: tuple[weights_pb2.WeightProbe, ...] = ()
    ) -> PolicyVersion:
        """Uploads the weights after the last committed update, and announces them. Repeatable.

        `weights` are tensors by name, as `Tensor` or numpy array, or a safetensors file. Raises `Fenced`, `WrongVersion`,
        `VersionConflict`, `DiskFull`.
        """
        with tempfile.TemporaryDirectory(prefix="rollmesh-") as folder:
            path = Path(folder) / WEIGHTS_NAME
            if isinstance(weights, Path):
                path = weights
            else:
                await asyncio.to_thread(write_safetensors, weights, path)
            built = await asyncio.to_thread(build_manifest, {WEIGHTS_NAME: path}, probes=probes)
            version = PolicyVersion(
                policy=self._verbs.where.policy,
                step=self.update,
                incarnation=self.attached.incarnation,
                weights_digest=built.weights_digest,
            )
            await self._verbs.publish_weights(version, built)
        return version
