"""Check a trainer's request before a decision: names, epoch and lease."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from rollmesh.services.coordinator.core.decision_context import DecisionContext
from rollmesh.services.coordinator.core.records import TrainerRequest
from rollmesh.services.coordinator.core.state import BatchState
from rollmesh.shared.errors import (
    Fenced,
    LeaseExpired,
    LeaseOut,
    NoLearner,
    UnknownLearner,
    UnknownLease,
)


def check_names(ctx: DecisionContext, policy: str, learner: str) -> None:
    clock = ctx.clock
    if policy != clock.policy or learner != clock.learner:
        raise UnknownLearner(
            f"run {ctx.spec.run} trains policy {clock.policy!r} with learner {clock.learner!r}, not {policy!r} with "
            f"{learner!r}",
        )


def check_epoch(ctx: DecisionContext, request: TrainerRequest[Any]) -> None:
    check_names(ctx, request.policy, request.learner)
    check_not_fenced(ctx, request.trainer_epoch)


def check_not_fenced(ctx: DecisionContext, trainer_epoch: int) -> None:
    current = ctx.clock.trainer_epoch
    if trainer_epoch != current:
        raise Fenced(
            f"trainer epoch {trainer_epoch} is fenced by {current}: a newer trainer has attached; stop, or attach "
            "again from the newest checkpoint",
            trainer_epoch=trainer_epoch,
            current_epoch=current,
        )


def check_trains(ctx: DecisionContext) -> None:
    """Reject a request to lease or commit in an export."""
    if ctx.spec.exports:
        raise NoLearner(
            f"run {ctx.spec.run} exports its samples (export_groups = {ctx.spec.export_groups}): call StreamSamples",
        )


def refuse_expired(lease_id: str) -> NoReturn:
    raise LeaseExpired(
        f"batch lease {lease_id} has expired and its samples are in doubt: return to the newest checkpoint and attach "
        "again",
        lease_id=lease_id,
    )


def check_none_out(ctx: DecisionContext, lease_ids: Sequence[str]) -> None:
    """An update has at most one lease, and its commit must name it. Reject the commit if a lease outside `lease_ids` is
    held."""
    for batch in ctx.state.batches.values():
        if batch.lease_id in lease_ids:
            continue
        if batch.in_doubt:
            refuse_expired(batch.lease_id)
        raise LeaseOut(
            f"batch lease {batch.lease_id} of update {batch.update} is held and the commit does not name it; name it "
            "in `lease_ids`, or release it first",
            lease_id=batch.lease_id,
        )


def held_batch(ctx: DecisionContext, lease_id: str) -> BatchState:
    batch = ctx.state.batches.get(lease_id)
    if batch is None:
        if lease_id in ctx.state.expired:
            refuse_expired(lease_id)
        raise UnknownLease(
            f"batch lease {lease_id!r} is not held: it was never granted, or was committed or released; load the "
            "newest checkpoint and attach again",
            lease_id=lease_id,
        )
    if batch.in_doubt:
        refuse_expired(lease_id)
    return batch
