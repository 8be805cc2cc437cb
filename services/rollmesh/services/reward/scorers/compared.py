"""The part that scorers share whose comparison runs in worker processes, because its time has no bound."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from rollmesh.services.reward.scorer import Scorer
from rollmesh.services.reward.scorers.extract import AnswerOptions, Extractor
from rollmesh.services.reward.worker_pool import WorkerPool
from rollmesh.shared.config.settings import PositiveFloat


class ComparedOptions(AnswerOptions):
    """Location of the answer, and limits of the workers."""

    num_workers: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of worker processes."""
    compare_s_max: PositiveFloat = 1.0
    """Maximum CPU time of a comparison, in seconds. An answer that needs more is wrong. A key that needs more by itself
    is an error of the task, and its samples are infra failures."""
    start_s_max: PositiveFloat = 60.0
    """Timeout for the start of a worker, in seconds."""
    memory_bytes_max: Annotated[int, Meta(ge=256 << 20)] = 1 << 30
    """Address space of a worker, in bytes."""


class ComparedScorer(Scorer):
    """Base of scorers that compare in worker processes."""

    worker: ClassVar[str] = ""
    """Module of the worker."""
    what: ClassVar[str] = ""
    """The kind of the workers in errors."""

    def __init__(self, *, options: ComparedOptions) -> None:
        self._extractor = Extractor(options)
        self._pool = WorkerPool(
            self.worker,
            self.what,
            num_workers=options.num_workers,
            compare_s_max=options.compare_s_max,
            start_s_max=options.start_s_max,
            memory_bytes_max=options.memory_bytes_max,
        )

    def use_timeout(self, timeout_s: float) -> None:
        """Limit the CPU time of a comparison by `timeout_s` of the entry. A wait for a worker is not the answer's."""
        self._pool.compare_s_max = min(self._pool.compare_s_max, timeout_s)

    async def close(self) -> None:
        await self._pool.close()
