"""Probability ratios that stay finite."""

from __future__ import annotations

from torch import Tensor

LOG_RATIO_MAX = 20.0
"""Largest absolute log-ratio. exp(20) = 5e8 is far beyond any clip bound, and finite in float32 times an advantage."""


def out_of_range(numerator: Tensor, denominator: Tensor, log_ratio_max: float = LOG_RATIO_MAX) -> Tensor:
    """Return where `safe_ratio` limits the exponent [m], so that no gradient passes."""
    return (numerator - denominator).detach().abs() > log_ratio_max


def safe_ratio(numerator: Tensor, denominator: Tensor, log_ratio_max: float = LOG_RATIO_MAX) -> Tensor:
    """Return exp(numerator - denominator) of log-probs [m], with the exponent limited to +-`log_ratio_max`."""
    return (numerator - denominator).clamp(-log_ratio_max, log_ratio_max).exp()
