"""Decide who trains: attach, fencing, and batches that the last trainer left.

The trainer's checkpoint is the commit point. A batch lease belongs to one update and one epoch. If the lease is lost,
its samples are in doubt until the next attach reports what the weights contain.
"""

from __future__ import annotations

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core import rollouts
from rollmesh.services.coordinator.core.commits import dispositions, note_checkpoint
from rollmesh.services.coordinator.core.decision_context import DecisionContext
from rollmesh.services.coordinator.core.facts import SampleEnd
from rollmesh.services.coordinator.core.guards import check_names
from rollmesh.services.coordinator.core.state import BatchState
from rollmesh.shared.domain.digest import next_digest
from rollmesh.shared.errors import DigestMismatch, UnknownUpdate


def attach(ctx: DecisionContext, request: i.AttachTrainer) -> None:
    """Make the caller the only trainer and resolve what the last one left. The checkpoint decides."""
    check_names(ctx, request.policy, request.learner)
    resolution = _resolution(ctx, request)
    for waiter in ctx.ephemeral.trainers:
        ctx.reply(waiter.request, m.LeaseBatchResponse(waiting_for="fenced: a newer trainer has attached"))
    ctx.ephemeral.trainers.clear()
    for batch in _open_batches(ctx):
        _doubt(ctx, batch, "FENCED")
    was_forgetful = ctx.clock.keeps_no_checkpoints
    epoch = ctx.clock.trainer_epoch + 1
    ctx.emit(
        f.TrainerAttached(
            policy=request.policy,
            learner=request.learner,
            trainer_epoch=epoch,
            last_update=request.last_update,
            holder=request.holder,
            keeps_no_checkpoints=request.keeps_no_checkpoints,
        )
    )
    if resolution is m.AttachResolution.ROLLED_FORWARD:
        _roll_forward(ctx, request)
    _settle_doubt(ctx, forgetful=was_forgetful or request.keeps_no_checkpoints)
    if resolution is m.AttachResolution.ROLLED_BACK:
        rollouts.roll_back(ctx, request.last_update)
        ctx.emit(
            f.RolledBack(
                policy=request.policy,
                learner=request.learner,
                to_update=request.last_update,
                incarnation=ctx.clock.incarnation + 1,
            )
        )
    if request.last_update > ctx.clock.checkpoint:
        note_checkpoint(ctx, request.last_update)
    ctx.reply(
        request,
        i.Attached(
            trainer_epoch=epoch,
            next_update=ctx.clock.applied + 1,
            incarnation=ctx.clock.incarnation,
            resolution=resolution,
        ),
    )


def _resolution(ctx: DecisionContext, request: i.AttachTrainer) -> m.AttachResolution:
    """Return how the checkpoint (last_update, digest) relates to the ledger. Rejects a checkpoint of another
    history."""
    clock, last = ctx.clock, request.last_update
    if last == clock.applied + 1 and _doubted(ctx, request) is not None:
        return m.AttachResolution.ROLLED_FORWARD
    if not 0 <= last <= clock.applied:
        raise UnknownUpdate(
            f"the checkpoint contains update {last} with digest {request.digest!r}, the ledger ends at {clock.applied} "
            "and a batch in doubt does not give that digest: the checkpoint belongs to another run, or samples of its "
            "last update were dropped or the update was skipped and `samples` and `outcome` do not say so; attach with "
            "this run's checkpoint or create a new run",
            last_update=last,
            applied=clock.applied,
        )
    if last > 0 and last not in clock.updates:
        raise UnknownUpdate(f"update {last} is older than the digests kept; use a newer checkpoint", last_update=last)
    known = clock.updates[last].digest if last else ""
    if known != request.digest:
        raise DigestMismatch(
            f"the checkpoint's digest after update {last} is {request.digest!r}, the ledger's {known!r}: it belongs to "
            "another history; attach with this run's checkpoint or create a new run",
        )
    return m.AttachResolution.CONTINUED if last == clock.applied else m.AttachResolution.ROLLED_BACK


def _doubted(ctx: DecisionContext, request: i.AttachTrainer) -> BatchState | None:
    """Return the held or doubtful batch of the update by which the checkpoint is ahead of the ledger."""
    for batch in ctx.state.batches.values():
        if not set(request.named) <= set(batch.sample_ids):
            continue
        used, _ = dispositions(request, batch.sample_ids)
        expected = next_digest(ctx.clock.digest, batch.update, used)
        if batch.update == request.last_update and expected == request.digest:
            return batch
    return None


def _roll_forward(ctx: DecisionContext, request: i.AttachTrainer) -> None:
    batch = _doubted(ctx, request)
    assert batch is not None, "resolved as rolled forward"
    used, dropped = dispositions(request, batch.sample_ids)
    ctx.emit(
        f.UpdateCommitted(
            policy=request.policy,
            learner=request.learner,
            trainer_epoch=batch.trainer_epoch,
            update=batch.update,
            incarnation=ctx.clock.incarnation,
            lease_ids=(batch.lease_id,),
            used=used,
            dropped=dropped,
            applied=request.applied,
            digest=request.digest,
        )
    )


def _settle_doubt(ctx: DecisionContext, *, forgetful: bool) -> None:
    """Return or drop batches that are not in the checkpoint. A trainer without checkpoints cannot report their use, so
    drop them."""
    for batch in list(ctx.state.batches.values()):
        if not forgetful:
            ctx.emit(f.BatchReturned(lease_id=batch.lease_id, reason="NOT_IN_CHECKPOINT"))
            continue
        groups = [ctx.state.groups[name] for name in batch.groups if name in ctx.state.groups]
        ctx.emit(f.BatchReturned(lease_id=batch.lease_id, reason="IN_DOUBT"))
        for group in groups:
            live = tuple(s.sample_id for s in group.live_samples())
            ctx.emit(f.SamplesEnded(group=group.group, sample_ids=live, end=SampleEnd.FAILED, reason="IN_DOUBT"))


def _open_batches(ctx: DecisionContext) -> list[BatchState]:
    return [b for b in ctx.state.batches.values() if not b.in_doubt]


def _doubt(ctx: DecisionContext, batch: BatchState, reason: str) -> None:
    ctx.ephemeral.batch_deadlines.pop(batch.lease_id, None)
    ctx.emit(f.BatchInDoubt(lease_id=batch.lease_id, reason=reason))


def expire(ctx: DecisionContext) -> None:
    """Put overdue batch leases in doubt, because their trainer may have used them."""
    for batch in _open_batches(ctx):
        if ctx.now >= ctx.ephemeral.batch_deadlines.get(batch.lease_id, ctx.now):
            _doubt(ctx, batch, "LEASE_EXPIRED")
