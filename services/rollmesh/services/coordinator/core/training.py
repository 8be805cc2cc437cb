"""Decisions about trainers: attach, batches, commits, checkpoints, versions.

The trainer's checkpoint is the commit point. A batch lease is bound to one update and one epoch; whatever is leased when its
lease is lost stays in doubt until the next attach says what the weights contain.
"""

from __future__ import annotations

from rollmesh.services.coordinator.core import bound, rollouts
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.records import DroppedSample, SampleEnd, SampleMeta, Version
from rollmesh.services.coordinator.core.state import BatchState, GroupPhase, GroupState, SampleState
from rollmesh.services.coordinator.core.turn import BatchWait, Turn, describe, refuse
from rollmesh.shared.digest import next_digest

SKIPPED = "SKIPPED_UPDATE"


def attach(turn: Turn, request: i.AttachTrainer) -> None:
    """Make the caller the one trainer and settle what the last one left; its checkpoint is the truth."""
    _check_names(turn, request.policy, request.learner)
    resolution = _resolution(turn, request)
    for waiter in turn.volatile.trainers:
        turn.reply(waiter.ticket, i.Batch(waiting_for="fenced: a newer trainer has attached"))
    turn.volatile.trainers.clear()
    for batch in _open_batches(turn):
        _doubt(turn, batch, "FENCED")
    was_forgetful = turn.clock.keeps_no_checkpoints
    epoch = turn.clock.trainer_epoch + 1
    turn.emit(
        f.TrainerAttached(
            policy=request.policy,
            learner=request.learner,
            trainer_epoch=epoch,
            last_update=request.last_update,
            holder=request.holder,
            keeps_no_checkpoints=request.keeps_no_checkpoints,
        )
    )
    if resolution is i.Resolution.ROLLED_FORWARD:
        _roll_forward(turn, request)
    _settle_doubt(turn, forgetful=was_forgetful or request.keeps_no_checkpoints)
    if resolution is i.Resolution.ROLLED_BACK:
        turn.emit(
            f.RolledBack(
                policy=request.policy,
                learner=request.learner,
                to_update=request.last_update,
                incarnation=turn.clock.incarnation + 1,
            )
        )
    if request.last_update > turn.clock.checkpoint:
        _checkpoint(turn, request.last_update)
    turn.reply(
        request.ticket,
        i.Attached(
            trainer_epoch=epoch,
            next_update=turn.clock.applied + 1,
            incarnation=turn.clock.incarnation,
            resolution=resolution,
        ),
    )


def _check_names(turn: Turn, policy: str, learner: str) -> None:
    clock = turn.clock
    if policy != clock.policy or learner != clock.learner:
        refuse(
            "UNKNOWN_LEARNER",
            f"run {turn.spec.run} trains policy {clock.policy!r} with learner {clock.learner!r}, not {policy!r} with {learner!r}",
        )


def _resolution(turn: Turn, request: i.AttachTrainer) -> i.Resolution:
    """How the checkpoint (last_update, digest) relates to the ledger; refuses one of another history."""
    clock, last = turn.clock, request.last_update
    if last == clock.applied + 1 and _doubted(turn, request) is not None:
        return i.Resolution.ROLLED_FORWARD
    if last < 0 or last > clock.applied:
        refuse(
            "UNKNOWN_UPDATE",
            f"the checkpoint holds update {last}, the ledger ends at {clock.applied}: it belongs to another run or the ledger is "
            "lost; attach with this run's checkpoint or create a new run",
            last_update=last,
            applied=clock.applied,
        )
    if last > 0 and last not in clock.updates:
        refuse(
            "UNKNOWN_UPDATE", f"update {last} is older than the digests kept; use a newer checkpoint", last_update=last
        )
    known = clock.updates[last].digest if last else ""
    if known != request.digest:
        refuse(
            "DIGEST_MISMATCH",
            f"the checkpoint's digest after update {last} is {request.digest[:12]!r}, the ledger's {known[:12]!r}: it is of "
            "another history; attach with this run's checkpoint or create a new run",
        )
    return i.Resolution.CONTINUED if last == clock.applied else i.Resolution.ROLLED_BACK


def _doubted(turn: Turn, request: i.AttachTrainer) -> BatchState | None:
    """The open or doubtful batch of exactly the update that the checkpoint holds beyond the ledger."""
    for batch in turn.state.batches.values():
        expected = next_digest(turn.clock.digest, batch.update, batch.sample_ids)
        if batch.update == request.last_update and expected == request.digest:
            return batch
    return None


def _roll_forward(turn: Turn, request: i.AttachTrainer) -> None:
    batch = _doubted(turn, request)
    assert batch is not None, "resolved as rolled forward"
    turn.emit(
        f.UpdateCommitted(
            policy=request.policy,
            learner=request.learner,
            trainer_epoch=batch.trainer_epoch,
            update=batch.update,
            incarnation=turn.clock.incarnation,
            lease_ids=(batch.lease_id,),
            used=batch.sample_ids,
            digest=request.digest,
        )
    )


def _settle_doubt(turn: Turn, *, forgetful: bool) -> None:
    """What is not in the checkpoint was not trained; a trainer without checkpoints can't say: rather lost than doubled."""
    for batch in list(turn.state.batches.values()):
        if not forgetful:
            turn.emit(f.BatchReturned(lease_id=batch.lease_id, reason="NOT_IN_CHECKPOINT"))
            continue
        groups = [turn.state.groups[name] for name in batch.groups if name in turn.state.groups]
        turn.emit(f.BatchReturned(lease_id=batch.lease_id, reason="IN_DOUBT"))
        for group in groups:
            live = tuple(s.sample_id for s in group.live_samples())
            turn.emit(f.SamplesEnded(group=group.group, sample_ids=live, end=SampleEnd.FAILED, reason="IN_DOUBT"))


def _open_batches(turn: Turn) -> list[BatchState]:
    return [b for b in turn.state.batches.values() if not b.in_doubt]


def _doubt(turn: Turn, batch: BatchState, reason: str) -> None:
    turn.volatile.batch_deadlines.pop(batch.lease_id, None)
    turn.emit(f.BatchInDoubt(lease_id=batch.lease_id, reason=reason))


def check_epoch(turn: Turn, request: i.TrainerRequest) -> None:
    _check_names(turn, request.policy, request.learner)
    current = turn.clock.trainer_epoch
    if request.trainer_epoch != current:
        refuse(
            "FENCED",
            f"trainer epoch {request.trainer_epoch} is fenced by {current}: a newer trainer has attached; stop, or attach again "
            "from the newest checkpoint",
            trainer_epoch=request.trainer_epoch,
            current_epoch=current,
        )


def lease_batch(turn: Turn, request: i.LeaseBatch) -> None:
    """Lease the batch of the next update, now or when there is enough; idempotent by (epoch, update)."""
    check_epoch(turn, request)
    held = next((b for b in turn.state.batches.values() if b.update == request.update), None)
    if held is not None and held.in_doubt:
        _refuse_expired(held.lease_id)
    if held is not None:
        turn.reply(request.ticket, _describe_batch(turn, held))
        return
    _check_update(turn, request.update)
    turn.volatile.trainers.append(BatchWait(request.ticket, request, request.trainer_epoch, turn.now + request.wait_s))


def _refuse_expired(lease_id: str) -> None:
    refuse(
        "LEASE_EXPIRED",
        f"batch lease {lease_id} has expired and its samples are in doubt: go back to the newest checkpoint and attach again",
        lease_id=lease_id,
    )


def _check_update(turn: Turn, update: int) -> None:
    clock, spec = turn.clock, turn.spec
    if turn.state.ended or (spec.updates_max and clock.applied >= spec.updates_max):
        refuse("RUN_ENDED", f"run {spec.run} has ended: {turn.state.ended or 'UPDATES_MAX'}")
    if update != clock.applied + 1:
        refuse(
            "WRONG_UPDATE",
            f"update {update} asked for, the next one is {clock.applied + 1}",
            next_update=clock.applied + 1,
        )
    if clock.published is None:
        refuse(
            "NOT_PUBLISHED",
            f"publish the weights of step {clock.applied}, incarnation {clock.incarnation}, before leasing a batch",
        )


def grant_batches(turn: Turn) -> None:
    """Answer waiting trainers that can have their batch, or whose wait is over."""
    for waiter in list(turn.volatile.trainers):
        request = waiter.request
        assert isinstance(request, i.LeaseBatch)
        chosen = _choose(turn, request)
        if chosen:
            turn.volatile.trainers.remove(waiter)
            turn.reply(waiter.ticket, _lease(turn, request, chosen))
        elif turn.now >= waiter.deadline or turn.state.ended:
            turn.volatile.trainers.remove(waiter)
            turn.reply(waiter.ticket, i.Batch(waiting_for=why_no_batch(turn)))


def sweep(turn: Turn, update: int) -> None:
    """End READY samples that can no longer be trained at `update` or later. Whole groups stay comparable: rewards are kept."""
    for group in turn.state.training_groups(GroupPhase.READY):
        ended: dict[str, list[str]] = {}
        for sample in group.live_samples():
            reason = bound.why_inadmissible(sample, update=update, spec=turn.spec, clock=turn.clock)
            if reason:
                ended.setdefault(reason, []).append(sample.sample_id)
        for reason, ids in ended.items():
            turn.emit(f.SamplesEnded(group=group.group, sample_ids=tuple(ids), end=SampleEnd.STALE, reason=reason))


def _choose(turn: Turn, request: i.LeaseBatch) -> list[GroupState]:
    """Whole groups in order of admission until the amount is reached; empty if there is not enough."""
    sweep(turn, request.update)
    amount = request.amount or turn.spec.batch_groups
    chosen: list[GroupState] = []
    total = 0
    for group in turn.state.training_groups(GroupPhase.READY):
        chosen.append(group)
        total += _size(group, request.unit if request.amount else i.GeometryUnit.GROUPS)
        if total >= amount:
            return chosen
    return []


def _size(group: GroupState, unit: i.GeometryUnit) -> int:
    if unit is i.GeometryUnit.GROUPS:
        return 1
    if unit is i.GeometryUnit.SAMPLES:
        return sum(1 for _ in group.live_samples())
    return sum(span.num_tokens for s in group.live_samples() for span in s.steps)


def why_no_batch(turn: Turn) -> str:
    """For people: what a trainer without a batch waits for."""
    state = turn.state
    if state.ended:
        return f"run ended: {state.ended}"
    ready = len(state.training_groups(GroupPhase.READY))
    busy = len(state.training_groups(GroupPhase.OPEN, GroupPhase.FINALIZING))
    return f"READY groups: {ready} of {turn.spec.batch_groups}, {busy} on their way"


def _lease(turn: Turn, request: i.LeaseBatch, chosen: list[GroupState]) -> i.Batch:
    sample_ids = tuple(s.sample_id for g in chosen for s in g.live_samples())
    lease_id = f"b{request.trainer_epoch}.{request.update}.{turn.clock.incarnation}"
    turn.emit(
        f.BatchLeased(
            lease_id=lease_id,
            policy=request.policy,
            learner=request.learner,
            trainer_epoch=request.trainer_epoch,
            update=request.update,
            groups=tuple(g.group for g in chosen),
            sample_ids=sample_ids,
        )
    )
    turn.volatile.batch_deadlines[lease_id] = turn.now + turn.spec.batch_lease_s
    return _describe_batch(turn, turn.state.batches[lease_id])


def _describe_batch(turn: Turn, batch: BatchState) -> i.Batch:
    groups = [turn.state.groups[name] for name in batch.groups]
    return i.Batch(
        lease_id=batch.lease_id,
        samples=tuple(_leased_sample(turn, g, s, batch.update) for g in groups for s in g.live_samples()),
        groups=tuple(_members(g) for g in groups),
        lease_s=turn.spec.batch_lease_s,
    )


def _leased_sample(turn: Turn, group: GroupState, sample: SampleState, update: int) -> i.LeasedSample:
    spans = bound.trained_spans(sample.steps, update=update, spec=turn.spec)
    meta = SampleMeta(
        sample_id=sample.sample_id,
        policy=sample.policy,
        leaf=sample.leaf,
        steps=sample.steps,
        num_tokens=sample.num_tokens,
        rewards=sample.rewards,
        trainable=sample.trainable,
    )
    return i.LeasedSample(
        meta=meta,
        group=group.group,
        task=group.task.task_id,
        payload=group.episodes[sample.episode].payload,
        staleness=bound.sample_staleness(spans, update=update),
        mask_below_step=bound.mask_below_step(sample, update=update, spec=turn.spec),
    )


def _members(group: GroupState) -> i.GroupMembers:
    members = tuple(
        i.Member(
            sample_id=s.sample_id,
            rewards=s.rewards,
            end="ready" if s.end is SampleEnd.LIVE else f"{s.end.name.lower()}/{s.reason}",
        )
        for s in group.samples.values()
    )
    return i.GroupMembers(group=group.group, task=group.task.task_id, members=members)


def _held_batch(turn: Turn, lease_id: str) -> BatchState:
    batch = turn.state.batches.get(lease_id)
    if batch is None:
        refuse("UNKNOWN_LEASE", f"no batch lease {lease_id!r}: never given, committed or released", lease_id=lease_id)
    if batch.in_doubt:
        _refuse_expired(lease_id)
    return batch


def get_batch(turn: Turn, request: i.GetBatch) -> None:
    """The contents of a lease, for the gateway; it names no policy."""
    if request.trainer_epoch != turn.clock.trainer_epoch:
        refuse("FENCED", f"trainer epoch {request.trainer_epoch} is fenced by {turn.clock.trainer_epoch}")
    turn.reply(request.ticket, _describe_batch(turn, _held_batch(turn, request.lease_id)))


def renew_batch(turn: Turn, request: i.RenewBatch) -> None:
    check_epoch(turn, request)
    batch = _held_batch(turn, request.lease_id)
    turn.volatile.batch_deadlines[batch.lease_id] = turn.now + turn.spec.batch_lease_s
    turn.reply(request.ticket, i.Renewed(gone=(), lease_s=turn.spec.batch_lease_s))


def release_batch(turn: Turn, request: i.ReleaseBatch) -> None:
    check_epoch(turn, request)
    batch = _held_batch(turn, request.lease_id)
    turn.volatile.batch_deadlines.pop(batch.lease_id, None)
    turn.emit(f.BatchReturned(lease_id=batch.lease_id, reason="RELEASED"))
    turn.reply(request.ticket, i.Done())


def commit(turn: Turn, request: i.CommitUpdate) -> None:
    """Make update k's samples APPLIED, after checking the bound once more. Idempotent."""
    check_epoch(turn, request)
    if request.update <= turn.clock.applied:
        turn.reply(request.ticket, _committed_before(turn, request))
        return
    if request.update != turn.clock.applied + 1:
        refuse("WRONG_UPDATE", f"update {request.update} committed, the next one is {turn.clock.applied + 1}")
    batches = [_held_batch(turn, lease_id) for lease_id in request.lease_ids]
    for batch in batches:
        if batch.update != request.update:
            refuse("WRONG_UPDATE", f"lease {batch.lease_id} is bound to update {batch.update}, not {request.update}")
    used, dropped = _dispositions(request, [s for b in batches for s in b.sample_ids])
    _check_bound(turn, batches, used, request.update)
    digest = next_digest(turn.clock.digest, request.update, used)
    turn.emit(
        f.UpdateCommitted(
            policy=request.policy,
            learner=request.learner,
            trainer_epoch=request.trainer_epoch,
            update=request.update,
            incarnation=turn.clock.incarnation,
            lease_ids=request.lease_ids,
            used=used,
            dropped=dropped,
            applied=request.applied,
            digest=digest,
        )
    )
    for lease_id in request.lease_ids:
        turn.volatile.batch_deadlines.pop(lease_id, None)
    if turn.clock.keeps_no_checkpoints:
        _checkpoint(turn, request.update)
    turn.reply(request.ticket, i.Committed(digest=digest))


def _committed_before(turn: Turn, request: i.CommitUpdate) -> i.Committed:
    record = turn.clock.updates.get(request.update)
    same = record is not None and record.lease_ids == request.lease_ids and record.applied == request.applied
    if record is None or not same:
        refuse(
            "COMMIT_CONFLICT",
            f"update {request.update} was committed with other leases or another outcome; attach again from the newest checkpoint",
        )
    return i.Committed(digest=record.digest)


def _dispositions(request: i.CommitUpdate, leased: list[str]) -> tuple[tuple[str, ...], tuple[DroppedSample, ...]]:
    strangers = sorted(set(request.named) - set(leased))
    if strangers:
        refuse("UNKNOWN_SAMPLE", f"sample {strangers[0]!r} is not in the leases of update {request.update}")
    if not request.applied:
        return (), tuple(DroppedSample(sample_id=s, reason=SKIPPED) for s in leased)
    left_out = {d.sample_id for d in request.dropped}
    return tuple(s for s in leased if s not in left_out), request.dropped


def _check_bound(turn: Turn, batches: list[BatchState], used: tuple[str, ...], update: int) -> None:
    wanted = set(used)
    for group in (turn.state.groups[name] for b in batches for name in b.groups):
        for sample in group.live_samples():
            if sample.sample_id in wanted:
                reason = bound.why_inadmissible(sample, update=update, spec=turn.spec, clock=turn.clock)
                if reason:
                    refuse(
                        "BEYOND_BOUND",
                        f"sample {sample.sample_id} may not be trained at update {update}: {reason}; drop it and train again",
                        sample_id=sample.sample_id,
                    )


def report_checkpoint(turn: Turn, request: i.ReportCheckpoint) -> None:
    check_epoch(turn, request)
    record = turn.clock.updates.get(request.update)
    if request.update > turn.clock.applied or (request.update > 0 and record is None):
        refuse("UNKNOWN_UPDATE", f"update {request.update} was never committed; the last is {turn.clock.applied}")
    if record is not None and record.digest != request.digest:
        refuse("DIGEST_MISMATCH", f"the digest after update {request.update} is {record.digest[:12]!r}")
    if request.update > turn.clock.checkpoint:
        _checkpoint(turn, request.update)
    turn.reply(request.ticket, i.Done())


def _checkpoint(turn: Turn, update: int) -> None:
    turn.emit(f.CheckpointReported(policy=turn.clock.policy, learner=turn.clock.learner, update=update))


def publish(turn: Turn, request: i.PublishVersion) -> None:
    """Announce uploaded weights of the newest committed step. Idempotent for the same digest."""
    check_epoch(turn, request)
    clock, version = turn.clock, request.version
    if version.policy != clock.policy or version.incarnation != clock.incarnation or version.step != clock.applied:
        refuse(
            "WRONG_VERSION",
            f"{describe(version)} is not the present {clock.policy}@{clock.applied}.{clock.incarnation}",
            applied=clock.applied,
            incarnation=clock.incarnation,
        )
    last = clock.published
    if last is not None and last.step == version.step:
        if last.weights_digest != version.weights_digest:
            refuse(
                "VERSION_CONFLICT",
                f"{describe(version)} was published with digest {last.weights_digest[:12]!r}, not {version.weights_digest[:12]!r}",
            )
    else:
        turn.emit(f.VersionPublished(version=version))
    turn.reply(request.ticket, i.Done())


def version_refused(turn: Turn, refused: i.VersionRefused) -> None:
    if refused.version not in turn.clock.quarantined:
        turn.emit(f.VersionQuarantined(version=refused.version, cause=refused.cause))


def is_quarantined(turn: Turn, version: Version) -> bool:
    return version in turn.clock.quarantined


def expire(turn: Turn) -> None:
    """Overdue batch leases are in doubt: their trainer may or may not have used them."""
    for batch in _open_batches(turn):
        if turn.now >= turn.volatile.batch_deadlines.get(batch.lease_id, turn.now):
            _doubt(turn, batch, "LEASE_EXPIRED")


def stop(turn: Turn, request: i.StopRun) -> None:
    end_run(turn, f"STOPPED: {request.reason}" if request.reason else "STOPPED")
    turn.reply(request.ticket, i.Done())


def end_run(turn: Turn, reason: str) -> None:
    if not turn.state.ended:
        _cancel_unused(turn, include_evals=True)
        turn.emit(f.RunEnded(reason=reason))


def finish(turn: Turn) -> None:
    """After the last update nothing more is generated; the run ends when its last weights are safe and measured."""
    spec, clock = turn.spec, turn.clock
    if turn.state.ended or not spec.updates_max or clock.applied < spec.updates_max:
        return
    _cancel_unused(turn, include_evals=False)
    published = clock.published is not None and clock.published.step == clock.applied
    if published and clock.checkpoint == clock.applied and not turn.volatile.eval_deadlines:
        end_run(turn, "UPDATES_MAX")


def _cancel_unused(turn: Turn, *, include_evals: bool) -> None:
    groups = turn.state.training_groups(GroupPhase.OPEN, GroupPhase.FINALIZING, GroupPhase.READY)
    if include_evals:
        groups += [g for g in turn.state.groups.values() if g not in groups and g.phase is GroupPhase.OPEN]
    for group in groups:
        rollouts.cancel_group(turn, group, "RUN_ENDED")
