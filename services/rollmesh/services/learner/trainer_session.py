"""One trainer session: from an attach until the session is lost or the run ends.

    restore -> attach -> publish -> [ lease -> fetch -> step -> commit -> compare digests -> checkpoint? -> publish? ]
    ... -> finish

A publication copies and uploads the weights while their update is committed. It is announced after the commit, and
after a checkpoint that is due. What is not done then runs while the next batch is leased, fetched and trained, and ends
before the commit of that update, so that at most one publication is open and the weights never run ahead of it.

The order inside an update is fixed, because it ensures that a sample is used at most once:
- The weights step before the commit, so a crash in between leaves the batch in doubt and never counts it twice.
- The digest is compared before anything with this update is made durable.
- The checkpoint precedes publishing, so a published version can be restored or is rolled back under a new incarnation.

With `checkpoint_async`, the place of the checkpoint in this order is a copy in memory, which is written while the next
batches are leased and trained. At most one copy exists. A version may then be published before its checkpoint is
durable; a crash rolls it back.

A session passes no state to the next one, which begins with the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

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
from rollmesh.services.learner.publisher import Publisher, WeightsCopy
from rollmesh.services.learner.source import DecodedBatch, decode_batch
from rollmesh.services.learner.update_trace import COMMIT, TRAIN, UpdateSpans
from rollmesh.shared.clock import Clock
from rollmesh.shared.codec.trajectory import encode_trained_group
from rollmesh.shared.domain.sources import EXTERNAL_SOURCES
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import ConfigError, DigestMismatch, PayloadLost, RunEnded, VersionRefused, WrongUpdate
from rollmesh.shared.net.retry import Backoff
from rollmesh.shared.process.fault_points import Hook
from rollmesh.shared.telemetry import log_context
from rollmesh.shared.telemetry.metrics import count
from rollmesh.shared.telemetry.tracing import now_ns
from rollmesh.trainer.checkpoint_files import TRAINED_NAME

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
    saving: ComputeThread
    """Writes the copies of checkpoints, so that `compute` is free for the next update."""
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

    After `Fenced` and similar errors the caller begins a new session; `DigestMismatch`, `UnknownUpdate`,
    `VersionConflict` are permanent.
    """
    async with contextlib.AsyncExitStack() as on_error:
        with parts.progress.during("attach"):
            restored = await _open(parts, parts.config)
            position = restored.position
            trainer = await parts.run.attach(
                last_update=position.update,
                digest=position.digest,
                holder=parts.holder,
                prefetch_bytes_max=parts.config.prefetch_bytes_max,
            )
            on_error.push_async_callback(trainer.close)
            admitted = tuple(name for name in EXTERNAL_SOURCES if name in trainer.attached.spec.external_sources)
            if set(admitted) != set(parts.config.external_sources):  # changed since this process read its configuration
                # This frees the memory of its model. It is not closed, because the next one uses the ranks of torchrun.
                del restored
                restored = await _open(parts, structs.replace(parts.config, external_sources=admitted))
        attached, opened = trainer.attached, restored.position.update
        if attached.next_update != opened + 1:
            raise WrongUpdate(
                f"attached with update {position.update}, but the trainer was opened at update {opened} and the "
                f"coordinator expects {attached.next_update} next; attach again from the newest checkpoint"
            )
        session = TrainerSession(parts, restored, trainer)
        await session.publish()  # no batch can be leased before it
        on_error.pop_all()
        return session


async def _open(parts: Parts, config: LearnerConfig) -> Restored:
    """Open the trainer, and report the checkpoints that it passed by."""
    restored = await parts.compute.run(lambda: parts.open_engine(config))
    for damage in restored.passed_by:
        parts.progress.last_error = damage
        _log.error("%s", damage)
    return restored


@dataclass(frozen=True, slots=True)
class _Publication:
    """A version that is being copied, uploaded and announced."""

    copying: asyncio.Task[WeightsCopy]
    task: asyncio.Task[None]
    may_announce: asyncio.Event
    """Set when the update of the version is committed, and its checkpoint, if one is due, is durable."""


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
        self._publication: _Publication | None = None
        """The open publication; its error ends the session."""
        self._saving: asyncio.Task[None] | None = None
        """Reports the copy of a checkpoint once it is written; its error ends the session."""
        self._writing: asyncio.Task[Path] | None = None
        """Writes that copy. The end of the session waits for it."""
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
        """Make updates until the run ends or a stop is requested; then write the last checkpoint and publish the last
        version."""
        try:
            while (lease := await self._lease()) is not None:
                with log_context(update=str(lease.update), lease=lease.lease_id):
                    await self._update(lease)
            await self._published_all()
            if self._log.update > self._checkpointed:
                await self._checkpoint()
            await self._saved()
            if self._log.update > self._parts.progress.published_step:
                await self.publish()
            await self._parts.compute.run(self._engine.close)
        finally:
            await self._drop_publication()
            await self._drop_saving()
            # An open batch is in doubt now: the next attach compares the checkpoint with the ledger.
            await self._trainer.close()

    # Publishing -------------------------------------------------------------------------------------------------------

    async def publish(self) -> None:
        """Publish the current weights, and wait until they are announced."""
        try:
            self._start_publication(self._trainer.version)
            await self._announce()
            await self._published_all()
        finally:
            await self._drop_publication()

    def _start_publication(self, version: PolicyVersion) -> None:
        """Begin to copy and to upload the current weights, which are `version`. `_announce` lets them be announced."""
        parts, trainer = self._parts, self._trainer
        assert self._publication is None, "one publication at a time"
        copying = asyncio.create_task(parts.publisher.copy(self._engine, version), name=f"copy {version}")
        may_announce = asyncio.Event()

        async def publish() -> None:
            published = await parts.publisher.publish(trainer, copying, may_announce)
            parts.progress.published_step = published.step
            self._published.append(f"{published.policy}@{published.step}.{published.incarnation}")
            await parts.at(LearnerFaultPoint.PUBLISHED)

        self._publication = _Publication(
            copying, asyncio.create_task(publish(), name=f"publish {version}"), may_announce
        )

    async def _announce(self) -> None:
        """Wait for the copy of the open publication, and let it be announced. `_published_all` waits for that. Raise an
        error of the copy."""
        publication = self._publication
        assert publication is not None, "not started"
        with self._parts.progress.during("publish"):
            await asyncio.wait([publication.copying])
        publication.copying.result()
        await self._parts.at(LearnerFaultPoint.COPIED)
        publication.may_announce.set()

    async def _published_all(self) -> None:
        """Wait until the open publication is announced, and raise its error."""
        if self._publication is not None:
            with self._parts.progress.during("publish"):
                await asyncio.wait([self._publication.task])
            self._check_publication()

    def _check_publication(self) -> None:
        """Raise the error of the publication if it has failed."""
        if self._publication is not None and self._publication.task.done():
            publication, self._publication = self._publication, None
            publication.task.result()

    async def _drop_publication(self) -> None:
        """Cancel the open publication at the end of the session; a repetition is harmless."""
        publication, self._publication = self._publication, None
        if publication is not None:
            for task in (publication.task, publication.copying):
                task.cancel()
            await asyncio.gather(publication.task, publication.copying, return_exceptions=True)

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
        """Request a lease, or cancel the request on a stop. A lease granted meanwhile is in doubt until the next
        attach, which returns it."""
        parts = self._parts
        self._asked_ns = now_ns()
        asking = asyncio.create_task(self._trainer.lease(wait_s=parts.config.wait_s))
        stopping = asyncio.create_task(parts.commands.stop.wait())
        try:
            while not asking.done() and not stopping.done():
                # Without the publication there may never be a batch, so its failure ends the wait.
                self._check_publication()
                self._check_saving()
                publishing = None if self._publication is None else self._publication.task
                background = [task for task in (publishing, self._saving) if task is not None]
                await asyncio.wait([asking, stopping, *background], return_when=asyncio.FIRST_COMPLETED)
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
                f"the inference nodes refused the weights {row[0]}, the last of {len(row)} consecutive ones: "
                f"{refused[row[0]]}; find the cause in their logs; then remove the newest checkpoint, so that the run "
                "rolls back and publishes again, and resume",
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
        self._report(result, unreadable)  # before the checkpoint, after which no restart repeats the update
        await self._save_and_publish_when_due()

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
        self._check_saving()
        await parts.at(LearnerFaultPoint.STEPPED)
        await self._published_all()
        if lease.update - parts.progress.published_step >= self._publish_every:
            self._start_publication(structs.replace(self._trainer.version, step=lease.update))
        dropped = {name: reason for name, reason in result.verdicts if reason is not None}
        with parts.progress.during("commit"), trace.part(COMMIT):
            committed = await self._trainer.commit(
                batch,
                dropped={**dropped, **decoded.unreadable},
                applied=result.applied,
                groups=[encode_trained_group(group) for group in result.groups],
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
                f"after update {result.update} the coordinator's digest is {committed.digest!r}, the trainer's "
                f"{digest!r}: they disagree on which samples it used; report this, and resume from the newest "
                "checkpoint"
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
        if self._publication is not None:
            await self._announce()

    async def _checkpoint(self) -> None:
        parts, update = self._parts, self._log.update
        position = Position(
            update=update,
            policy=parts.run.policy,
            incarnation=self._incarnation,
            digest=self._log.digest,
            head=self._head,
        )
        await self._saved()
        with parts.progress.during("checkpoint"):
            snapshot = await self._data_snapshot()
            if parts.config.checkpoint_async:
                write = await parts.compute.run(
                    lambda: self._engine.copy_to_save(self._log, position, data_snapshot=snapshot)
                )
                self._writing = asyncio.create_task(parts.saving.run(write), name=f"write checkpoint {update}")
                self._saving = asyncio.create_task(
                    self._report_written(self._writing, position), name=f"report checkpoint {update}"
                )
            else:
                await parts.compute.run(lambda: self._engine.save(self._log, position, data_snapshot=snapshot))
                await self._report_durable(position)
        self._checkpointed = update

    async def _report_written(self, writing: asyncio.Task[Path], position: Position) -> None:
        """Wait until the copy of a checkpoint is written, and report it."""
        folder = await asyncio.shield(writing)
        self._log.rebase(folder / TRAINED_NAME, position.update)
        await self._report_durable(position)

    async def _report_durable(self, position: Position) -> None:
        parts = self._parts
        await parts.at(LearnerFaultPoint.MID_CHECKPOINT)
        await self._trainer.report_checkpoint(position.update, position.digest)
        parts.progress.checkpoint_update = position.update
        await parts.at(LearnerFaultPoint.CHECKPOINTED)

    async def _saved(self) -> None:
        """Wait until the copy of a checkpoint is written and reported, and raise its error."""
        if self._saving is not None:
            with self._parts.progress.during("checkpoint"):
                await asyncio.wait([self._saving])
            self._check_saving()

    def _check_saving(self) -> None:
        """Raise the error of the copy of a checkpoint if it could not be written or reported."""
        if self._saving is not None and self._saving.done():
            saving, self._saving = self._saving, None
            saving.result()

    async def _drop_saving(self) -> None:
        """At the end of the session, wait until the copy of a checkpoint is written, because the next session reads the
        folder. A report that is missing is harmless, because the next attach reports the checkpoint. An error is
        logged: the session has ended with another one, and the next session begins with an older checkpoint."""
        saving, self._saving = self._saving, None
        if saving is None or self._writing is None:
            return
        saving.cancel()
        await asyncio.wait([saving, self._writing])
        error = self._writing.exception() or (None if saving.cancelled() else saving.exception())
        if error is not None:
            _log.error("a checkpoint could not be written or reported: %s", error)

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
    """Return the limit of consecutive refusals. Beyond it the served weights are too old for the next update, which
    would never start."""
    return min(config.quarantined_max, attached.spec.max_staleness // publish_every)


def _publish_every(config: LearnerConfig, attached: Attachment) -> int:
    """Return the interval in updates. Raise `ConfigError` if a batch could wait for weights that are never
    published."""
    every = config.publish.publish_every or max(1, attached.spec.publish_every)
    limit = attached.spec.max_staleness + 1
    if every > limit:
        raise ConfigError(
            f"`publish_every` must be <= max_staleness + 1 = {limit}, got {every}; otherwise the run waits for "
            "unpublished weights"
        )
    return every
