"""The core as one object: inputs in, facts and effects out.

    for each input:   dispatch -> facts (applied at once)
                      pump: grant leases, request tasks and decisions, grant batches, end the run
    the driver:       store the facts as one ledger record, then release the effects

Recovery applies the stored facts and calls `resume` once: every lease gets one full term, every open request to another
service is repeated, and no decision is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from rollmesh.services.coordinator.core import (
    archive,
    batches,
    changes,
    commits,
    demand,
    ending,
    epochs,
    foreign_samples,
    limits,
    reports,
    rollouts,
    stall,
    submissions,
)
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.apply import PROGRESS, apply
from rollmesh.services.coordinator.core.decision_context import DecisionContext, Effect, EphemeralState
from rollmesh.services.coordinator.core.fleet import WeightGoal
from rollmesh.services.coordinator.core.state import GroupPhase, State
from rollmesh.shared.domain.versions import oldest_admissible
from rollmesh.shared.errors import MeshError, RunEnded, RunExists, UnknownRun


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision: facts for one ledger record, effects to release once it is stored."""

    facts: tuple[f.Fact, ...]
    effects: tuple[Effect, ...]


def _create(ctx: DecisionContext, request: m.CreateRun) -> None:
    if ctx.state.spec is None:
        ctx.emit(f.RunCreated(spec=request.spec))
        ctx.reply(request, m.CreateRunResponse(created=True))
    elif ctx.state.spec == request.spec:
        ctx.reply(request, m.CreateRunResponse(created=False))
    else:
        old, new = msgspec.structs.asdict(ctx.state.spec), msgspec.structs.asdict(request.spec)
        different = ", ".join(
            f"{name} is {old[name]}, got {value}" for name, value in new.items() if old[name] != value
        )
        raise RunExists(
            f"run {request.spec.run} exists with another spec: {different}; change it by ChangeRun, or choose another "
            "name",
        )


_HANDLERS: dict[type, Callable[[DecisionContext, Any], None]] = {
    m.CreateRun: _create,
    m.ChangeRun: changes.change,
    i.AcquireRollouts: rollouts.acquire,
    m.RenewLeases: rollouts.renew,
    i.ReportEpisodes: reports.report,
    i.TasksDrawn: rollouts.tasks_drawn,
    i.DrawFailed: rollouts.draw_failed,
    i.GroupDecided: rollouts.group_decided,
    i.FinalizeFailed: rollouts.finalize_failed,
    i.NodeDead: rollouts.node_dead,
    i.AttachTrainer: epochs.attach,
    i.LeaseBatch: batches.lease_batch,
    m.GetBatch: batches.get_batch,
    m.RenewBatch: batches.renew_batch,
    i.CommitUpdate: commits.commit,
    m.ReleaseBatch: batches.release_batch,
    m.ReportCheckpoint: commits.report_checkpoint,
    i.PublishVersion: commits.publish,
    i.VersionRejected: commits.version_refused,
    i.SubmitTasks: submissions.submit,
    i.SubmitSamples: foreign_samples.submit,
    m.StopRun: ending.stop,
    i.Stalled: stall.stalled,
    i.ReplayDead: stall.replay,
    i.SealArchive: archive.seal,
    i.Tick: lambda ctx, _: None,
}


_AFTER_FAILURE_REFUSED = (
    i.AttachTrainer,
    i.LeaseBatch,
    m.GetBatch,
    m.RenewBatch,
    i.CommitUpdate,
    m.ReleaseBatch,
    i.PublishVersion,
    i.ReplayDead,
    i.ReportEpisodes,
    i.SubmitTasks,
    i.SubmitSamples,
)
"""Inputs that are rejected after a bug has ended the run, because the same input could trigger the bug again."""


class Core:
    """One run's coordinator. Not thread-safe; `now` is seconds on any monotonic clock."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state if state is not None else State()
        self.ephemeral = EphemeralState()

    def handle(self, request: i.Input, now: float) -> Decision:
        """Decide on one input. Raises MeshError if the input is rejected; the state is then unchanged. An error after a
        part was decided is a bug, which the caller must resolve by a recovery of the stored state."""
        ctx = DecisionContext(self.state, self.ephemeral, now)
        if self.state.spec is None and not isinstance(request, m.CreateRun):
            raise UnknownRun("no such run; CreateRun first")
        if isinstance(request, _AFTER_FAILURE_REFUSED) and ending.has_failed(ctx):
            raise RunEnded(f"run {ctx.spec.run} has ended: {self.state.ended}")
        if self.state.spec is not None and stall.waits_for_tasks(ctx):
            self.ephemeral.progressed_at = now  # a stall begins after the wait
        try:
            _HANDLERS[type(request)](ctx, request)
            self._pump(ctx)
        except MeshError as error:
            if ctx.facts:
                names = ", ".join(type(fact).__name__ for fact in ctx.facts)
                raise RuntimeError(f"rejected after {names} was decided: {error}") from error
            raise
        if any(isinstance(fact, PROGRESS) for fact in ctx.facts):
            self.ephemeral.progressed_at = now
            self.ephemeral.failing.clear()
        return Decision(tuple(ctx.facts), tuple(ctx.effects))

    def forget(self, ticket: int) -> None:
        """Remove the waiting caller with `ticket`, which has disconnected."""
        self.ephemeral.workers = [w for w in self.ephemeral.workers if w.request.ticket != ticket]
        self.ephemeral.trainers = [t for t in self.ephemeral.trainers if t.request.ticket != ticket]

    def replay(self, facts: Iterable[f.Fact]) -> None:
        """Apply stored facts during recovery."""
        for fact in facts:
            apply(self.state, fact)

    def resume(self, now: float) -> Decision:
        """Resume after recovery: renew every lease and repeat every open request to another service."""
        ctx = DecisionContext(self.state, self.ephemeral, now)
        self.ephemeral.progressed_at = now
        if self.state.spec is None:
            return Decision((), ())
        for group, episode in rollouts.leased_episodes(ctx):
            self.ephemeral.episode_deadlines[episode.lease_id] = now + ctx.spec.episode_lease_s
            self.ephemeral.group_deadlines.setdefault(group.group, now + ctx.spec.group_s_max)
        for batch in self.state.batches.values():
            if not batch.in_doubt:
                self.ephemeral.batch_deadlines[batch.lease_id] = now + ctx.spec.batch_lease_s
        demand.resume(self.state, self.ephemeral.demand)
        for result in self.state.open_evals():
            self.ephemeral.eval_deadlines[(result.step, result.incarnation)] = now + ctx.spec.eval_s_max
        self._pump(ctx)
        return Decision(tuple(ctx.facts), tuple(ctx.effects))

    def fail(self, cause: str, now: float) -> Decision:
        """End the run after recovery from a bug, and decide nothing else."""
        ctx = DecisionContext(self.state, self.ephemeral, now)
        ending.fail(ctx, cause)
        return Decision(tuple(ctx.facts), tuple(ctx.effects))

    def end(self, reason: str, now: float) -> Decision:
        """End the run after recovery, and decide nothing else."""
        ctx = DecisionContext(self.state, self.ephemeral, now)
        ending.end_run(ctx, reason)
        return Decision(tuple(ctx.facts), tuple(ctx.effects))

    def weight_goal(self) -> WeightGoal:
        """Return what nodes should serve: announced versions without a refusal, pins, and the oldest step that the next
        update may use."""
        clock = self.state.the_clock
        return WeightGoal(
            versions=[version for version in clock.versions if version not in clock.quarantined],
            refused=clock.quarantined,
            pins=self.pinned(),
            step_min=oldest_admissible(update=clock.applied + 1, eta=self.state.the_spec.max_staleness),
            incarnation=clock.incarnation,
            ended=bool(self.state.ended),
        )

    def pinned(self) -> list[tuple[int, int]]:
        """Return (step, incarnation) of evaluations that nodes must not pass, oldest first."""
        return sorted(self.ephemeral.eval_deadlines, key=lambda key: (key[1], key[0]))

    def waiting(self) -> dict[str, str]:
        """Return the waiting components and what each waits for, for display. Nothing waits for a run that has
        ended."""
        if self.state.ended:
            return {}
        ctx = DecisionContext(self.state, self.ephemeral, 0.0)
        found = {f"worker/{w.request.node_id}": rollouts.why_no_work(ctx) for w in self.ephemeral.workers}
        if self.ephemeral.trainers:
            found[f"learner/{ctx.clock.learner}"] = batches.why_no_batch(ctx)
        finalizing = sum(g.phase is GroupPhase.FINALIZING for g in self.state.groups.values())
        if finalizing:
            found["groups"] = f"{finalizing} wait for the reward service to finalize them"
        return found

    def why_no_work(self) -> str:
        """Return what a worker without work waits for, for display."""
        return rollouts.why_no_work(DecisionContext(self.state, self.ephemeral, 0.0))

    def ready_ahead(self, request: i.WatchReady, known: set[str]) -> tuple[m.LeasedSample, ...]:
        """Return READY samples for the next batch, see `batches.ready_ahead`. Raises MeshError."""
        if self.state.spec is None:
            raise UnknownRun("no such run; CreateRun first")
        return batches.ready_ahead(DecisionContext(self.state, self.ephemeral, 0.0), request, known)

    def idle_s(self, now: float) -> float:
        """Return the seconds since the last progress."""
        return now - self.ephemeral.progressed_at

    def is_stalled(self, now: float) -> bool:
        """Return whether the run has made no progress for `stall_s` of its spec."""
        return stall.is_stalled(DecisionContext(self.state, self.ephemeral, now))

    def next_deadline(self) -> float | None:
        """Return the earliest time at which a Tick changes the state; None if there is none."""
        v = self.ephemeral
        moments = [*v.episode_deadlines.values(), *v.batch_deadlines.values(), *v.group_deadlines.values()]
        if (counting := limits.next_count(self.state, v)) is not None:
            moments.append(counting)
        if v.draw_at is not None:
            moments.append(v.draw_at)
        moments += [*v.eval_deadlines.values(), *(w.deadline for w in v.workers), *(t.deadline for t in v.trainers)]
        return min(moments, default=None)

    def _pump(self, ctx: DecisionContext) -> None:
        """Derive everything that follows from the new state. Each step can enable the next one."""
        limits.count_time(ctx)
        rollouts.expire(ctx)
        epochs.expire(ctx)
        rollouts.request_decisions(ctx)
        limits.notice_limits(ctx)
        rollouts.request_eval(ctx)
        unserved = batches.grant_batches(ctx)
        demand.observe(ctx.state, ctx.ephemeral.demand, ctx.now, unserved=unserved)
        limits.notice_exhaustion(ctx, unserved=unserved)
        ending.finish(ctx)
        rollouts.request_tasks(ctx)
        rollouts.grant(ctx)
