"""Decide on finished samples of other sources that clients submit (SubmitSamples): rollouts of peers, given solutions.

A group of them waits in the state until admission has room, and is then one group of the run whose episodes a worker
takes as given. So scores, payloads, retries and leases are those of every group. What differs is here:

    age at update k = (k - 1) - applied step at the submission <= max_age of the source
    groups of a source that no batch has yet <= floor(share * fresh_groups), so that rollouts always have room
    groups of a source in a batch <= share * its amount without what the replay log draws, or one whole group

The counters of their samples are those of the source, see `State.foreign`. A key of a group is used once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core import replay
from rollmesh.services.coordinator.core.decision_context import DecisionContext
from rollmesh.services.coordinator.core.facts import AnswerKey, Reward, SampleEnd, SubmittedGroup
from rollmesh.services.coordinator.core.records import EXTEND_FACTOR_MAX, UNLIMITED, ForeignSource, whole_share
from rollmesh.services.coordinator.core.state import (
    GroupPhase,
    GroupState,
    SourceAccount,
    State,
    WaitingSamples,
    key_bytes,
    samples_bytes,
    samples_digest,
)
from rollmesh.services.coordinator.core.submissions import with_reference
from rollmesh.services.coordinator.core.submitted import SAMPLES, Amount
from rollmesh.shared.errors import Phrase, SamplesNotAccepted, field_error

BEYOND_AGE = "BEYOND_AGE"
"""Reason of samples that are older than the bound of their source."""
ZERO_VARIANCE = "ZERO_VARIANCE"
NOT_ACCEPTED = "NOT_ACCEPTED"
"""Reason of samples whose source the run does not accept any more."""
_ROUNDING = 1e-9


def submit(ctx: DecisionContext, request: i.SubmitSamples) -> None:
    """Add the groups that are new. A rejected request adds none."""
    state, source = ctx.state, request.source.name.lower()
    if bound_of(ctx.spec.foreign, source) is None:
        accepted = ", ".join(one.source for one in ctx.spec.foreign) or "none"
        raise SamplesNotAccepted(
            f"run {ctx.spec.run} accepts no submitted samples of source {source}, because `run.foreign` has no bound "
            f"for it (accepted: {accepted}); add an entry with `source: {source}`, its `max_age`, which may be "
            f"unlimited, and its `share`, and add {source} to `run.external_sources`",
            source=source,
        )
    keys = {key.task_id: key for key in request.answer_keys}
    new = SAMPLES.new(
        request.groups,
        state.foreign_keys,
        lambda group: group.key,
        lambda group: samples_digest(group, source, keys.get(group.task.task_id)),
    )
    if new:
        SAMPLES.check_open(ctx)
        _check_sizes(ctx, new)
        tasks = {group.task.task_id for group in new}
        with_key = tuple(key for key in request.answer_keys if key.task_id in tasks)
        num_bytes = sum(map(samples_bytes, new)) + sum(map(key_bytes, with_key))
        waiting = Amount(len(state.foreign_waiting), state.foreign_waiting_bytes)
        of_call = Amount(len(new), num_bytes)
        SAMPLES.check_quota(ctx.spec.run, request.limits, of_call, waiting, len(state.foreign_keys), num_bytes)
        ctx.emit(
            f.SamplesSubmitted(
                submission=request.submission,
                source=request.source,
                groups=tuple(_referring(group, ctx.spec.run, request.submission, keys) for group in new),
                answer_keys=with_key,
                provenance=request.provenance,
            )
        )
    ctx.reply(request, m.SubmitSamplesResponse(num_added=len(new), submitted=account(state, source)))


def account(state: State, source: str) -> m.SubmittedSamples:
    """Return the account of a source."""
    found = state.foreign.get(source) or SourceAccount()
    counters = found.counters
    ends = {end.name.lower(): counters.ends.get(end, 0) for end in SampleEnd if end is not SampleEnd.LIVE}
    return m.SubmittedSamples(
        source=source,
        groups=found.groups,
        waiting=sum(waiting.source == source for waiting in state.foreign_waiting.values()),
        dropped=found.dropped,
        samples=m.SampleCounts(reserved=counters.reserved, live=counters.live, reasons=counters.reasons, **ends),
        trained_by_age=found.trained_by_age,
        tokens_trained=found.tokens_trained,
    )


def accounts(state: State) -> list[m.SubmittedSamples]:
    """Return the accounts of all sources that the run accepts or has accepted."""
    names = dict.fromkeys([*(one.source for one in state.the_spec.foreign), *state.foreign])
    return [account(state, name) for name in names]


def admissible(ctx: DecisionContext) -> Iterator[WaitingSamples]:
    """Yield groups that may be admitted now, in order of submission. The caller reserves each before the next one."""
    room = _room(ctx)
    for waiting in list(ctx.state.foreign_waiting.values()) if room else ():
        if waiting.source in room:
            yield waiting
            room[waiting.source] -= 1
            room = +room
            if not room:
                return


def any_admissible(ctx: DecisionContext) -> bool:
    """Return whether a group that waits may be admitted now. Others wait for a batch that takes groups of their
    source."""
    room = _room(ctx)
    return bool(room) and any(waiting.source in room for waiting in ctx.state.foreign_waiting.values())


def drop_old(ctx: DecisionContext) -> None:
    """Drop groups that wait and are too old for the next update. Only an update or a change of the bounds makes some
    so."""
    state, judged = ctx.state, (ctx.clock.applied, ctx.spec.foreign)
    if state.ended or state.stopping or ctx.ephemeral.foreign_judged == judged:
        return
    ctx.ephemeral.foreign_judged = judged
    if old := [w.group.key for w in state.foreign_waiting.values() if why_refused(ctx, w.source, w.step)]:
        ctx.emit(f.SubmittedSamplesDropped(keys=tuple(old)))


def groups_max(ctx: DecisionContext, source: str) -> int:
    """Return how many groups of a source may be ahead of their batch."""
    found = bound_of(ctx.spec.foreign, source)
    return whole_share(found.share, ctx.spec.fresh_groups) if found is not None else 0


def _room(ctx: DecisionContext) -> Counter[str]:
    """Return how many further groups of each source may be ahead of their batch, for those that may have some."""
    if not ctx.state.foreign_waiting:
        return Counter()
    ahead = ctx.state.training_groups(GroupPhase.OPEN, GroupPhase.FINALIZING, GroupPhase.READY)
    unleased = Counter(group.source for group in ahead)
    room: Counter[str] = Counter({s.source: groups_max(ctx, s.source) - unleased[s.source] for s in ctx.spec.foreign})
    return +room


def bound_of(sources: tuple[ForeignSource, ...], source: str) -> ForeignSource | None:
    """Return the entry of a source, or None."""
    return next((one for one in sources if one.source == source), None)


def age(submitted_step: int, update: int) -> int:
    """Return the age at `update` of what was submitted at this applied step; 0 after a roll-back below it."""
    return max(0, update - 1 - submitted_step)


def why_beyond(sources: tuple[ForeignSource, ...], source: str, submitted_step: int, update: int) -> str:
    """Return why samples of `source` must not be trained at `update`; empty if they may, or for rollouts. This check is
    the guarantee of the bounds of sources."""
    if not source:
        return ""
    if (found := bound_of(sources, source)) is None:
        return NOT_ACCEPTED
    return BEYOND_AGE if found.max_age != UNLIMITED and age(submitted_step, update) > int(found.max_age) else ""


def why_refused(ctx: DecisionContext, source: str, submitted_step: int) -> str:
    """Return why such samples cannot be in the next batch or a later one; empty if they can."""
    return why_beyond(ctx.spec.foreign, source, submitted_step, ctx.clock.applied + 1)


class BatchShare:
    """How much of a batch of `amount` its sources may still fill: their shares of what the replay log does not draw. A
    batch may have one group of a source that is larger than its share, because no later batch has more room for it."""

    def __init__(self, ctx: DecisionContext, amount: int) -> None:
        replayed = ctx.spec.replay
        fresh = amount - replay.quota(ctx, amount) if replayed is not None and replayed.made.draws else amount
        self._left: dict[str, float] = {one.source: one.share * fresh + _ROUNDING for one in ctx.spec.foreign}
        self._taken: set[str] = set()

    def take(self, group: GroupState, size: int) -> bool:
        """Return whether the batch may have a group of this size, and count it if so."""
        if not group.source:
            return True
        if group.source not in self._left or (size > self._left[group.source] and group.source in self._taken):
            return False
        self._left[group.source] -= size
        self._taken.add(group.source)
        return True


def is_without_signal(ctx: DecisionContext, group: GroupState, adjusted: Mapping[str, tuple[Reward, ...]]) -> bool:
    """Return whether a group of several submitted episodes is to be dropped because all of its rewards are equal.
    `adjusted` are rewards that the finalizers changed, by sample."""
    found = bound_of(ctx.spec.foreign, group.source)
    if not group.source or len(group.episodes) < 2 or (found is not None and found.keep_equal):
        return False
    rewards = (adjusted.get(s.sample_id, s.meta.rewards) for s in group.samples.values())
    return len({tuple(sorted((r.name, r.segment, r.outcome, r.value) for r in one)) for one in rewards}) <= 1


def why_invalid(group: GroupState, sample: f.SampleMeta) -> str:
    """Return what in the metadata of a given sample contradicts its source; empty if nothing does. A worker of an
    older release runs an agent instead."""
    if not group.source:
        return ""
    others = [span.source.name.lower() for span in sample.external if span.source.name.lower() != group.source]
    if sample.steps or others:
        got = others[0] if others else "policy"
        return f"its samples are submitted ones, so all trained tokens must be of source {group.source}, got {got}"
    return ""


def _check_sizes(ctx: DecisionContext, new: list[SubmittedGroup]) -> None:
    """Check that the groups are not larger than one of rollouts can become, so that a batch of them fits into its
    reply."""
    most = EXTEND_FACTOR_MAX * ctx.spec.group_size
    for group in new:
        if len(group.episodes) > most:
            must = f"be at most {most} per group, {EXTEND_FACTOR_MAX} * run.group_size"
            got = Phrase(f"{len(group.episodes)} in group {group.key[:100]}")
            raise field_error("episodes", must, got, "divide the group, or submit fewer of its episodes")


def _referring(group: SubmittedGroup, run: str, submission: str, keys: Mapping[str, AnswerKey]) -> SubmittedGroup:
    if group.task.task_id not in keys:
        return group
    return replace(group, task=with_reference(group.task, run, submission))
