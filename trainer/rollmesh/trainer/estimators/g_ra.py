"""GRPO on an outcome to which lower rewards are added only if it is good enough (Gated Reward Accumulation, G-RA,
2025-08, arXiv:2508.10548).

    R_i = weighted R_gate,i + 1[R_gate,i >= threshold] (sum over turns of r_t,i + other rewards),   then `grpo`

Rewards have priorities: the reward `gate` of the whole sample is the outcome, and those of turns, such as format or use
of tools, are below it. For software engineering, the gate is whether the episode submitted a patch that is not empty,
and an episode without one gets nothing for its turns. Without the gate (`accumulate: direct`, D-RA of the paper), the
policy learns to collect rewards of turns while the outcome falls. Rewards of the whole sample in `gated` are behind the
gate too, such as a length penalty that only right answers should pay; the others are always added.

From the abstract and public summaries. Not established, so configuration: the threshold, the weights, and how the sum
becomes an advantage. A public implementation opens the gate above the threshold, this one at it. Thresholds are on the
reward without its weight. A sample to which the gate does not apply has a closed gate. A failure of the infrastructure
in a reward of a turn excludes the member. The metrics are means over episodes: `outcome_mean` is the part that is
always added, `steps_mean` the part behind the gate as it is added, and `steps_offered_mean` the same without the gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.settings import NonEmptyStr, Settings
from rollmesh.shared.domain.trajectory import WHOLE_SAMPLE, GroupContext, MemberOutcome, Outcome
from rollmesh.trainer.estimators.base import Estimate, deviation, episode_weights, filled, usable_rewards
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch

Parts = NDArray[np.float64]
"""[n, 3] of each member: the part that is always added, the part behind the gate, and 1 if the gate is open."""


class GRaOptions(GrpoOptions):
    """Settings of the estimator `g_ra`: those of `grpo`, and the gate."""

    gate: NonEmptyStr = "correct"
    """Name of the reward of the whole sample that opens the gate."""
    threshold: float = 1.0
    """Smallest value of this reward, without its weight, at which the gate is open."""
    gated: tuple[NonEmptyStr, ...] = ()
    """Names of further rewards of the whole sample behind the gate. Rewards of turns always are."""
    accumulate: Literal["gated", "direct"] = "gated"
    """`gated` adds what is behind the gate only if it is open, `direct` always."""

    def check_fields(self) -> None:
        super().check_fields()
        if self.gate in self.gated:
            raise ValueError(f"`gated` must not contain the gate `{self.gate}`, got {list(self.gated)}")


class GRa(Grpo):
    """Add lower rewards to an outcome that is good enough."""

    Options: ClassVar[type[Settings]] = GRaOptions

    @property
    def rewards(self) -> tuple[str, ...]:
        return (self.options.gate, *self.options.gated)

    def __call__(self, batch: UpdateBatch) -> Estimate:
        found = super().__call__(batch)
        scored = [self._parts(group) for group in batch.groups]
        members = [m for of_group, _ in scored for m in of_group]
        parts = np.concatenate([np.zeros((0, 3)), *(of_group for _, of_group in scored)])
        always, offered, is_open = (episode_weights(members) @ parts).tolist() if members else (0.0, 0.0, 0.0)
        added = float(episode_weights(members) @ self._added(parts)) if members else 0.0
        metrics = {
            "outcome_mean": always,
            "steps_mean": added,
            "steps_offered_mean": offered,
            "gate_open_share": is_open,
        }
        return replace(found, metrics={**found.metrics, **metrics})

    def reward_sums(self, group: GroupContext) -> tuple[list[MemberOutcome], NDArray[np.float64]]:
        """Return the members with usable rewards, and the accumulated reward of each."""
        members, parts = self._parts(group)
        return members, parts[:, 0] + self._added(parts)

    def deviation_of(
        self, members: Sequence[MemberOutcome], sums: NDArray[np.float64], weights: NDArray[np.float64]
    ) -> float:
        """Return the plain deviation, because a closed gate leaves out rewards that the members have."""
        return deviation(sums, weights)

    def _added(self, parts: Parts) -> NDArray[np.float64]:
        """Return [n]: the part behind the gate, as far as it is added."""
        direct = self.options.accumulate == "direct"
        return parts[:, 1] if direct else np.where(parts[:, 2] > 0, parts[:, 1], 0.0)

    def _parts(self, group: GroupContext) -> tuple[list[MemberOutcome], Parts]:
        options: GRaOptions = self.options
        members: list[MemberOutcome] = []
        rows: list[Sequence[float]] = []
        for member, complete in zip(group.members, filled(group).members, strict=True):
            own, whole, turns = usable_rewards(member), usable_rewards(complete), self._of_turns(member)
            if own is None or whole is None or turns is None:
                continue
            behind = turns + sum(self.weight_of(name) * whole[name] for name in options.gated if name in whole)
            always = sum(self.weight_of(name) * value for name, value in whole.items() if name not in options.gated)
            is_open = options.gate in own and own[options.gate] >= options.threshold
            members.append(member)
            rows.append((always, behind, float(is_open)))
        return members, np.array(rows, dtype=np.float64).reshape(-1, 3)

    def _of_turns(self, member: MemberOutcome) -> float | None:
        """Return the weighted sum of the rewards of turns; None if one of them is a failure of the infrastructure."""
        rewards = [r for r in member.rewards if r.segment != WHOLE_SAMPLE and r.outcome is not Outcome.NOT_APPLICABLE]
        if any(r.outcome is Outcome.INFRA_FAILURE or not isfinite(r.value) for r in rewards):
            return None
        return sum(self.weight_of(r.name) * r.value for r in rewards)
