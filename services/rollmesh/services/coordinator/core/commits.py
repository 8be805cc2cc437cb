"""Decide what weights contain: commits, checkpoints, published and rejected versions."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.services.coordinator.core import bound, foreign_samples
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.decision_context import DecisionContext, describe
from rollmesh.services.coordinator.core.facts import DroppedSample
from rollmesh.services.coordinator.core.guards import check_epoch, check_none_out, check_trains, held_batch
from rollmesh.services.coordinator.core.state import BatchState, names_digest
from rollmesh.shared.domain.digest import INITIAL_DIGEST, next_digest
from rollmesh.shared.domain.text import count_of
from rollmesh.shared.errors import (
    BeyondBound,
    CommitConflict,
    DigestMismatch,
    MeshError,
    RunEnded,
    UnknownUpdate,
    UnleasedGroup,
    UnleasedSample,
    VersionConflict,
    WrongUpdate,
    WrongVersion,
    field_error,
)

SKIPPED = "SKIPPED_UPDATE"
NAMED_MAX = 100
"""Maximum number of samples that an error names."""


def commit(ctx: DecisionContext, request: i.CommitUpdate) -> None:
    """Make the samples of update k APPLIED, after the second check of the bound. Idempotent."""
    check_trains(ctx)
    check_epoch(ctx, request)
    if request.update <= ctx.clock.applied:
        ctx.reply(request, _committed_before(ctx, request))
        return
    if request.update != ctx.clock.applied + 1:
        raise WrongUpdate(
            f"update {request.update} cannot be committed, the next one is {ctx.clock.applied + 1}; load the newest "
            "checkpoint and attach again",
        )
    batches = [held_batch(ctx, lease_id) for lease_id in request.lease_ids]
    for batch in batches:
        if batch.update != request.update:
            raise WrongUpdate(
                f"lease {batch.lease_id} is bound to update {batch.update}, not {request.update}; load the newest "
                "checkpoint and attach again",
            )
    check_none_out(ctx, request.lease_ids)
    if not request.lease_ids and (ctx.state.ended or ctx.state.stopping):
        raise RunEnded(
            f"run {ctx.spec.run} has ended: {ctx.state.ended or ctx.state.stopping}; it starts no further update",
        )
    leased = [s for b in batches for s in b.sample_ids]
    if unleased := sorted(set(request.named) - set(leased)):
        raise _not_leased("samples", UnleasedSample, request.update, unleased[0])
    if unleased := sorted({g.group for g in request.groups} - {name for b in batches for name in b.groups}):
        raise _not_leased("groups", UnleasedGroup, request.update, unleased[0])
    used, dropped = dispositions(request, leased)
    _check_bound(ctx, batches, used, request.update)
    digest = next_digest(ctx.clock.digest, request.update, used)
    ctx.emit(
        f.UpdateCommitted(
            policy=request.policy,
            learner=request.learner,
            trainer_epoch=request.trainer_epoch,
            update=request.update,
            incarnation=ctx.clock.incarnation,
            lease_ids=request.lease_ids,
            used=used,
            dropped=dropped,
            applied=request.applied,
            digest=digest,
            groups=request.groups,
        )
    )
    for lease_id in request.lease_ids:
        ctx.ephemeral.batch_deadlines.pop(lease_id, None)
    if ctx.clock.keeps_no_checkpoints:
        note_checkpoint(ctx, request.update)
    ctx.reply(request, i.Committed(digest=digest))


def _not_leased(field: str, of: type[MeshError], update: int, name: str) -> MeshError:
    """Return the error of a commit whose `field` contains a name that is not in its leases."""
    return field_error(field, f"name only {field} of the leases of update {update}", name, of=of)


def _committed_before(ctx: DecisionContext, request: i.CommitUpdate) -> i.Committed:
    record = ctx.clock.updates.get(request.update)
    dropped = names_digest(d.sample_id for d in request.dropped) if request.applied else ""
    asked = (request.lease_ids, request.applied, dropped)
    if record is None or asked != (record.lease_ids, record.applied, record.dropped):
        raise CommitConflict(
            f"update {request.update} was committed with other leases, another outcome or other dropped samples; load "
            "the newest checkpoint and attach again",
        )
    return i.Committed(digest=record.digest)


def dispositions(
    request: i.CommitUpdate | i.AttachTrainer, leased: Sequence[str]
) -> tuple[tuple[str, ...], tuple[DroppedSample, ...]]:
    """Return the used and the dropped samples among `leased`."""
    if not request.applied:
        return (), tuple(DroppedSample(sample_id=s, reason=SKIPPED) for s in leased)
    left_out = {d.sample_id for d in request.dropped}
    return tuple(s for s in leased if s not in left_out), request.dropped


def _check_bound(ctx: DecisionContext, batches: list[BatchState], used: tuple[str, ...], update: int) -> None:
    wanted = set(used)
    found: dict[str, str] = {}
    for group, batch in ((ctx.state.groups[name], b) for b in batches for name in b.groups):
        too_old = foreign_samples.why_beyond(batch.foreign, group.source, group.submitted_step, update)
        for sample in group.live_samples():
            if sample.sample_id in wanted:
                of_sample = bound.bound_of(sample, batch.bound, ctx.spec)
                reason = too_old or bound.why_inadmissible(
                    sample.meta.steps, update=update, bound=of_sample, clock=ctx.clock
                )
                if reason:
                    found[sample.sample_id] = reason
    if found:
        named = list(found)[:NAMED_MAX]
        raise BeyondBound(
            f"{count_of(len(found), 'sample')} may not be trained at update {update}, first {named[0]}: "
            f"{found[named[0]]}; restore the weights from before this update (or attach again from the newest "
            "checkpoint), drop the samples in `sample_ids`, and train again",
            sample_ids=",".join(named),
            num=len(found),
        )


def report_checkpoint(ctx: DecisionContext, request: m.ReportCheckpoint) -> None:
    check_epoch(ctx, request)
    record = ctx.clock.updates.get(request.update)
    if request.update > ctx.clock.applied or (request.update > 0 and record is None):
        raise UnknownUpdate(f"update {request.update} was never committed; the last is {ctx.clock.applied}")
    known = record.digest if record is not None else INITIAL_DIGEST
    if known != request.digest:
        raise DigestMismatch(
            f"the digest after update {request.update} is {known!r}, the checkpoint has {request.digest!r}: it "
            "belongs to another history; attach with this run's checkpoint or create a new run",
        )
    if request.update > ctx.clock.checkpoint:
        note_checkpoint(ctx, request.update)
    ctx.reply(request, m.ReportCheckpointResponse())


def note_checkpoint(ctx: DecisionContext, update: int) -> None:
    ctx.emit(f.CheckpointReported(policy=ctx.clock.policy, learner=ctx.clock.learner, update=update))


def publish(ctx: DecisionContext, request: i.PublishVersion) -> None:
    """Announce uploaded weights of the newest committed step. Idempotent for the same digest, also after the next
    commit."""
    check_epoch(ctx, request)
    clock, version = ctx.clock, request.version
    known = next((v for v in clock.versions if str(v) == str(version)), None)
    if known is not None and version.incarnation == clock.incarnation:
        if known.weights_digest != version.weights_digest:
            raise VersionConflict(
                f"{describe(version)} was published with digest {known.weights_digest!r}, not "
                f"{version.weights_digest!r}; "
                "publish the same manifest bytes, or attach with an older checkpoint for a new incarnation",
            )
        ctx.reply(request, m.PublishVersionResponse())
        return
    if version.policy != clock.policy or version.incarnation != clock.incarnation or version.step != clock.applied:
        raise WrongVersion(
            f"{describe(version)} is not the current version {clock.policy}@{clock.applied}.{clock.incarnation}",
            applied=clock.applied,
            incarnation=clock.incarnation,
        )
    ctx.emit(f.VersionPublished(version=version))
    ctx.reply(request, m.PublishVersionResponse())


def version_refused(ctx: DecisionContext, refused: i.VersionRejected) -> None:
    if refused.version not in ctx.clock.quarantined:
        ctx.emit(f.VersionQuarantined(version=refused.version, cause=refused.cause))
