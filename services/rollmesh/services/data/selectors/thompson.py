"""Difficulty targeting: a Beta posterior over each prompt's success rate, and Thompson sampling towards a target rate.

After VADE (2025-11, variance-aware dynamic sampling): the learning signal is in prompts whose groups are neither all
correct nor all wrong, the posterior predicts these prompts, and old evidence decays because the policy changes.
Deviations: the prior of a prompt is the estimate of its level, which covers prompts that were never drawn, and a share
of draws is uniform.

t is the number of observed groups including this one; s and f are the sums of p and 1 - p over a group's members (p in
[0, 1]):

    level l, per group of that level:    A_l <- d A_l + s/(s+f)     B_l <- d B_l + f/(s+f)     d = 2^(-1 / level_half_life)
                                         m_l  = (A_l + 1) / (A_l + B_l + 2)
    prompt x, per group of that prompt:  a_x <- w a_x + s           b_x <- w b_x + f           w = 2^(-(t - t_x) / prompt_half_life)
                                         t_x <- t, then a_x, b_x scaled to a_x + b_x <= prompt_evidence_max
    posterior of x:                      Beta(k m_l + w a_x,  k (1 - m_l) + w b_x)             k = prior_strength

A draw is uniform with probability `uniform_share`. Otherwise theta_x is drawn for each candidate, and the candidate
nearest to `target` is taken. The estimate of a level counts groups, not members, because members share a prompt.
Half-lives are counted in groups. That of a level is the short time scale, that of a prompt the long one, so the
evidence of a prompt fades into the estimate of its level. Measured on the demo: clearly better than uniform if most of
the pool is too easy or impossible, and slightly worse on a balanced pool, in which target 0.5 rarely draws the hardest
solvable tasks. The uniform share compensates for that.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from rollmesh.services.data.labels import categories_of
from rollmesh.services.data.selector import GroupResult
from rollmesh.services.data.selectors.base import Floats, Ints, StoredSelector
from rollmesh.services.data.task import TaskPool
from rollmesh.shared.config.settings import PositiveFloat, PositiveInt, Settings, Share


class ThompsonOptions(Settings):
    """Settings of the Thompson selector."""

    target: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Target success rate, in (0, 1). 0.5 has the most variance per group; 0.3 draws harder tasks."""
    uniform_share: Share = 0.25
    """Share of draws that are uniform over the pool. It keeps every prompt reachable for any posterior."""
    level_label: str = "level"
    """Task label whose values share a prior. Tasks without it form one level."""
    prior_strength: PositiveFloat = 4.0
    """Weight of the level's estimate in a prompt's posterior, in members."""
    level_half_life_groups: PositiveFloat = 64.0
    """Half-life of the evidence of a level, in groups of that level: the short time scale."""
    prompt_half_life_groups: PositiveFloat = 256.0
    """Half-life of the evidence of a prompt, in groups of any prompt: the long time scale."""
    prompt_evidence_max: PositiveFloat = 32.0
    """Maximum evidence of a prompt, in members; the default is about two groups. Prompts of a small pool are drawn
    often. Without the limit, their old evidence would hide a changed policy for many half-lives."""
    num_candidates: PositiveInt = 4096
    """Number of prompts considered per draw, a random subset of a larger pool. It bounds the cost of a draw."""


class ThompsonSelector(StoredSelector):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = ThompsonOptions
    schema = "thompson@1"

    def __init__(self, *, pool: TaskPool, seed: int, options: ThompsonOptions) -> None:
        super().__init__(pool)
        self._options = options
        self._seed = seed
        found = categories_of(pool, options.level_label)
        self._level = found.of_task
        self._num_observed = 0
        self._level_evidence: Floats = np.zeros((2, len(found.names)))
        self._evidence: Floats = np.zeros((2, len(pool)))
        self._observed_at: Ints = np.zeros(len(pool), dtype=np.int64)

    def draw(self, index: int, in_flight: AbstractSet[int]) -> int:
        rng = np.random.default_rng((self._seed, index))
        candidates = self._candidates(rng, in_flight)
        if rng.random() < self._options.uniform_share:
            return int(rng.choice(candidates))
        alpha, beta = self.posterior(candidates)
        distance = np.abs(rng.beta(alpha, beta) - self._options.target)
        # If a whole pool is impossible or solved, samples underflow to exactly 0 or 1. The random choice among equal
        # distances keeps such a pool from being drawn in order.
        return int(rng.choice(candidates[distance == distance.min()]))

    def posterior(self, positions: Ints) -> tuple[Floats, Floats]:
        """Return the posterior parameters (alpha, beta), both [n] and > 0, of the prompts at `positions` [n]."""
        successes, failures = self._level_evidence
        mean = ((successes + 1.0) / (successes + failures + 2.0))[self._level[positions]]
        own = self._evidence[:, positions] * self._fade(self._observed_at[positions])
        strength = self._options.prior_strength
        return strength * mean + own[0], strength * (1.0 - mean) + own[1]

    def observe(self, result: GroupResult) -> None:
        total = result.successes + result.failures
        if total <= 0.0:
            return
        counts = np.array([result.successes, result.failures])
        level, position = self._level[result.position], result.position
        self._num_observed += 1
        self._level_evidence[:, level] *= 2.0 ** (-1.0 / self._options.level_half_life_groups)
        self._level_evidence[:, level] += counts / total
        self._evidence[:, position] *= self._fade(self._observed_at[position])
        self._evidence[:, position] += counts
        self._evidence[:, position] *= min(1.0, self._options.prompt_evidence_max / self._evidence[:, position].sum())
        self._observed_at[position] = self._num_observed

    def stored(self) -> dict[str, Any]:
        seen = np.flatnonzero(self._evidence.any(axis=0))
        return {
            "num_observed": self._num_observed,
            "level_evidence": self._level_evidence.astype("<f8").tobytes(),
            "positions": seen.astype("<i8").tobytes(),
            "evidence": self._evidence[:, seen].astype("<f8").tobytes(),
            "observed_at": self._observed_at[seen].astype("<i8").tobytes(),
        }

    def load(self, fields: Mapping[str, Any]) -> None:
        num_observed = int(fields["num_observed"])
        levels = np.frombuffer(fields["level_evidence"], dtype="<f8").reshape(self._level_evidence.shape)
        seen = np.frombuffer(fields["positions"], dtype="<i8")
        evidence, observed_at = np.zeros_like(self._evidence), np.zeros_like(self._observed_at)
        evidence[:, seen] = np.frombuffer(fields["evidence"], dtype="<f8").reshape(2, len(seen))
        observed_at[seen] = np.frombuffer(fields["observed_at"], dtype="<i8")
        self._num_observed, self._level_evidence = num_observed, levels.astype(np.float64)
        self._evidence, self._observed_at = evidence, observed_at

    def _fade(self, observed_at: Ints | np.int64) -> Floats:
        age = self._num_observed - observed_at
        return np.asarray(2.0 ** (-age / self._options.prompt_half_life_groups), dtype=np.float64)

    def _candidates(self, rng: np.random.Generator, in_flight: AbstractSet[int]) -> Ints:
        """Return candidate positions: a random subset of a large pool, without those in flight if others remain."""
        num_tasks = len(self._level)
        num_wanted = self._options.num_candidates + len(in_flight)
        if num_tasks <= num_wanted:
            chosen = np.arange(num_tasks, dtype=np.int64)
        else:
            chosen = rng.choice(num_tasks, size=num_wanted, replace=False, shuffle=False)
        free = chosen[~np.isin(chosen, np.fromiter(in_flight, dtype=np.int64, count=len(in_flight)))]
        return free if len(free) else chosen
