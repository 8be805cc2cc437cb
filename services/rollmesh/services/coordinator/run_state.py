"""RunState for users and trainers, read from a run's core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.decision_context import FailedAttempts, ScoredEpisode
from rollmesh.services.coordinator.core.facts import Purpose, SampleEnd
from rollmesh.services.coordinator.core.foreign_samples import accounts
from rollmesh.services.coordinator.core.state import (
    REWARD_NAMES_MAX,
    EpisodeStatus,
    EvalState,
    GroupPhase,
    GroupState,
    SampleCounters,
    State,
)
from rollmesh.services.coordinator.core.submissions import submitted_tasks
from rollmesh.services.coordinator.fact_codec import encode
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.v1 import run_pb2 as pb

EVALS_BYTES_MAX = 2 * 1024 * 1024
"""Maximum size of the evaluations in a state, bytes."""
_PHASES = {
    GroupPhase.FINALIZING: "finalizing",
    GroupPhase.READY: "ready",
    GroupPhase.LEASED: "leased",
    GroupPhase.IN_DOUBT: "in_doubt",
    GroupPhase.APPLIED: "applied",
}
GROUP_STATES = ("pending", "generating", *_PHASES.values())
"""Return the state of a group, as in `PolicyState.groups`."""


def run_state(core: Core, head: LedgerHead) -> pb.RunState:
    """Return the state after the ledger record at `head`."""
    state = core.state
    return pb.RunState(
        run=state.the_spec.run,
        ended=state.ended,
        samples=sample_counts(state.counters),
        eval_samples=sample_counts(state.eval_counters),
        policies=[_policy(state)],
        evals=_evals(state),
        waiting=core.waiting(),
        mean_rewards=state.the_clock.mean_rewards,
        ledger_position=head.position,
        ledger_hash=head.hash,
        leases=_leases(state),
        stalled=state.stall,
        stopping=state.stopping,
        seconds=state.seconds,
        failed_attempts=_failed(core.ephemeral.failed) if core.ephemeral.failed.num else None,
        recent=_recent(core.ephemeral.recent) if core.ephemeral.recent else None,
        replay=_replay(state) if state.the_spec.replay is not None else None,
        submitted=encode(submitted_tasks(state), pb.SubmittedTasks) if state.the_spec.submitted_tasks else None,
        submitted_samples=[encode(account, pb.SubmittedSamples) for account in accounts(state)],
    )


def _replay(state: State) -> pb.ReplayState:
    log = state.replay
    entries = log.entries.values()
    steps = [s.step for e in entries for name in e.sample_ids for s in e.group.samples[name].meta.steps]
    return pb.ReplayState(
        samples=sample_counts(log.counters),
        trained_by_staleness=log.trained_by_staleness,
        tokens_trained=log.tokens_trained,
        groups=len(entries),
        log_samples=sum(len(entry.sample_ids) for entry in entries),
        oldest_step=min(steps, default=-1),
        mean_abs_advantage=fmean(entry.advantage for entry in entries) if entries else 0.0,
    )


def _recent(episodes: Sequence[ScoredEpisode]) -> pb.RecentEpisodes:
    values: dict[str, list[float]] = {}
    for name, value in (reward for episode in episodes for reward in episode.rewards):
        if name in values or len(values) < REWARD_NAMES_MAX:
            values.setdefault(name, []).append(value)
    tokens = [num for episode in episodes for num in episode.num_sampled_tokens]
    return pb.RecentEpisodes(
        num_samples=len(tokens),
        mean_rewards={name: fmean(found) for name, found in values.items()},
        mean_sampled_tokens=fmean(tokens),
        num_tool_calls=sum(episode.num_tool_calls for episode in episodes),
        num_tool_calls_failed=sum(episode.num_tool_calls_failed for episode in episodes),
        newest_sample_id=episodes[-1].newest_sample_id,
    )


def _failed(failed: FailedAttempts) -> pb.FailedAttempts:
    return pb.FailedAttempts(
        num=failed.num,
        num_alike=failed.num_alike,
        cause=failed.cause,
        traceback=failed.traceback,
        num_undecided=failed.num_undecided,
    )


def sample_counts(counters: SampleCounters) -> pb.SampleCounts:
    ends = {end.name.lower(): counters.ends.get(end, 0) for end in SampleEnd if end is not SampleEnd.LIVE}
    return pb.SampleCounts(reserved=counters.reserved, live=counters.live, reasons=counters.reasons, **ends)


def _policy(state: State) -> pb.PolicyState:
    clock = state.the_clock
    groups = Counter(_phase(group) for group in state.groups.values() if group.purpose is not Purpose.EVAL)
    return pb.PolicyState(
        policy=clock.policy,
        applied_step=clock.applied,
        published_step=clock.published.step if clock.published is not None else -1,
        incarnation=clock.incarnation,
        digest=clock.digest,
        checkpoint_update=clock.checkpoint,
        trainer_epoch=clock.trainer_epoch,
        groups=groups,
        trained_by_staleness=clock.trained_by_staleness,
        tokens_trained=clock.tokens_trained,
        tokens_generated=clock.tokens_generated,
        refused=clock.refusals,
    )


def _leases(state: State) -> pb.LeaseCounts:
    episodes = (e for group in state.groups.values() for e in group.episodes.values())
    in_doubt = sum(batch.in_doubt for batch in state.batches.values())
    return pb.LeaseCounts(
        episodes_leased=sum(e.status is EpisodeStatus.LEASED for e in episodes),
        episodes_pending=len(state.pending),
        eval_episodes_pending=len(state.pending_eval),
        batches_leased=len(state.batches) - in_doubt,
        batches_in_doubt=in_doubt,
    )


def _phase(group: GroupState) -> str:
    if group.phase is not GroupPhase.OPEN:
        return _PHASES[group.phase]
    begun = any(e.status is not EpisodeStatus.PENDING for e in group.episodes.values())
    return "generating" if begun else "pending"


def _evals(state: State) -> list[pb.EvalResult]:
    """Return the newest evaluations that fit, oldest first."""
    found: list[pb.EvalResult] = []
    num_bytes = 0
    for result in reversed(state.evals):
        message = _eval(result, state)
        num_bytes += message.ByteSize()
        if num_bytes > EVALS_BYTES_MAX:
            break
        found.append(message)
    return found[::-1]


def _eval(result: EvalState, state: State) -> pb.EvalResult:
    num = max(1, result.num_samples)
    return pb.EvalResult(
        step=result.step,
        incarnation=result.incarnation,
        split=result.split,
        num_samples=result.num_samples,
        mean_rewards={name: total / num for name, total in result.reward_sums.items()},
        success_by_label={key: total / result.label_nums[key] for key, total in result.label_sums.items()},
        complete=result.num_open == 0 and result.num_samples >= result.num_reserved,
        graded=result.graded,
    )
