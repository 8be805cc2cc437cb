"""Check that there is one trainer, and one lease for each sample and update: epochs and batch leases against the
commits that used them.

    TrainerAttached(e) -> BatchLeased(e, k, samples) -> UpdateCommitted(e, k, used + dropped = samples)

A commit in an older epoch is allowed in one case: the following attach finds update k in the trainer's checkpoint and
commits the batch in doubt (roll forward).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from rollmesh.services.coordinator.audit_report import Complain
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.records import RunSpec


class Leases:
    """The trainer epochs and the batch leases of a run."""

    def __init__(self, complain: Complain) -> None:
        self.open: dict[str, f.BatchLeased] = {}
        """Batch leases that are held or in doubt."""
        self._complain = complain
        self._in_doubt: set[str] = set()
        self._epochs: set[int] = set()
        self._newest: f.TrainerAttached | None = None
        self._applied = 0
        """Last update of the trainer: that of its checkpoint at the attach, then that of the last commit."""
        self._spec: RunSpec | None = None
        self._leased_under: dict[str, RunSpec | None] = {}
        self._group: dict[str, str] = {}
        """Group of every scored or replayed sample that is not forgotten."""
        self._holder: dict[str, str] = {}
        """The held lease of a sample."""

    def spec_of(self, lease_ids: tuple[str, ...]) -> RunSpec | None:
        """Settings of the run when a batch was leased. Their bound applies to its samples."""
        return self._leased_under.get(lease_ids[0], self._spec) if lease_ids else self._spec

    def forget(self, samples: Collection[str]) -> None:
        """Forget samples of a group that has ended."""
        for sample in samples:
            self._group.pop(sample, None)

    def enter(self, fact: f.Fact) -> None:
        """Fold one fact."""
        match fact:
            case f.RunCreated() | f.RunChanged():
                self._spec = fact.spec
            case f.EpisodeScored():
                self._group.update((sample.sample_id, fact.group) for sample in fact.samples)
            case f.SamplesReplayed():
                self._group.update((sample.sample_id, fact.group) for sample in fact.samples)
            case f.TrainerAttached():
                self._attach(fact)
            case f.BatchLeased():
                self._lease(fact)
            case f.BatchInDoubt():
                if fact.lease_id not in self.open:
                    self._complain("once", f"lease {fact.lease_id} is in doubt, but is not held")
                self._in_doubt.add(fact.lease_id)
            case f.BatchReturned():
                if self._close(fact.lease_id) is None:
                    self._complain("once", f"lease {fact.lease_id} is returned, but is not held")
            case f.UpdateCommitted():
                self._commit(fact)

    def _attach(self, fact: f.TrainerAttached) -> None:
        last = self._newest.trainer_epoch if self._newest is not None else 0
        if fact.trainer_epoch != last + 1:
            self._complain(
                "once", f"trainer epoch {fact.trainer_epoch} attached after epoch {last}, expected {last + 1}"
            )
        self._newest = fact
        self._applied = fact.last_update
        self._epochs.add(fact.trainer_epoch)

    def _lease(self, fact: f.BatchLeased) -> None:
        name = fact.lease_id
        if name in self.open:
            self._complain("once", f"lease {name} is granted twice")
        newest = self._newest.trainer_epoch if self._newest is not None else 0
        if fact.trainer_epoch not in self._epochs or fact.trainer_epoch != newest:
            what = f"epoch {fact.trainer_epoch}; the trainer that attached last has epoch {newest}"
            self._complain("once", f"lease {name} is bound to {what}")
        if fact.update != self._applied + 1:
            self._complain(
                "once", f"lease {name} is bound to update {fact.update}, the next one is {self._applied + 1}"
            )
        if not fact.sample_ids:
            self._complain("once", f"lease {name} of update {fact.update} has no samples")
        groups = set(fact.groups)
        for sample in fact.sample_ids:
            if self._group.get(sample) not in groups:
                self._complain("once", f"lease {name} has sample {sample}, which no group of the lease has")
            if sample in self._holder:
                self._complain("once", f"lease {name} has sample {sample}, which lease {self._holder[sample]} has")
            self._holder[sample] = name
        self.open[name] = fact
        self._leased_under[name] = self._spec

    def _close(self, lease_id: str) -> f.BatchLeased | None:
        self._in_doubt.discard(lease_id)
        lease = self.open.pop(lease_id, None)
        for sample in lease.sample_ids if lease is not None else ():
            self._holder.pop(sample, None)
        return lease

    def _commit(self, fact: f.UpdateCommitted) -> None:
        leased: Counter[str] = Counter()
        measured = {group.group for group in fact.groups}
        self._applied = fact.update
        forward = self._newest is not None and self._newest.last_update == fact.update
        if fact.trainer_epoch not in self._epochs:
            self._complain(
                "once", f"update {fact.update} is committed by epoch {fact.trainer_epoch}, which never attached"
            )
        elif self._newest is not None and fact.trainer_epoch != self._newest.trainer_epoch and not forward:
            what = f"epoch {fact.trainer_epoch}, which epoch {self._newest.trainer_epoch} fences"
            self._complain("once", f"update {fact.update} is committed by {what}")
        for lease_id in fact.lease_ids:
            doubtful = lease_id in self._in_doubt
            lease = self._close(lease_id)
            if lease is None:
                self._complain("once", f"update {fact.update} is committed with lease {lease_id}, which is not held")
                continue
            leased.update(lease.sample_ids)
            measured -= set(lease.groups)
            if doubtful and not forward:
                self._complain("once", f"update {fact.update} is committed with lease {lease_id}, which is in doubt")
            if (lease.update, lease.trainer_epoch) != (fact.update, fact.trainer_epoch):
                self._complain(
                    "once",
                    f"update {fact.update} of epoch {fact.trainer_epoch} is committed with lease {lease_id}, which is "
                    f"bound to update {lease.update} of epoch {lease.trainer_epoch}",
                )
        for group in sorted(measured):
            self._complain("once", f"update {fact.update} measured group {group}, which no lease of it contains")
        self._compare(fact, leased)

    def _compare(self, fact: f.UpdateCommitted, leased: Counter[str]) -> None:
        """Check that every leased sample has one disposition, and that no other sample has one."""
        disposed = Counter([*fact.used, *(dropped.sample_id for dropped in fact.dropped)])
        for sample in sorted((disposed - leased).keys()):
            what = (
                f"more often than its leases contain it ({leased[sample]} times)"
                if leased[sample]
                else "though no lease of it contains it"
            )
            self._complain("once", f"update {fact.update} used or dropped sample {sample} {what}")
        for sample in sorted((leased - disposed).keys()):
            self._complain("once", f"update {fact.update} neither used nor dropped sample {sample} of its leases")
