"""The lineage of every sample of a run, folded from its ledger: task, group, attempt, rewards, end, and the update that
trained it.

A sample is yielded once, at its final end. That of a trained one is known only when no later roll-back undoes its
update, so the ledger is read twice: `UpdateFates` finds the updates that stand and are in a checkpoint, and
`Lineage` yields their samples at the commit. Only live samples and those of unsettled updates are in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import GroupDecision, SampleEnd
from rollmesh.services.coordinator.ledger import StoredRecord

ROLLED_BACK = "ROLLED_BACK"
"""Reason of the end of a sample that was trained by an update that a roll-back undid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLineage:
    """What the ledger records about a sample, or about an episode that ended without one."""

    group: f.GroupReserved
    episode: str
    attempt: int = 0
    node_id: str = ""
    """Worker of the last attempt."""
    meta: f.SampleMeta | None = None
    """None if the episode ended without samples."""
    payload: f.PayloadRef
    """Its sequence is 0 if there is none."""
    replay_of: str = ""
    """Its original if it is a replayed sample. The row of the original has the episode, the task and the tokens."""
    provenance: f.Provenance | None = None
    """Where a submitted sample comes from, if the client named it. `group.submitted_key` is its key."""
    reserved_s: float
    scored_s: float | None = None
    """Times are seconds since 1970."""
    ended_s: float = 0.0
    end: SampleEnd = SampleEnd.LIVE
    reason: str = ""
    cause: str = ""
    update: f.UpdateCommitted | None = None
    """The update that trained it, or that excluded it."""

    @property
    def staleness(self) -> int | None:
        """Return (k - 1) - oldest trained step of the update k that used it."""
        if self.update is None or self.meta is None or not self.meta.steps:
            return None
        return self.update.update - 1 - min(span.step for span in self.meta.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTogether:
    """Samples that one ledger record ended."""

    position: int
    hash: str
    """Position and hash of the record."""
    update: f.UpdateCommitted | None
    """The settled update that trained them; None for all other ends."""
    samples: tuple[SampleLineage, ...]


class Commit(NamedTuple):
    """What identifies a commit, without its samples."""

    update: int
    digest: str


class UpdateFates:
    """Which commits stand and are in a checkpoint, by their number in the order of the ledger."""

    def __init__(self) -> None:
        self._num = 0
        self._open: dict[int, Commit] = {}
        """Commits that stand, by their number, of which no checkpoint is known."""
        self.settled: dict[int, Commit] = {}
        """Commits that stand and are in a checkpoint."""

    def enter(self, record: StoredRecord) -> None:
        for fact in record.facts:
            if isinstance(fact, f.UpdateCommitted):
                self._open[self._num] = Commit(fact.update, fact.digest)
                self._num += 1
            elif isinstance(fact, f.CheckpointReported):
                self.settled |= {n: c for n, c in self._open.items() if c.update <= fact.update}
                self._open = {n: c for n, c in self._open.items() if c.update > fact.update}
            elif isinstance(fact, f.RolledBack):
                self._open = {n: c for n, c in self._open.items() if c.update <= fact.to_update}
                self.settled = {n: c for n, c in self.settled.items() if c.update <= fact.to_update}


@dataclass(slots=True, kw_only=True)
class _LiveGroup:
    fact: f.GroupReserved
    reserved_s: float
    num_open: int
    """Reservations and live samples."""
    provenance: f.Provenance | None = None
    attempts: dict[str, tuple[int, str]] = field(default_factory=dict)
    """(attempt, node) of the episodes that have not ended."""
    members: set[str] = field(default_factory=set)
    """Live samples."""


@dataclass(slots=True)
class _OpenCommit:
    """An update that is not settled: a roll-back undoes it, or no checkpoint has it yet."""

    fact: f.UpdateCommitted
    trained: bool = False


class Lineage:
    """Folds the ledger again, with the settled updates of the first pass."""

    def __init__(self, settled: Iterable[int]) -> None:
        self._settled = frozenset(settled)
        self._num_commits = 0
        self._groups: dict[str, _LiveGroup] = {}
        self._live: dict[str, SampleLineage] = {}
        self._commits: list[_OpenCommit] = []
        self._submitted: dict[str, f.Provenance] = {}
        """Provenances of the submitted groups that wait for admission, by key."""
        self._now_s = 0.0

    @property
    def num_live(self) -> int:
        """Number of reservations and samples that have not ended, or whose update is not settled."""
        return sum(group.num_open for group in self._groups.values())

    def enter(self, record: StoredRecord) -> Iterator[EndedTogether]:
        """Yield what a record ended: the samples of each settled update, then all others."""
        self._now_s = record.time_unix_s
        others: list[SampleLineage] = []
        for fact in record.facts:
            if isinstance(fact, f.UpdateCommitted):
                others += self._dropped(fact)
                if self._num_commits in self._settled:
                    trained = tuple(self._finish(name, SampleEnd.TRAINED, update=fact) for name in fact.used)
                    yield EndedTogether(position=record.position, hash=record.hash, update=fact, samples=trained)
                else:
                    self._commits.append(_OpenCommit(fact))
                self._num_commits += 1
            else:
                others += self._ends(fact)
        if others:
            yield EndedTogether(position=record.position, hash=record.hash, update=None, samples=tuple(others))

    def _ends(self, fact: f.Fact) -> Iterator[SampleLineage]:
        """Fold a fact that is not a commit, and yield what it ends."""
        match fact:
            case f.SamplesSubmitted() if fact.provenance != f.Provenance():
                self._submitted |= {group.key: fact.provenance for group in fact.groups}
            case f.SubmittedSamplesDropped():
                for key in fact.keys:
                    self._submitted.pop(key, None)
            case f.GroupReserved():
                self._groups[fact.group] = _LiveGroup(
                    fact=fact,
                    reserved_s=self._now_s,
                    num_open=fact.num_episodes,
                    provenance=self._submitted.pop(fact.submitted_key, None),
                )
            case f.EpisodesAdded():
                self._groups[fact.group].num_open += fact.num_episodes
            case f.EpisodeLeased():
                self._groups[fact.group].attempts[fact.episode] = (fact.attempt, fact.node_id)
            case f.EpisodeEnded():
                yield self._without_samples(fact)
            case f.EpisodeScored():
                self._score(fact)
            case f.SamplesReplayed():
                self._replay(fact)
            case f.GroupFinalized():
                yield from self._finalize(fact)
            case f.SamplesEnded():
                for name in fact.sample_ids:
                    yield self._finish(name, fact.end, fact.reason)
            case f.CheckpointReported():
                for commit in self._commits:
                    commit.trained |= commit.fact.update <= fact.update
            case f.RolledBack():
                yield from self._roll_back(fact)
            case _:
                pass

    def _without_samples(self, fact: f.EpisodeEnded) -> SampleLineage:
        group = self._groups[fact.group]
        attempt, node_id = group.attempts.pop(fact.episode, (0, ""))
        self._close(group, 1)
        return SampleLineage(
            group=group.fact,
            episode=fact.episode,
            attempt=attempt,
            node_id=node_id,
            payload=f.PayloadRef(),
            provenance=group.provenance,
            reserved_s=group.reserved_s,
            ended_s=self._now_s,
            end=fact.end,
            reason=fact.reason,
            cause=fact.cause,
        )

    def _score(self, fact: f.EpisodeScored) -> None:
        group = self._groups[fact.group]
        attempt, node_id = group.attempts.pop(fact.episode, (0, ""))
        for meta in fact.samples:
            self._live[meta.sample_id] = SampleLineage(
                group=group.fact,
                episode=fact.episode,
                attempt=attempt,
                node_id=node_id,
                meta=meta,
                payload=fact.payload,
                provenance=group.provenance,
                reserved_s=group.reserved_s,
                scored_s=self._now_s,
            )
            group.members.add(meta.sample_id)
        self._close(group, 1 - len(fact.samples))

    def _replay(self, fact: f.SamplesReplayed) -> None:
        made = f.GroupReserved(group=fact.group, purpose=f.Purpose.REPLAY)
        group = self._groups.setdefault(fact.group, _LiveGroup(fact=made, reserved_s=self._now_s, num_open=0))
        group.num_open += len(fact.samples)
        for sample in fact.samples:
            self._live[sample.sample_id] = SampleLineage(
                group=group.fact,
                episode="",
                meta=f.SampleMeta(sample_id=sample.sample_id, steps=sample.steps),
                payload=f.PayloadRef(),
                replay_of=sample.original_id,
                reserved_s=self._now_s,
            )

    def _finalize(self, fact: f.GroupFinalized) -> Iterator[SampleLineage]:
        for adjusted in fact.adjusted:
            sample = self._live.get(adjusted.sample_id)
            if sample is not None and sample.meta is not None:
                rewards = _with_evidence(adjusted.rewards, sample.meta.rewards)
                meta = msgspec.structs.replace(sample.meta, rewards=rewards)
                self._live[adjusted.sample_id] = replace(sample, meta=meta)
        if fact.decision is GroupDecision.FILTER:
            for name in sorted(self._groups[fact.group].members):
                yield self._finish(name, SampleEnd.FILTERED, fact.reason)

    def _dropped(self, fact: f.UpdateCommitted) -> Iterator[SampleLineage]:
        for dropped in fact.dropped:
            yield self._finish(dropped.sample_id, SampleEnd.FILTERED, dropped.reason, update=fact)

    def _roll_back(self, fact: f.RolledBack) -> Iterator[SampleLineage]:
        undone = [commit for commit in self._commits if commit.fact.update > fact.to_update]
        self._commits = [commit for commit in self._commits if commit.fact.update <= fact.to_update]
        for commit in undone:
            for name in commit.fact.used if commit.trained else ():
                yield self._finish(name, SampleEnd.STALE, ROLLED_BACK)

    def _finish(
        self, name: str, end: SampleEnd, reason: str = "", *, update: f.UpdateCommitted | None = None
    ) -> SampleLineage:
        sample = self._live.pop(name)
        group = self._groups[sample.group.group]
        group.members.discard(name)
        self._close(group, 1)
        return replace(sample, end=end, reason=reason, update=update, ended_s=self._now_s)

    def _close(self, group: _LiveGroup, num: int) -> None:
        """Count `num` ends of a group, and forget the group after its last one."""
        group.num_open -= num
        if group.num_open <= 0:
            self._groups.pop(group.fact.group, None)


def group_measures(update: f.UpdateCommitted, group: str) -> dict[str, float]:
    """Return what an update measured on a group of its batch, such as the mean advantage; empty if it reported
    nothing."""
    found = next((trained for trained in update.groups if trained.group == group), None)
    if found is None:
        return {}
    return found.measures or {"mean_abs_advantage": found.mean_abs_advantage, "policy_loss": found.policy_loss}


def _with_evidence(rewards: tuple[f.Reward, ...], reported: tuple[f.Reward, ...]) -> tuple[f.Reward, ...]:
    """Return adjusted rewards with the evidence that the workers reported, which a verdict does not repeat."""
    evidence = {(reward.name, reward.segment): reward.evidence for reward in reported}
    return tuple(
        reward
        if reward.evidence
        else msgspec.structs.replace(reward, evidence=evidence.get((reward.name, reward.segment), ""))
        for reward in rewards
    )
