"""The client divides submitted tasks into calls that the mesh accepts, and checks which keys belong to them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rollmesh.client.client import Run
from rollmesh.shared.errors import InvalidInput, TaskQuota
from rollmesh.v1 import run_pb2, types_pb2


class SmallMesh(Run):
    """Accepts at most `num_max` tasks per call."""

    def __init__(self, num_max: int) -> None:
        super().__init__(cast(Any, None), "r", "main", "main")
        self.num_max = num_max
        self.accepted: list[run_pb2.SubmitTasksRequest] = []

    async def ask(self, verb: str, request: Any, limit_s: float | None = None) -> Any:
        if len(request.tasks) > self.num_max:
            raise TaskQuota("too many", tasks_per_call=self.num_max)
        self.accepted.append(request)
        return run_pb2.SubmitTasksResponse()


TASKS = [types_pb2.Task(task_id=name) for name in "abcdefg"]
KEYS = [types_pb2.AnswerKey(task_id=name) for name in "gca"]


async def test_a_call_above_the_quota_is_divided_in_order_with_its_keys() -> None:
    mesh = SmallMesh(2)
    await mesh.submit_tasks(TASKS, KEYS, finish=True)
    assert [[task.task_id for task in part.tasks] for part in mesh.accepted] == [
        ["a"],
        ["b", "c"],
        ["d", "e"],
        ["f", "g"],
    ]
    assert [[key.task_id for key in part.answer_keys] for part in mesh.accepted] == [["a"], ["c"], [], ["g"]]
    assert [part.finish for part in mesh.accepted] == [False, False, False, True]


async def test_a_task_that_never_fits_is_an_error() -> None:
    with pytest.raises(TaskQuota):
        await SmallMesh(0).submit_tasks(TASKS)


@pytest.mark.parametrize("names", ["aa", "ax"])
async def test_keys_that_belong_to_no_task_or_twice_to_one_are_rejected_before_any_call(names: str) -> None:
    mesh = SmallMesh(9)
    with pytest.raises(InvalidInput, match="answer_keys.task_id"):
        await mesh.submit_tasks(TASKS, [types_pb2.AnswerKey(task_id=name) for name in names])
    assert mesh.accepted == []
