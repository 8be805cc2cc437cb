"""Decisions about what goes wrong: a run that stands still, and given-up tasks that are tried again."""

from __future__ import annotations

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.turn import Turn, refuse


def is_stalled(turn: Turn) -> bool:
    """Whether the run has made no progress for longer than its spec allows."""
    spec = turn.spec
    return 0 < spec.stall_s <= turn.now - turn.volatile.progressed_at and not turn.state.ended


def stalled(turn: Turn, notice: i.Stalled) -> None:
    """Record a stall once; another root only after as long a time again, for what nodes say of each other lags behind."""
    same = notice.root == turn.state.stall_root
    if is_stalled(turn) and not same and turn.now - turn.volatile.stall_told_at >= turn.spec.stall_s:
        turn.volatile.stall_told_at = turn.now
        stalled_s = turn.now - turn.volatile.progressed_at
        turn.emit(f.RunStalled(root=notice.root, cause=notice.cause, stalled_s=stalled_s))


def replay(turn: Turn, request: i.ReplayDead) -> None:
    """Queue the tasks of dead letters for admission. Idempotent: a letter is replayed once; if it fails again, there is a new one."""
    if turn.state.ended:
        refuse("RUN_ENDED", f"run {turn.spec.run} has ended: {turn.state.ended}; nothing can be tried again in it")
    taken = []
    for task in request.tasks:
        if task.dead_id not in turn.state.replayed:
            turn.emit(f.TaskReplayed(dead_id=task.dead_id, task=task.task, draw=task.draw))
            taken.append(task.dead_id)
    turn.reply(request.ticket, i.Replayed(dead_ids=tuple(taken)))
