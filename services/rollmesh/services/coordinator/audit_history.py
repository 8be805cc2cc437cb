"""The history of a sample: every fact of the ledger about it, in order, as text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import msgspec

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.ledger import StoredRecord


class HistoryLine(msgspec.Struct, frozen=True, kw_only=True):
    """One event in the history of a sample."""

    position: int
    time_unix_s: float
    what: str


def sample_history(records: Sequence[StoredRecord], name: str) -> list[HistoryLine]:
    """Return the history of a sample, or of an episode without samples. Empty if the records have neither."""
    found = next((found for record in records if (found := _origin(record, name)) is not None), None)
    if found is None:
        return []
    history = _History(*found, sample=name)
    return [line for record in records for line in _lines(history, record)]


async def ledger_history(read: Callable[[], AsyncIterator[StoredRecord]], name: str) -> list[HistoryLine]:
    """Return the same from a ledger of any length. `read` begins at its first record, and is called twice: the facts
    about the group are before the one that has the sample."""
    async for record in read():
        if (found := _origin(record, name)) is not None:
            break
    else:
        return []
    history = _History(*found, sample=name)
    return [line async for record in read() for line in _lines(history, record)]


def _lines(history: _History, record: StoredRecord) -> Iterator[HistoryLine]:
    for fact in record.facts:
        for what in history.about(fact):
            yield HistoryLine(position=record.position, time_unix_s=record.time_unix_s, what=what)


def _origin(record: StoredRecord, name: str) -> tuple[str, str] | None:
    """Return (group, episode) of a sample or episode if a fact of the record has it; empty texts for a replayed sample,
    whose original has them."""
    for fact in record.facts:
        if isinstance(fact, f.EpisodeScored) and name in (fact.episode, *(s.sample_id for s in fact.samples)):
            return fact.group, fact.episode
        if isinstance(fact, f.EpisodeLeased | f.EpisodeEnded) and fact.episode == name:
            return fact.group, fact.episode
        if isinstance(fact, f.SamplesReplayed) and name in [sample.sample_id for sample in fact.samples]:
            return "", ""
    return None


class _History:
    """Describes each fact for one sample."""

    def __init__(self, group: str, episode: str, *, sample: str) -> None:
        self._group = group
        self._episode = episode
        self._sample = sample
        self._leases: set[str] = set()
        self._update = 0
        """The remaining update that used it; 0 if there is none."""
        self._trained = False
        self._submitted: dict[str, f.SamplesSubmitted] = {}
        """Submissions by the keys of their groups."""

    def about(self, fact: f.Fact) -> Iterator[str]:
        if getattr(fact, "episode", None) == self._episode:
            yield from self._episode_fact(fact)
        elif isinstance(fact, f.GroupReserved | f.EpisodesAdded | f.GroupFinalized) and fact.group == self._group:
            yield from self._group_fact(fact)
        elif isinstance(fact, f.SamplesSubmitted):
            self._submitted |= dict.fromkeys((group.key for group in fact.groups), fact)
        elif isinstance(fact, f.SamplesEnded) and self._sample in fact.sample_ids:
            yield f"ended: {fact.end.name.lower()} {fact.reason}".rstrip()
        elif isinstance(fact, f.SamplesReplayed):
            yield from self._replay_fact(fact)
        else:
            yield from self._batch_fact(fact)
            yield from self._update_fact(fact)

    def _group_fact(self, fact: f.GroupReserved | f.EpisodesAdded | f.GroupFinalized) -> Iterator[str]:
        if isinstance(fact, f.GroupReserved):
            intended = f" for update {fact.update_intended}" if fact.update_intended else ""
            again = f", again after dead letter {fact.dead_id}" if fact.dead_id else ""
            if fact.submitted_key:
                again = f", for the submitted samples {fact.submitted_key}{self._provenance(fact.submitted_key)}"
            yield (
                f"group {fact.group} of task {fact.task.task_id} was admitted{intended}, step_min "
                f"{fact.step_min}{again}"
            )
        elif isinstance(fact, f.EpisodesAdded):
            yield f"its group grew by {fact.num_episodes} episodes"
        else:
            yield f"its group was decided on: {fact.decision.name.lower()} {fact.reason}".rstrip()

    def _provenance(self, key: str) -> str:
        if key not in self._submitted:
            return ""
        fact = self._submitted[key]
        origin = fact.provenance
        parts = [f"mesh {origin.mesh}"] * bool(origin.mesh) + [f"run {origin.run} at step {origin.step}"] * bool(
            origin.run
        )
        return f" of source {fact.source.name.lower()}" + (f" from {', '.join(parts)}" if parts else "")

    def _episode_fact(self, fact: f.Fact) -> Iterator[str]:
        if isinstance(fact, f.EpisodeLeased):
            yield f"attempt {fact.attempt} of episode {fact.episode} was leased to {fact.node_id}"
        elif isinstance(fact, f.EpisodeReturned):
            yield f"the attempt was returned ({'counts' if fact.counts else 'does not count'}): {fact.cause}"
        elif isinstance(fact, f.EpisodeEnded):
            yield f"the episode ended without samples: {fact.end.name.lower()} {fact.reason}: {fact.cause}".rstrip(": ")
        elif isinstance(fact, f.EpisodeScored):
            for meta in (m for m in fact.samples if m.sample_id == self._sample):
                steps = ", ".join(f"{s.num_tokens} tokens of step {s.step}.{s.incarnation}" for s in meta.steps)
                rewards = ", ".join(f"{r.name} {r.value:g}" for r in meta.rewards)
                yield (
                    f"scored: {steps or 'no POLICY tokens'}; {rewards or 'no reward'}; payload {fact.payload.sequence}"
                )

    def _replay_fact(self, fact: f.SamplesReplayed) -> Iterator[str]:
        for sample in fact.samples:
            if sample.sample_id == self._sample:
                steps = ", ".join(f"{s.num_tokens} tokens of step {s.step}.{s.incarnation}" for s in sample.steps)
                what = f"replays {sample.original_id} of group {fact.original_group} for update {fact.update}"
                yield f"{what}: {steps or 'no POLICY tokens'}"
            elif sample.original_id == self._sample:
                yield f"replayed as {sample.sample_id} for update {fact.update}"

    def _batch_fact(self, fact: f.Fact) -> Iterator[str]:
        if isinstance(fact, f.BatchLeased) and self._sample in fact.sample_ids:
            self._leases.add(fact.lease_id)
            yield f"leased for update {fact.update} in batch {fact.lease_id}, trainer epoch {fact.trainer_epoch}"
        elif isinstance(fact, f.BatchReturned | f.BatchInDoubt) and fact.lease_id in self._leases:
            if isinstance(fact, f.BatchReturned):
                self._leases.discard(fact.lease_id)  # a later lease can have the same id
            yield f"its batch {'was returned' if isinstance(fact, f.BatchReturned) else 'is in doubt'}: {fact.reason}"

    def _update_fact(self, fact: f.Fact) -> Iterator[str]:
        if isinstance(fact, f.UpdateCommitted):
            if self._sample in fact.used:
                self._update, self._trained = fact.update, False
                yield f"used by update {fact.update}, incarnation {fact.incarnation}"
            for dropped in (d for d in fact.dropped if d.sample_id == self._sample):
                yield f"excluded from update {fact.update}: filtered {dropped.reason}"
        elif isinstance(fact, f.CheckpointReported) and 0 < self._update <= fact.update and not self._trained:
            self._trained = True
            yield f"trained: a checkpoint with update {fact.update} is durable"
        elif isinstance(fact, f.RolledBack) and self._update > fact.to_update:
            self._update = 0
            yield f"update undone by a roll-back to {fact.to_update}: {'stale' if self._trained else 'ready again'}"
