"""Conservation, counted independently: the end of every sample, without the core's `apply`.

A reservation becomes the first sample of its episode, or ends with it. A sample ends once, and is not leased
afterwards. Only TRAINED may change, when the update that used the sample is undone. Samples of rollouts, of
evaluations, of the replay log, and of each source of submitted samples are separate accounts.

The samples of a group are forgotten when all of them have ended, so that memory does not grow with the run. A later
fact about one of them is a violation in either case. Of a trained update the numbers of samples remain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import GroupDecision, Purpose, SampleEnd

TRAINING, EVALUATION, REPLAY = "training", "evaluation", "replay"


def submitted_account(source: str) -> str:
    """Return the account of the submitted samples of a source."""
    return f"submitted {source}"


class Conservation:
    """Ends of all reservations and samples of a run. `complain` receives violations."""

    def __init__(
        self,
        complain: Callable[[str], None],
        forget: Callable[[str, Collection[str]], None] = lambda group, samples: None,
    ) -> None:
        """`forget` is called with a group whose samples have all ended, and with these."""
        self._complain = complain
        self._forget = forget
        self._account: dict[str, str] = {}
        """Account of every group."""
        self._sources: dict[str, str] = {}
        """Sources of submitted samples that no group has yet, by key."""
        self._members: dict[str, list[str]] = {}
        self._places: Counter[str] = Counter()
        """Number of reservations per group that are neither samples nor ended yet."""
        self._end: dict[str, SampleEnd] = {}
        """End of every sample of a group that has live ones; LIVE if it has not ended."""
        self._group: dict[str, str] = {}
        self._of_sample: dict[str, str] = {}
        """Account of such a sample: that of its group, or REPLAY."""
        self._num_live: Counter[str] = Counter()
        """Number of live samples by group."""
        self._applied: dict[int, list[str]] = {}
        """Samples of the updates that are in no checkpoint."""
        self._trained: dict[int, Counter[str]] = {}
        """Number of samples of the updates that are in a checkpoint, by account."""
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
                self._complain(f"group {fact.group} has submitted samples {fact.submitted_key!r}, which do not wait")
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

    def _close(self, group: str) -> None:
        """Forget a group without reservations and live samples."""
        if self._places[group] or self._num_live[group]:
            return
        del self._places[group], self._num_live[group]
        members = self._members.pop(group, [])
        for sample in members:
            self._end.pop(sample, None)
            self._group.pop(sample, None)
            self._of_sample.pop(sample, None)
        self._forget(group, members)

    def _episode_ended(self, fact: f.EpisodeEnded) -> None:
        self._take_place(fact.group, fact.episode)
        self._ends[self._account[fact.group], fact.end] += 1
        self._close(fact.group)

    def _episode_scored(self, fact: f.EpisodeScored) -> None:
        self._take_place(fact.group, fact.episode)
        self._reserved[self._account[fact.group]] += len(fact.samples) - 1
        for sample in fact.samples:
            if sample.sample_id in self._end:
                self._complain(f"sample {sample.sample_id} is reported twice")
            self._add(sample.sample_id, fact.group, self._account[fact.group])

    def _samples_replayed(self, fact: f.SamplesReplayed) -> None:
        self._reserved[REPLAY] += len(fact.samples)
        for sample in fact.samples:
            if sample.sample_id in self._end:
                self._complain(f"sample {sample.sample_id} is replayed, but exists")
            self._add(sample.sample_id, fact.group, REPLAY)

    def _add(self, sample: str, group: str, account: str) -> None:
        self._end[sample] = SampleEnd.LIVE
        self._group[sample] = group
        self._of_sample[sample] = account
        self._num_live[group] += 1
        self._members.setdefault(group, []).append(sample)

    def _finish(self, sample: str, end: SampleEnd) -> None:
        before = self._end.get(sample)
        if before is None:
            self._complain(
                f"sample {sample} ended as {end.name}, but was never reported, or all samples of its group had ended"
            )
            return
        if before is not SampleEnd.LIVE:
            self._complain(f"sample {sample} ended as {end.name}, having ended as {before.name}")
            return
        group = self._group[sample]
        self._end[sample] = end
        self._ends[self._of_sample[sample], end] += 1
        self._num_live[group] -= 1
        self._close(group)

    def _group_finalized(self, fact: f.GroupFinalized) -> None:
        if fact.decision is GroupDecision.FILTER:
            for sample in list(self._members.get(fact.group, ())):
                if self._end.get(sample) is SampleEnd.LIVE:
                    self._finish(sample, SampleEnd.FILTERED)

    def _samples_ended(self, fact: f.SamplesEnded) -> None:
        for sample in fact.sample_ids:
            self._finish(sample, fact.end)

    def _batch_leased(self, fact: f.BatchLeased) -> None:
        for sample in fact.sample_ids:
            if (end := self._end.get(sample)) is not SampleEnd.LIVE:
                what = f"had ended as {end.name}" if end is not None else "was never reported, or had ended"
                self._complain(f"lease {fact.lease_id} has sample {sample}, which {what}")

    def _update_committed(self, fact: f.UpdateCommitted) -> None:
        self._applied[fact.update] = list(fact.used)
        for dropped in fact.dropped:
            self._finish(dropped.sample_id, SampleEnd.FILTERED)

    def _checkpoint_reported(self, fact: f.CheckpointReported) -> None:
        for update in [u for u in self._applied if u <= fact.update]:
            trained = self._trained[update] = Counter[str]()
            for sample in self._applied.pop(update):
                if self._end.get(sample) is SampleEnd.LIVE:
                    trained[self._of_sample[sample]] += 1
                self._finish(sample, SampleEnd.TRAINED)

    def _rolled_back(self, fact: f.RolledBack) -> None:
        for update in [u for u in self._applied if u > fact.to_update]:
            del self._applied[update]
        for update in [u for u in self._trained if u > fact.to_update]:
            for account, num in self._trained.pop(update).items():
                self._ends[account, SampleEnd.TRAINED] -= num
                self._ends[account, SampleEnd.STALE] += num


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
