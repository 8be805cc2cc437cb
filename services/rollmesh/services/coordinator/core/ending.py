"""Decide on the end of a run."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import limits, rollouts
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.decision_context import DecisionContext
from rollmesh.services.coordinator.core.facts import Purpose
from rollmesh.services.coordinator.core.state import RUN_ENDED, BatchState, GroupPhase

FAILED = "FAILED"
"""Prefix of the reason of a run that a bug of the coordinator ended."""

LEDGER_FULL = "LEDGER_FULL"
"""Prefix of the reason of a run whose ledger has no room for further records."""


def stop(ctx: DecisionContext, request: m.StopRun) -> None:
    end_run(ctx, f"STOPPED: {request.reason}" if request.reason else "STOPPED")
    ctx.reply(request, m.StopRunResponse())


def fail(ctx: DecisionContext, cause: str) -> None:
    """End the run because of a bug. Its batches end too, because their commits cannot be decided."""
    end_run(ctx, f"{FAILED}: {cause}")
    _end_rest(ctx, list(ctx.state.batches.values()))


def has_failed(ctx: DecisionContext) -> bool:
    return ctx.state.ended.startswith(FAILED)


def end_run(ctx: DecisionContext, reason: str) -> None:
    if not ctx.state.ended:
        _cancel_unused(ctx, include_evals=True)
        limits.count_time(ctx, all_of_it=True)
        ctx.emit(f.RunEnded(reason=reason))


def finish(ctx: DecisionContext) -> None:
    """At a limit, stop generation. End the run when no batch is held and its last weights are in a checkpoint and
    evaluated."""
    state, clock = ctx.state, ctx.clock
    if state.ended:
        _end_rest(ctx, [batch for batch in state.batches.values() if batch.in_doubt])
        return
    if ctx.spec.exports:
        _finish_export(ctx)
        return
    if not state.stopping:
        return
    _cancel_unused(ctx, include_evals=False)
    published = clock.published is not None and clock.published.step == clock.applied
    if published and clock.checkpoint == clock.applied and not state.batches and not ctx.ephemeral.eval_deadlines:
        end_run(ctx, state.stopping)


def _end_rest(ctx: DecisionContext, batches: Sequence[BatchState]) -> None:
    """After the end, cancel the samples of `batches` and those released or undone since. A held batch may still be
    committed."""
    for batch in batches:
        ctx.ephemeral.batch_deadlines.pop(batch.lease_id, None)
        ctx.emit(f.BatchReturned(lease_id=batch.lease_id, reason=RUN_ENDED))
    _cancel_unused(ctx, include_evals=True)


def _finish_export(ctx: DecisionContext) -> None:
    """Return whether an export has ended: every group of it has ended, or it is at a limit."""
    state = ctx.state
    if state.stopping:
        _cancel_unused(ctx, include_evals=False)
    complete = state.num_groups >= ctx.spec.export_groups
    drawn = ctx.ephemeral.exhausted or state.submissions_done
    if (complete or drawn or state.stopping) and not state.groups:
        end_run(ctx, "EXPORTED" if complete else state.stopping or "TASKS_EXHAUSTED")


def _cancel_unused(ctx: DecisionContext, *, include_evals: bool) -> None:
    """End every group that no batch holds and no update has used. Scored evaluations end by themselves."""
    for group in ctx.state.learner_groups(GroupPhase.OPEN, GroupPhase.FINALIZING, GroupPhase.READY):
        rollouts.cancel_group(ctx, group, RUN_ENDED)
    if include_evals:
        for group in list(ctx.state.groups.values()):
            if group.purpose is Purpose.EVAL and group.phase is GroupPhase.OPEN:
                rollouts.cancel_group(ctx, group, RUN_ENDED)
