"""Decide on replay: which samples of the log the next batch trains again, and which fresh ones they replace.

The order is that of the priority, and ties are broken by a draw that depends on the seed of the run, the update and the
group only. Nothing here guarantees a bound: `bound.why_inadmissible` is checked at the lease and again at the commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.decision_context import DecisionContext
from rollmesh.services.coordinator.core.facts import ReplayedSample, SampleEnd
from rollmesh.services.coordinator.core.replay_log import (
    DEFERRED,
    VANISHED,
    admissible,
    has_success,
    members_of,
    spread,
)
from rollmesh.services.coordinator.core.replay_priorities import Compensation, SuccessPerTask, Worth
from rollmesh.services.coordinator.core.state import GroupPhase, GroupState, ReplayEntry, SampleState

Size = Callable[[GroupState], int]
"""Size of a group in the unit of the batch."""


def quota(ctx: DecisionContext, amount: int) -> int:
    """Return how much of a batch of this amount may be replayed. At least one unit is fresh."""
    spec = ctx.spec.replay
    return 0 if spec is None else spec.quota(amount)


def fresh_amount(ctx: DecisionContext, update: int, amount: int, size: Size, group_amount: int) -> int:
    """Return how much of a batch of this amount must be fresh at least, as `plan` does, without a look at the groups of
    the log: it may have fewer than this assumes. `group_amount` is the amount of a whole group."""
    spec = ctx.spec.replay
    if spec is None:
        return amount
    if isinstance(spec.made, Compensation):
        return 0 if _begins_extra_update(ctx, update) else amount
    return amount - _replayed_max(ctx, amount, size, group_amount)


def _replayed_max(ctx: DecisionContext, amount: int, size: Size, group_amount: int) -> int:
    """Return how much of a batch the groups of the log may be, with a priority that adds whole groups to batches."""
    spec = ctx.spec.replay
    if spec is None or not (spec.made.draws or spec.made.replaces):
        return 0
    most = quota(ctx, amount)
    if spec.made.replaces:
        waiting = ctx.state.replayed_groups(GroupPhase.READY)
        most = min(most, ctx.state.replay.vanished * group_amount + sum(map(size, waiting)))
    return most


def drop_vanished(ctx: DecisionContext, group: GroupState) -> bool:
    """End a READY group without an advantage if the log replaces such groups. Return whether it ended."""
    spec = ctx.spec.replay
    if spec is None or not spec.made.replaces or group.source:
        return False
    name = ctx.spec.success_reward
    measured = any(has_success(s.meta.rewards, name) for s in group.samples.values())
    if spread(members_of(group, name)) > 0 or not measured:
        return False  # without the reward nothing says that the advantage vanishes
    live = tuple(s.sample_id for s in group.live_samples())
    ctx.emit(f.SamplesEnded(group=group.group, sample_ids=live, end=SampleEnd.FILTERED, reason=VANISHED))
    return True


def plan(
    ctx: DecisionContext, update: int, amount: int, size: Size, group_amount: int
) -> tuple[list[GroupState | ReplayEntry], int]:
    """Return what to replay in a batch of `amount`, and the amount that must be fresh. `group_amount` is the amount of
    a whole group.

    Groups of the log that a returned batch had come first.
    """
    spec = ctx.spec.replay
    if spec is None:
        return [], amount
    priority = spec.made
    if isinstance(priority, Compensation):
        if not _begins_extra_update(ctx, update):
            return [], amount
        waiting = ctx.state.replayed_groups(GroupPhase.READY)
        chosen = _first([*waiting, *_ranked(ctx, update)], amount, size, full=True)
        return chosen, 0 if chosen else amount
    most = _replayed_max(ctx, amount, size, group_amount)
    if most <= 0:
        return [], amount
    waiting = ctx.state.replayed_groups(GroupPhase.READY)
    chosen = _first([*waiting, *_ranked(ctx, update)], most, size, full=False)
    return chosen, amount - (most if priority.draws else sum(size(_group(one)) for one in chosen))


def take(ctx: DecisionContext, update: int, chosen: Iterable[GroupState | ReplayEntry]) -> list[GroupState]:
    """Return the groups of a plan. Those of the log become groups of new samples."""
    found = []
    for one in chosen:
        if isinstance(one, ReplayEntry):
            name = f"r{ctx.state.replay.num_groups}"
            spec = ctx.spec.replay
            assert spec is not None, "a plan is of a replay log"
            _emit(ctx, update, name, one, admissible(one, spec, ctx.state, update))
            one = ctx.state.groups[name]
        found.append(one)
    return found


def adjust(ctx: DecisionContext, update: int, fresh: list[GroupState]) -> list[GroupState]:
    """Let fresh groups defer samples, or add stored successes to them, as the priority says. Return those that still
    have samples for the batch."""
    spec = ctx.spec.replay
    if spec is not None and isinstance(spec.made, Compensation):
        _defer(ctx, spec.made, fresh)
    elif spec is not None and isinstance(spec.made, SuccessPerTask):
        _add_successes(ctx, update, spec.made, fresh)
    return [group for group in fresh if any(True for _ in group.live_samples())]


def _defer(ctx: DecisionContext, priority: Compensation, fresh: list[GroupState]) -> None:
    """Defer all but the first samples of the groups. A group that has deferred some keeps the others."""
    rollouts = [group for group in fresh if not group.source]
    new = [g for g in rollouts if not any(s.reason == DEFERRED for s in g.samples.values())]
    live = {s.sample_id for g in new for s in g.live_samples()}
    members = [m for g in new for m in members_of(g, ctx.spec.success_reward) if m.sample_id in live]
    first = priority.first(members)
    for group in new:
        rest = tuple(s.sample_id for s in group.live_samples() if s.sample_id not in first)
        if rest:
            ctx.emit(f.SamplesEnded(group=group.group, sample_ids=rest, end=SampleEnd.FILTERED, reason=DEFERRED))


def _add_successes(ctx: DecisionContext, update: int, priority: SuccessPerTask, fresh: list[GroupState]) -> None:
    """Add the stored success of its task to each group that has none, within the share of the batch."""
    spec = ctx.spec.replay
    assert spec is not None, "the priority is of a replay log"
    left = quota(ctx, sum(1 for g in fresh for s in g.live_samples() if s.origin is None))
    stored = {entry.group.task.task_id: entry for entry in ctx.state.replay.entries.values()}
    for group in fresh:
        entry = stored.get(group.task.task_id)
        if entry is None or left <= 0 or group.source or any(s.origin is not None for s in group.samples.values()):
            continue
        if any(m.reward >= priority.success_min for m in members_of(group, ctx.spec.success_reward)):
            continue
        if ctx.state.replay.failed_groups.get(group.task.task_id, 0) < priority.after_groups:
            continue
        if samples := admissible(entry, spec, ctx.state, update):
            _emit(ctx, update, group.group, entry, samples)
            del stored[group.task.task_id]  # a batch has a sample once
            left -= len(samples)


def _emit(ctx: DecisionContext, update: int, group: str, entry: ReplayEntry, samples: Iterable[SampleState]) -> None:
    number = ctx.state.replay.num_groups
    ctx.emit(
        f.SamplesReplayed(
            group=group,
            original_group=entry.group.group,
            samples=tuple(
                ReplayedSample(sample_id=f"r{number}.{index}", original_id=s.sample_id, steps=s.meta.steps)
                for index, s in enumerate(samples)
            ),
            update=update,
        )
    )


def _begins_extra_update(ctx: DecisionContext, update: int) -> bool:
    """Return whether the next batch is one of deferred samples: a returned one, or the log has no room for those of
    another batch, or its oldest ones would be beyond their bound at the update after this one."""
    spec, log = ctx.spec.replay, ctx.state.replay
    assert spec is not None, "the priority is of a replay log"
    assert isinstance(spec.made, Compensation), "only this priority has extra updates"
    if ctx.state.replayed_groups(GroupPhase.READY):
        return True
    if not spec.made.extra_updates or not log.entries:
        return False
    after_another = len(log.entries) + ctx.spec.batch_groups
    if after_another > ctx.spec.deferred_groups_max:
        return True
    if log.num_bytes / len(log.entries) * after_another > spec.capacity_bytes:
        return True
    oldest = next(iter(log.entries.values()))
    return len(admissible(oldest, spec, ctx.state, update + 1)) < len(admissible(oldest, spec, ctx.state, update))


def _ranked(ctx: DecisionContext, update: int) -> list[ReplayEntry]:
    """Return the groups of the log of which `update` may train samples, the first choice first. A group that a batch or
    a training group has is not chosen again meanwhile."""
    spec, state = ctx.spec.replay, ctx.state
    assert spec is not None, "a run without a replay log has no groups in it"
    live = {s.origin.group for g in state.groups.values() for s in g.live_samples() if s.origin is not None}
    ranked = []
    for index, entry in enumerate(state.replay.entries.values()):
        if entry.group.group in live or not admissible(entry, spec, state, update):
            continue
        draw = _uniform(f"{ctx.spec.seed}/{update}/{entry.group.group}")
        kept = {s.sample_id for s in entry.group.samples.values()} & set(entry.sample_ids)
        returns = [m.reward for m in members_of(entry.group, ctx.spec.success_reward) if m.sample_id in kept]
        worth = Worth(
            advantage=entry.advantage,
            mean_return=sum(returns) / len(returns),
            age=len(state.replay.entries) - index,
        )
        ranked.append((-spec.made.order(worth, draw), draw, index, entry))
    return [entry for *_, entry in sorted(ranked, key=lambda one: one[:3])]


def _uniform(key: str) -> float:
    """Return a draw in (0, 1)."""
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big")
    return (number + 0.5) / 2**48


def _first(
    candidates: Iterable[GroupState | ReplayEntry], most: int, size: Size, *, full: bool
) -> list[GroupState | ReplayEntry]:
    """Return the first candidates within the size `most`; with `full`, until they reach it."""
    chosen: list[GroupState | ReplayEntry] = []
    total = 0
    for one in candidates:
        if total >= most:
            break
        num = size(_group(one))
        if not full and total + num > most:
            continue
        chosen.append(one)
        total += num
    return chosen


def _group(one: GroupState | ReplayEntry) -> GroupState:
    return one.group if isinstance(one, ReplayEntry) else one
