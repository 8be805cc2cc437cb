"""The staleness bound and admission. docs/staleness.md derives both, with the same symbols.

`why_inadmissible` *guarantees* the bound: it runs when a batch is leased and again when its update is committed.
`num_admissible` (admission) and `step_min` only save work, because they keep most samples within the bound until their
update.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.services.coordinator.core.facts import StepSpan
from rollmesh.services.coordinator.core.records import Bound, BoundPolicy, RunSpec
from rollmesh.services.coordinator.core.state import (
    VERSIONS_KEPT_MAX,
    VOID_VERSION,
    GroupPhase,
    GroupState,
    PolicyClock,
    SampleState,
    State,
)
from rollmesh.shared.domain.versions import intended_update, oldest_admissible, staleness

_BEFORE_COMMIT = (GroupPhase.READY, GroupPhase.LEASED, GroupPhase.IN_DOUBT)


def bound_of(sample: SampleState, leased_under: Bound, spec: RunSpec) -> Bound:
    """Return the bound of a sample: that of the replay log if it is replayed."""
    if sample.origin is None:
        return leased_under
    assert spec.replay is not None, "a sample is replayed by the replay log of its run"
    return spec.replay.bound


def is_void(span: StepSpan, clock: PolicyClock) -> bool:
    """Return whether (step, incarnation) was undone: a later incarnation began below that step."""
    return any(span.incarnation < r.incarnation and span.step > r.to_update for r in clock.rollbacks)


def was_published(span: StepSpan, clock: PolicyClock) -> bool:
    """Return whether weights of (step, incarnation) were announced. For versions older than those kept, only the order
    is compared."""
    if any((span.step, span.incarnation) == (v.step, v.incarnation) for v in clock.versions):
        return True
    if len(clock.versions) < VERSIONS_KEPT_MAX:
        return False
    oldest = clock.versions[0]
    return min(span.step, span.incarnation) >= 0 and (span.incarnation, span.step) < (oldest.incarnation, oldest.step)


def trained_spans(steps: Sequence[StepSpan], *, update: int, bound: Bound) -> list[StepSpan]:
    """Return the spans whose tokens keep their loss at `update`: all under DROP, those within the bound under MASK."""
    if bound.beyond is BoundPolicy.DROP:
        return list(steps)
    oldest = oldest_admissible(update=update, eta=bound.max_staleness)
    return [span for span in steps if span.step >= oldest]


def sample_staleness(spans: Sequence[StepSpan], *, update: int) -> int:
    """Return the staleness of the oldest of `spans`; -1 if there are none (the sample trains no POLICY token)."""
    if not spans:
        return -1
    return staleness(update=update, oldest_step=min(span.step for span in spans))


def why_inadmissible(steps: Sequence[StepSpan], *, update: int, bound: Bound, clock: PolicyClock) -> str:
    """Return why a sample of `steps` must not be trained at `update`; empty if it may. This check is the guarantee."""
    if not steps:
        return ""
    if any(is_void(span, clock) for span in steps):
        return VOID_VERSION
    if any(span.step > update - 1 for span in steps):
        return "FUTURE_VERSION"
    spans = trained_spans(steps, update=update, bound=bound)
    if not spans or sample_staleness(spans, update=update) > bound.max_staleness:
        return "BEYOND_BOUND"
    return ""


def mask_below_step(steps: Sequence[StepSpan], *, update: int, bound: Bound) -> int:
    """Return the step below which tokens lose their loss at `update`; 0 if no token does."""
    if bound.beyond is BoundPolicy.DROP:
        return 0
    oldest = oldest_admissible(update=update, eta=bound.max_staleness)
    return oldest if any(span.step < oldest for span in steps) else 0


def next_intended_update(state: State) -> int:
    """Return k*: the update that the next admitted group is intended for.

    n counts the groups of committed updates and all live groups: in progress, READY, leased or in doubt. Filtered,
    failed and stale groups are not in it, except those that groups of the replay log replace.
    """
    return intended_update(admitted=num_ahead(state), batch=state.the_spec.fresh_groups)


def num_ahead(state: State) -> int:
    """Return n: groups of committed updates and all live groups that no committed update has."""
    phases = (GroupPhase.OPEN, GroupPhase.FINALIZING, *_BEFORE_COMMIT)
    live = len(state.training_groups(*phases)) + _num_replacing(state)
    return state.the_clock.applied * state.the_spec.fresh_groups + live


def _num_replacing(state: State) -> int:
    """Return how many groups of the log are, or will be, in the next batch in place of groups that have ended without
    an advantage. Until the lease, these are counted; from then on, the batch has groups of the log."""
    spec, log = state.the_spec.replay, state.replay
    if spec is None or not spec.made.replaces:
        return 0
    taken = state.replayed_groups(*_BEFORE_COMMIT)
    if not log.vanished:
        return len(taken)
    room = spec.quota(state.the_spec.batch_groups) - sum(group.phase is GroupPhase.READY for group in taken)
    chosen = {
        s.origin.group for g in state.replayed_groups(*GroupPhase) for s in g.live_samples() if s.origin is not None
    }
    return len(taken) + max(0, min(log.vanished, room, len(log.entries.keys() - chosen)))


def step_min(state: State) -> int:
    """Return the oldest step that may sample in the next admitted group: step_min = k* - 1 - eta."""
    return oldest_admissible(update=next_intended_update(state), eta=state.the_spec.max_staleness)


def num_admissible(state: State) -> int:
    """Return how many groups may be admitted now: those whose step_min is published, up to the last update of the run.

    An export has no updates, so all its groups are admissible once a version is published.
    """
    spec, clock = state.the_spec, state.the_clock
    if clock.published is None or state.ended or state.stopping:
        return 0
    if spec.exports:
        return max(0, spec.export_groups - state.num_groups)
    last_update = clock.published.step + 1 + spec.max_staleness
    if spec.updates_max:
        last_update = min(last_update, spec.updates_max)
    return max(0, last_update * spec.fresh_groups - num_ahead(state))


def out_of_reach(state: State, to_update: int) -> list[GroupState]:
    """Return groups in progress whose step_min is above the step that a roll-back restores. Their turn may come before
    that step does: their workers would wait for weights that in turn wait for these groups."""
    groups = state.training_groups(GroupPhase.OPEN, GroupPhase.FINALIZING)
    return [group for group in groups if group.step_min > to_update]
