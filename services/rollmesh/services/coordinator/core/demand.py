"""Admission on demand: how many groups the learner needs ahead, so that it does not wait for them.

The bound admits a group while n < (p + 1)·b + eta·b (bound.py). If the learner is the bottleneck, that fills the queue
of READY groups, and every sample waits in it until it is almost eta updates old. Demand lowers the allowance from eta·b
to

    ahead = min(eta·b, needed + slack)

- `needed` is a base stock. After each commit, `_measure` computes the smallest allowance under which the next batch
  would have been READY: a batch, and the groups that were still on their way although they had been admitted before the
  commit. The largest of the last `WINDOW` measurements counts.
- `slack` repairs what these measurements do not predict, such as a stall of all workers. The time for which the learner
  waits for a batch is a debt. The allowance grows by `GAIN` batches for a debt of one update's duration. The debt
  decays by `WAIT_SHARE` of the time that passes, so a learner that waits for more than this share gets as much ahead as
  the bound allows.

The allowance is that of the bound until the first measurement, and while the learner waits and no group is on its way.
Demand never admits more than the bound. An error here costs time or freshness, never the bound. All of it follows from
the inputs and their times, and it is not in the ledger: after a recovery the allowance begins with the groups that are
live.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil

from rollmesh.services.coordinator.core import bound
from rollmesh.services.coordinator.core.facts import Purpose
from rollmesh.services.coordinator.core.state import BatchState, GroupPhase, GroupState, State

WINDOW = 16
"""Number of updates whose measurements count."""
WAIT_SHARE = 0.01
"""Share of the time for which the learner may wait because of demand, over a long run."""
GAIN = 8.0
"""Batches by which the allowance grows for a debt of one update's duration."""
DEBT_MAX = 2.0
"""Limit of the debt, as a multiple of the debt that raises the allowance by eta batches."""


@dataclass(slots=True)
class LearnerDemand:
    """Measurements of one coordinator process. Times are seconds on its monotonic clock, sizes are groups."""

    ahead: int | None = None
    """Groups that may be ahead of the update after the published step; None: as many as the bound allows."""
    needs: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    debt_s: float = 0.0
    """Charged waiting time that has not decayed."""
    now: float | None = None
    """Time of the last decision."""
    epoch: int = 0
    """Trainer epoch that the fields below describe."""
    applied: int = 0
    leased: int = 0
    """Last update whose batch was leased when the learner was free for it."""
    began_at: float = 0.0
    """When the learner was given its batch, or finished the one before a batch that it already held."""
    update_s: float = 0.0
    """Duration of the last update: from `began_at` to its commit."""
    batch: int = 0
    """Groups of the last batch."""
    published: int = -1
    """Published step before the last commit."""
    mark: int = 0
    """Number of the first group that was not admitted before the last commit."""
    idle_since: float | None = None
    """Since when the learner waits for a batch; None: it does not wait."""


def observe(state: State, demand: LearnerDemand, now: float, *, unserved: bool) -> None:
    """Note what this decision changed, and set the allowance. `unserved`: a trainer requested a batch and got none."""
    if not applies(state):
        demand.ahead = None
        return
    clock = state.the_clock
    if clock.trainer_epoch != demand.epoch or clock.applied < demand.applied:
        _begin_epoch(state, demand)
    _pass_time(state, demand, now)
    if clock.applied > demand.applied:
        _note_commit(state, demand, now)
    held = [batch for batch in state.batches.values() if not batch.in_doubt]
    batch = next((batch for batch in held if batch.update == clock.applied + 1), None)
    waits = demand.idle_since is not None or (unserved and not held)
    if demand.mark and (batch is not None or waits):
        _measure(state, demand, _num_fresh(state, batch) if batch is not None else demand.batch)
    if batch is not None and demand.leased <= clock.applied:
        demand.leased, demand.began_at, demand.batch = batch.update, now, _num_fresh(state, batch)
        demand.idle_since = None
    elif waits and demand.idle_since is None:
        demand.idle_since = now
    demand.ahead = _allowance(state, demand)


def applies(state: State) -> bool:
    """Return whether groups are admitted on demand."""
    spec = state.the_spec
    return not (spec.admit_early or spec.exports or state.ended)


def resume(state: State, demand: LearnerDemand) -> None:
    """Begin with the groups that are live: the last process admitted them by its measurements."""
    published = state.the_clock.published
    if applies(state) and published is not None and state.training_groups(*GroupPhase):
        ahead = bound.num_ahead(state) - (published.step + 1) * state.the_spec.fresh_groups
        demand.needs.append(max(ahead, state.the_spec.publish_every * state.the_spec.fresh_groups))


def num_wanted(state: State, demand: LearnerDemand) -> int:
    """Return how many groups are admitted now if workers request them: at most those that the bound admits."""
    admissible, clock = bound.num_admissible(state), state.the_clock
    if demand.ahead is None or clock.published is None:
        return admissible
    room = (clock.published.step + 1) * state.the_spec.fresh_groups + demand.ahead - bound.num_ahead(state)
    if demand.idle_since is not None:
        unused = state.training_groups(GroupPhase.OPEN, GroupPhase.FINALIZING, GroupPhase.READY)
        room = max(room, demand.batch - len(unused))
    return max(0, min(admissible, room))


def ahead_groups(state: State, demand: LearnerDemand) -> dict[str, int]:
    """Return the groups ahead of the update after the published step, for display: admitted, demanded, and within the
    bound. Empty before the first publication."""
    spec, published = state.the_spec, state.the_clock.published
    if published is None:
        return {}
    most = spec.max_staleness * spec.fresh_groups
    return {
        "admitted": bound.num_ahead(state) - (published.step + 1) * spec.fresh_groups,
        "demand": most if demand.ahead is None else demand.ahead,
        "bound": most,
    }


def _begin_epoch(state: State, demand: LearnerDemand) -> None:
    """Forget the batch and the wait of the previous trainer, or of updates that were rolled back."""
    demand.epoch, demand.applied, demand.leased = state.the_clock.trainer_epoch, state.the_clock.applied, 0
    demand.mark, demand.batch = 0, state.the_spec.fresh_groups
    demand.idle_since = None


def _pass_time(state: State, demand: LearnerDemand, now: float) -> None:
    """Let the debt decay, and charge the time for which the learner waits.

    The groups that the bound holds ahead last for eta updates, so the part of a wait beyond that has another cause.
    """
    since, demand.now = demand.now if demand.now is not None else now, now
    demand.debt_s = max(0.0, demand.debt_s - WAIT_SHARE * (now - since))
    if demand.idle_since is None or demand.leased == 0:
        return
    eta_s = state.the_spec.max_staleness * demand.update_s
    demand.debt_s += max(0.0, min(now, demand.idle_since + eta_s) - max(since, demand.idle_since))
    demand.debt_s = min(demand.debt_s, DEBT_MAX * eta_s / GAIN)


def _note_commit(state: State, demand: LearnerDemand, now: float) -> None:
    clock = state.the_clock
    demand.applied = clock.applied
    demand.update_s = now - demand.began_at
    demand.began_at = now
    demand.published = clock.published.step if clock.published is not None else -1
    demand.mark = state.num_groups


def _measure(state: State, demand: LearnerDemand, batch: int) -> None:
    """Compute the allowance under which exactly the `batch` groups of the next batch would be READY.

    Before the commit, n groups were admitted by an allowance of n - (published + 1)·b. Each group less would be one
    READY group less, because the admission times of the other groups would not change. So the surplus of READY groups
    was not needed:

        n - (published + 1)·b - (READY - batch) = (applied - 2 - published)·b + last batch + batch + late
    """
    late = sum(group.number < demand.mark for group in on_their_way(state))
    ahead = (demand.applied - 2 - demand.published) * state.the_spec.fresh_groups
    demand.needs.append(ahead + demand.batch + batch + late)
    demand.mark = 0


def _allowance(state: State, demand: LearnerDemand) -> int | None:
    spec = state.the_spec
    if not demand.needs or (demand.idle_since is not None and not on_their_way(state)):
        return None
    if demand.debt_s and not demand.update_s:  # an update that took no time needs all that the bound allows
        return None
    slack = GAIN * spec.fresh_groups * demand.debt_s / demand.update_s if demand.debt_s else 0.0
    ahead = max(max(demand.needs), (spec.publish_every - 1) * spec.fresh_groups) + ceil(slack)
    return ahead if ahead < spec.max_staleness * spec.fresh_groups else None


def _num_fresh(state: State, batch: BatchState) -> int:
    """Return the number of groups of a held batch that were generated for it."""
    return sum(state.groups[name].purpose is not Purpose.REPLAY for name in batch.groups)


def on_their_way(state: State) -> list[GroupState]:
    """Return the groups that may become READY."""
    return state.training_groups(GroupPhase.OPEN, GroupPhase.FINALIZING)
