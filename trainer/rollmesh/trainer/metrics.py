"""What an update tells about the health of off-policy training, from per-token log-probs.

The signals that matter, by experience: drift from the sampling policy (k3 estimate of KL) decides survival more than the
version count does, and a mean over all tokens hides it, hence the grouping by lag. Numbers are natural-log based.

Names: `kl`, `ess`, ... over all trained tokens; `lag/<n>/...` over tokens of staleness n.
`entropy` is that of the distribution at the sampling temperature. `clipped_share` counts the tokens without gradient: those beyond
a clip bound and those whose ratio is kept finite. `packed` is 1 if sequences share rows (see `self_test`).
Log-probs of the policy are those of the moment a token was trained on; with several optimiser steps per update, later ones
include the effect of earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.trajectory import FloatArray, GroupContext, TrainingSample
from rollmesh.trainer.advantages.base import usable_rewards
from rollmesh.trainer.losses.ratio import LOG_RATIO_MAX
from rollmesh.trainer.samples import NO_LAG, num_trained


def effective_sample_size(weights: FloatArray) -> float:
    """(sum w)^2 / (n sum w^2), in (0, 1]: the share of tokens that an estimate with importance weights `w` [n] is worth.

    Kong 1992. 1 when all weights agree; 1/n when one token holds all the weight; 0 for no tokens.
    """
    total_square = float(np.square(weights, dtype=np.float64).sum())
    return float(weights.sum(dtype=np.float64)) ** 2 / (len(weights) * total_square) if total_square > 0 else 0.0


def kl_k3(policy: FloatArray, behaviour: FloatArray) -> float:
    """Estimate of KL(behaviour || policy) from tokens sampled by behaviour: mean of r - 1 - log r with r = pi / mu.

    Schulman 2020 (joschu.net/blog/kl-approx.html): unbiased, and never negative for any token.
    """
    log_ratio = _log_ratio(policy, behaviour)
    return float(np.mean(np.expm1(log_ratio) - log_ratio)) if log_ratio.size else 0.0


def drift_metrics(policy: FloatArray, behaviour: FloatArray, lag: NDArray[np.int64]) -> dict[str, float]:
    """`kl`, `ess`, `ratio_max` over all tokens [m], and `lag/<n>/{tokens,kl,ess}` per staleness present."""
    result = {
        "kl": kl_k3(policy, behaviour),
        "ess": effective_sample_size(np.exp(_log_ratio(policy, behaviour))),
        "ratio_max": float(np.exp(_log_ratio(policy, behaviour).max(initial=-LOG_RATIO_MAX))),
    }
    for value in np.unique(lag):
        at = lag == value
        name = "none" if value == NO_LAG else str(int(value))
        result[f"lag/{name}/tokens"] = float(at.sum())
        result[f"lag/{name}/kl"] = kl_k3(policy[at], behaviour[at])
        result[f"lag/{name}/ess"] = effective_sample_size(np.exp(_log_ratio(policy[at], behaviour[at])))
    return result


def reward_metrics(groups: Sequence[GroupContext]) -> dict[str, float]:
    """`reward/<name>` mean over members with usable rewards, and `reward/unusable_share` of all members."""
    values: dict[str, list[float]] = {}
    usable = [usable_rewards(m) for g in groups for m in g.members]
    for rewards in usable:
        for name, value in (rewards or {}).items():
            values.setdefault(name, []).append(value)
    result = {f"reward/{name}": float(np.mean(v)) for name, v in sorted(values.items())}
    result["reward/unusable_share"] = sum(r is None for r in usable) / len(usable) if usable else 0.0
    return result


def length_metrics(leased: Sequence[TrainingSample], used: Sequence[TrainingSample]) -> dict[str, float]:
    """Mean trained tokens per sample: of the leased ones, of the used ones, and used / leased.

    A ratio away from 1 means that what is dropped differs in length from what is kept, so training is biased by length.
    """
    before, after = _mean_length(leased), _mean_length(used)
    return {
        "length/leased_mean": before,
        "length/used_mean": after,
        "length/used_over_leased": after / before if before else 0.0,
    }


def mean_stats(stats: Mapping[str, FloatArray]) -> dict[str, float]:
    """Per-token statistics of a loss -> their means, as `<name>_share`."""
    return {f"{name}_share": float(values.mean()) for name, values in stats.items() if values.size}


def _mean_length(samples: Sequence[TrainingSample]) -> float:
    return float(np.mean([num_trained(s) for s in samples])) if samples else 0.0


def _log_ratio(policy: FloatArray, behaviour: FloatArray) -> NDArray[np.float64]:
    return np.clip(policy.astype(np.float64) - behaviour, -LOG_RATIO_MAX, LOG_RATIO_MAX)
