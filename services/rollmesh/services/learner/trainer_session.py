"""One trainer session: from an attach until the session is lost or the run ends.

    restore -> attach -> publish -> [ lease -> fetch -> step -> commit -> compare digests -> checkpoint? -> publish? ] ... -> finish

A publication copies the weights between two updates. Its upload and its announcement run while the next batch is leased, fetched and
trained, and end before the commit of that update, so that at most one publication is open and the weights never run ahead of it.

The order inside an update is fixed, because it ensures that a sample is used at most once:
- The weights step before the commit, so a crash in between leaves the batch in doubt and never counts it twice.
- The digest is compared before anything with this update is made durable.
- The checkpoint precedes publishing, so a published version can be restored or is rolled back under a new incarnation.

A session passes no state to the next one, which begins with the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import asdict

from rollmesh.client import Batch, BatchLease, Run, Trainer
from rollmesh.client.trainer import Attachment, CommitResult
from rollmesh.services.learner.commands import Commands
from rollmesh.services.learner.compute import ComputeThread
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.engine import OpenEngine, Position, Restored, StepResult
from rollmesh.services.learner.fault_points import LearnerFaultPoint
from rollmesh.services.learner.metrics import TOKENS, UPDATES, trained_tokens
from rollmesh.services.learner.metrics_log import MetricsLog
from rollmesh.services.learner.progress import LearnerProgress
from rollmesh.services.learner.publisher import Publisher
from rollmesh.services.learner.source import DecodedBatch, decode_batch
from rollmesh.services.learner.update_trace import COMMIT, TRAIN, UpdateSpans
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import ConfigError, DigestMismatch, PayloadLost, RunEnded, VersionRefused, WrongUpdate
from rollmesh.shared.fault_points import Hook
from rollmesh.shared.retry import Backoff
from rollmesh.shared.telemetry import log_context
from rollmesh.shared.telemetry.metrics import count
from rollmesh.shared.telemetry.tracing import now_ns
from rollmesh.v1 import events_pb2

_log = logging.getLogger(__name__)

DataSnapshot = Callable[[int], Awaitable[bytes]]
"""Returns the data service's state at a ledger position, for the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The components that all sessions of a learner share."""

    config: LearnerConfig
    run: Run
    holder: str
    """Host and process of the learner, for messages of the coordinator."""
    compute: ComputeThread
    commands: Commands
    publisher: Publisher
    metrics: MetricsLog
    progress: LearnerProgress
    clock: Clock
    at: Hook
    open_engine: OpenEngine
    data_snapshot: DataSnapshot | None


async def begin_session(parts: Parts) -> TrainerSession:
    """Restore, attach and publish. The caller continues with `TrainerSession.train`.

    After `Fenced` and similar errors the caller begins a new session; `DigestMismatch`, `UnknownUpdate`, `VersionConflict` are permanent.
    """
    with parts.progress.during("attach"):
        restored = await parts.compute.run(lambda: parts.open_engine(parts.config))
        for damage in restored.passed_by:
            parts.progress.last_error = damage
            _log.error("%s", damage)
        position = restored.position
        trainer = await parts.run.attach(
            last_update=position.update,
            digest=position.digest,
            holder=parts.holder,
            prefetch_bytes_max=parts.config.prefetch_bytes_max,
        )
    attached = trainer.attached
    if attached.next_update != position.update + 1:
        raise WrongUpdate(
            f"attached with update {position.update}, but the coordinator expects {attached.next_update} next"
        )
    session = TrainerSession(parts, restored, trainer)
    await session.publish()  # no batch can be leased before it
    return session


class TrainerSession:
    """The session of one trainer epoch, created by `begin_session`."""

    def __init__(self, parts: Parts, restored: Restored, trainer: Trainer) -> None:
        attached = trainer.attached
        self._parts = parts
        self._trainer = trainer
        self._engine = restored.engine
        self._log = restored.log
        self._incarnation = attached.incarnation
        self._head = restored.position.head
        self._checkpointed = restored.position.update
        self._publish_every = _publish_every(parts.config, attached)
        self.exports = attached.spec.export_groups > 0
        """Whether the run exports its samples. Such a run does not train."""
        self._refused_max = _refused_max(parts.config, attached, self._publish_every)
        self._published: list[str] = []
        """Versions published in this session, by the names that WatchRun uses."""
        self._publication: asyncio.Task[None] | None = None
        """The open publication; its error ends the session."""
        self._num_lost = 0
        self._asked_ns = 0
        """Time of the request for the current batch, on the clock of spans."""
        self._backoff = Backoff(parts.config.retry, parts.clock)
        progress = parts.progress
        progress.num_attached += 1
        progress.update = progress.checkpoint_update = restored.position.update
        progress.incarnation = attached.incarnation
        progress.published_step = -1

    async def train(self) -> None:
        """Make updates until the run ends or a stop is requested; then write the last checkpoint and publish the last version."""
        try:
            while (lease := await self._lease()) is not None:
                with log_context(update=str(lease.update), lease=lease.lease_id):
                    await self._update(lease)
            await self._published_all()
            if self._log.update > self._checkpointed:
                await self._checkpoint()
            if self._log.update > self._parts.progress.published_step:
                await self.publish()
        finally:
            await self._drop_publication()
            # An open batch is in doubt now: the next attach compares the checkpoint with the ledger.
            await self._trainer.close()

    # Publishing -------------------------------------------------------------------------------------------------------

    async def publish(self) -> None:
        """Publish the current weights, and wait until they are announced."""
        try:
            await self._begin_publication()
            await self._published_all()
        finally:
            await self._drop_publication()

    async def _begin_publication(self) -> None:
        """Copy the weights and begin to publish them. `_published_all` waits for the end, and raises its error."""
        parts, trainer = self._parts, self._trainer
        assert self._publication is None, "one publication at a time"
        with parts.progress.during("publish"):
            copy = await parts.publisher.copy(self._engine, trainer.version)
        await parts.at(LearnerFaultPoint.COPIED)

        async def announce() -> None:
            version = await parts.publisher.publish(trainer, copy)
            parts.progress.published_step = version.step
            self._published.append(f"{version.policy}@{version.step}.{version.incarnation}")
            await parts.at(LearnerFaultPoint.PUBLISHED)

        self._publication = asyncio.create_task(announce(), name=f"publish {copy.version}")

    async def _published_all(self) -> None:
        """Wait until the open publication is announced, and raise its error."""
        if self._publication is not None:
            with self._parts.progress.during("publish"):
                await asyncio.wait([self._publication])
            self._check_publication()

    def _check_publication(self) -> None:
        """Raise the error of the publication if it has failed."""
        if self._publication is not None and self._publication.done():
            publication, self._publication = self._publication, None
            publication.result()

    async def _drop_publication(self) -> None:
        """Cancel the open publication at the end of the session; a repetition is harmless."""
        publication, self._publication = self._publication, None
        if publication is not None:
            publication.cancel()
            await asyncio.wait([publication])

    # Leasing ----------------------------------------------------------------------------------------------------------

    async def _lease(self) -> BatchLease | None:
        """Return the next batch, or None once the run has ended or a stop is requested."""
        parts = self._parts
        with parts.progress.during("wait"), contextlib.suppress(RunEnded):
            while not parts.commands.stop.is_set():
                self._check_refused()
                answer = await self._lease_or_stop()
                if isinstance(answer, BatchLease):
                    parts.progress.waiting_for = ""
                    return answer
                parts.progress.waiting_for = answer
        parts.progress.waiting_for = ""
        return None

    async def _lease_or_stop(self) -> BatchLease | str:
        """Request a lease, or cancel the request on a stop. A lease granted meanwhile is in doubt until the next attach, which returns it."""
        parts = self._parts
        self._asked_ns = now_ns()
        asking = asyncio.create_task(self._trainer.lease(wait_s=parts.config.wait_s))
        stopping = asyncio.create_task(parts.commands.stop.wait())
        try:
            while not asking.done() and not stopping.done():
                # Without the publication there may never be a batch, so its failure ends the wait.
                self._check_publication()
                publishing = [] if self._publication is None else [self._publication]
                await asyncio.wait([asking, stopping, *publishing], return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else "stop"
        finally:
            asking.cancel()
            stopping.cancel()
            await asyncio.wait([asking, stopping])

    def _check_refused(self) -> None:
        """Raise `VersionRefused` if the nodes refused more than `quarantined_max` consecutive versions."""
        refused = self._parts.progress.refused
        row = list(itertools.takewhile(lambda name: name in refused, reversed(self._published)))
        if len(row) > self._refused_max:
            raise VersionRefused(
                f"the inference nodes refused the weights {row[0]}, the last of {len(row)} consecutive ones: {refused[row[0]]}; find the "
                "cause in their logs; then remove the newest checkpoint, so that the run rolls back and publishes again, and resume",
                version=row[0],
            )

    # One update -------------------------------------------------------------------------------------------------------

    async def _update(self, lease: BatchLease) -> None:
        parts = self._parts
        await parts.at(LearnerFaultPoint.LEASED)
        with UpdateSpans(lease, self._asked_ns, now_ns()) as trace:
            done = await self._train_and_commit(lease, trace)
        if done is None:
            return
        result, committed, unreadable = done
        self._record(result, committed)
        await parts.at(LearnerFaultPoint.COMMITTED)
        await self._save_and_publish_when_due()
        self._report(result, unreadable)

    async def _train_and_commit(
        self, lease: BatchLease, trace: UpdateSpans
    ) -> tuple[StepResult, CommitResult, Mapping[str, str]] | None:
        """Return the results and the reasons of unreadable samples, or None if the batch was released."""
        parts = self._parts
        batch = await self._fetch(lease)
        if batch is None:
            return None
        with parts.progress.during("decode"):
            decoded = await parts.compute.run(lambda: decode_batch(batch))
        trace.fetched(decoded.traceparents)
        with trace.part(TRAIN):
            result = await self._step(lease, decoded)
        self._trainer.check()
        await parts.at(LearnerFaultPoint.STEPPED)
        await self._published_all()
        dropped = {name: reason for name, reason in result.verdicts if reason is not None}
        with parts.progress.during("commit"), trace.part(COMMIT):
            committed = await self._trainer.commit(
                batch,
                dropped={**dropped, **decoded.unreadable},
                applied=result.applied,
                groups=[events_pb2.TrainedGroup(**asdict(group)) for group in result.groups],
            )
        return result, committed, decoded.unreadable

    async def _fetch(self, lease: BatchLease) -> Batch | None:
        """Fetch the batch. If a payload is lost, release the batch and return None; the next lease omits it."""
        parts = self._parts
        with parts.progress.during("fetch"):
            try:
                batch = await self._trainer.fetch(lease, on_first=lambda: parts.at(LearnerFaultPoint.MID_FETCH))
            except PayloadLost as err:
                self._num_lost += 1
                parts.progress.waiting_for = str(err)
                await self._trainer.release()
                if self._num_lost > parts.config.retry.restarts_max:
                    raise
                await self._backoff.pause()
                return None
        self._num_lost = 0
        self._backoff.reset()
        return batch

    async def _step(self, lease: BatchLease, batch: DecodedBatch) -> StepResult:
        def compute() -> StepResult:
            self._parts.publisher.note_samples(batch.samples)
            return self._engine.update(lease.update, batch.samples, batch.groups)

        with self._parts.progress.during("train"):
            return await self._parts.compute.run(compute)

    def _record(self, result: StepResult, committed: CommitResult) -> None:
        """Append the commit to the trainer's log. Raise `DigestMismatch` if the coordinator's digest differs."""
        outcome = "APPLIED" if result.applied else "SKIPPED"
        digest = self._log.append(result.update, result.used_ids, incarnation=self._incarnation, outcome=outcome)
        if digest != committed.digest:
            raise DigestMismatch(
                f"after update {result.update} the coordinator's digest is {committed.digest[:12]!r}, the trainer's "
                f"{digest[:12]!r}: they disagree on which samples it used; report this, and resume from the newest checkpoint"
            )
        self._head = committed.head
        self._parts.progress.update = result.update
        count(UPDATES, outcome.lower())
        count(TOKENS, amount=trained_tokens(result.metrics))

    async def _save_and_publish_when_due(self) -> None:
        update, parts = self._log.update, self._parts
        asked = parts.commands.take_checkpoint()
        if asked or update - self._checkpointed >= parts.config.checkpoint_every:
            await self._checkpoint()
        if update - parts.progress.published_step >= self._publish_every:
            await self._begin_publication()

    async def _checkpoint(self) -> None:
        parts, update = self._parts, self._log.update
        position = Position(
            update=update,
            policy=parts.run.policy,
            incarnation=self._incarnation,
            digest=self._log.digest,
            head=self._head,
        )
        with parts.progress.during("checkpoint"):
            snapshot = await self._data_snapshot()
            await parts.compute.run(lambda: self._engine.save(self._log, position, data_snapshot=snapshot))
            await parts.at(LearnerFaultPoint.MID_CHECKPOINT)
            await self._trainer.report_checkpoint()
        self._checkpointed = parts.progress.checkpoint_update = update
        await parts.at(LearnerFaultPoint.CHECKPOINTED)

    async def _data_snapshot(self) -> bytes:
        take, position = self._parts.data_snapshot, self._head.position
        return b"" if take is None else await self._parts.run.retry(lambda: take(position))

    def _report(self, result: StepResult, unreadable: Mapping[str, str]) -> None:
        parts = self._parts
        dropped: dict[str, float] = {}
        for reason in (*(reason for _, reason in result.verdicts), *unreadable.values()):
            if reason is not None:
                dropped[f"dropped/{reason}"] = dropped.get(f"dropped/{reason}", 0.0) + 1.0
        parts.progress.metrics = {**result.metrics, **dropped}
        parts.metrics.append(
            update=result.update,
            incarnation=self._incarnation,
            outcome="APPLIED" if result.applied else "SKIPPED",
            time_unix_s=parts.clock.wall_s(),
            metrics=parts.progress.metrics,
            seconds=parts.progress.seconds,
        )


def _refused_max(config: LearnerConfig, attached: Attachment, publish_every: int) -> int:
    """Return the limit of consecutive refusals. Beyond it the served weights are too old for the next update, which would never start."""
    return min(config.quarantined_max, attached.spec.max_staleness // publish_every)


def _publish_every(config: LearnerConfig, attached: Attachment) -> int:
    """Return the interval in updates. Raise `ConfigError` if a batch could wait for weights that are never published."""
    every = config.publish.publish_every or max(1, attached.spec.publish_every)
    limit = attached.spec.max_staleness + 1
    if every > limit:
        raise ConfigError(
            f"`publish_every` must be <= max_staleness + 1 = {limit}, got {every}; otherwise the run waits for unpublished weights"
        )
    return every
