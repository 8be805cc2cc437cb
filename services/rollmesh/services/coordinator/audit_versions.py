"""Check versions and incarnations: what was published and undone, and that samples and updates name no other
versions."""

from __future__ import annotations

from rollmesh.services.coordinator.audit_report import Complain
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import SampleMeta, StepSpan


class Versions:
    """The published versions of a run's one policy. `complain` receives violations."""

    def __init__(self, complain: Complain) -> None:
        self._complain = complain
        self._policy = ""
        self._applied = 0
        self._incarnation = 0
        self._attached_with: int | None = None
        """Last update in the checkpoint of the newest trainer; None before the first."""
        self._published: dict[tuple[int, int], str] = {}
        """Digest by (step, incarnation)."""
        self._rolled_back: list[f.RolledBack] = []

    def is_void(self, span: StepSpan) -> bool:
        """Return whether a later incarnation undid the step."""
        return any(span.incarnation < r.incarnation and span.step > r.to_update for r in self._rolled_back)

    def enter(self, fact: f.Fact) -> None:
        """Fold one fact."""
        match fact:
            case f.RunCreated() | f.RunChanged():
                self._policy = fact.spec.policy
            case f.TrainerAttached():
                self._attached_with = fact.last_update
            case f.VersionPublished():
                self._publish(fact)
            case f.EpisodeScored():
                for sample in fact.samples:
                    self._check_sample(sample)
            case f.UpdateCommitted():
                self._applied = fact.update
                if fact.incarnation != self._incarnation:
                    self._complain(
                        "bound",
                        f"update {fact.update} is of incarnation {fact.incarnation}, expected {self._incarnation}",
                    )
            case f.RolledBack():
                self._roll_back(fact)

    def _publish(self, fact: f.VersionPublished) -> None:
        version = fact.version
        if self._attached_with is None:
            self._complain("once", f"{version} is published before a trainer attached")
        expected = (self._policy, self._applied, self._incarnation)
        if (version.policy, version.step, version.incarnation) != expected:
            self._complain("bound", f"{version} is published, expected {expected[0]}@{expected[1]}.{expected[2]}")
        if (version.step, version.incarnation) in self._published:
            self._complain("bound", f"{version} is published a second time")
        self._published[version.step, version.incarnation] = version.weights_digest

    def _check_sample(self, sample: SampleMeta) -> None:
        for span in sample.steps:
            if (span.step, span.incarnation) not in self._published:
                what = f"sampled by {sample.policy}@{span.step}.{span.incarnation}, which was not published before"
                self._complain("bound", f"sample {sample.sample_id} is {what}")
            if span.num_tokens < 1:
                self._complain("bound", f"sample {sample.sample_id} has {span.num_tokens} tokens of step {span.step}")
        trainable = sum(span.num_tokens for span in sample.steps)
        if trainable > sample.num_tokens:
            what = f"{trainable} trainable tokens, but only {sample.num_tokens} tokens"
            self._complain("bound", f"sample {sample.sample_id} has {what}")

    def _roll_back(self, fact: f.RolledBack) -> None:
        if fact.incarnation != self._incarnation + 1:
            what = f"incarnation {fact.incarnation} began after incarnation {self._incarnation}"
            self._complain("bound", f"{what}, expected {self._incarnation + 1}")
        if fact.to_update != self._attached_with or fact.to_update >= self._applied:
            what = f"after update {self._applied}, by a trainer that attached with update {self._attached_with}"
            self._complain("bound", f"updates above {fact.to_update} are undone {what}")
        self._incarnation = fact.incarnation
        self._applied = min(self._applied, fact.to_update)
        self._rolled_back.append(fact)
