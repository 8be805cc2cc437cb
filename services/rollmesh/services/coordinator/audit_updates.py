"""Once, bound and digests, recomputed from the facts alone.

The arithmetic of the bound is written out here a second time on purpose: an error in `core/bound.py` must not hide itself.

    lag of a sample at update k = (k - 1) - (oldest step among its trained tokens) <= eta
    DROP trains all its tokens; MASK those of steps >= k - 1 - eta, and at least one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.records import BoundPolicy, RunSpec, SampleMeta, StepSpan
from rollmesh.shared.digest import INITIAL_DIGEST, next_digest

Complain = Callable[[str, str], None]
"""(check, what): "once", "bound" or "digest"."""


@dataclass(frozen=True, slots=True)
class StandingUpdate:
    """An update that no roll-back has undone."""

    digest: str
    used: tuple[str, ...]
    applied: bool


class Updates:
    """The standing updates of a run's one learner, and what their samples were made of."""

    def __init__(self, complain: Complain) -> None:
        self.standing: dict[int, StandingUpdate] = {}
        self.num_undone = 0
        self.lags: Counter[int] = Counter()
        """Used samples of all committed updates, undone ones too, by lag; -1 for those without POLICY tokens."""
        self.open_batches: dict[str, f.BatchLeased] = {}
        """Batch leases that are out or in doubt."""
        self._complain = complain
        self._spec: RunSpec | None = None
        self._leased_under: dict[str, RunSpec | None] = {}
        """What the run was when a batch was leased: its bound judges that batch's samples."""
        self._samples: dict[str, SampleMeta] = {}
        self._used_in: dict[str, int] = {}
        self._rolled_back: list[f.RolledBack] = []

    @property
    def applied(self) -> int:
        return max(self.standing, default=0)

    @property
    def digest(self) -> str:
        return self.digest_after(self.applied)

    def digest_after(self, update: int) -> str:
        return self.standing[update].digest if update in self.standing else INITIAL_DIGEST

    @property
    def used_in(self) -> Mapping[str, int]:
        """The standing update that used each sample."""
        return self._used_in

    def enter(self, fact: f.Fact) -> None:
        """Take note of one fact."""
        if isinstance(fact, f.RunCreated | f.RunChanged):
            self._spec = fact.spec
        elif isinstance(fact, f.EpisodeScored):
            self._samples.update((sample.sample_id, sample) for sample in fact.samples)
        elif isinstance(fact, f.BatchLeased):
            self.open_batches[fact.lease_id] = fact
            self._leased_under[fact.lease_id] = self._spec
        elif isinstance(fact, f.BatchReturned):
            self.open_batches.pop(fact.lease_id, None)
        elif isinstance(fact, f.UpdateCommitted):
            self._commit(fact)
        elif isinstance(fact, f.RolledBack):
            self._roll_back(fact)

    def _commit(self, fact: f.UpdateCommitted) -> None:
        k = fact.update
        for lease_id in fact.lease_ids:
            if self.open_batches.pop(lease_id, None) is None:
                self._complain("once", f"update {k} is committed with lease {lease_id}, which is not out")
        if k != self.applied + 1:
            self._complain("digest", f"update {k} is committed after update {self.applied}")
        expected = next_digest(self.digest_after(k - 1), k, sorted(set(fact.used)))
        if fact.digest != expected:
            self._complain("digest", f"digest after update {k} is {fact.digest[:12]!r}, recomputed {expected[:12]!r}")
        if fact.used and not fact.applied:
            self._complain("once", f"update {k} was skipped, and yet used {len(fact.used)} samples")
        spec = self._leased_under.get(fact.lease_ids[0], self._spec) if fact.lease_ids else self._spec
        for sample in fact.used:
            if sample in self._used_in:
                self._complain(
                    "once", f"sample {sample} is used by update {k} and by standing update {self._used_in[sample]}"
                )
            self._used_in[sample] = k
            self._check_bound(sample, k, spec)
        self.standing[k] = StandingUpdate(digest=fact.digest, used=fact.used, applied=fact.applied)

    def _roll_back(self, fact: f.RolledBack) -> None:
        self._rolled_back.append(fact)
        for update in [u for u in self.standing if u > fact.to_update]:
            del self.standing[update]
            self.num_undone += 1
        self._used_in = {sample: update for sample, update in self._used_in.items() if update <= fact.to_update}

    def _check_bound(self, sample_id: str, k: int, spec: RunSpec | None) -> None:
        meta = self._samples.get(sample_id)
        if meta is None or spec is None:
            self._complain("bound", f"update {k} used sample {sample_id}, which was never scored")
            return
        for span in meta.steps:
            if span.step > k - 1:
                self._complain(
                    "bound", f"update {k} used sample {sample_id}, sampled at step {span.step}: later than its weights"
                )
            if self._is_void(span):
                self._complain(
                    "bound", f"update {k} used sample {sample_id} of void step {span.step}.{span.incarnation}"
                )
        oldest = k - 1 - spec.max_staleness
        trained = [s.step for s in meta.steps if spec.beyond is BoundPolicy.DROP or s.step >= oldest]
        lag = (k - 1) - min(trained) if trained else -1
        if lag > spec.max_staleness or (meta.steps and not trained):
            self._complain(
                "bound",
                f"update {k} used sample {sample_id} with lag {lag}, eta {spec.max_staleness}: steps {_steps(meta)}",
            )
        self.lags[lag] += 1

    def _is_void(self, span: StepSpan) -> bool:
        return any(span.incarnation < r.incarnation and span.step > r.to_update for r in self._rolled_back)


def _steps(meta: SampleMeta) -> str:
    return ", ".join(f"{span.step}.{span.incarnation}" for span in meta.steps) or "none"
