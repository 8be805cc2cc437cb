"""A learner's view of its run: batches as domain types, commits from the trainer's results. The verbs are `shared.clients.trainer`'s."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from rollmesh.services.learner.engine import StepResult
from rollmesh.services.learner.source import BatchAssembler, Fetched
from rollmesh.shared.clients.trainer import Committed, TrainerClient
from rollmesh.shared.codec.trajectory import decode_group_context
from rollmesh.shared.telemetry.tracing import now_ns
from rollmesh.shared.trajectory import GroupContext
from rollmesh.v1 import run_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLease:
    """The batch of one update."""

    lease_id: str
    update: int
    samples: Sequence[run_pb2.LeasedSample]
    groups: tuple[GroupContext, ...]
    lease_s: float
    asked_ns: int = 0
    leased_ns: int = 0
    """When it was asked for and came, on the clock of spans."""


class RunClient(TrainerClient):
    """One learner's view of one run; an async context that owns the channel."""

    async def lease(self, update: int, *, wait_s: float) -> BatchLease | str:
        """The batch of `update`, or after `wait_s` what it waits for. Raises `Fenced`, `LeaseExpired`, `RunEnded`."""
        asked_ns = now_ns()
        reply = await self.ask_batch(update, wait_s=wait_s)
        if not reply.lease_id:
            return reply.waiting_for or "a batch"
        return BatchLease(
            lease_id=reply.lease_id,
            update=update,
            samples=list(reply.samples),
            groups=tuple(decode_group_context(g, f"groups[{i}]") for i, g in enumerate(reply.groups)),
            lease_s=reply.lease_s,
            asked_ns=asked_ns,
            leased_ns=now_ns(),
        )

    async def fetch(self, lease: BatchLease, arriving: Callable[[], Awaitable[None]]) -> Fetched:
        """The lease's samples. Awaits `arriving` when the first episode is here. Raises `PayloadLost`, `UnknownLease`."""
        return await self.persist(lambda: self._fetch(lease, arriving))

    async def _fetch(self, lease: BatchLease, arriving: Callable[[], Awaitable[None]]) -> Fetched:
        batch = BatchAssembler(lease.samples)
        announced = False
        async with aclosing(self.episodes(lease.lease_id, lease.samples)) as episodes:
            async for message in episodes:
                batch.add(message)
                if not announced:
                    announced = True
                    await arriving()
        return batch.finish()

    async def commit(self, lease: BatchLease, result: StepResult, unreadable: Mapping[str, str]) -> Committed:
        """Commits the update with a disposition for every leased sample; those in `unreadable` are dropped with their reasons.

        Raises `Fenced`, `LeaseExpired`, `BeyondBound`, `CommitConflict`.
        """
        fates = {**dict(result.verdicts), **unreadable}
        return await self.commit_update(result.update, lease.lease_id, fates, applied=result.applied)
