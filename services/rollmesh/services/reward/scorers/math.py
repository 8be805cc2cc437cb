"""Compare the extracted answer with the accepted ones by value: 1 if one is equal, else 0.

math-verify defines equality of values: 1/2 = 0.5, 1,000 = 1000, x+1 = 1+x, and also 10 % = 10. The text is first
rewritten as LaTeX, with or without dollar signs, and is compared as a whole: `8, 7` is two values and `7x` is a
product, so neither is 7. A key that is the letter of an option, words, a time of day or a number with its base is
compared as such.

The comparison runs in worker processes, because a short expression can keep sympy busy for minutes, and neither a
thread nor the alarm signal of math-verify ends it reliably. An answer that exceeds the CPU time or the memory of a
worker is a wrong answer.
"""

from __future__ import annotations

import importlib.util
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import not_applicable
from rollmesh.services.reward.scorers.compared import ComparedOptions, ComparedScorer
from rollmesh.services.reward.scorers.extract import shorten, verdict
from rollmesh.shared.config.settings import PositiveFloat
from rollmesh.shared.domain.trajectory import Reward
from rollmesh.shared.errors import ConfigError


class MathOptions(ComparedOptions):
    """Settings of the math scorer. With an empty `pattern`, the answer is the last `\\boxed`, or what follows "answer
    is", or else the last number."""

    num_workers: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of worker processes. Each uses about 80 MiB for sympy and makes some hundred comparisons per second."""
    compare_s_max: PositiveFloat = 2.0
    """Maximum CPU time of a comparison, in seconds, without that of the key. An answer that needs more is wrong. A key
    that needs more by itself is an error of the task, and its samples are infra failures."""
    start_s_max: PositiveFloat = 60.0
    """Timeout for the start of a worker, in seconds. The import of sympy takes about one second on an idle machine."""
    memory_bytes_max: Annotated[int, Meta(ge=256 << 20)] = 4 << 30
    """Address space of a worker, in bytes."""


class MathScorer(ComparedScorer):
    """See the module. It does not apply to a task without an answer key."""

    Options: ClassVar[type[msgspec.Struct]] = MathOptions
    version = "2"
    worker = "rollmesh.services.reward.math_worker"
    what = "math"

    def __init__(self, *, options: MathOptions) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("the math scorer needs math-verify: pip install 'rollmesh[verify]'")
        super().__init__(options=options)

    async def score(self, item: ScoreItem) -> Reward:
        if item.answer_key is None or not item.answer_key.answers:
            return not_applicable("the task has no answer key")
        found = self._extractor.find(item)
        if not found or found in item.answer_key.answers:
            return verdict(bool(found), found)
        reply = await self._pool.ask({"answers": list(item.answer_key.answers)}, found)
        if reply is None:  # more CPU time or memory than it may use
            return verdict(False, found)
        return verdict(bool(reply["equal"]), shorten(str(reply["understood"])) or found)
