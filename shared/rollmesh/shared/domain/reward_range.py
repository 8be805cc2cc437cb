"""The range of a reward whose value counts, so that means and variances over the rewards of a run are finite."""

from __future__ import annotations

REWARD_ABS_MAX = 1e30
_RANGE = f"[{-REWARD_ABS_MAX:g}, {REWARD_ABS_MAX:g}]"
RANGE_FORM = f"be in {_RANGE}"
REWARD_RANGE = f"expected a number in {_RANGE}"


def in_reward_range(value: float) -> bool:
    """Return whether `value` is in the range. NaN is not."""
    return abs(value) <= REWARD_ABS_MAX
