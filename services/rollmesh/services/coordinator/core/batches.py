"""Decide on batch leases: choose whole groups within the bound, renew, release."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from rollmesh.services.coordinator.core import bound, foreign_samples, replay, rollouts
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.apply import RELEASED
from rollmesh.services.coordinator.core.decision_context import BatchWait, DecisionContext
from rollmesh.services.coordinator.core.facts import SampleEnd
from rollmesh.services.coordinator.core.guards import (
    check_epoch,
    check_not_fenced,
    check_trains,
    held_batch,
    refuse_expired,
)
from rollmesh.services.coordinator.core.records import EXTEND_FACTOR_MAX, SAMPLE_TOKENS_MAX, SAMPLES_PER_EPISODE_MAX
from rollmesh.services.coordinator.core.state import BatchState, GroupPhase, GroupState, ReplayEntry, SampleState
from rollmesh.shared.domain.text import count_of, short_labels
from rollmesh.shared.errors import (
    NotPublished,
    PayloadTooLarge,
    RunEnded,
    WrongUpdate,
    field_error,
)


def lease_batch(ctx: DecisionContext, request: i.LeaseBatch) -> None:
    """Lease the batch of the next update, now or when enough samples are READY. Idempotent by (epoch, update)."""
    check_trains(ctx)
    check_epoch(ctx, request)
    _check_geometry(ctx, request)
    held = next((b for b in ctx.state.batches.values() if b.update == request.update), None)
    if held is not None and held.in_doubt:
        refuse_expired(held.lease_id)
    if held is not None:
        grant = _describe_batch(ctx, held, ctx.ephemeral.batch_deadlines[held.lease_id])
        if refusal := _too_large(ctx, request, grant, is_held=True):
            raise refusal
        ctx.reply(request, grant)
        return
    _check_update(ctx, request.update)
    ctx.ephemeral.trainers.append(BatchWait(request, ctx.now + request.wait_s))


def _check_update(ctx: DecisionContext, update: int) -> None:
    clock, state = ctx.clock, ctx.state
    if state.ended or state.stopping:
        raise RunEnded(f"run {ctx.spec.run} has ended: {state.ended or state.stopping}")
    if update != clock.applied + 1:
        raise WrongUpdate(
            f"update {update} was requested, the next one is {clock.applied + 1}; load the newest checkpoint and "
            "attach again",
            next_update=clock.applied + 1,
        )
    if clock.published is None:
        raise NotPublished(
            f"publish the weights of step {clock.applied}, incarnation {clock.incarnation}, before leasing a batch",
        )


def grant_batches(ctx: DecisionContext) -> bool:
    """Reply to waiting trainers whose batch is ready or whose wait is over. Return whether one of them got no batch."""
    unserved = False
    for waiter in list(ctx.ephemeral.trainers):
        request = waiter.request
        chosen = [] if ctx.state.stopping else _choose(ctx, request)
        if chosen:
            ctx.ephemeral.trainers.remove(waiter)
            ctx.reply(waiter.request, _lease(ctx, request, chosen))
            continue
        unserved = True
        if ctx.now >= waiter.deadline or ctx.state.ended or ctx.state.stopping:
            ctx.ephemeral.trainers.remove(waiter)
            ctx.reply(waiter.request, m.LeaseBatchResponse(waiting_for=why_no_batch(ctx, request)))
    return unserved


def sweep(ctx: DecisionContext, update: int) -> None:
    """End READY samples that cannot be trained at `update` or later. The rewards stay with the group for its
    baseline."""
    for group in ctx.state.learner_groups(GroupPhase.READY):
        ended: dict[str, list[str]] = {}
        for sample in group.live_samples():
            of_sample = bound.bound_of(sample, ctx.spec.bound, ctx.spec)
            reason = foreign_samples.why_beyond(ctx.spec.foreign, group.source, group.submitted_step, update)
            reason = reason or bound.why_inadmissible(
                sample.meta.steps, update=update, bound=of_sample, clock=ctx.clock
            )
            if reason:
                ended.setdefault(reason, []).append(sample.sample_id)
        for reason, ids in ended.items():
            ctx.emit(f.SamplesEnded(group=group.group, sample_ids=tuple(ids), end=SampleEnd.STALE, reason=reason))


def _choose(ctx: DecisionContext, request: i.LeaseBatch) -> list[GroupState]:
    """Return whole groups in order of admission until the amount is reached, and what the replay log adds. Return none
    if more can become READY."""
    sweep(ctx, request.update)
    unit, amount = _wanted(ctx, request)
    ready = [g for g in ctx.state.training_groups(GroupPhase.READY) if not replay.drop_vanished(ctx, g)]
    within = _within_shares(ctx, ready, unit, amount)
    if within or not _is_all(ctx):  # else only submitted samples are left, which no rollout will join
        ready = within
    least = replay.fresh_amount(ctx, request.update, amount, partial(_size, unit=unit), _whole(ctx, unit, amount))
    if sum(_size(g, unit) for g in ready) < least and not _is_all(ctx):
        return []
    replayed, num_fresh = _plan(ctx, request.update, unit, amount)
    fresh: list[GroupState] = []
    total = 0
    for group in _whole_bundles_first(ctx, ready, request.update, partial(_size, unit=unit), num_fresh):
        if total >= num_fresh:
            break
        fresh.append(group)
        total += _size(group, unit)
    fresh.sort(key=lambda group: group.number)
    if total < num_fresh and not (fresh and _is_all(ctx)):
        return []
    return replay.adjust(ctx, request.update, fresh) + replay.take(ctx, request.update, replayed)


def _whole_bundles_first(
    ctx: DecisionContext, ready: list[GroupState], update: int, size_of: Callable[[GroupState], int], amount: int
) -> list[GroupState]:
    """Return the READY groups in the order in which a batch of `amount` takes them: in order of admission, but groups
    that belong together adjoin, and those of which one is not READY yet, or for which the batch has no room, come
    last, unless one of them would be beyond the bound at the next update. The order of the others, and whether the
    batch can be filled, do not depend on them."""
    if not any(group.together for group in ready):
        return ready
    unready = {group.together for group in ctx.state.training_groups(GroupPhase.OPEN, GroupPhase.FINALIZING)}
    order, last, total, seen = list[GroupState](), list[GroupState](), 0, set[str]()
    for group in ready:
        if group.together and group.together in seen:
            continue
        seen.add(group.together)
        bundle = [one for one in ready if one.together == group.together] if group.together else [group]
        size = sum(size_of(one) for one in bundle)
        fits = len(bundle) == 1 or total + size <= amount or not total
        is_whole = fits and not (group.together and group.together in unready)
        if is_whole or any(_is_last_update(ctx, one, update) for one in bundle):
            order += bundle
            total += size
        else:
            last += bundle
    return order + last


def _is_last_update(ctx: DecisionContext, group: GroupState, update: int) -> bool:
    """Return whether a sample of a READY group is beyond its bound after this update."""
    return any(
        bound.why_inadmissible(
            sample.meta.steps,
            update=update + 1,
            bound=bound.bound_of(sample, ctx.spec.bound, ctx.spec),
            clock=ctx.clock,
        )
        for sample in group.live_samples()
    )


def _plan(
    ctx: DecisionContext, update: int, unit: i.GeometryUnit, amount: int
) -> tuple[list[GroupState | ReplayEntry], int]:
    return replay.plan(ctx, update, amount, partial(_size, unit=unit), _whole(ctx, unit, amount))


def _whole(ctx: DecisionContext, unit: i.GeometryUnit, amount: int) -> int:
    """Return the amount of a whole group."""
    return {i.GeometryUnit.GROUPS: 1, i.GeometryUnit.SAMPLES: ctx.spec.group_size}.get(unit, amount)


def _within_shares(
    ctx: DecisionContext, ready: list[GroupState], unit: i.GeometryUnit, amount: int
) -> list[GroupState]:
    """Return the groups that a batch of this amount may have: those of a source at most up to its share."""
    share = foreign_samples.BatchShare(ctx, amount)
    return [group for group in ready if share.take(group, _size(group, unit))]


def _progress(ctx: DecisionContext, request: i.LeaseBatch | None = None) -> tuple[int, int]:
    """Return how much of the next batch is READY, and how much of it must be fresh, as `_choose` computes it."""
    unit, amount = _wanted(ctx, request)
    ready = _within_shares(ctx, ctx.state.training_groups(GroupPhase.READY), unit, amount)
    return sum(_size(group, unit) for group in ready), _plan(ctx, ctx.clock.applied + 1, unit, amount)[1]


def has_batch(ctx: DecisionContext) -> bool:
    """Return whether a batch of the run's own size could be leased now."""
    ready, wanted = _progress(ctx)
    return ready >= wanted


def _is_all(ctx: DecisionContext) -> bool:
    """Return whether no further group can become READY before this update is committed."""
    state = ctx.state
    drawn = state.submissions_done and not state.replays and not foreign_samples.any_admissible(ctx)
    return not state.training_groups(GroupPhase.OPEN, GroupPhase.FINALIZING) and (
        drawn or bound.num_admissible(state) == 0
    )


def ready_ahead(ctx: DecisionContext, request: i.WatchReady, known: set[str]) -> tuple[m.LeasedSample, ...]:
    """Return the READY samples of the next batch outside the groups in `known`, which becomes the groups of that batch
    and other READY ones of before. This decides nothing: the lease does."""
    check_trains(ctx)
    check_epoch(ctx, request)
    if ctx.state.ended or ctx.state.stopping:
        raise RunEnded(f"run {ctx.spec.run} has ended: {ctx.state.ended or ctx.state.stopping}")
    unit, amount = _wanted(ctx, request)
    ready = ctx.state.training_groups(GroupPhase.READY)
    fresh: list[GroupState] = []
    total = 0
    for group in ready:
        if total >= amount:
            break
        total += _size(group, unit)
        if group.group not in known:
            fresh.append(group)
    known &= {group.group for group in ready}
    known |= {group.group for group in fresh}
    return tuple(_ready_sample(ctx, group, sample) for group in fresh for sample in group.live_samples())


def _wanted(ctx: DecisionContext, request: i.LeaseBatch | i.WatchReady | None) -> tuple[i.GeometryUnit, int]:
    if request is None or request.amount == 0:
        return i.GeometryUnit.GROUPS, ctx.spec.batch_groups
    return request.unit, request.amount


def _size(group: GroupState, unit: i.GeometryUnit) -> int:
    if unit is i.GeometryUnit.GROUPS:
        return 1
    if unit is i.GeometryUnit.SAMPLES:
        return sum(1 for _ in group.live_samples())
    if group.source:
        return sum(span.num_tokens for s in group.live_samples() for span in s.meta.external)
    return sum(span.num_tokens for s in group.live_samples() for span in s.meta.steps)


def _check_geometry(ctx: DecisionContext, request: i.LeaseBatch) -> None:
    """Reject an amount that admission can never supply for this update."""
    unit, amount = _wanted(ctx, request)
    update = ctx.clock.applied + 1
    most = _most(ctx, update, unit)
    if amount > most:
        must = f"be in [1, {most}] {unit.name.lower()} for update {update}"
        why = f"max_staleness {ctx.spec.max_staleness} and batch_groups {ctx.spec.batch_groups} admit no more"
        raise field_error("geometry.amount", must, amount, why, amount_max=most)


def _most(ctx: DecisionContext, update: int, unit: i.GeometryUnit) -> int:
    """Return the largest amount: admission reserves groups up to update `update` + eta, and sizes of groups and samples
    are bounded."""
    spec = ctx.spec
    last_update = max(update, min(update + spec.max_staleness, spec.updates_max or update + spec.max_staleness))
    groups = (last_update - update + 1) * spec.fresh_groups + spec.batch_groups - spec.fresh_groups
    samples = groups * spec.group_size * EXTEND_FACTOR_MAX * SAMPLES_PER_EPISODE_MAX
    return {
        i.GeometryUnit.GROUPS: groups,
        i.GeometryUnit.SAMPLES: samples,
        i.GeometryUnit.TOKENS: samples * SAMPLE_TOKENS_MAX,
    }[unit]


def why_no_batch(ctx: DecisionContext, request: i.LeaseBatch | None = None) -> str:
    """Return what a trainer without a batch waits for. Without `request`: the first waiting trainer, or the run's
    geometry."""
    state = ctx.state
    if state.ended or state.stopping:
        return f"run ended: {state.ended or state.stopping}"
    request = request or next((waiter.request for waiter in ctx.ephemeral.trainers), None)
    unit, _ = _wanted(ctx, request)
    ready, wanted = _progress(ctx, request)
    busy = len(state.training_groups(GroupPhase.OPEN, GroupPhase.FINALIZING))
    on_their_way = str(busy) if unit is i.GeometryUnit.GROUPS else count_of(busy, "group")
    text = f"READY {unit.name.lower()}: {ready} of {wanted}, {on_their_way} on their way"
    if rejected := rollouts.why_rejected(ctx):
        return f"{text}; {rejected}"
    return text if busy else f"{text}: the run waits for {_why_no_group(ctx)}"


def _why_no_group(ctx: DecisionContext) -> str:
    admitted = ctx.clock.published is not None and bound.num_admissible(ctx.state) > 0
    waits_for_task = ctx.ephemeral.data_waiting or (ctx.spec.submitted_tasks and not ctx.state.submitted_open)
    if admitted and not ctx.ephemeral.workers and not waits_for_task:
        return "a rollout worker that requests episodes"
    return rollouts.why_no_work(ctx)


def _lease(
    ctx: DecisionContext, request: i.LeaseBatch, chosen: list[GroupState]
) -> m.LeaseBatchResponse | PayloadTooLarge:
    """Lease the groups, unless the reply would exceed a message: the trainer could never receive that lease."""
    batch = BatchState(
        lease_id=f"b{request.trainer_epoch}.{request.update}.{ctx.clock.incarnation}.{ctx.state.num_batches}",
        trainer_epoch=request.trainer_epoch,
        update=request.update,
        groups=tuple(g.group for g in chosen),
        sample_ids=tuple(s.sample_id for g in chosen for s in g.live_samples()),
        bound=ctx.spec.bound,
    )
    deadline = ctx.now + ctx.spec.batch_lease_s
    grant = _describe_batch(ctx, batch, deadline)
    if refusal := _too_large(ctx, request, grant, is_held=False):
        return refusal
    ctx.emit(
        f.BatchLeased(
            lease_id=batch.lease_id,
            policy=request.policy,
            learner=request.learner,
            trainer_epoch=batch.trainer_epoch,
            update=batch.update,
            groups=batch.groups,
            sample_ids=batch.sample_ids,
        )
    )
    ctx.ephemeral.batch_deadlines[batch.lease_id] = deadline
    return grant


def _too_large(
    ctx: DecisionContext, request: i.LeaseBatch, grant: m.LeaseBatchResponse, *, is_held: bool
) -> PayloadTooLarge | None:
    """Return the refusal of a grant whose reply exceeds a message; None if it fits. `is_held` says whether the batch is
    leased; only then does the refusal name its lease."""
    if (size := request.size_of(grant)) <= request.bytes_max:
        return None
    spec = ctx.spec
    outcome = f"batch lease {grant.lease_id} remains held; release it, then " if is_held else "no batch was leased; "
    error = PayloadTooLarge(
        f"the metadata of the batch of update {request.update} has {size} bytes "
        f"({count_of(len(grant.samples), 'sample')} in {count_of(len(grant.groups), 'group')}), expected at most "
        f"{request.bytes_max}: {outcome}lower `run.batch_groups` (now {spec.batch_groups}), `run.group_size` (now "
        f"{spec.group_size}), the sizes that the selector plans or `geometry.amount`, let scorers return fewer rewards "
        "or shorter answers, or raise `coordinator.server.message_bytes_max` if it is below that of clients, 8 MiB",
        bytes=size,
        bytes_max=request.bytes_max,
    )
    if is_held:
        error.metadata["lease_id"] = grant.lease_id
    return error


def _describe_batch(ctx: DecisionContext, batch: BatchState, deadline: float) -> m.LeaseBatchResponse:
    groups = [ctx.state.groups[name] for name in batch.groups]
    return m.LeaseBatchResponse(
        lease_id=batch.lease_id,
        samples=tuple(_leased_sample(ctx, g, s, batch) for g in groups for s in g.live_samples()),
        groups=tuple(group_members(g) for g in groups),
        lease_s=max(0.0, deadline - ctx.now),
    )


def _leased_sample(ctx: DecisionContext, group: GroupState, sample: SampleState, batch: BatchState) -> m.LeasedSample:
    of_sample = bound.bound_of(sample, batch.bound, ctx.spec)
    spans = bound.trained_spans(sample.meta.steps, update=batch.update, bound=of_sample)
    return msgspec.structs.replace(
        _ready_sample(ctx, group, sample),
        staleness=bound.sample_staleness(spans, update=batch.update),
        mask_below_step=bound.mask_below_step(sample.meta.steps, update=batch.update, bound=of_sample),
    )


def _ready_sample(ctx: DecisionContext, group: GroupState, sample: SampleState) -> m.LeasedSample:
    meta, episode = sample.meta, group.episodes[sample.episode]
    if meta.summary.text:  # the members of the groups have it
        meta = msgspec.structs.replace(meta, summary=msgspec.structs.replace(meta.summary, text=""))
    return m.LeasedSample(
        meta=meta,
        group=group.group,
        task=group.task.task_id,
        payload=episode.payload,
        staleness=0,
        mask_below_step=0,
        key=m.EpisodeKey(
            run=ctx.spec.run,
            task=group.task.task_id,
            group=sample.origin.group if sample.origin is not None else group.group,
            episode=episode.episode,
            attempt=episode.attempt,
        ),
        rewards_as_reported=sample.rewards_as_reported,
        replay_of=sample.origin.sample_id if sample.origin is not None else "",
    )


def group_members(group: GroupState) -> m.GroupContext:
    """Return what estimators and trainers see of a group."""
    members = tuple(
        m.MemberOutcome(
            sample_id=s.sample_id,
            rewards=s.meta.rewards,
            end=s.end_text,
            episode=s.episode,
            summary=s.meta.summary,
        )
        for s in group.samples.values()
    )
    return m.GroupContext(
        group=group.group,
        task=group.task.task_id,
        members=members,
        labels=short_labels(group.task.labels),
        propensity=group.propensity,
    )


def get_batch(ctx: DecisionContext, request: m.GetBatch) -> None:
    """Reply with the samples of a lease, for the gateway. The request has no policy."""
    check_not_fenced(ctx, request.trainer_epoch)
    batch, wanted = held_batch(ctx, request.lease_id), set(request.sample_ids)
    samples = ((g, s) for g in (ctx.state.groups[name] for name in batch.groups) for s in g.live_samples())
    found = tuple(_leased_sample(ctx, g, s, batch) for g, s in samples if not wanted or s.sample_id in wanted)
    ctx.reply(request, m.GetBatchResponse(samples=found))


def renew_batch(ctx: DecisionContext, request: m.RenewBatch) -> None:
    check_epoch(ctx, request)
    batch = held_batch(ctx, request.lease_id)
    ctx.ephemeral.batch_deadlines[batch.lease_id] = ctx.now + ctx.spec.batch_lease_s
    ctx.reply(request, m.RenewBatchResponse(lease_s=ctx.spec.batch_lease_s))


def release_batch(ctx: DecisionContext, request: m.ReleaseBatch) -> None:
    """Make the samples of a lease READY again. Idempotent within the trainer epoch."""
    check_epoch(ctx, request)
    if request.lease_id not in ctx.state.released:
        batch = held_batch(ctx, request.lease_id)
        ctx.ephemeral.batch_deadlines.pop(batch.lease_id, None)
        ctx.emit(f.BatchReturned(lease_id=batch.lease_id, reason=RELEASED))
    ctx.reply(request, m.ReleaseBatchResponse())
