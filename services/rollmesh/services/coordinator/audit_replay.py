"""Check replayed samples: each has the stamps of its original, which was trained or deferred before, and keeps the
bound of the replay log at its lease and at its commit.

As `audit_updates`, this module repeats the arithmetic of the bound on purpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from rollmesh.services.coordinator.audit_report import Complain
from rollmesh.services.coordinator.audit_versions import Versions
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import GroupDecision, StepSpan
from rollmesh.services.coordinator.core.records import ReplaySpec

_DEFERRED = "DEFERRED"


class Replays:
    """The replayed samples of a run."""

    def __init__(self, complain: Complain, versions: Versions) -> None:
        self.lags: Counter[int] = Counter()
        """Number of used replayed samples of all committed updates, by lag; -1 for those without POLICY tokens."""
        self.originals: dict[str, str] = {}
        """Id of the original of every replayed sample."""
        self._complain = complain
        self._versions = versions
        self._spec: ReplaySpec | None = None
        self._scored: dict[str, tuple[str, tuple[StepSpan, ...]]] = {}
        """Group and steps of every scored sample."""
        self._decided: set[str] = set()
        """Groups that a finalizer has kept, in a run that defers samples."""
        self._steps: dict[str, tuple[StepSpan, ...]] = {}
        self._used: dict[int, tuple[str, ...]] = {}
        self._replayable: set[str] = set()

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self.originals

    def forget(self, samples: Collection[str]) -> None:
        """Forget replayed samples of a group that has ended. Of originals everything is kept, in a run with a replay
        log: only the fold knows which of them are in it."""
        for sample in samples:
            self._steps.pop(sample, None)

    def enter(self, fact: f.Fact) -> None:
        """Fold one fact."""
        match fact:
            case f.RunCreated() | f.RunChanged():
                self._spec = fact.spec.replay
            case f.EpisodeScored() if self._spec is not None:
                self._scored.update((sample.sample_id, (fact.group, sample.steps)) for sample in fact.samples)
            case f.UpdateCommitted() if self._spec is not None:
                self._used[fact.update] = fact.used
                for sample_id in fact.used:
                    if sample_id in self:
                        self._commit(sample_id, fact.update)
            case f.CheckpointReported() if self._spec is not None:
                for update in [update for update in self._used if update <= fact.update]:
                    self._replayable.update(self._used.pop(update))
            case f.RolledBack():
                self._used = {update: used for update, used in self._used.items() if update <= fact.to_update}
            case f.GroupFinalized(decision=GroupDecision.KEEP) if self._defers:
                self._decided.add(fact.group)
            case f.SamplesEnded(reason=reason) if reason == _DEFERRED and fact.group in self._decided:
                self._replayable.update(fact.sample_ids)  # else a finalizer of this word has dropped them
            case f.SamplesReplayed():
                self._replay(fact)
            case f.BatchLeased():
                for sample_id in fact.sample_ids:
                    if sample_id in self:
                        self._check(sample_id, fact.update, f"lease {fact.lease_id} of update {fact.update} has")

    @property
    def _defers(self) -> bool:
        return self._spec is not None and self._spec.made.once

    def _replay(self, fact: f.SamplesReplayed) -> None:
        if not fact.samples:
            self._complain("once", f"nothing of group {fact.original_group} is replayed in group {fact.group}")
        for sample in fact.samples:
            name, original = sample.sample_id, sample.original_id
            group, steps = self._scored.get(original, ("", None))
            if name in self or name in self._scored:
                self._complain("once", f"sample {name} is replayed, but this id exists")
            if steps is None or group != fact.original_group or original not in self._replayable:
                what = f"sample {original} of group {fact.original_group}, which was neither trained nor deferred"
                self._complain("once", f"sample {name} replays {what}")
            elif steps != sample.steps:
                self._complain(
                    "bound",
                    f"replayed sample {name} has steps {_text(sample.steps)}, its original {original} has "
                    f"{_text(steps)}",
                )
            self.originals[name] = original
            self._steps[name] = sample.steps

    def _commit(self, sample_id: str, update: int) -> None:
        self.lags[self._check(sample_id, update, f"update {update} used")] += 1

    def _check(self, sample_id: str, update: int, what: str) -> int:
        """Compare a sample with the bound of the replay log. Return its lag."""
        steps = self._steps.get(sample_id, ())
        for span in steps:
            if self._versions.is_void(span):
                self._complain(
                    "bound", f"{what} replayed sample {sample_id} of void step {span.step}.{span.incarnation}"
                )
        lag = update - 1 - min((span.step for span in steps), default=update)
        bound = self._spec.max_staleness if self._spec is not None else 0
        if steps and (lag < 0 or (isinstance(bound, int) and lag > bound)):
            self._complain(
                "bound",
                f"{what} replayed sample {sample_id} with staleness {lag}, replay bound {bound}: steps {_text(steps)}",
            )
        return lag if steps else -1


def _text(steps: tuple[StepSpan, ...]) -> str:
    return ", ".join(f"{span.num_tokens} of {span.step}.{span.incarnation}" for span in steps) or "none"
