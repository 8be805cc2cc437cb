"""Changes of the replay log that facts imply: what it keeps, what leaves it, and the samples that are trained again.

Only `apply.py` uses it. A group is kept when its samples are TRAINED, or when a lease defers some of them. The log is a
fold of the ledger and of the spec, so it needs no facts; a choice from it is one, SamplesReplayed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from rollmesh.services.coordinator.core import bound
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import GroupDecision, Purpose, Reward, RewardOutcome, SampleEnd, Task
from rollmesh.services.coordinator.core.records import ReplaySpec
from rollmesh.services.coordinator.core.replay_priorities import Member, SuccessPerTask
from rollmesh.services.coordinator.core.state import (
    GroupPhase,
    GroupState,
    ReplayEntry,
    SampleOrigin,
    SampleState,
    State,
)

DEFERRED = "DEFERRED"
"""Reason of samples that a lease leaves to an extra update, see `replay_priorities.Compensation`."""
VANISHED = "VANISHED_ADVANTAGE"
"""Reason of groups that the replay log replaces, see `replay_priorities.Advantage`."""
RESERVED_REASONS = (DEFERRED, VANISHED)
"""Reasons that no finalizer may give."""
TASKS_KEPT_MAX = 65_536
"""Number of tasks whose groups without a success are counted."""


def success(rewards: Iterable[Reward], name: str) -> float:
    """Return the success reward; 0 without it."""
    return next((r.value for r in rewards if r.name == name and r.outcome is RewardOutcome.OK), 0.0)


def has_success(rewards: Iterable[Reward], name: str) -> bool:
    """Return whether the success reward was computed."""
    return any(r.name == name and r.outcome is RewardOutcome.OK for r in rewards)


def members_of(group: GroupState, name: str, used: Collection[str] = ()) -> list[Member]:
    """Return the members that were generated in the group. `used`: those that an update used."""
    return [
        Member(s.sample_id, success(s.meta.rewards, name), s.meta.num_sampled_tokens, s.sample_id in used)
        for s in group.samples.values()
        if s.origin is None
    ]


def spread(members: Collection[Member]) -> float:
    """Return the mean absolute deviation of the success reward; 0 without members."""
    mean = sum(member.reward for member in members) / max(1, len(members))
    return sum(abs(member.reward - mean) for member in members) / max(1, len(members))


def keep_trained(state: State, group: GroupState, used: Collection[str]) -> None:
    """Keep what the priority wants of a group whose samples `used` are about to end as TRAINED."""
    spec = state.the_spec.replay
    if spec is None or group.purpose is not Purpose.TRAIN or group.source:
        return
    members = members_of(group, state.the_spec.success_reward, used)
    advantage = group.mean_abs_advantage if group.mean_abs_advantage >= 0 else spread(members)
    _keep(state, spec, group, spec.made.kept(members, advantage), advantage)


def _keep(state: State, spec: ReplaySpec, group: GroupState, sample_ids: tuple[str, ...], advantage: float) -> None:
    if not sample_ids:
        return
    samples = {
        name: replace(sample, end=SampleEnd.LIVE, reason="") if name in sample_ids else _ended(sample)
        for name, sample in group.samples.items()
        if sample.origin is None
    }
    entries = state.replay.entries
    if spec.made.by_task:
        samples = {name: samples[name] for name in sample_ids}
        if known := next((g for g, e in entries.items() if e.group.task.task_id == group.task.task_id), ""):
            _remove(state, known)
    wanted = {samples[name].episode for name in sample_ids}
    episodes = {name: episode for name, episode in group.episodes.items() if name in wanted}
    task = Task(task_id=group.task.task_id, labels=group.task.labels)
    kept = replace(group, purpose=Purpose.REPLAY, phase=GroupPhase.READY, task=task, samples=samples, episodes=episodes)
    kept.lease_id, kept.update, kept.lost = "", 0, False
    entries[group.group] = ReplayEntry(group=kept, sample_ids=sample_ids, advantage=advantage)
    state.replay.num_bytes += entries[group.group].num_bytes
    while len(entries) > spec.capacity_groups or state.replay.num_bytes > spec.capacity_bytes:
        _remove(state, next(iter(entries)), "capacity")


def _remove(state: State, name: str, cause: str = "") -> None:
    """Remove a group from the log. Count the `cause` if nothing has taken the place of its samples."""
    log = state.replay
    log.num_bytes -= log.entries.pop(name).num_bytes
    if cause:
        log.left[cause] = log.left.get(cause, 0) + 1


def note_ended(state: State, fact: f.SamplesEnded) -> None:
    """Note samples that a lease has deferred, or a group that it has found without an advantage. Finalizers of earlier
    releases may have used the same words, so only what ends a READY group under such a priority counts."""
    spec, group = state.the_spec.replay, state.groups[fact.group]
    if spec is None or group.phase is not GroupPhase.READY:
        return
    if fact.reason == DEFERRED and spec.made.once:
        _keep(state, spec, group, fact.sample_ids, 0.0)
    elif fact.reason == VANISHED and spec.made.replaces:
        state.replay.vanished += 1


def note_decided(state: State, fact: f.GroupFinalized) -> None:
    """Count the consecutive groups of a task that have no success."""
    spec = state.the_spec.replay
    if spec is None or not isinstance(priority := spec.made, SuccessPerTask) or fact.decision is GroupDecision.EXTEND:
        return
    group, failed = state.groups[fact.group], state.replay.failed_groups
    if group.source:
        return
    found = failed.pop(group.task.task_id, 0)
    if not any(m.reward >= priority.success_min for m in members_of(group, state.the_spec.success_reward)):
        failed[group.task.task_id] = found + 1
        if len(failed) > TASKS_KEPT_MAX:
            del failed[next(iter(failed))]


def prune(state: State) -> None:
    """Remove groups of which no sample can be trained by the next update: beyond the bound, or of undone weights."""
    spec, clock = state.the_spec.replay, state.the_clock
    for name, entry in list(state.replay.entries.items()) if spec is not None else ():
        assert spec is not None
        if not admissible(entry, spec, state, clock.applied + 1):
            _remove(state, name, "bound")


def admissible(entry: ReplayEntry, spec: ReplaySpec, state: State, update: int) -> list[SampleState]:
    """Return the samples of a group in the log that `update` may train."""
    samples = (entry.group.samples[name] for name in entry.sample_ids)
    return [
        sample
        for sample in samples
        if not bound.why_inadmissible(sample.meta.steps, update=update, bound=spec.bound, clock=state.the_clock)
    ]


def replay(state: State, fact: f.SamplesReplayed) -> None:
    """Make the samples of a choice, in a group of the log or in a training group that waits for its lease."""
    log, spec = state.replay, state.the_spec.replay
    assert spec is not None, "a run without a replay log replays nothing"
    entry = log.entries[fact.original_group]
    new = {replayed.original_id: _replayed(entry, replayed) for replayed in fact.samples}
    group = state.groups.get(fact.group)
    if group is None:
        samples = [new.get(name) or _ended(sample) for name, sample in entry.group.samples.items()]
        group = replace(
            entry.group,
            group=fact.group,
            number=log.num_groups,
            samples={sample.sample_id: sample for sample in samples},
            episodes=dict(entry.group.episodes),
        )
        state.groups[fact.group] = group
    else:
        assert group.phase is GroupPhase.READY, f"{fact.group} got a replayed sample while {group.phase.name}"
        for sample in new.values():
            assert sample.sample_id not in group.samples, f"sample {sample.sample_id} replayed twice"
            group.samples[sample.sample_id] = sample
            group.episodes[sample.episode] = entry.group.episodes[sample.episode]
    log.num_groups += 1
    log.counters.reserve(len(new))
    if spec.made.once:
        _remove(state, fact.original_group)


def _ended(sample: SampleState) -> SampleState:
    """Return a member that counts in the baseline only."""
    return replace(sample, end=SampleEnd.TRAINED) if sample.end is SampleEnd.LIVE else replace(sample)


def _replayed(entry: ReplayEntry, fact: f.ReplayedSample) -> SampleState:
    original = entry.group.samples[fact.original_id]
    assert fact.original_id in entry.sample_ids, f"sample {fact.original_id} may not be replayed"
    assert fact.steps == original.meta.steps, f"{fact.sample_id} has other versions than {fact.original_id}"
    return SampleState(
        meta=replace(original.meta, sample_id=fact.sample_id),
        rewards_as_reported=original.rewards_as_reported,
        episode=original.episode,
        origin=SampleOrigin(group=entry.group.group, sample_id=fact.original_id),
    )
