"""The batch of one update, as estimators and update rules see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.domain.trajectory import FloatArray, GroupContext, MemberOutcome, Source, TrainingSample
from rollmesh.trainer.samples import TokenTable


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBatch:
    """S samples that can be trained on, with M trained tokens, and their groups.

    A column [M] has one value per trained token, sample by sample. `batch["sample"]` numbers the sample of each token
    from 0. `samples.TokenTable` lists the columns; the requested features are among them.
    """

    update: int
    samples: tuple[TrainingSample, ...]
    """The samples in the order of their numbers."""
    groups: tuple[GroupContext, ...]
    """Every group of a sample with all its scored members, trained or not."""
    table: TokenTable
    last: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last applied update; empty before the first."""
    repeat: int = 0
    """Number of earlier estimates of this update, which an update rule refreshes. A memory must count a batch once."""

    def __getitem__(self, column: str) -> NDArray[Any]:
        """Return a column [M] or [M, k]. Raises ValueError if the batch does not have it."""
        if column not in self.table.columns:
            known = ", ".join(sorted(self.table.columns))
            raise ValueError(f"the batch has no column `{column}`; columns are {known}; `needs` must name further ones")
        return self.table.columns[column]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of trained tokens per sample, [S]."""
        return self.table.lengths

    @property
    def members(self) -> tuple[MemberOutcome, ...]:
        """The samples as members of their groups, [S]: with all rewards, turns and answers, as the members that are not
        trained."""
        found = {(group.group, m.sample_id): m for group in self.groups for m in group.members}
        return tuple(found[one.group, one.sample.sample_id] for one in self.samples)

    @property
    def contexts(self) -> tuple[GroupContext, ...]:
        """The group of each sample, [S], e.g. for the labels of its task."""
        found = {group.group: group for group in self.groups}
        return tuple(found[sample.group] for sample in self.samples)

    def per_turn(self, values: Sequence[NDArray[Any]]) -> FloatArray:
        """Return [M]: the value of each token's turn. `values` has one array per sample with one value per turn, as
        `turn_rewards`.

        A turn beyond the array has the last value, because a summary has at most 512 turns; 0 for an empty array.
        """
        return self._gathered(values, self["turn"])

    def per_segment(self, values: Sequence[NDArray[Any]]) -> FloatArray:
        """Return [M]: the value of each token's segment. `values` has one array per sample with one value per segment
        of its path."""
        return self._gathered(values, self["segment"])

    def _gathered(self, values: Sequence[NDArray[Any]], numbers: NDArray[np.int64]) -> FloatArray:
        if len(values) != len(self.samples):
            raise ValueError(f"`values` must have one array per sample, {len(self.samples)}, got {len(values)}")
        rows = np.split(numbers, np.cumsum(self.lengths)[:-1])
        parts = [
            np.asarray(of_sample)[np.minimum(row, len(of_sample) - 1)] if len(of_sample) else np.zeros(len(row))
            for of_sample, row in zip(values, rows, strict=True)
        ]
        gathered: FloatArray = np.concatenate([np.zeros(0), *parts]).astype(np.float32)
        return gathered

    def per_token(self, values: NDArray[Any]) -> FloatArray:
        """Return [M]: the value of each token's sample, of `values` [S]."""
        repeated: FloatArray = np.repeat(values, self.lengths).astype(np.float32)
        return repeated

    def sums(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Return [S]: the sum over each sample's tokens, of `values` [M]."""
        sums = np.zeros(len(self.samples))
        np.add.at(sums, self["sample"], values)
        return sums

    @property
    def external(self) -> NDArray[np.bool_]:
        """True for each sample without a trained token that the policy sampled, such as a given solution, [S]."""
        external: NDArray[np.bool_] = self.sums(self["source"] == Source.POLICY) == 0
        return external

    def first(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return [S]: the value at each sample's first trained token, of `values` [M]."""
        return values[np.concatenate([[0], np.cumsum(self.lengths)[:-1]]).astype(np.int64)]


def check_membership(groups: Sequence[GroupContext], samples: Sequence[TrainingSample]) -> None:
    """Raise ValueError for a sample whose group is missing or does not list it, because its baseline would miss its own
    reward."""
    members = {g.group: {m.sample_id for m in g.members} for g in groups}
    for sample in samples:
        sample_id = sample.sample.sample_id
        if sample.group not in members:
            raise ValueError(f"sample {sample_id} is of group {sample.group!r}, whose context is missing")
        if sample_id not in members[sample.group]:
            raise ValueError(f"group {sample.group!r} does not list sample {sample_id}")
