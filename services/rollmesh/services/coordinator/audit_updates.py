"""Check once, bound and digests of updates, recomputed from the facts.

This module repeats the arithmetic of the bound on purpose, so that an error in `core/bound.py` cannot hide itself.

    lag of a sample at update k = (k - 1) - (oldest step among its trained tokens) <= eta
    DROP trains all its tokens; MASK those of steps >= k - 1 - eta, and at least one
    age of a submitted sample = (k - 1) - applied step at its submission <= max_age of its source
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from rollmesh.services.coordinator.audit_leases import Leases
from rollmesh.services.coordinator.audit_replay import Replays
from rollmesh.services.coordinator.audit_report import Complain
from rollmesh.services.coordinator.audit_versions import Versions
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import SampleMeta
from rollmesh.services.coordinator.core.records import BoundPolicy, RunSpec
from rollmesh.shared.domain.digest import INITIAL_DIGEST, next_digest


@dataclass(frozen=True, slots=True)
class StandingUpdate:
    """An update that no roll-back has undone."""

    digest: str
    names: bytes
    """Ids of the used samples, a line each, which takes a fifth of the memory of a tuple."""
    applied: bool
    incarnation: int

    @property
    def used(self) -> set[str]:
        """Ids of the used samples."""
        return set(self.names.decode().split("\n")) if self.names else set()


class Updates:
    """The remaining updates of a run's one learner, and the metadata of their samples."""

    def __init__(self, complain: Complain) -> None:
        self.leases = Leases(complain)
        self.versions = Versions(complain)
        self.replays = Replays(complain, self.versions)
        self.standing: dict[int, StandingUpdate] = {}
        self.num_undone = 0
        self.lags: Counter[int] = Counter()
        """Number of used samples of all committed updates, also undone ones, by lag; -1 for those without POLICY
        tokens. Replayed samples are in `replays.lags`."""
        self.ages: dict[str, Counter[int]] = {}
        """Number of used submitted samples of all committed updates, by source and age."""
        self._submitted: dict[str, tuple[str, int]] = {}
        """Source of submitted samples and the applied step at the submission, by key."""
        self._of_group: dict[str, tuple[str, int]] = {}
        """The same, by group."""
        self._group: dict[str, str] = {}
        """Group of every sample that a client submitted."""
        self._complain = complain
        self._samples: dict[str, SampleMeta] = {}
        self._used_in: dict[str, int] = {}

    @property
    def applied(self) -> int:
        return max(self.standing, default=0)

    @property
    def digest(self) -> str:
        return self.digest_after(self.applied)

    def digest_after(self, update: int) -> str:
        return self.standing[update].digest if update in self.standing else INITIAL_DIGEST

    def forget(self, samples: Collection[str]) -> None:
        """Forget samples of a group that has ended: an update that uses one of them again is a violation."""
        self.leases.forget(samples)
        self.replays.forget(samples)
        for sample in samples:
            self._group.pop(sample, None)
            self._samples.pop(sample, None)
            self._used_in.pop(sample, None)

    def enter(self, fact: f.Fact) -> None:
        """Fold one fact."""
        self.leases.enter(fact)
        self.versions.enter(fact)
        self.replays.enter(fact)
        match fact:
            case f.SamplesSubmitted():
                found = fact.source.name.lower(), self.applied
                self._submitted |= dict.fromkeys((group.key for group in fact.groups), found)
            case f.GroupReserved() if fact.submitted_key in self._submitted:
                self._of_group[fact.group] = self._submitted.pop(fact.submitted_key)
            case f.EpisodeScored():
                self._samples.update((sample.sample_id, sample) for sample in fact.samples)
                if fact.group in self._of_group:
                    self._group |= dict.fromkeys((sample.sample_id for sample in fact.samples), fact.group)
            case f.UpdateCommitted():
                self._commit(fact)
            case f.CheckpointReported():
                if fact.update not in self.standing:
                    what = f"update {fact.update}, which no remaining commit made"
                    self._complain("once", f"a checkpoint is reported with {what}; the last is {self.applied}")
            case f.RolledBack():
                self._roll_back(fact)

    def _commit(self, fact: f.UpdateCommitted) -> None:
        k = fact.update
        if k != self.applied + 1:
            self._complain("digest", f"update {k} is committed after update {self.applied}")
        expected = next_digest(self.digest_after(k - 1), k, sorted(set(fact.used))) if k >= 1 else ""
        if fact.digest != expected:
            self._complain("digest", f"digest after update {k} is {fact.digest!r}, recomputed {expected!r}")
        if fact.used and not fact.applied:
            self._complain("once", f"update {k} was skipped, but used {len(fact.used)} samples")
        spec = self.leases.spec_of(fact.lease_ids)
        for sample in fact.used:
            if sample in self._used_in:
                self._complain("once", f"sample {sample} is used by update {k} and by update {self._used_in[sample]}")
            self._used_in[sample] = k
            if sample not in self.replays:
                self._check_bound(sample, fact, spec)
        self.standing[k] = StandingUpdate(
            digest=fact.digest,
            names="\n".join(fact.used).encode(),
            applied=fact.applied,
            incarnation=fact.incarnation,
        )

    def _roll_back(self, fact: f.RolledBack) -> None:
        for update in [u for u in self.standing if u > fact.to_update]:
            del self.standing[update]
            self.num_undone += 1
        self._used_in = {sample: update for sample, update in self._used_in.items() if update <= fact.to_update}

    def _check_bound(self, sample_id: str, fact: f.UpdateCommitted, spec: RunSpec | None) -> None:
        k, meta = fact.update, self._samples.get(sample_id)
        if meta is None or spec is None:
            self._complain("bound", f"update {k} used sample {sample_id}, which was never scored, or had ended")
            return
        if meta.policy != fact.policy:
            self._complain(
                "bound", f"update {k} of policy {fact.policy!r} used sample {sample_id} of policy {meta.policy!r}"
            )
        if sample_id in self._group:
            self._check_age(sample_id, k, spec)
            return
        for span in meta.steps:
            if span.step > k - 1:
                self._complain(
                    "bound", f"update {k} used sample {sample_id}, sampled at step {span.step}: later than its weights"
                )
            if self.versions.is_void(span):
                self._complain(
                    "bound", f"update {k} used sample {sample_id} of void step {span.step}.{span.incarnation}"
                )
        oldest = k - 1 - spec.max_staleness
        trained = [s.step for s in meta.steps if spec.beyond is BoundPolicy.DROP or s.step >= oldest]
        lag = (k - 1) - min(trained) if trained else -1
        if lag > spec.max_staleness or (meta.steps and not trained):
            self._complain(
                "bound",
                f"update {k} used sample {sample_id} with staleness {lag}, bound {spec.max_staleness}: steps "
                f"{_steps(meta)}",
            )
        self.lags[lag] += 1

    def _check_age(self, sample_id: str, k: int, spec: RunSpec) -> None:
        source, step = self._of_group[self._group[sample_id]]
        age = max(0, k - 1 - step)
        most = next((one.max_age for one in spec.foreign if one.source == source), -1)
        if isinstance(most, int) and age > most:
            self._complain("bound", f"update {k} used submitted sample {sample_id} of age {age}, bound {most}")
        self.ages.setdefault(source, Counter())[age] += 1


def _steps(meta: SampleMeta) -> str:
    return ", ".join(f"{span.step}.{span.incarnation}" for span in meta.steps) or "none"
