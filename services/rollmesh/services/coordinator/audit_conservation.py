"""Conservation, counted independently: the end of every sample, without the core's `apply`.

A reservation becomes the first sample of its episode, or ends with it. A sample ends once, and is not leased
afterwards. Only TRAINED may change, when the update that used the sample is undone. Samples of rollouts, of
evaluations, of the replay log, and of each source of submitted samples are separate accounts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import GroupDecision, Purpose, SampleEnd

TRAINING, EVALUATION, REPLAY = "training", "evaluation", "replay"


def submitted_account(source: str) -> str:
    """Return the account of the submitted samples of a source."""
    return f"submitted {source}"


class Conservation:
    """Ends of all reservations and samples of a run. `complain` receives violations."""

    def __init__(self, complain: Callable[[str], None]) -> None:
        self._complain = complain
        self._account: dict[str, str] = {}
        """Account of every group."""
        self._sources: dict[str, str] = {}
        """Sources of submitted samples that no group has yet, by key."""
        self._members: dict[str, list[str]] = {}
        self._places: Counter[str] = Counter()
        """Number of reservations per group that are neither samples nor ended yet."""
        self._end: dict[str, SampleEnd] = {}
        """End of every sample; LIVE if it has not ended."""
        self._of_sample: dict[str, str] = {}
        """Account of every sample: that of its group, or REPLAY."""
        self._applied: dict[int, list[str]] = {}
        self._reserved: Counter[str] = Counter()
        self._ends: Counter[tuple[str, SampleEnd]] = Counter()

    def reserved(self, account: str) -> int:
        return self._reserved[account]

    def ends(self, end: SampleEnd, account: str) -> int:
        return self._ends[account, end]

    def live(self, account: str) -> int:
        """Count them one by one, not as a difference."""
        places = sum(num for group, num in self._places.items() if self._account[group] == account)
        samples = sum(end is SampleEnd.LIVE and self._of_sample[sample] == account for sample, end in self._end.items())
        return places + samples

    def enter(self, fact: f.Fact) -> None:
        """Fold one fact."""
        handler = _HANDLERS.get(type(fact))
        if handler is not None:
            handler(self, fact)

    def _reserve(self, group: str, num: int) -> None:
        self._places[group] += num
        self._reserved[self._account[group]] += num

    def _group_reserved(self, fact: f.GroupReserved) -> None:
        if fact.group in self._account:
            self._complain(f"group {fact.group} is reserved twice")
        self._account[fact.group] = EVALUATION if fact.purpose is Purpose.EVAL else TRAINING
        if fact.submitted_key:
            source = self._sources.pop(fact.submitted_key, None)
            if source is None:
                self._complain(f"group {fact.group} replays samples {fact.submitted_key!r}, which do not wait")
            self._account[fact.group] = submitted_account(source or "")
        self._members.setdefault(fact.group, [])
        self._reserve(fact.group, fact.num_episodes)

    def _samples_submitted(self, fact: f.SamplesSubmitted) -> None:
        self._sources |= {group.key: fact.source.name.lower() for group in fact.groups}

    def _samples_dropped(self, fact: f.SubmittedSamplesDropped) -> None:
        for key in fact.keys:
            if self._sources.pop(key, None) is None:
                self._complain(f"submitted samples {key!r} are dropped, which do not wait")

    def _episodes_added(self, fact: f.EpisodesAdded) -> None:
        self._reserve(fact.group, fact.num_episodes)

    def _take_place(self, group: str, episode: str) -> None:
        self._places[group] -= 1
        if self._places[group] < 0:
            self._complain(f"episode {episode} ended without a reservation in group {group}")

    def _episode_ended(self, fact: f.EpisodeEnded) -> None:
        self._take_place(fact.group, fact.episode)
        self._ends[self._account[fact.group], fact.end] += 1

    def _episode_scored(self, fact: f.EpisodeScored) -> None:
        self._take_place(fact.group, fact.episode)
        self._reserved[self._account[fact.group]] += len(fact.samples) - 1
        for sample in fact.samples:
            if sample.sample_id in self._end:
                self._complain(f"sample {sample.sample_id} is reported twice")
            self._end[sample.sample_id] = SampleEnd.LIVE
            self._of_sample[sample.sample_id] = self._account[fact.group]
            self._members[fact.group].append(sample.sample_id)

    def _finish(self, sample: str, end: SampleEnd) -> None:
        before = self._end.get(sample)
        if before is None:
            self._complain(f"sample {sample} ended as {end.name}, but was never reported")
            return
        if before is not SampleEnd.LIVE:
            self._complain(f"sample {sample} ended as {end.name}, having ended as {before.name}")
            return
        self._end[sample] = end
        self._ends[self._of_sample[sample], end] += 1

    def _samples_replayed(self, fact: f.SamplesReplayed) -> None:
        self._reserved[REPLAY] += len(fact.samples)
        for sample in fact.samples:
            if sample.sample_id in self._end:
                self._complain(f"sample {sample.sample_id} is replayed, but exists")
            self._end[sample.sample_id] = SampleEnd.LIVE
            self._of_sample[sample.sample_id] = REPLAY
            self._members.setdefault(fact.group, []).append(sample.sample_id)

    def _group_finalized(self, fact: f.GroupFinalized) -> None:
        if fact.decision is GroupDecision.FILTER:
            for sample in self._members[fact.group]:
                if self._end[sample] is SampleEnd.LIVE:
                    self._finish(sample, SampleEnd.FILTERED)

    def _samples_ended(self, fact: f.SamplesEnded) -> None:
        for sample in fact.sample_ids:
            self._finish(sample, fact.end)

    def _batch_leased(self, fact: f.BatchLeased) -> None:
        for sample in fact.sample_ids:
            if (end := self._end.get(sample, SampleEnd.LIVE)) is not SampleEnd.LIVE:
                self._complain(f"lease {fact.lease_id} has sample {sample}, which had ended as {end.name}")

    def _update_committed(self, fact: f.UpdateCommitted) -> None:
        self._applied[fact.update] = list(fact.used)
        for dropped in fact.dropped:
            self._finish(dropped.sample_id, SampleEnd.FILTERED)

    def _checkpoint_reported(self, fact: f.CheckpointReported) -> None:
        for update, used in self._applied.items():
            for sample in used if update <= fact.update else ():
                if self._end.get(sample) is not SampleEnd.TRAINED:
                    self._finish(sample, SampleEnd.TRAINED)

    def _rolled_back(self, fact: f.RolledBack) -> None:
        for update in [u for u in self._applied if u > fact.to_update]:
            for sample in self._applied.pop(update):
                if self._end.get(sample) is SampleEnd.TRAINED:
                    account = self._of_sample[sample]
                    self._end[sample] = SampleEnd.STALE
                    self._ends[account, SampleEnd.TRAINED] -= 1
                    self._ends[account, SampleEnd.STALE] += 1


_HANDLERS: dict[type, Callable[[Conservation, Any], None]] = {
    f.SamplesSubmitted: Conservation._samples_submitted,
    f.SubmittedSamplesDropped: Conservation._samples_dropped,
    f.GroupReserved: Conservation._group_reserved,
    f.EpisodesAdded: Conservation._episodes_added,
    f.EpisodeEnded: Conservation._episode_ended,
    f.EpisodeScored: Conservation._episode_scored,
    f.GroupFinalized: Conservation._group_finalized,
    f.SamplesEnded: Conservation._samples_ended,
    f.BatchLeased: Conservation._batch_leased,
    f.UpdateCommitted: Conservation._update_committed,
    f.CheckpointReported: Conservation._checkpoint_reported,
    f.RolledBack: Conservation._rolled_back,
    f.SamplesReplayed: Conservation._samples_replayed,
}
