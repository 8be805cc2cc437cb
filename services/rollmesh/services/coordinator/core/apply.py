"""apply(state, fact): the only code that changes durable state. It never decides, and never fails on a valid ledger.

Only a bug or a foreign ledger can violate the assertions here. `audit` relies on them.
"""

from __future__ import annotations

from functools import singledispatch

import msgspec

from rollmesh.services.coordinator.core import bound, replay_log
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import GroupDecision, Purpose, RewardOutcome, SampleEnd
from rollmesh.services.coordinator.core.group_changes import (
    add_episodes,
    close_eval_episode,
    count_eval,
    end_episode,
    end_sample,
    end_samples,
    finish,
    keep_result,
    open_eval,
    open_task,
    settle,
    without_evidence,
)
from rollmesh.services.coordinator.core.records import Bound
from rollmesh.services.coordinator.core.state import (
    RUN_ENDED,
    VERSIONS_KEPT_MAX,
    BatchState,
    EpisodeStatus,
    GroupPhase,
    GroupState,
    PolicyClock,
    Replay,
    RollBack,
    SampleState,
    SourceAccount,
    State,
    UpdateRecord,
    WaitingSamples,
    key_bytes,
    names_digest,
    samples_bytes,
    samples_digest,
    submitted_digest,
)

UPDATES_KEPT_MAX = 4096
"""Number of digests that are kept for a roll-back. A checkpoint that is older cannot be attached."""
REFUSED_KEPT_MAX = 100
RELEASED_KEPT_MAX = 1024
"""Number of released leases that are kept to recognize a repeated release."""
RELEASED = "RELEASED"
PROGRESS = (
    f.RunCreated,
    f.EpisodeScored,
    f.GroupFinalized,
    f.UpdateCommitted,
    f.CheckpointReported,
    f.VersionPublished,
    f.TasksSubmitted,
    f.SamplesSubmitted,
)
"""Facts that are progress towards trained weights. Leases, retries, failures and reservations are not, because they
also occur in a run that is stalled. Nor is an attach, because a learner that crashes repeatedly attaches repeatedly."""
REPLAYED_KEPT_MAX = 4096
"""Number of replayed dead letters that are kept. An older letter could be replayed twice."""


def apply(state: State, fact: f.Fact) -> None:
    """Apply `fact` to `state`."""
    _apply(fact, state)
    if isinstance(fact, PROGRESS):
        state.stall = state.stall_root = ""


@singledispatch
def _apply(fact: object, state: State) -> None:
    raise TypeError(f"cannot apply {fact!r}: expected a Fact")


@_apply.register
def _(fact: f.RunCreated, state: State) -> None:
    assert state.spec is None, "a run is created once"
    state.spec = fact.spec
    state.clock = PolicyClock(policy=fact.spec.policy, learner=fact.spec.learner)


@_apply.register
def _(fact: f.GroupReserved, state: State) -> None:
    assert fact.group not in state.groups, f"group {fact.group} reserved twice"
    group = GroupState(
        group=fact.group,
        number=state.num_groups,
        purpose=fact.purpose,
        policy=fact.policy,
        task=fact.task,
        draw=fact.draw,
        update_intended=fact.update_intended,
        step_min=fact.step_min,
        incarnation_min=fact.incarnation_min,
        dead_id=fact.dead_id,
        submitted_key=fact.submitted_key,
        size=fact.num_episodes,
        variants=fact.variants,
        propensity=fact.propensity,
        together=fact.together,
    )
    state.groups[fact.group] = group
    if fact.submitted_key:
        waiting = _no_longer_waiting(state, fact.submitted_key)
        given = waiting.group.episodes
        assert (fact.num_episodes, fact.task) == (len(given), waiting.group.task), f"{fact.group} has other samples"
        group.source, group.submitted_step, group.given = waiting.source, waiting.step, given
    elif state.the_spec.submitted_tasks and fact.purpose is not Purpose.EVAL and not fact.dead_id:
        assert state.submitted_open, f"{fact.group} has a task that was not submitted"
        first = state.submitted_open.pop(0)
        expected = first.task.task_id
        assert expected == fact.task.task_id, f"{fact.group} has {fact.task.task_id}, expected {expected}"
        state.submitted_open_bytes -= first.num_bytes
    state.replays = [replay for replay in state.replays if not fact.dead_id or replay.dead_id != fact.dead_id]
    if fact.purpose is Purpose.EVAL:
        open_eval(state, fact)
    else:
        state.num_groups += 1
    if fact.purpose is not Purpose.EVAL and not group.source:
        state.next_draw = max(state.next_draw, fact.draw + 1)
    add_episodes(state, group, fact.num_episodes)


@_apply.register
def _(fact: f.EpisodesAdded, state: State) -> None:
    group = state.groups[fact.group]
    group.phase = GroupPhase.OPEN
    add_episodes(state, group, fact.num_episodes)


@_apply.register
def _(fact: f.EpisodeLeased, state: State) -> None:
    group = state.groups[fact.group]
    episode = group.episodes[fact.episode]
    assert episode.status is EpisodeStatus.PENDING, f"{fact.episode} leased twice"
    state.pending_of(group.purpose).remove((fact.group, fact.episode))
    episode.status = EpisodeStatus.LEASED
    episode.attempt = fact.attempt
    episode.lease_id = fact.lease_id
    episode.node_id = fact.node_id


@_apply.register
def _(fact: f.EpisodeReturned, state: State) -> None:
    group = state.groups[fact.group]
    episode = group.episodes[fact.episode]
    assert episode.status is EpisodeStatus.LEASED, f"{fact.episode} returned without a lease"
    episode.status = EpisodeStatus.PENDING
    episode.failures += fact.counts
    episode.cause = fact.cause
    state.pending_of(group.purpose).insert(0, (fact.group, fact.episode))


@_apply.register
def _(fact: f.EpisodeEnded, state: State) -> None:
    group = state.groups[fact.group]
    episode = group.episodes[fact.episode]
    assert episode.status in (EpisodeStatus.PENDING, EpisodeStatus.LEASED), f"{fact.episode} ended twice"
    end_episode(state, group, episode, fact.end, fact.reason)
    episode.cause = fact.cause
    close_eval_episode(state, group)
    settle(state, group)


@_apply.register
def _(fact: f.EpisodeScored, state: State) -> None:
    group = state.groups[fact.group]
    episode = group.episodes[fact.episode]
    assert episode.status in (EpisodeStatus.PENDING, EpisodeStatus.LEASED), f"{fact.episode} scored twice"
    assert fact.samples, "an episode without samples ends as EpisodeEnded"
    finish(state, group, episode, EpisodeStatus.SCORED)
    episode.payload = fact.payload
    for meta in fact.samples:
        assert meta.sample_id not in group.samples, f"sample {meta.sample_id} reported twice"
        meta = msgspec.structs.replace(meta, rewards=without_evidence(meta.rewards))
        group.samples[meta.sample_id] = SampleState(meta=meta, rewards_as_reported=True, episode=fact.episode)
        if group.purpose is Purpose.EVAL:
            count_eval(state, group, meta.rewards)
        else:
            state.the_clock.tokens_generated += meta.num_sampled_tokens
    state.counters_of(group).reserve(len(fact.samples) - 1)
    keep_result(state, group, episode, "", fact.samples)
    close_eval_episode(state, group)
    settle(state, group)


@_apply.register
def _(fact: f.GroupFinalized, state: State) -> None:
    group = state.groups[fact.group]
    assert group.phase is GroupPhase.FINALIZING, f"{fact.group} finalized while {group.phase.name}"
    for adjusted in fact.adjusted:
        sample = group.samples[adjusted.sample_id]
        sample.meta = msgspec.structs.replace(sample.meta, rewards=without_evidence(adjusted.rewards))
        sample.rewards_as_reported = False
    replay_log.note_decided(state, fact)
    if fact.decision is GroupDecision.KEEP:
        group.phase = GroupPhase.READY
    elif fact.decision is GroupDecision.FILTER:
        end_samples(state, group, [s.sample_id for s in group.live_samples()], SampleEnd.FILTERED, fact.reason)


@_apply.register
def _(fact: f.SamplesEnded, state: State) -> None:
    replay_log.note_ended(state, fact)
    end_samples(state, state.groups[fact.group], fact.sample_ids, fact.end, fact.reason)


@_apply.register
def _(fact: f.TrainerAttached, state: State) -> None:
    clock = state.the_clock
    assert fact.trainer_epoch > clock.trainer_epoch, "trainer epochs grow"
    clock.trainer_epoch = fact.trainer_epoch
    clock.keeps_no_checkpoints = fact.keeps_no_checkpoints
    state.released.clear()


@_apply.register
def _(fact: f.BatchLeased, state: State) -> None:
    assert fact.lease_id not in state.batches, f"batch {fact.lease_id} leased twice"
    state.batches[fact.lease_id] = BatchState(
        lease_id=fact.lease_id,
        trainer_epoch=fact.trainer_epoch,
        update=fact.update,
        groups=fact.groups,
        sample_ids=fact.sample_ids,
        bound=state.the_spec.bound,
        foreign=state.the_spec.foreign,
    )
    state.num_batches += 1
    state.replay.vanished = 0
    for name in fact.groups:
        group = state.groups[name]
        assert group.phase is GroupPhase.READY, f"{name} leased while {group.phase.name}"
        group.phase = GroupPhase.LEASED
        group.lease_id = fact.lease_id


@_apply.register
def _(fact: f.BatchReturned, state: State) -> None:
    batch = state.batches.pop(fact.lease_id)
    if fact.reason == RELEASED:
        state.released.append(fact.lease_id)
        del state.released[:-RELEASED_KEPT_MAX]
    elif fact.reason == RUN_ENDED:
        state.expired = [fact.lease_id]
    for name in batch.groups:
        if name in state.groups:
            state.groups[name].phase = GroupPhase.READY
            state.groups[name].lease_id = ""


@_apply.register
def _(fact: f.BatchInDoubt, state: State) -> None:
    batch = state.batches[fact.lease_id]
    batch.in_doubt = True
    for name in batch.groups:
        if name in state.groups:
            state.groups[name].phase = GroupPhase.IN_DOUBT


@_apply.register
def _(fact: f.UpdateCommitted, state: State) -> None:
    clock = state.the_clock
    assert fact.update == clock.applied + 1, f"update {fact.update} committed after {clock.applied}"
    batches = [state.batches.pop(lease) for lease in fact.lease_ids]
    bounds = {name: batch.bound for batch in batches for name in batch.groups}
    groups = [state.groups[name] for name in bounds if name in state.groups]
    used = set(fact.used)
    clock.applied = fact.update
    clock.updates[fact.update] = UpdateRecord(
        digest=fact.digest,
        trainer_epoch=fact.trainer_epoch,
        lease_ids=fact.lease_ids,
        dropped=names_digest(d.sample_id for d in fact.dropped) if fact.applied else "",
        applied=fact.applied,
    )
    clock.updates.pop(fact.update - UPDATES_KEPT_MAX, None)
    if fresh := [group for group in groups if group.purpose is not Purpose.REPLAY]:
        clock.mean_rewards = _mean_rewards(fresh)
    reasons = {d.sample_id: d.reason for d in fact.dropped}
    measured = {
        g.group: g.measures.get("mean_abs_advantage", -1.0) if g.measures else g.mean_abs_advantage for g in fact.groups
    }
    for group in groups:
        group.mean_abs_advantage = measured.get(group.group, -1.0)
        group.phase = GroupPhase.APPLIED
        group.lease_id = ""
        group.update = fact.update
        for sample in group.live_samples():
            if sample.sample_id in used:
                _count_trained(state, bounds[group.group], group, sample, fact.update)
            elif sample.sample_id in reasons:
                end_sample(state, group, sample, SampleEnd.FILTERED, reasons[sample.sample_id])
        settle(state, group)
    replay_log.prune(state)


def _count_trained(state: State, leased_under: Bound, group: GroupState, sample: SampleState, update: int) -> None:
    if group.source:
        account, age = state.foreign[group.source], max(0, update - 1 - group.submitted_step)
        account.trained_by_age[age] = account.trained_by_age.get(age, 0) + 1
        account.tokens_trained += sum(span.num_tokens for span in sample.meta.external)
        return
    spans = bound.trained_spans(
        sample.meta.steps, update=update, bound=bound.bound_of(sample, leased_under, state.the_spec)
    )
    lag = bound.sample_staleness(spans, update=update)
    counts = state.the_clock if sample.origin is None else state.replay
    counts.trained_by_staleness[lag] = counts.trained_by_staleness.get(lag, 0) + 1
    counts.tokens_trained += sum(span.num_tokens for span in spans)


def _mean_rewards(groups: list[GroupState]) -> dict[str, float]:
    """Return the means over rollouts of the policy."""
    values: dict[str, list[float]] = {}
    for group in (group for group in groups if not group.source):
        for sample in (s for s in group.samples.values() if s.origin is None):
            for reward in sample.meta.rewards:
                if reward.outcome is RewardOutcome.OK:
                    values.setdefault(reward.name, []).append(reward.value)
    return {name: sum(v) / len(v) for name, v in values.items()}


@_apply.register
def _(fact: f.CheckpointReported, state: State) -> None:
    clock = state.the_clock
    clock.checkpoint = max(clock.checkpoint, fact.update)
    for group in state.learner_groups(GroupPhase.APPLIED):
        if group.update <= fact.update:
            live = [s.sample_id for s in group.live_samples()]
            num_replayed = sum(s.origin is not None for s in group.live_samples())
            if (record := clock.updates.get(group.update)) is not None:
                record.num_replayed += num_replayed
                if group.source:
                    record.foreign_trained[group.source] = record.foreign_trained.get(group.source, 0) + len(live)
                else:
                    record.num_trained += len(live) - num_replayed
            replay_log.keep_trained(state, group, live)
            end_samples(state, group, live, SampleEnd.TRAINED, "")


@_apply.register
def _(fact: f.RolledBack, state: State) -> None:
    clock = state.the_clock
    assert fact.incarnation == clock.incarnation + 1, "incarnations grow by one"
    for group in state.learner_groups(GroupPhase.APPLIED):
        if group.update > fact.to_update:
            group.phase = GroupPhase.READY
            group.update = 0
    for group in bound.out_of_reach(state, fact.to_update):
        group.step_min, group.incarnation_min = fact.to_update, fact.incarnation
    for update in [u for u in clock.updates if u > fact.to_update]:
        undone = clock.updates.pop(update)
        state.counters.void_trained(undone.num_trained)
        state.replay.counters.void_trained(undone.num_replayed)
        for source, num in undone.foreign_trained.items():
            state.foreign[source].counters.void_trained(num)
    clock.applied = fact.to_update
    clock.checkpoint = min(clock.checkpoint, fact.to_update)
    clock.incarnation = fact.incarnation
    clock.published = None
    state.stopping = ""
    clock.rollbacks.append(RollBack(incarnation=fact.incarnation, to_update=fact.to_update))
    replay_log.prune(state)


@_apply.register
def _(fact: f.VersionPublished, state: State) -> None:
    clock = state.the_clock
    assert fact.version.incarnation == clock.incarnation, "only the current incarnation is published"
    clock.published = fact.version
    clock.versions.append(fact.version)
    del clock.versions[:-VERSIONS_KEPT_MAX]


@_apply.register
def _(fact: f.VersionQuarantined, state: State) -> None:
    clock = state.the_clock
    clock.quarantined.append(fact.version)
    del clock.quarantined[:-REFUSED_KEPT_MAX]
    clock.refusals[str(fact.version)] = fact.cause
    for old in list(clock.refusals)[:-REFUSED_KEPT_MAX]:
        del clock.refusals[old]


@_apply.register
def _(fact: f.RunEnded, state: State) -> None:
    state.ended = fact.reason
    state.stopping = ""


@_apply.register
def _(fact: f.RunStalled, state: State) -> None:
    state.stall, state.stall_root = fact.cause, fact.root


@_apply.register
def _(fact: f.TaskReplayed, state: State) -> None:
    assert fact.dead_id not in state.replayed, f"dead letter {fact.dead_id} replayed twice"
    state.replays.append(Replay(dead_id=fact.dead_id, task=fact.task, draw=fact.draw))
    state.replayed.append(fact.dead_id)
    del state.replayed[:-REPLAYED_KEPT_MAX]


@_apply.register
def _(fact: f.TasksSubmitted, state: State) -> None:
    keys = {key.task_id: key for key in fact.answer_keys}
    for task in fact.tasks:
        assert task.task_id not in state.submitted, f"task {task.task_id} submitted twice"
        key = keys.get(task.task_id)
        state.submitted[task.task_id] = submitted_digest(task, key)
        open_task(state, task, key_bytes(key), len(state.submitted_open))
    state.submitted_finished = state.submitted_finished or fact.finish


@_apply.register
def _(fact: f.SamplesReplayed, state: State) -> None:
    replay_log.replay(state, fact)


@_apply.register
def _(fact: f.ArchiveSealed, state: State) -> None:
    assert fact.number == state.num_segments + 1, f"segment {fact.number} after segment {state.num_segments}"
    assert fact.first == state.archived + 1, f"segment {fact.number} begins at {fact.first}, not {state.archived + 1}"
    state.archived, state.num_segments = fact.last, fact.number


@_apply.register
def _(fact: f.SamplesSubmitted, state: State) -> None:
    keys = {key.task_id: key for key in fact.answer_keys}
    source = fact.source.name.lower()
    account = state.foreign.setdefault(source, SourceAccount())
    for group in fact.groups:
        assert group.key not in state.foreign_keys, f"samples {group.key} submitted twice"
        state.foreign_keys[group.key] = samples_digest(group, source, keys.get(group.task.task_id))
        waiting = WaitingSamples(
            group=group, source=source, step=state.the_clock.applied, num_bytes=samples_bytes(group)
        )
        state.foreign_waiting[group.key] = waiting
        state.foreign_waiting_bytes += waiting.num_bytes
        account.groups += 1


@_apply.register
def _(fact: f.SubmittedSamplesDropped, state: State) -> None:
    for key in fact.keys:
        state.foreign[_no_longer_waiting(state, key).source].dropped += 1


def _no_longer_waiting(state: State, key: str) -> WaitingSamples:
    waiting = state.foreign_waiting.pop(key)
    state.foreign_waiting_bytes -= waiting.num_bytes
    return waiting


@_apply.register
def _(fact: f.TimeCounted, state: State) -> None:
    state.seconds += fact.seconds


@_apply.register
def _(fact: f.RunStopping, state: State) -> None:
    state.stopping = fact.reason


@_apply.register
def _(fact: f.RunChanged, state: State) -> None:
    state.spec = fact.spec
    state.last_change = fact.change_id
    state.stopping = ""
    if fact.reopened:
        state.ended = ""
