"""Responses of the data service fit into a message."""

from __future__ import annotations

from typing import Any

from rollmesh.services.data.servicer import REPLY_BYTES_MAX, DataServicer
from rollmesh.services.data.task import PoolTask
from rollmesh.shared.domain.trajectory import Message
from rollmesh.v1 import data_pb2, types_pb2


class _Long:
    """An engine with tasks of a given length."""

    def __init__(self, length: int) -> None:
        self._task = PoolTask(task_id="t", messages=(Message(role="user", content="x" * length),))

    async def tasks_in_order(self, *, split: str, first_draw: int, num: int) -> list[tuple[int, PoolTask]]:
        return [(draw, self._task) for draw in range(first_draw, first_draw + num)]


async def _draws(length: int, first_draw: int, num: int) -> list[int]:
    engine: Any = _Long(length)
    request = data_pb2.NextTasksRequest(run="r", purpose=types_pb2.PURPOSE_EVAL, first_draw=first_draw, num=num)
    response = await DataServicer(engine).NextTasks(request, None)
    assert response.ByteSize() < REPLY_BYTES_MAX + length
    return [drawn.draw for drawn in response.tasks]


async def test_a_response_has_as_many_tasks_as_fit_and_the_next_call_continues() -> None:
    size = REPLY_BYTES_MAX // 3
    assert await _draws(size, 0, 5) == [0, 1]
    assert await _draws(size, 2, 3) == [2, 3]
    assert await _draws(size, 4, 1) == [4]
    assert await _draws(10, 0, 1024) == list(range(1024))


async def test_a_task_above_the_limit_is_returned_alone() -> None:
    assert await _draws(REPLY_BYTES_MAX + 1, 7, 3) == [7]
