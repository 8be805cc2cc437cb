"""A curriculum over categories by upper confidence bounds on their mean absolute advantage.

After DUMP (arXiv:2504.09710; code: ZhentingWang/DUMP verl/utils/curriculum_learning.py). The categories are the sources
of a mixture. The advantages of recent samples say what a source still teaches, and a bonus explores sources with few
samples.

    L(d) = mean |A| over the newest `window_samples` samples of source d, 0 without a sample
    U(d) = L(d) + sqrt(2 ln(N + 1) / (n(d) + 1))          n(d) = samples of d since the start, N = max(1, sum over d of n(d))
    a draw is of source d with the probability exp(U(d) / tau) / sum over d' of exp(U(d') / tau)              tau = 0.1

Units: L, U and tau have the unit of the advantage; n and N count samples, i.e. scored members of measured groups. The
window bounds the memory of a source to `window_samples` entries, and n has no window, as in the code. A source without
a sample has the largest U from about eight samples on: its bonus is sqrt(2 ln(N + 1)), and an advantage that is divided
by its deviation has a mean absolute value of at most 1.

Deviations. The window has one entry per group, which counts for its samples, because the trainer measures |A| per group,
as a mean over tokens; the oldest entry counts for what is left of the window. Groups whose members agree count as 0
when they are decided (`agreement_is_zero`).
"""  # noqa: E501, W505

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np

from rollmesh.services.data.selectors.base import AdvantageOptions, AdvantageSelector, Floats, Ints, softmax
from rollmesh.services.data.task import TaskPool
from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, PositiveInt


class DumpOptions(AdvantageOptions):
    """Settings of the DUMP selector."""

    window_samples: PositiveInt = 300
    """Number of the newest samples of a category whose advantages count."""
    temperature: PositiveFloat = 0.1
    """Temperature of the softmax over the bounds. A lower one draws more of the category with the largest bound."""
    exploration: NonNegativeFloat = 1.0
    """Factor of the bonus for categories with few samples."""


class DumpSelector(AdvantageSelector):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = DumpOptions
    schema = "dump@1"

    def __init__(self, *, pool: TaskPool, seed: int, options: DumpOptions) -> None:
        super().__init__(pool=pool, seed=seed, options=options)
        self._options = options
        self.windows: tuple[deque[tuple[float, float]], ...] = tuple(deque() for _ in self.categories)
        """(|A|, number of samples that count) per group, oldest first, by category."""
        self._num_samples: Floats = np.zeros(len(self.categories))

    def shares(self, num_in_flight: Ints) -> Floats:
        return softmax(self.bounds(), self._options.temperature)

    def bounds(self) -> Floats:
        """Return U by category."""
        sums = np.array([[sum(a * n for a, n in window), sum(n for _, n in window)] for window in self.windows]).T
        means = np.divide(sums[0], sums[1], out=np.zeros(len(self.windows)), where=sums[1] > 0)
        total = max(1.0, float(self._num_samples.sum()))
        bonus = np.sqrt(2 * np.log(total + 1) / (self._num_samples + 1))
        return np.asarray(means + self._options.exploration * bonus, dtype=np.float64)

    def learn(self, category: int, signal: float, num_samples: float) -> None:
        self._num_samples[category] += num_samples
        window = self.windows[category]
        window.append((signal, num_samples))
        excess = sum(n for _, n in window) - self._options.window_samples
        while excess > 0.0:
            oldest, n = window.popleft()
            if n > excess:
                window.appendleft((oldest, n - excess))
            excess -= n

    def stored(self) -> dict[str, Any]:
        return {
            **super().stored(),
            "windows": [[list(entry) for entry in window] for window in self.windows],
            "num_samples": self._num_samples.tolist(),
        }

    def load(self, fields: Mapping[str, Any]) -> None:
        super().load(fields)
        num_samples = np.array(fields["num_samples"], dtype=np.float64).reshape(self._num_samples.shape)
        windows = tuple(deque((float(a), float(n)) for a, n in window) for window in fields["windows"])
        if len(windows) != len(self.categories):
            raise ValueError(f"windows must have {len(self.categories)} entries, got {len(windows)}")
        self.windows, self._num_samples = windows, num_samples
