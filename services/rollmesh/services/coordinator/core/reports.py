"""Decide on reports of finished episodes."""

from __future__ import annotations

from rollmesh.services.coordinator.core import bound, foreign_samples, rollouts
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.decision_context import DecisionContext, ScoredEpisode
from rollmesh.services.coordinator.core.facts import Purpose, Reward, RewardOutcome, SampleEnd, SampleMeta
from rollmesh.services.coordinator.core.state import EpisodeState, EpisodeStatus, GroupState
from rollmesh.shared.domain.plans import variant_of
from rollmesh.shared.domain.reward_range import REWARD_RANGE, in_reward_range


def report(ctx: DecisionContext, request: i.ReportEpisodes) -> None:
    results = tuple(_record(ctx, request.node_id, one) for one in request.reports)
    ctx.reply(request, m.ReportEpisodesResponse(results=results))


def _record(ctx: DecisionContext, node_id: str, report: i.EpisodeReport) -> str:
    """Record one report of the node with the lease. Idempotent by (episode, attempt). A late report counts if no other
    worker has the episode. A report of another node changes nothing, so that the ledger names the node that made the
    samples. The coordinator, which has no node id, returns leases of any node.

    A report that cannot be recorded counts as a failed attempt, so that a broken worker cannot hold an episode.
    """
    group = ctx.state.groups.get(report.group)
    episode = group.episodes.get(report.episode) if group else None
    if group is None or episode is None or report.attempt < 1:
        return "UNKNOWN_LEASE"
    if (episode.attempt, episode.lease_id) != (report.attempt, report.lease_id) or node_id not in ("", episode.node_id):
        return "UNKNOWN_LEASE"
    if episode.status is EpisodeStatus.SCORED:
        return ""
    if episode.status is EpisodeStatus.ENDED:
        return "UNKNOWN_LEASE"
    ctx.ephemeral.episode_deadlines.pop(episode.lease_id, None)
    invalid = report.invalid or _why_invalid(ctx, group, report)
    broken, broken_at = (f"rollout: invalid report: {invalid}", "") if invalid else _broken_reward(report)
    if report.outcome is m.EpisodeOutcome.COMPLETED and not broken:
        _complete(ctx, group, episode, report)
    elif episode.status is EpisodeStatus.LEASED:
        failed = report.outcome is not m.EpisodeOutcome.CANCELLED
        counts = bool(broken) or (report.counts and failed)
        cause, traceback = (broken, broken_at) if broken else (report.cause, report.traceback)
        rollouts.return_episode(ctx, group, episode, counts=counts, cause=cause, traceback=traceback, failed=failed)
    return f"INVALID_REPORT: {invalid}" if invalid else ""


def _why_invalid(ctx: DecisionContext, group: GroupState, report: i.EpisodeReport) -> str:
    """Return what in the report contradicts the run; empty if nothing does."""
    for sample in report.samples:
        if sample.trainable and sample.policy != group.policy:
            return (
                f"sample {sample.sample_id}: `policy` must be that of the lease, {group.policy!r}, got "
                f"{sample.policy!r}"
            )
        for span in sample.steps:
            if not bound.was_published(span, ctx.clock):
                return (
                    f"sample {sample.sample_id}: no weights of step {span.step}, incarnation {span.incarnation} "
                    "were published"
                )
        named = variant_of(group.variants, rollouts.episode_index(report.episode))
        if sample.summary.variant != (expected := named[0].name if named else ""):
            return (
                f"sample {sample.sample_id}: `summary.variant` must be that of the lease, {expected!r}, got "
                f"{sample.summary.variant!r}"
            )
        if what := foreign_samples.why_invalid(group, sample):
            return f"sample {sample.sample_id}: {what}"
        if sample.trainable and group.purpose is Purpose.TRAIN and (what := _why_not_admitted(ctx, sample)):
            return f"sample {sample.sample_id}: {what}"
    return ""


def _why_not_admitted(ctx: DecisionContext, sample: SampleMeta) -> str:
    """Return which trained tokens have a source that the run does not admit; empty if none has."""
    admitted = ctx.spec.external_sources
    for span in sample.external:
        if (name := span.source.name.lower()) not in admitted:
            return (
                f"it trains {span.num_tokens} tokens of source {name}, but `run.external_sources` is "
                f"[{', '.join(admitted)}]; add {name} to it, or give these tokens no loss"
            )
    return ""


def _broken_reward(report: i.EpisodeReport) -> tuple[str, str]:
    """Return cause and traceback of a failed scorer. The attempt is then an infra failure, never a verdict."""
    for sample in report.samples:
        for reward in sample.rewards:
            if reward.outcome is RewardOutcome.INFRA_FAILURE:
                cause, _, traceback = reward.evidence.partition("\n")
                return f"scorer {reward.scorer}: {cause}", traceback
            if not in_range(reward):
                return f"scorer {reward.scorer}: reward {reward.name!r} is {reward.value}, {REWARD_RANGE}", ""
    return "", ""


def in_range(reward: Reward) -> bool:
    """Return whether a reward is in its range, if its value counts."""
    return reward.outcome is not RewardOutcome.OK or in_reward_range(reward.value)


def _complete(ctx: DecisionContext, group: GroupState, episode: EpisodeState, report: i.EpisodeReport) -> None:
    """Complete an episode. In an export a scored sample ends at once: its readers wait for no group, and no finalizer
    runs."""
    ctx.ephemeral.failed.reset_alike()
    if report.samples:
        ctx.emit(
            f.EpisodeScored(group=group.group, episode=episode.episode, payload=report.payload, samples=report.samples)
        )
        if group.purpose is Purpose.TRAIN and not group.source:
            ctx.ephemeral.recent.append(_scored(report))
        if group.purpose is Purpose.EXPORT:
            ids = tuple(sample.sample_id for sample in report.samples)
            ctx.emit(f.SamplesEnded(group=group.group, sample_ids=ids, end=SampleEnd.EXPORTED))
    else:
        reason = report.reason or "NO_SAMPLES"
        ctx.emit(f.EpisodeEnded(group=group.group, episode=episode.episode, end=SampleEnd.FILTERED, reason=reason))


def _scored(report: i.EpisodeReport) -> ScoredEpisode:
    rewards = (reward for sample in report.samples for reward in sample.rewards)
    return ScoredEpisode(
        rewards=tuple((reward.name, reward.value) for reward in rewards if reward.outcome is RewardOutcome.OK),
        num_sampled_tokens=tuple(sample.num_sampled_tokens for sample in report.samples),
        num_tool_calls=report.num_tool_calls,
        num_tool_calls_failed=report.num_tool_calls_failed,
        newest_sample_id=report.samples[-1].sample_id,
    )
