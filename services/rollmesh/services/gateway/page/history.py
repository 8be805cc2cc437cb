"""The history of a run as the page shows it, folded from its ledger: updates, the ends of samples, evaluations, recent
samples.

It reads the facts as protobuf messages and verifies nothing; the audit does that. Memory is bounded: updates are a few
numbers each, and of groups and samples only the newest are kept.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from rollmesh.services.gateway.page.plain import word
from rollmesh.shared.codec.trajectory import decode_trained_group
from rollmesh.shared.domain.ledger_facts import facts_of
from rollmesh.v1 import events_pb2, reward_pb2, types_pb2

RECENT_MAX = 500
"""Number of recent samples that are listed."""
GROUPS_MAX = 20_000
LIVE_MAX = 150_000
"""Numbers of the newest groups and samples whose versions and rewards are kept for the update that uses them."""
UPDATES_MAX = 10_000
"""Number of updates that are stored. Of a longer run, the older ones are merged in pairs."""
POINTS_MAX = 1000
"""Number of updates in an answer. Of a longer run, consecutive updates are merged."""
TEXT_CHARS_MAX = 300
_ENDS = {
    types_pb2.SAMPLE_END_TRAINED: "used",
    types_pb2.SAMPLE_END_STALE: "stale",
    types_pb2.SAMPLE_END_FILTERED: "filtered",
    types_pb2.SAMPLE_END_FAILED: "failed",
    types_pb2.SAMPLE_END_CANCELLED: "cancelled",
    types_pb2.SAMPLE_END_EXPORTED: "exported",
}
K = TypeVar("K")
V = TypeVar("V")


class PageUpdate(msgspec.Struct, kw_only=True):
    """One committed update, or several consecutive ones that were merged."""

    update: int
    """The update, or the last of those that were merged."""
    incarnation: int
    time_unix_s: float
    applied: bool
    num_updates: int = 1
    lags: dict[int, int] = {}
    """Number of used samples by staleness, without replayed ones."""
    replayed: dict[int, int] = {}
    """Number of used replayed samples by staleness."""
    rewards: dict[str, float] = {}
    """Mean of each reward over all scored members of its groups."""
    abs_advantage: float | None = None
    """Mean absolute advantage per token; None if the trainer did not report it."""
    policy_loss: float | None = None
    """Mean policy loss per token; None if the trainer did not report it."""
    ends: dict[str, int] = {}
    """Number of training samples that ended since the update before, by end. `used` are those of this update."""


class EvalTime(msgspec.Struct, kw_only=True, frozen=True):
    """When the episodes of an evaluation were scored."""

    step: int
    incarnation: int
    time_unix_s: float


class RecentReward(msgspec.Struct, kw_only=True, frozen=True):
    """A reward of a whole sample."""

    name: str
    value: float
    outcome: str


class RecentSample(msgspec.Struct, kw_only=True):
    """A scored sample, or an episode that ended without one."""

    sample_id: str
    group: str
    episode: str
    task: str
    purpose: str
    time_unix_s: float
    position: int
    """Ledger record of its score."""
    num_tokens: int = 0
    steps: list[list[int]] = []
    """[step, incarnation, number of trainable tokens] of the weights that sampled it, oldest first."""
    rewards: list[RecentReward] = []
    finish: str = ""
    """Why it ended, e.g. "stop" or "length"; empty if the worker did not report it."""
    end: str = "live"
    """live, leased, used by an update, or its end."""
    reason: str = ""
    update: int = 0
    """The update that used it; 0 if there is none."""


@dataclass(slots=True)
class _HistoryGroup:
    task: str
    purpose: types_pb2.Purpose.ValueType
    step_min: int
    incarnation: int
    position: int
    members: dict[str, None] = field(default_factory=dict)
    """Its scored samples that have not ended."""
    rewards: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Sum and number of the members' rewards by name."""
    decided: bool = False


class RunHistory:
    """The fold. `enter` takes the records in order."""

    def __init__(self) -> None:
        self.position = 0
        """The newest record that was entered."""
        self.spec = events_pb2.RunSpec()
        self.updates: list[PageUpdate] = []
        self.evals: OrderedDict[tuple[int, int], EvalTime] = OrderedDict()
        self.recent: deque[RecentSample] = deque()
        self.began_unix_s = 0.0
        self.num_sampled = 0
        """Number of listed samples so far. It changes when the list of recent samples does."""
        self._by_id: dict[str, RecentSample] = {}
        self._groups: OrderedDict[str, _HistoryGroup] = OrderedDict()
        self._samples: OrderedDict[str, tuple[str, tuple[int, ...]]] = OrderedDict()
        """Group and steps of the newest samples that an update may use."""
        self._replayed: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        """Steps of the newest replayed samples."""
        self._used: deque[tuple[int, tuple[str, ...]]] = deque()
        """Samples of the updates that a roll-back may undo, with the update."""
        self._leases: dict[str, tuple[str, ...]] = {}
        self._ends: Counter[str] = Counter()

    def enter(self, record: events_pb2.LedgerRecord, position: int) -> None:
        """Fold one record. Facts that the page does not show are skipped."""
        self.position = position
        self.began_unix_s = self.began_unix_s or record.time_unix_s
        for fact in facts_of(record):
            handler = _HANDLERS.get(type(fact))
            if handler is not None:
                handler(self, fact, record.time_unix_s)

    def points(self) -> list[PageUpdate]:
        """Return at most POINTS_MAX updates. Of more, consecutive ones are merged."""
        size = -(-len(self.updates) // POINTS_MAX)
        if size <= 1:
            return self.updates
        return [_merged(self.updates[begin : begin + size]) for begin in range(0, len(self.updates), size)]

    def group_begin(self, group: str) -> int:
        """Return the record in which a group was reserved; 0 if it is no longer known."""
        found = self._groups.get(group)
        return found.position if found is not None else 0

    def find(self, name: str) -> RecentSample | None:
        """Return a recent sample by its id, or by the id of its episode."""
        return self._by_id.get(name) or next((one for one in self.recent if one.episode == name), None)

    # Facts ------------------------------------------------------------------------------------------------------------

    def _run_created(self, fact: events_pb2.RunCreated, time_s: float) -> None:
        self.spec = fact.spec

    def _run_changed(self, fact: events_pb2.RunChanged, time_s: float) -> None:
        self.spec = fact.spec

    def _group_reserved(self, fact: events_pb2.GroupReserved, time_s: float) -> None:
        group = _HistoryGroup(fact.task.task_id, fact.purpose, fact.step_min, fact.incarnation_min, self.position)
        _put(self._groups, fact.group, group, GROUPS_MAX)

    def _episode_ended(self, fact: events_pb2.EpisodeEnded, time_s: float) -> None:
        end = _ENDS.get(fact.end, "ended")
        if self._trains(fact.group):
            self._ends[end] += 1
        lost = self._listed(fact.group, fact.episode, fact.episode, time_s)
        lost.end, lost.reason = end, f"{fact.reason}: {fact.cause}".rstrip(": ")[:TEXT_CHARS_MAX]
        self._list(lost)

    def _episode_scored(self, fact: events_pb2.EpisodeScored, time_s: float) -> None:
        group = self._groups.get(fact.group)
        if group is not None and group.purpose == types_pb2.PURPOSE_EVAL:
            key = (group.step_min, group.incarnation)
            self.evals[key] = EvalTime(step=key[0], incarnation=key[1], time_unix_s=time_s)
        for meta in fact.samples:
            one = self._listed(fact.group, fact.episode, meta.sample_id, time_s)
            one.num_tokens = meta.num_tokens
            one.steps = [[span.step, span.incarnation, span.num_tokens] for span in meta.steps]
            one.rewards = _rewards(meta.rewards)
            if meta.summary.finish:
                one.finish = word(types_pb2.FinishReason.DESCRIPTOR, meta.summary.finish, "FINISH_REASON_")
            self._list(one)
            if group is not None:
                group.members[meta.sample_id] = None
                steps = tuple(span.step for span in meta.steps)
                _put(self._samples, meta.sample_id, (fact.group, steps), LIVE_MAX)
                _add_rewards(group, meta.rewards)

    def _group_finalized(self, fact: events_pb2.GroupFinalized, time_s: float) -> None:
        group = self._groups.get(fact.group)
        if group is None:
            return
        if fact.members:
            group.rewards = {}
        for member in fact.members:
            _add_rewards(group, member.rewards)
            if (one := self._by_id.get(member.sample_id)) is not None:
                one.rewards = _rewards(member.rewards)
        if fact.decision == reward_pb2.GROUP_DECISION_FILTER:
            self._end(list(group.members), fact.group, "filtered", fact.reason)
        if fact.decision != reward_pb2.GROUP_DECISION_EXTEND:
            group.members.clear()

    def _samples_ended(self, fact: events_pb2.SamplesEnded, time_s: float) -> None:
        self._end(fact.sample_ids, fact.group, _ENDS.get(fact.end, "ended"), fact.reason)

    def _batch_leased(self, fact: events_pb2.BatchLeased, time_s: float) -> None:
        self._leases[fact.lease_id] = tuple(fact.groups)
        for sample in fact.sample_ids:
            self._mark(sample, "leased", f"for update {fact.update}")

    def _batch_returned(self, fact: events_pb2.BatchReturned, time_s: float) -> None:
        groups = self._leases.pop(fact.lease_id, ())
        for one in self.recent:
            if one.end == "leased" and one.group in groups:
                one.end, one.reason = "live", f"its batch was returned: {fact.reason}"

    def _update_committed(self, fact: events_pb2.UpdateCommitted, time_s: float) -> None:
        groups = [name for lease in fact.lease_ids for name in self._leases.pop(lease, ())]
        dropped: Counter[str] = Counter()
        for excluded in fact.dropped:
            self._mark(excluded.sample_id, "filtered", excluded.reason)
            dropped["filtered"] += 1
        used = [sample for sample in fact.used if sample not in self._replayed]
        for sample in used:
            self._mark(sample, "used", f"by update {fact.update}", update=fact.update)
        lags = Counter(lag for sample in used if (lag := self._lag(sample, fact.update)) is not None)
        again = (self._replayed[sample] for sample in fact.used if sample in self._replayed)
        replayed = Counter(fact.update - 1 - min(steps) for steps in again if steps)
        self._used.append((fact.update, (*fact.used, *(excluded.sample_id for excluded in fact.dropped))))
        measured = [one for group in fact.groups if (one := decode_trained_group(group)).num_tokens]
        sizes = [one.num_tokens for one in measured]
        ends = self._ends + dropped
        if used:
            ends["used"] += len(used)
        self._ends = Counter()
        self.updates.append(
            PageUpdate(
                update=fact.update,
                incarnation=fact.incarnation,
                time_unix_s=time_s,
                applied=fact.applied,
                lags=dict(sorted(lags.items())),
                replayed=dict(sorted(replayed.items())),
                rewards=_means([group for name in groups if (group := self._groups.get(name)) is not None]),
                abs_advantage=_mean([one.measures.get("mean_abs_advantage") for one in measured], sizes),
                policy_loss=_mean([one.measures.get("policy_loss") for one in measured], sizes),
                ends=dict(ends),
            )
        )
        if len(self.updates) > UPDATES_MAX:
            half = UPDATES_MAX // 2
            self.updates[:half] = [_merged(self.updates[begin : begin + 2]) for begin in range(0, half, 2)]

    def _samples_replayed(self, fact: events_pb2.SamplesReplayed, time_s: float) -> None:
        for sample in fact.samples:
            _put(self._replayed, sample.sample_id, tuple(span.step for span in sample.steps), LIVE_MAX)

    def _checkpoint_reported(self, fact: events_pb2.CheckpointReported, time_s: float) -> None:
        while self._used and self._used[0][0] <= fact.update:
            for sample in self._used.popleft()[1]:
                self._samples.pop(sample, None)
                self._replayed.pop(sample, None)

    def _rolled_back(self, fact: events_pb2.RolledBack, time_s: float) -> None:
        self.updates = [point for point in self.updates if point.update <= fact.to_update]
        while self._used and self._used[-1][0] > fact.to_update:
            self._used.pop()
        for one in self.recent:
            if one.update > fact.to_update:
                one.end, one.update, one.reason = "live", 0, f"its update was undone by a roll-back to {fact.to_update}"

    # Helpers ----------------------------------------------------------------------------------------------------------

    def _trains(self, group: str) -> bool:
        found = self._groups.get(group)
        return found is not None and found.purpose != types_pb2.PURPOSE_EVAL

    def _lag(self, sample: str, update: int) -> int | None:
        """Return the staleness of a used sample. Tokens beyond the bound are not trained, so they do not count."""
        _, steps = self._samples.get(sample, ("", ()))
        lags = [update - 1 - step for step in steps]
        within = [lag for lag in lags if lag <= self.spec.max_staleness]
        return max(within or lags, default=None)

    def _end(self, samples: Iterable[str], group: str, end: str, reason: str) -> None:
        found = self._groups.get(group)
        for sample in samples:
            if self._trains(group) and sample not in self._replayed:
                self._ends[end] += 1
            if found is not None:
                found.members.pop(sample, None)
            self._samples.pop(sample, None)
            self._mark(sample, end, reason)

    def _mark(self, sample: str, end: str, reason: str, *, update: int = 0) -> None:
        if (one := self._by_id.get(sample)) is not None:
            one.end, one.reason, one.update = end, reason[:TEXT_CHARS_MAX], update

    def _listed(self, group: str, episode: str, sample: str, time_s: float) -> RecentSample:
        found = self._groups.get(group)
        return RecentSample(
            sample_id=sample,
            group=group,
            episode=episode,
            task=found.task[:TEXT_CHARS_MAX] if found is not None else "",
            purpose=word(types_pb2.Purpose.DESCRIPTOR, found.purpose, "PURPOSE_") if found is not None else "",
            time_unix_s=time_s,
            position=self.position,
        )

    def _list(self, one: RecentSample) -> None:
        self.num_sampled += 1
        self.recent.append(one)
        self._by_id[one.sample_id] = one
        if len(self.recent) > RECENT_MAX:
            oldest = self.recent.popleft()
            if self._by_id.get(oldest.sample_id) is oldest:
                del self._by_id[oldest.sample_id]


_HANDLERS: dict[type, Callable[[RunHistory, Any, float], None]] = {
    events_pb2.RunCreated: RunHistory._run_created,
    events_pb2.RunChanged: RunHistory._run_changed,
    events_pb2.GroupReserved: RunHistory._group_reserved,
    events_pb2.EpisodeEnded: RunHistory._episode_ended,
    events_pb2.EpisodeScored: RunHistory._episode_scored,
    events_pb2.GroupFinalized: RunHistory._group_finalized,
    events_pb2.SamplesEnded: RunHistory._samples_ended,
    events_pb2.BatchLeased: RunHistory._batch_leased,
    events_pb2.BatchReturned: RunHistory._batch_returned,
    events_pb2.UpdateCommitted: RunHistory._update_committed,
    events_pb2.CheckpointReported: RunHistory._checkpoint_reported,
    events_pb2.RolledBack: RunHistory._rolled_back,
    events_pb2.SamplesReplayed: RunHistory._samples_replayed,
}


def _put(table: OrderedDict[K, V], key: K, value: V, num_max: int) -> None:
    table[key] = value
    if len(table) > num_max:
        table.popitem(last=False)


def _rewards(rewards: Iterable[types_pb2.Reward]) -> list[RecentReward]:
    return [
        RecentReward(
            name=one.name,
            value=one.value,
            outcome=word(types_pb2.RewardOutcome.DESCRIPTOR, one.outcome, "REWARD_OUTCOME_"),
        )
        for one in rewards
        if one.segment < 0
    ]


def _add_rewards(group: _HistoryGroup, rewards: Iterable[types_pb2.Reward]) -> None:
    for one in rewards:
        if one.segment < 0 and one.outcome == types_pb2.REWARD_OUTCOME_OK:
            total, num = group.rewards.get(one.name, (0.0, 0))
            group.rewards[one.name] = (total + one.value, num + 1)


def _means(groups: Sequence[_HistoryGroup]) -> dict[str, float]:
    sums: dict[str, tuple[float, int]] = {}
    for group in groups:
        for name, (total, num) in group.rewards.items():
            before = sums.get(name, (0.0, 0))
            sums[name] = (before[0] + total, before[1] + num)
    return {name: total / num for name, (total, num) in sums.items()}


def _merged(points: Sequence[PageUpdate]) -> PageUpdate:
    """Return consecutive updates as one point: sums of counts, means of the other numbers."""
    last = points[-1]
    lags: Counter[int] = Counter()
    replayed: Counter[int] = Counter()
    ends: Counter[str] = Counter()
    for point in points:
        lags.update(point.lags)
        replayed.update(point.replayed)
        ends.update(point.ends)
    names = dict.fromkeys(name for point in points for name in point.rewards)
    sizes = [point.num_updates for point in points]
    rewards = {name: _mean([point.rewards.get(name) for point in points], sizes) for name in names}
    return PageUpdate(
        update=last.update,
        incarnation=last.incarnation,
        time_unix_s=last.time_unix_s,
        applied=any(point.applied for point in points),
        num_updates=sum(sizes),
        lags=dict(sorted(lags.items())),
        replayed=dict(sorted(replayed.items())),
        rewards={name: value for name, value in rewards.items() if value is not None},
        abs_advantage=_mean([point.abs_advantage for point in points], sizes),
        policy_loss=_mean([point.policy_loss for point in points], sizes),
        ends=dict(ends),
    )


def _mean(values: Sequence[float | None], sizes: Sequence[int]) -> float | None:
    """Return the mean of the known values, weighted by the numbers of updates or tokens that they stand for."""
    known = [(value, size) for value, size in zip(values, sizes, strict=True) if value is not None]
    return sum(value * size for value, size in known) / sum(size for _, size in known) if known else None
