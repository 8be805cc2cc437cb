"""Probability ratios that stay finite."""

from __future__ import annotations

from torch import Tensor

LOG_RATIO_MAX = 20.0
"""exp(20) = 5e8: far beyond any clip bound, and finite in float32 after multiplication with an advantage."""


def out_of_range(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Where `safe_ratio` holds the exponent at its bound, so that no gradient passes [m]."""
    return (numerator - denominator).detach().abs() > LOG_RATIO_MAX


def safe_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """exp(numerator - denominator) of log-probs [m], with the exponent kept within +-20."""
    return (numerator - denominator).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
