"""Compare the extracted answer with the accepted ones by value: 1 if one is equal, else 0.

math-verify defines equality. It parses LaTeX and plain numbers and compares with sympy: 1/2 = 0.5, 1,000 = 1000, $x+1$ = $1+x$, and also
10 % = 10. It runs in worker processes, because a short expression can keep sympy busy for minutes, and neither a thread nor the alarm
signal of math-verify ends it reliably.
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
    """Settings of the math scorer. With an empty `pattern`, math-verify finds the answer (`\\boxed`, then the last number)."""

    num_workers: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of worker processes. Each uses about 80 MiB for sympy and makes some hundred comparisons per second."""
    compare_s_max: PositiveFloat = 5.0
    """Timeout of a comparison, in seconds. The worker is then replaced, and the sample is an infra failure."""
    start_s_max: PositiveFloat = 60.0
    """Timeout for the start of a worker, in seconds. The import of sympy takes about one second on an idle machine."""
    memory_bytes_max: Annotated[int, Meta(ge=256 << 20)] = 4 << 30
    """Address space of a worker, in bytes."""


class MathScorer:
    """See the module. It does not apply to a task without an answer key."""

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
