"""Decide when a run reaches a limit: updates, seconds, tokens, success, or no further tasks.

A reached limit is a fact (`RunStopping`), so that it remains: a later, worse evaluation does not reopen the run after
its trainer has left. A roll-back or a change of the run revokes it, and the limits are checked again.

Time is a fact too. Each coordinator process counts by its monotonic clock and records the counted time (`TimeCounted`)
at least every `COUNT_EVERY_S` while it decides. A kill loses time that is not recorded yet. Every fold of the ledger
gives the same sum.
"""

from __future__ import annotations

from rollmesh.services.coordinator.core import bound, foreign_samples
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.decision_context import DecisionContext, EphemeralState
from rollmesh.services.coordinator.core.facts import StepSpan
from rollmesh.services.coordinator.core.state import EvalState, GroupPhase, State

COUNT_EVERY_S = 10.0


def count_time(ctx: DecisionContext, *, all_of_it: bool = False) -> None:
    """Record the time since the last count if it is long enough. Time before the first decision of a process, or after
    the end, is not counted."""
    began, ctx.ephemeral.counted_at = ctx.ephemeral.counted_at, ctx.now
    if began is None or ctx.state.ended:
        return
    seconds = ctx.now - began
    if seconds > 0 and (all_of_it or seconds >= _term_s(ctx.state)):
        ctx.emit(f.TimeCounted(seconds=seconds))
    else:
        ctx.ephemeral.counted_at = began


def next_count(state: State, ephemeral: EphemeralState) -> float | None:
    """Return when time is counted next, so that a stalled run ends in time; None if it is not counted."""
    if ephemeral.counted_at is None or state.ended or state.spec is None:
        return None
    return ephemeral.counted_at + _term_s(state)


def _term_s(state: State) -> float:
    left_s = state.the_spec.seconds_max - state.seconds
    return min(COUNT_EVERY_S, left_s) if left_s > 0 else COUNT_EVERY_S


def notice_limits(ctx: DecisionContext) -> None:
    """Stop updates once a limit is reached."""
    if not ctx.state.ended and not ctx.state.stopping and (reason := _reached(ctx.state)):
        _stop(ctx, reason)


def notice_exhaustion(ctx: DecisionContext, *, unserved: bool) -> None:
    """Stop when no task is left and no episode is in progress. `unserved`: a trainer requested a batch and got none.

    Too few READY groups for a batch do not keep the run open. But only a trainer decides how many it needs, so it must
    have asked.
    """
    state, ephemeral = ctx.state, ctx.ephemeral
    if state.ended or state.stopping or ctx.spec.exports or not (ephemeral.exhausted or state.submissions_done):
        return
    if state.pending or state.replays or foreign_samples.any_admissible(ctx):
        return
    in_flight = state.training_groups(GroupPhase.OPEN, GroupPhase.FINALIZING, GroupPhase.LEASED, GroupPhase.IN_DOUBT)
    if not in_flight and (unserved or not state.training_groups(GroupPhase.READY)):
        _stop(ctx, "TASKS_EXHAUSTED")


def _stop(ctx: DecisionContext, reason: str) -> None:
    ctx.emit(f.RunStopping(reason=reason))
    for waiter in ctx.ephemeral.trainers:
        ctx.reply(waiter.request, m.LeaseBatchResponse(waiting_for=f"run ends: {reason}"))
    ctx.ephemeral.trainers.clear()


def _reached(state: State) -> str:
    spec, clock = state.the_spec, state.the_clock
    if spec.updates_max and clock.applied >= spec.updates_max:
        return "UPDATES_MAX"
    if spec.tokens_max and clock.tokens_generated >= spec.tokens_max:
        return "TOKENS_MAX"
    if spec.seconds_max and state.seconds >= spec.seconds_max:
        return "SECONDS_MAX"
    if spec.success_target and _success(state) >= spec.success_target:
        return "SUCCESS_TARGET"
    return ""


def _success(state: State) -> float:
    """Return the share of solved tasks in the newest complete evaluation of existing weights. A task without a score is
    not solved."""
    for result in reversed(state.evals):
        if result.num_open == 0 and not _is_void(result, state):
            return result.reward_sums.get(state.the_spec.success_reward, 0.0) / max(1, result.num_reserved)
    return 0.0


def _is_void(result: EvalState, state: State) -> bool:
    return bound.is_void(StepSpan(step=result.step, incarnation=result.incarnation), state.the_clock)
