"""Decide on stalls and on replays of dead letters."""

from __future__ import annotations

from rollmesh.services.coordinator.core import batches, foreign_samples, rollouts
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.decision_context import DecisionContext
from rollmesh.services.coordinator.core.state import GroupPhase
from rollmesh.shared.errors import RunEnded


def is_stalled(ctx: DecisionContext) -> bool:
    """Return whether the run has made no progress for `stall_s` of its spec. A run that only waits for tasks of clients
    is not stalled."""
    spec = ctx.spec
    if waits_for_tasks(ctx):
        return False
    return 0 < spec.stall_s <= ctx.now - ctx.ephemeral.progressed_at and not ctx.state.ended


def waits_for_tasks(ctx: DecisionContext) -> bool:
    """Return whether a run only waits for further tasks of clients: workers could begin, no episode is in progress, no
    batch is held, and the READY groups are too few for one."""
    state = ctx.state
    if not ctx.spec.submitted_tasks or state.submitted_finished:
        return False
    if state.submitted_open or state.replays or foreign_samples.any_admissible(ctx):
        return False
    if ctx.clock.published is None or rollouts.why_rejected(ctx):
        return False
    phases = [group.phase for group in state.groups.values()]
    enough = not ctx.ephemeral.trainers and batches.has_batch(ctx)
    return not enough and all(phase in (GroupPhase.READY, GroupPhase.APPLIED) for phase in phases)


def stalled(ctx: DecisionContext, notice: i.Stalled) -> None:
    """Record a stall once. Another root cause is recorded only after `stall_s` again, because the nodes' reports about
    each other lag."""
    same = notice.root == ctx.state.stall_root
    if is_stalled(ctx) and not same and ctx.now - ctx.ephemeral.stall_recorded_at >= ctx.spec.stall_s:
        ctx.ephemeral.stall_recorded_at = ctx.now
        stalled_s = ctx.now - ctx.ephemeral.progressed_at
        ctx.emit(f.RunStalled(root=notice.root, cause=notice.cause, stalled_s=stalled_s))


def replay(ctx: DecisionContext, request: i.ReplayDead) -> None:
    """Queue the tasks of dead letters for admission. Idempotent: a letter is replayed once; if it fails again, there is
    a new one."""
    if ctx.state.ended:
        raise RunEnded(f"run {ctx.spec.run} has ended: {ctx.state.ended}; a run that has ended retries no task")
    taken = []
    for task in request.tasks:
        if task.dead_id not in ctx.state.replayed:
            ctx.emit(f.TaskReplayed(dead_id=task.dead_id, task=task.task, draw=task.draw))
            taken.append(task.dead_id)
    ctx.reply(request, m.ReplayDeadResponse(dead_ids=tuple(taken)))
