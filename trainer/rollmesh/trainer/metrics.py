"""Metrics of an update, from per-token log-probs.

Drift from the sampling policy (k3 estimate of KL) predicts divergence better than the version count, as measured. A
mean over all tokens hides it, so metrics are also grouped by lag. All numbers use natural logarithms.

`kl`, `ess` and so on are over all trained tokens that were sampled, of which `tokens/external_share` is the complement;
`lag/<n>/...` are over tokens of staleness n. `entropy` is that of the distribution at the sampling temperature.
`clipped_share` counts the tokens without gradient: tokens beyond a clip bound, and tokens whose ratio is limited to
stay finite. `terms_without_gradient` counts loss terms with a value without gradient, if any. `packed` is 1 if
sequences share rows (see `self_test`). The policy's log-probs are taken when a token is trained on. With several
optimizer steps per update, later ones include the effect of earlier steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.domain.trajectory import FloatArray, GroupContext, TrainingSample
from rollmesh.trainer.effective_size import effective_sample_size
from rollmesh.trainer.estimators.base import usable_rewards
from rollmesh.trainer.losses.ratio import LOG_RATIO_MAX
from rollmesh.trainer.samples import NO_LAG, num_trained


def kl_k3(policy: FloatArray, behavior: FloatArray) -> float:
    """Estimate KL(behavior || policy) from tokens sampled by behavior: the mean of r - 1 - log r with r = pi / mu.

    Schulman 2020 (joschu.net/blog/kl-approx.html): unbiased, and never negative for any token.
    """
    log_ratio = limited_log_ratio(policy, behavior)
    return float(np.mean(np.expm1(log_ratio) - log_ratio)) if log_ratio.size else 0.0


def drift_metrics(policy: FloatArray, behavior: FloatArray, lag: NDArray[np.int64]) -> dict[str, float]:
    """Return `kl`, `ess`, `ratio_max` over all tokens [m], and `lag/<n>/{tokens,kl,ess}` per staleness."""
    result = {
        "kl": kl_k3(policy, behavior),
        "ess": effective_sample_size(np.exp(limited_log_ratio(policy, behavior))),
        "ratio_max": float(np.exp(limited_log_ratio(policy, behavior).max(initial=-LOG_RATIO_MAX))),
    }
    for value in np.unique(lag):
        at = lag == value
        name = "none" if value == NO_LAG else str(int(value))
        result[f"lag/{name}/tokens"] = float(at.sum())
        result[f"lag/{name}/kl"] = kl_k3(policy[at], behavior[at])
        result[f"lag/{name}/ess"] = effective_sample_size(np.exp(limited_log_ratio(policy[at], behavior[at])))
    return result


def reward_metrics(groups: Sequence[GroupContext]) -> dict[str, float]:
    """Return the mean `reward/<name>` over members with usable rewards, and `reward/unusable_share` of all members."""
    values: dict[str, list[float]] = {}
    usable = [usable_rewards(m) for g in groups for m in g.members]
    for rewards in usable:
        for name, value in (rewards or {}).items():
            values.setdefault(name, []).append(value)
    result = {f"reward/{name}": float(np.mean(v)) for name, v in sorted(values.items())}
    result["reward/unusable_share"] = sum(r is None for r in usable) / len(usable) if usable else 0.0
    return result


def source_metrics(groups: Sequence[GroupContext]) -> dict[str, float]:
    """Return the share of the groups that each source of a mixture has in the batch, as `source/<name>/groups_share`. A
    source without a group in the batch has none. The id of a task of a mixture begins with its label `source`; other
    tasks may have any such label, with any number of values."""
    labels = [(group.task, group.labels.get("source", "")) for group in groups]
    sources = Counter(name for task, name in labels if name and task.startswith(f"{name}/"))
    return {f"source/{name}/groups_share": num / len(groups) for name, num in sorted(sources.items())}


def length_metrics(leased: Sequence[TrainingSample], used: Sequence[TrainingSample]) -> dict[str, float]:
    """Return the mean number of trained tokens per sample, of leased samples, of used samples, and their ratio.

    If the ratio is not about 1, dropped samples differ in length from used ones, which biases training by length.
    """
    before, after = _mean_length(leased), _mean_length(used)
    return {
        "length/leased_mean": before,
        "length/used_mean": after,
        "length/used_over_leased": after / before if before else 0.0,
    }


def mean_stats(stats: Mapping[str, FloatArray]) -> dict[str, float]:
    """Return the means of a loss's per-token statistics as `<name>_share`. They are NaN at tokens outside the token set
    of the term."""
    found = {name: values[~np.isnan(values)] for name, values in stats.items()}
    return {f"{name}_share": float(values.mean()) for name, values in found.items() if values.size}


def _mean_length(samples: Sequence[TrainingSample]) -> float:
    return float(np.mean([num_trained(s) for s in samples])) if samples else 0.0


def limited_log_ratio(policy: FloatArray, behavior: FloatArray) -> NDArray[np.float64]:
    """Return log policy - log behavior [m], limited so that its exponential is finite."""
    return np.clip(policy.astype(np.float64) - behavior, -LOG_RATIO_MAX, LOG_RATIO_MAX)
