"""A model of the contract of RunService, written from the text of the protos. It shares no arithmetic with the
coordinator.

The model stores what the player sent and received. It computes staleness from the stamps that the player, as a worker,
wrote into its payloads, never from metadata.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .dropping import MALFORMED


class Violation(AssertionError):
    """The mesh violated the contract; the message says how."""


def require(condition: bool, message: str) -> None:
    """Raise Violation unless `condition` holds."""
    if not condition:
        raise Violation(message)


@dataclass(frozen=True, slots=True)
class Stamp:
    """Trained POLICY tokens that one set of weights sampled."""

    step: int
    incarnation: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class MadeSample:
    """A sample that the player wrote and reported."""

    sample_id: str
    group: str
    episode: str
    reward: float
    trainable: bool
    stamps: tuple[Stamp, ...]
    """By the payload."""
    reported: tuple[Stamp, ...]
    """By the metadata."""
    contradicted: bool = False
    """Whether metadata and payload differ."""
    external: str = ""
    """Source of trained tokens that no policy sampled; empty if there are none."""
    drop: str = ""
    """Reason for which the finalizer drops it; empty if it does not."""


@dataclass(frozen=True, slots=True)
class SubmittedGroup:
    """A group of finished samples that the player submitted under its key."""

    num_episodes: int
    step: int
    """Number of applied updates when it was submitted."""


@dataclass(slots=True)
class HeldBatch:
    """A batch that the player leased."""

    lease_id: str
    update: int
    eta: int
    samples: tuple[str, ...]
    mask_below: Mapping[str, int]
    unreadable: set[str] = field(default_factory=set)
    """Samples for which FetchSamples returned a failure."""
    fetched: bool = False
    in_doubt: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    """An update as committed. `dropped` are (sample id, reason)."""

    update: int
    lease_ids: tuple[str, ...]
    applied: bool
    used: tuple[str, ...]
    dropped: frozenset[tuple[str, str]]
    digest: str
    eta: int
    """The bound under which its batch was leased."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a trainer stored: the updates in its weights."""

    commits: tuple[Commit, ...]

    @property
    def update(self) -> int:
        return len(self.commits)

    @property
    def digest(self) -> str:
        return self.commits[-1].digest if self.commits else ""


def digest_of(before: str, update: int, used: Iterable[str]) -> str:
    """Return digest_k by the definition of CommitUpdateResponse.digest."""
    fields = [before, str(update), *sorted(used, key=lambda name: name.encode())]
    hashed = hashlib.sha256()
    for text in fields:
        data = text.encode()
        hashed.update(len(data).to_bytes(8, "big") + data)
    return hashed.hexdigest()


@dataclass(slots=True)
class RunModel:
    """One run, as its trainer and worker may expect it."""

    eta: int
    mask: bool
    keeps_no_checkpoints: bool
    group_size: int = 1
    external_sources: tuple[str, ...] = ()
    max_age: int | None = None
    """Bound of submitted samples; None if it is unlimited."""
    share: float = 0.0
    """Largest share of a batch that submitted groups may have."""
    submitted: dict[str, SubmittedGroup] = field(default_factory=dict)
    """Submitted groups by key."""
    given: dict[str, str] = field(default_factory=dict)
    """Keys of the submitted groups that workers were given, by the group of the run."""
    epoch: int = 0
    incarnation: int = 0
    commits: list[Commit] = field(default_factory=list)
    """Updates that are not undone."""
    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    """(update of the roll-back, new incarnation)."""
    published: dict[tuple[int, int], str] = field(default_factory=dict)
    """Weights digest by (step, incarnation)."""
    samples: dict[str, MadeSample] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    """Samples in a reported checkpoint, or committed by a trainer without checkpoints."""
    batch: HeldBatch | None = None
    lease_ids: set[str] = field(default_factory=set)
    """Every batch lease that was granted."""
    returned: set[str] = field(default_factory=set)
    """Batch leases of this epoch that the player released."""
    checkpoint_update: int = 0
    dropped: dict[str, str] = field(default_factory=dict)
    """Reasons of the dropped samples that leased groups showed."""
    stopped: bool = False
    num_undone: int = 0

    # Reading ----------------------------------------------------------------------------------------------------------

    @property
    def applied(self) -> int:
        return len(self.commits)

    @property
    def digest(self) -> str:
        return self.commits[-1].digest if self.commits else ""

    @property
    def is_published(self) -> bool:
        """Whether a batch can be leased: weights of this incarnation were published."""
        return any(incarnation == self.incarnation for _, incarnation in self.published)

    @property
    def versions(self) -> list[tuple[int, int]]:
        """(step, incarnation) of all published versions, the newest last."""
        return list(self.published)

    def admits(self, samples: Iterable[MadeSample]) -> bool:
        """Return whether the run trains the sources of these samples."""
        return all(not s.trainable or s.external in ("", *self.external_sources) for s in samples)

    def was_given(self, name: str) -> bool:
        """Return whether a sample is a submitted one."""
        return self.samples[name].group in self.given

    def check_age(self, name: str, update: int) -> None:
        """Require that a submitted sample is within its bound at `update`."""
        if self.max_age is not None and self.was_given(name):
            age = max(0, update - 1 - self.submitted[self.given[self.samples[name].group]].step)
            require(age <= self.max_age, f"submitted sample {name} of age {age} is beyond {self.max_age}")

    def is_void(self, stamp: Stamp) -> bool:
        return any(stamp.incarnation < began and stamp.step > to for to, began in self.rollbacks)

    def group_members(self, group: str) -> dict[str, float]:
        """Return the reward of every scored sample of a group."""
        return {sample.sample_id: sample.reward for sample in self.samples.values() if sample.group == group}

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Return whether the checkpoint belongs to this history. The digest decides: an update without used samples
        equals a skipped one."""
        update = checkpoint.update
        return update <= self.applied and (not update or self.commits[update - 1].digest == checkpoint.digest)

    def used_standing(self) -> set[str]:
        return {name for commit in self.commits for name in commit.used}

    def is_decided(self, group: str) -> bool:
        """Return whether the finalizer of the player returns a valid verdict on a group."""
        return all(sample.drop != MALFORMED for sample in self.samples.values() if sample.group == group)

    def end_of(self, sample: MadeSample) -> str:
        """Return the end that the decision on its group gives a sample; empty if it may be leased."""
        return f"filtered/{sample.drop or 'NOT_TRAINABLE'}" if sample.drop or not sample.trainable else ""

    # Checks -----------------------------------------------------------------------------------------------------------

    def check_trainable(self, sample: MadeSample, stamps: Sequence[Stamp], batch: HeldBatch, reported: int) -> None:
        """Require that `sample`, by these stamps, is within the bound of its batch, and that `reported` is its
        staleness."""
        name, oldest = sample.sample_id, batch.update - 1 - batch.eta
        require(not any(map(self.is_void, stamps)), f"{name} holds tokens of undone weights: {stamps}")
        require(all(stamp.step < batch.update for stamp in stamps), f"{name} is from the future: {stamps}")
        below = batch.mask_below.get(name, 0)
        if not self.mask:
            require(below == 0, f"{name} is masked below {below} under `drop`")
        elif any(stamp.step < oldest for stamp in stamps):
            require(below == oldest, f"{name} is masked below {below}, not {oldest}")
        trained = [stamp.step for stamp in stamps if stamp.step >= below]
        require(bool(trained) or not stamps, f"{name} has no token within the bound: {stamps}")
        staleness = batch.update - 1 - min(trained) if trained else -1
        require(
            staleness <= batch.eta, f"{name}: staleness {staleness} at update {batch.update} is beyond eta {batch.eta}"
        )
        require(
            reported == staleness, f"{name}: staleness {reported} was reported, {staleness} follows from the stamps"
        )

    def check_fresh(self, names: Iterable[str]) -> None:
        """Require that no weights contain any of these samples yet."""
        names = set(names)
        twice = names & self.used_standing()
        require(not twice, f"leased again though standing updates used them: {sorted(twice)}")
        gone = names & self.trained
        require(not gone, f"leased again though a checkpoint made them TRAINED: {sorted(gone)}")

    # Facts ------------------------------------------------------------------------------------------------------------

    def commit_of(self, update: int, batch: HeldBatch | None, *, applied: bool, dropped: Mapping[str, str]) -> Commit:
        """Return the update that a commit of this would make."""
        leased = batch.samples if batch else ()
        used = tuple(name for name in leased if name not in dropped) if applied else ()
        return Commit(
            update=update,
            lease_ids=(batch.lease_id,) if batch else (),
            applied=applied,
            used=used,
            dropped=frozenset(dropped.items()),
            digest=digest_of(self.digest, update, used),
            eta=batch.eta if batch else self.eta,
        )

    def committed(self, commit: Commit) -> None:
        self.check_fresh(commit.used)
        self.commits.append(commit)
        self.batch = None
        if self.keeps_no_checkpoints:
            self.checkpointed(commit.update)

    def checkpointed(self, update: int) -> None:
        for commit in self.commits[self.checkpoint_update : update]:
            self.trained.update(commit.used)
        self.checkpoint_update = max(self.checkpoint_update, update)

    def rolled_back(self, update: int) -> None:
        self.num_undone += len(self.commits) - update
        self.commits = self.commits[:update]
        self.incarnation += 1
        self.rollbacks.append((update, self.incarnation))
        self.checkpoint_update = min(self.checkpoint_update, update)

    def lags(self) -> Counter[int]:
        """Return the used samples of the remaining updates by staleness, from the stamps in the payloads."""
        found: Counter[int] = Counter()
        for commit in self.commits:
            for name in commit.used:
                steps = [stamp.step for stamp in self.samples[name].stamps]
                if self.mask:
                    steps = [step for step in steps if step >= commit.update - 1 - commit.eta]
                if steps:
                    found[commit.update - 1 - min(steps)] += 1
        return found
