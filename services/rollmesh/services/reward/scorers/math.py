"""Numeric and symbolic equality of the extracted answer with any accepted one: 1 or 0.

Equality is math-verify's (parses LaTeX and plain numbers, compares through sympy): 1/2 = 0.5, 1,000 = 1000, $x+1$ = $1+x$,
and also 10 % = 10. It runs in worker processes, because sympy can be sent into minutes of work by a short expression, and
neither a thread nor math-verify's own alarm signal can be relied on to end it here.
"""

from __future__ import annotations

import importlib.util
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.math_pool import MathPool
from rollmesh.services.reward.scorers.extract import AnswerOptions, Extractor, not_applicable, shorten, verdict
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.settings import PositiveFloat
from rollmesh.shared.trajectory import Reward


class MathOptions(AnswerOptions):
    """Settings of the math scorer. With an empty `pattern`, math-verify looks for the answer (`\\boxed`, then the last number)."""

    num_workers: Annotated[int, Meta(ge=1, le=64)] = 1
    """Worker processes; each holds sympy (about 80 MiB) and makes some hundred comparisons a second."""
    compare_s_max: PositiveFloat = 5.0
    """Longest comparison, seconds; the worker is then replaced and the sample counts as an infra failure."""
    start_s_max: PositiveFloat = 60.0
    """Longest start of a worker, seconds; importing sympy takes one on a quiet machine."""
    memory_bytes_max: Annotated[int, Meta(ge=256 << 20)] = 4 << 30
    """Address space of a worker."""


class MathScorer:
    """See the module. Without an answer key it does not apply."""

    Options: ClassVar[type[msgspec.Struct]] = MathOptions
    version: ClassVar[str] = "1"

    def __init__(self, *, options: MathOptions) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("the math scorer needs math-verify: pip install 'rollmesh[verify]'")
        self._extractor = Extractor(options)
        self._pool = MathPool(
            num_workers=options.num_workers,
            compare_s_max=options.compare_s_max,
            start_s_max=options.start_s_max,
            memory_bytes_max=options.memory_bytes_max,
        )

    async def score(self, item: ScoreItem) -> Reward:
        if item.answer_key is None or not item.answer_key.answers:
            return not_applicable("the task has no answer key")
        found = self._extractor.find(item)
        if not found or found in item.answer_key.answers:
            return verdict(bool(found), found)
        comparison = await self._pool.compare(item.answer_key.answers, found)
        return verdict(comparison.equal, shorten(comparison.understood) or found)

    async def close(self) -> None:
        await self._pool.close()
