"""The reader of StreamSamples resumes broken streams without gaps or repeats, and raises errors that are not
retryable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollmesh.app.samples.export_run import stream_samples
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.errors import HasLearner, MeshError, NotReady
from rollmesh.v1 import run_pb2


@dataclass
class Gateway:
    """Breaks after the given number of responses, with the error of each entry; None ends cleanly."""

    script: Sequence[tuple[int, MeshError | None]]
    num: int = 6
    asked: list[str] = field(default_factory=list)

    def StreamSamples(self, request: run_pb2.StreamSamplesRequest) -> Call:
        self.asked.append(request.cursor)
        count, error = self.script[len(self.asked) - 1]
        first = int(request.cursor.partition(".")[0] or 0) + 1
        return Call([run_pb2.StreamSamplesResponse(cursor=f"{n}.0") for n in range(first, first + count)], error)


@dataclass
class Call:
    responses: list[run_pb2.StreamSamplesResponse]
    error: MeshError | None

    async def __aiter__(self) -> AsyncIterator[run_pb2.StreamSamplesResponse]:
        for response in self.responses:
            yield response
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Return False, as a call that has ended does."""


async def read(gateway: Any) -> list[str]:
    clock = ManualClock()
    reading = asyncio.create_task(_collect(gateway, clock))
    while not reading.done():
        clock.advance(1.0)
        await asyncio.sleep(0)
    return reading.result()


async def _collect(gateway: Any, clock: ManualClock) -> list[str]:
    return [response.cursor async for response in stream_samples(gateway, "r", clock)]


async def test_a_broken_stream_is_taken_up_after_the_newest_cursor() -> None:
    gateway = Gateway([(2, NotReady("away")), (0, NotReady("still away")), (3, NotReady("again")), (1, None)])
    assert await read(gateway) == [f"{n}.0" for n in range(1, 7)]
    assert gateway.asked == ["", "2.0", "2.0", "5.0"]


async def test_a_refusal_that_asking_again_cannot_help_is_raised() -> None:
    gateway = Gateway([(1, HasLearner("lease batches"))])
    with pytest.raises(HasLearner):
        await read(gateway)
    assert len(gateway.asked) == 1
