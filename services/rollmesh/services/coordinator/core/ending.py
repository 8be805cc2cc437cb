"""Decisions about the end of a run."""

from __future__ import annotations

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import limits, rollouts
from rollmesh.services.coordinator.core.state import GroupPhase
from rollmesh.services.coordinator.core.turn import Turn


def stop(turn: Turn, request: i.StopRun) -> None:
    end_run(turn, f"STOPPED: {request.reason}" if request.reason else "STOPPED")
    turn.reply(request.ticket, i.Done())


def end_run(turn: Turn, reason: str) -> None:
    if not turn.state.ended:
        _cancel_unused(turn, include_evals=True)
        limits.count_time(turn, all_of_it=True)
        turn.emit(f.RunEnded(reason=reason))


def finish(turn: Turn) -> None:
    """At a limit nothing more is generated; the run ends when no batch is out and its last weights are safe and measured."""
    state, clock = turn.state, turn.clock
    if turn.spec.exports:
        _finish_export(turn)
        return
    if state.ended or not state.stopping:
        return
    _cancel_unused(turn, include_evals=False)
    published = clock.published is not None and clock.published.step == clock.applied
    if published and clock.checkpoint == clock.applied and not state.batches and not turn.volatile.eval_deadlines:
        end_run(turn, state.stopping)


def _finish_export(turn: Turn) -> None:
    """An export ends when every group it may have has ended, or at a limit."""
    state = turn.state
    if state.stopping:
        _cancel_unused(turn, include_evals=False)
    complete = state.num_groups >= turn.spec.export_groups
    if (complete or turn.volatile.exhausted or state.stopping) and not state.groups:
        end_run(turn, "EXPORTED" if complete else state.stopping or "TASKS_EXHAUSTED")


def _cancel_unused(turn: Turn, *, include_evals: bool) -> None:
    groups = turn.state.training_groups(GroupPhase.OPEN, GroupPhase.FINALIZING, GroupPhase.READY)
    if include_evals:
        groups += [g for g in turn.state.groups.values() if g not in groups and g.phase is GroupPhase.OPEN]
    for group in groups:
        rollouts.cancel_group(turn, group, "RUN_ENDED")
