"""A curriculum over categories that learns the mean absolute advantage of each by TD(0), and draws by a softmax of it.

After SEC, Self-Evolving Curriculum (arXiv:2505.14970; its code is public as ServiceNow/sec, read in a copy,
Vincent-La/cofa sec/verl/verl/utils/auto_curriculum/priority.py). The mean absolute advantage of a category is the proxy
of what an update learns from it. It is largest where half of the answers are right, and 0 for a solved category and for
one that always fails.

Per step of `step_groups` groups, for each category c with a group in the step:

    r(c) = mean |A| over the samples of c in the step          Q(c) <- (1 - alpha) Q(c) + alpha r(c)         Q(c) = 0 at first
    a draw is of category c with the probability exp(Q(c) / tau) / sum over c' of exp(Q(c') / tau)

Units: |A| and Q have the unit of the advantage, which is 1 for an estimator that divides by the deviation; alpha has
none, tau has that of Q. The scripts of the paper have alpha 0.5 and tau 1.0 (Countdown), 0.4 (mathematics) or 0.2
(several domains).

Deviations. A step is `step_groups` measured groups, normally `run.batch_groups`, because a selector sees groups and not
updates. The published code also multiplies Q by 1 - alpha for a category that a step does not contain
(`absent_decays`); the equation does not say so, and with the small steps here a category that is absent by chance would
lose half of its value. |A| is the mean over the tokens of a group, not over its samples. Tasks of a category are drawn
uniformly, where the code takes them in the order of a queue.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from rollmesh.services.data.selectors.base import AdvantageOptions, AdvantageSelector, Floats, Ints, softmax
from rollmesh.services.data.task import TaskPool
from rollmesh.shared.config.settings import PositiveFloat, PositiveInt


class SecOptions(AdvantageOptions):
    """Settings of the SEC selector."""

    alpha: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Weight of the newest step in the value of a category."""
    temperature: PositiveFloat = 1.0
    """Temperature of the softmax over the values. A lower one draws more of the category with the largest value."""
    step_groups: PositiveInt = 16
    """Number of measured groups after which the values are updated, normally `run.batch_groups`."""
    absent_decays: bool = False
    """Whether a step multiplies the value of a category that it does not contain by 1 - alpha."""


class SecSelector(AdvantageSelector):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = SecOptions
    schema = "sec@1"

    def __init__(self, *, pool: TaskPool, seed: int, options: SecOptions) -> None:
        super().__init__(pool=pool, seed=seed, options=options)
        self._options = options
        self.values: Floats = np.zeros(len(self.categories))
        """Q by category."""
        self._sums: Floats = np.zeros((2, len(self.categories)))
        """Sum of |A| over samples, and number of samples, by category in the step that has begun."""
        self._num_groups = 0

    def shares(self, num_in_flight: Ints) -> Floats:
        return softmax(self.values, self._options.temperature)

    def learn(self, category: int, signal: float, num_samples: float) -> None:
        self._sums[:, category] += (signal * num_samples, num_samples)
        self._num_groups += 1
        if self._num_groups < self._options.step_groups:
            return
        sums, counts = self._sums
        present = counts > 0
        rewards = np.divide(sums, counts, out=np.zeros_like(sums), where=present)
        updated = present | self._options.absent_decays
        alpha = self._options.alpha
        self.values = np.where(updated, (1 - alpha) * self.values + alpha * rewards, self.values)
        self._sums, self._num_groups = np.zeros_like(self._sums), 0

    def stored(self) -> dict[str, Any]:
        return {
            **super().stored(),
            "values": self.values.tolist(),
            "sums": self._sums.tolist(),
            "num_groups": self._num_groups,
        }

    def load(self, fields: Mapping[str, Any]) -> None:
        super().load(fields)
        values = np.array(fields["values"], dtype=np.float64).reshape(self.values.shape)
        sums = np.array(fields["sums"], dtype=np.float64).reshape(self._sums.shape)
        self._num_groups, self.values, self._sums = int(fields["num_groups"]), values, sums
