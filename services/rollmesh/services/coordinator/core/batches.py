"""Decisions about batch leases: choosing whole groups within the bound, renewing, releasing."""

from __future__ import annotations

from rollmesh.services.coordinator.core import bound, rollouts
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.apply import RELEASED
from rollmesh.services.coordinator.core.guards import check_epoch, check_trains, held_batch, refuse_expired
from rollmesh.services.coordinator.core.records import (
    EXTEND_FACTOR_MAX,
    SAMPLE_TOKENS_MAX,
    SAMPLES_PER_EPISODE_MAX,
    SampleEnd,
    SampleMeta,
)
from rollmesh.services.coordinator.core.state import BatchState, GroupPhase, GroupState, SampleState
from rollmesh.services.coordinator.core.turn import BatchWait, Turn, refuse


def lease_batch(turn: Turn, request: i.LeaseBatch) -> None:
    """Lease the batch of the next update, now or when there is enough; idempotent by (epoch, update)."""
    check_trains(turn)
    check_epoch(turn, request)
    _check_geometry(turn, request)
    held = next((b for b in turn.state.batches.values() if b.update == request.update), None)
    if held is not None and held.in_doubt:
        refuse_expired(held.lease_id)
    if held is not None:
        turn.reply(request.ticket, _describe_batch(turn, held))
        return
    _check_update(turn, request.update)
    turn.volatile.trainers.append(BatchWait(request.ticket, request, request.trainer_epoch, turn.now + request.wait_s))


def _check_update(turn: Turn, update: int) -> None:
    clock, state = turn.clock, turn.state
    if state.ended or state.stopping:
        refuse("RUN_ENDED", f"run {turn.spec.run} has ended: {state.ended or state.stopping}")
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


def grant_batches(turn: Turn) -> bool:
    """Answer waiting trainers that can have their batch, or whose wait is over. Whether one of them has none."""
    unserved = False
    for waiter in list(turn.volatile.trainers):
        request = waiter.request
        chosen = [] if turn.state.stopping else _choose(turn, request)
        if chosen:
            turn.volatile.trainers.remove(waiter)
            turn.reply(waiter.ticket, _lease(turn, request, chosen))
            continue
        unserved = True
        if turn.now >= waiter.deadline or turn.state.ended or turn.state.stopping:
            turn.volatile.trainers.remove(waiter)
            turn.reply(waiter.ticket, i.Batch(waiting_for=why_no_batch(turn, request)))
    return unserved


def sweep(turn: Turn, update: int) -> None:
    """End READY samples that can no longer be trained at `update` or later. Whole groups stay comparable: rewards are kept."""
    for group in turn.state.training_groups(GroupPhase.READY):
        ended: dict[str, list[str]] = {}
        for sample in group.live_samples():
            reason = bound.why_inadmissible(sample, update=update, bound=turn.spec.bound, clock=turn.clock)
            if reason:
                ended.setdefault(reason, []).append(sample.sample_id)
        for reason, ids in ended.items():
            turn.emit(f.SamplesEnded(group=group.group, sample_ids=tuple(ids), end=SampleEnd.STALE, reason=reason))


def _choose(turn: Turn, request: i.LeaseBatch) -> list[GroupState]:
    """Whole groups in order of admission until the amount is reached; empty if there is not enough and more can become READY."""
    sweep(turn, request.update)
    unit, amount = _wanted(turn, request)
    chosen: list[GroupState] = []
    total = 0
    for group in turn.state.training_groups(GroupPhase.READY):
        chosen.append(group)
        total += _size(group, unit)
        if total >= amount:
            return chosen
    return chosen if _is_all(turn) else []


def _is_all(turn: Turn) -> bool:
    """Whether no further group can become READY before this update is committed."""
    on_their_way = turn.state.training_groups(GroupPhase.OPEN, GroupPhase.FINALIZING)
    return not on_their_way and bound.num_admissible(turn.state) == 0


def _wanted(turn: Turn, request: i.LeaseBatch | None) -> tuple[i.GeometryUnit, int]:
    if request is None or request.amount == 0:
        return i.GeometryUnit.GROUPS, turn.spec.batch_groups
    return request.unit, request.amount


def _size(group: GroupState, unit: i.GeometryUnit) -> int:
    if unit is i.GeometryUnit.GROUPS:
        return 1
    if unit is i.GeometryUnit.SAMPLES:
        return sum(1 for _ in group.live_samples())
    return sum(span.num_tokens for s in group.live_samples() for span in s.steps)


def _check_geometry(turn: Turn, request: i.LeaseBatch) -> None:
    """Refuse an amount that admission can never supply for this update."""
    unit, amount = _wanted(turn, request)
    update = turn.clock.applied + 1
    most = _most(turn, update, unit)
    if amount > most:
        refuse(
            "INVALID_INPUT",
            f"`geometry.amount` must be in [1, {most}] {unit.name.lower()} for update {update}, got {amount}: with "
            f"max_staleness {turn.spec.max_staleness} and batch_groups {turn.spec.batch_groups} no more can be admitted",
            field="geometry.amount",
            amount_max=most,
        )


def _most(turn: Turn, update: int, unit: i.GeometryUnit) -> int:
    """The largest amount: admission reserves groups up to update `update` + eta, of bounded size, with bounded samples."""
    spec = turn.spec
    last_update = max(update, min(update + spec.max_staleness, spec.updates_max or update + spec.max_staleness))
    groups = (last_update - update + 1) * spec.batch_groups
    samples = groups * spec.group_size * EXTEND_FACTOR_MAX * SAMPLES_PER_EPISODE_MAX
    return {
        i.GeometryUnit.GROUPS: groups,
        i.GeometryUnit.SAMPLES: samples,
        i.GeometryUnit.TOKENS: samples * SAMPLE_TOKENS_MAX,
    }[unit]


def why_no_batch(turn: Turn, request: i.LeaseBatch | None = None) -> str:
    """For people: what a trainer without a batch waits for. Without `request`: the first trainer that waits, or the run's geometry."""
    state = turn.state
    if state.ended or state.stopping:
        return f"run ended: {state.ended or state.stopping}"
    request = request or next((waiter.request for waiter in turn.volatile.trainers), None)
    unit, amount = _wanted(turn, request)
    ready = sum(_size(group, unit) for group in state.training_groups(GroupPhase.READY))
    busy = len(state.training_groups(GroupPhase.OPEN, GroupPhase.FINALIZING))
    groups = "" if unit is i.GeometryUnit.GROUPS else " groups"
    text = f"READY {unit.name.lower()}: {ready} of {amount}, {busy}{groups} on their way"
    return text if busy else f"{text}: they wait for {_why_none(turn)}"


def _why_none(turn: Turn) -> str:
    admitted = turn.clock.published is not None and bound.num_admissible(turn.state) > 0
    if admitted and not turn.volatile.workers and not turn.volatile.data_waiting:
        return "a rollout worker that asks for episodes"
    return rollouts.why_no_work(turn)


def _lease(turn: Turn, request: i.LeaseBatch, chosen: list[GroupState]) -> i.Batch:
    sample_ids = tuple(s.sample_id for g in chosen for s in g.live_samples())
    lease_id = f"b{request.trainer_epoch}.{request.update}.{turn.clock.incarnation}.{turn.state.num_batches}"
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
        samples=tuple(_leased_sample(g, s, batch) for g in groups for s in g.live_samples()),
        groups=tuple(_members(g) for g in groups),
        lease_s=max(0.0, turn.volatile.batch_deadlines[batch.lease_id] - turn.now),
    )


def _leased_sample(group: GroupState, sample: SampleState, batch: BatchState) -> i.LeasedSample:
    spans = bound.trained_spans(sample.steps, update=batch.update, bound=batch.bound)
    meta = SampleMeta(
        sample_id=sample.sample_id,
        policy=sample.policy,
        leaf=sample.leaf,
        steps=sample.steps,
        num_tokens=sample.num_tokens,
        num_sampled_tokens=sample.num_sampled_tokens,
        rewards=sample.rewards,
        trainable=sample.trainable,
    )
    return i.LeasedSample(
        meta=meta,
        group=group.group,
        task=group.task.task_id,
        payload=group.episodes[sample.episode].payload,
        staleness=bound.sample_staleness(spans, update=batch.update),
        mask_below_step=bound.mask_below_step(sample, update=batch.update, bound=batch.bound),
    )


def _members(group: GroupState) -> i.GroupMembers:
    members = tuple(
        i.Member(
            sample_id=s.sample_id,
            rewards=s.rewards,
            end="ready" if s.end is SampleEnd.LIVE else f"{s.end.name.lower()}/{s.reason}",
            episode=s.episode,
        )
        for s in group.samples.values()
    )
    return i.GroupMembers(group=group.group, task=group.task.task_id, members=members)


def get_batch(turn: Turn, request: i.GetBatch) -> None:
    """The contents of a lease, for the gateway; it names no policy."""
    if request.trainer_epoch != turn.clock.trainer_epoch:
        refuse("FENCED", f"trainer epoch {request.trainer_epoch} is fenced by {turn.clock.trainer_epoch}")
    turn.reply(request.ticket, _describe_batch(turn, held_batch(turn, request.lease_id)))


def renew_batch(turn: Turn, request: i.RenewBatch) -> None:
    check_epoch(turn, request)
    batch = held_batch(turn, request.lease_id)
    turn.volatile.batch_deadlines[batch.lease_id] = turn.now + turn.spec.batch_lease_s
    turn.reply(request.ticket, i.Renewed(gone=(), lease_s=turn.spec.batch_lease_s))


def release_batch(turn: Turn, request: i.ReleaseBatch) -> None:
    """Make the samples of a lease READY again. Idempotent within the trainer epoch."""
    check_epoch(turn, request)
    if request.lease_id not in turn.state.released:
        batch = held_batch(turn, request.lease_id)
        turn.volatile.batch_deadlines.pop(batch.lease_id, None)
        turn.emit(f.BatchReturned(lease_id=batch.lease_id, reason=RELEASED))
    turn.reply(request.ticket, i.Done())
