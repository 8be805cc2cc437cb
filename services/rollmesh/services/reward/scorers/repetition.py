"""Detect repetition: the share of n-grams that occurred before, in [0, 1], or a penalty for it.

    rate = 1 - distinct n-grams / n-grams;   `rate`: rate;   `penalty`: -rate

A text with fewer than n words has the rate 0. Words are separated by white space and compared in lower case.

Source: the repetition penalty of "Demystifying Long Chain-of-Thought Reasoning" (2025-02, arXiv:2502.03373) in the form
that public recipes use, with n = 3 and the largest penalty -1. Give it a small weight: short answers have no penalty.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from rollmesh.services.reward.item import ScoreItem, Where
from rollmesh.services.reward.scorer import Scorer
from rollmesh.shared.config.settings import PositiveInt, Settings
from rollmesh.shared.domain.trajectory import Reward


class RepetitionOptions(Settings):
    """Settings of the detector of repetition."""

    form: Literal["penalty", "rate"] = "penalty"
    """`penalty`: in [-1, 0]; `rate`: in [0, 1]."""
    n: PositiveInt = 3
    """Number of words, or of characters, of an n-gram."""
    unit: Literal["words", "characters"] = "words"
    """`characters`, with a larger n, suits languages that do not separate words by spaces. White space does not
    count."""
    where: Where = "final"
    """`final`: the last assistant message; `episode`: all assistant messages."""


class RepetitionScorer(Scorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = RepetitionOptions
    version = "1"

    def __init__(self, *, options: RepetitionOptions) -> None:
        self._options = options

    async def score(self, item: ScoreItem) -> Reward:
        options = self._options
        words = item.response(options.where).lower().split()
        rate = repetition_rate(words if options.unit == "words" else list("".join(words)), options.n)
        value = rate if options.form == "rate" else -rate
        return Reward(name="", value=value + 0.0, evidence=f"{rate:.3f} of the {options.n}-grams occurred before")


def repetition_rate(units: list[str], n: int) -> float:
    """Return the share of n-grams that equal an earlier one."""
    ngrams = list(zip(*(units[start:] for start in range(n)), strict=False))
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
