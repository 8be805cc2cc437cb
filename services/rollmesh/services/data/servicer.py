"""DataService over gRPC: translate between protobuf and the types of the engine."""

from __future__ import annotations

from rollmesh.services.data.engine import DataEngine, PlannedTasks
from rollmesh.services.data.metrics import TASKS
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.shared.codec.plans import encode_plan
from rollmesh.shared.domain.extras import NAMES_MAX, encode_extras
from rollmesh.shared.domain.plans import Plan
from rollmesh.shared.domain.versions import DEFAULT_POLICY
from rollmesh.shared.errors import field_error
from rollmesh.shared.telemetry.metrics import count
from rollmesh.v1 import data_pb2, data_pb2_grpc, types_pb2

NUM_TASKS_MAX = 1024
DEFAULT_PLAN = Plan()
"""The plan of a selector that does not plan, which a response does not have."""
REPLY_BYTES_MAX = 4 * 1024 * 1024
"""Maximum size of the tasks of a response, bytes. One larger task is returned alone."""


class DataServicer(data_pb2_grpc.DataServiceServicer):
    """Serves one engine."""

    def __init__(self, engine: DataEngine) -> None:
        self._engine = engine

    async def NextTasks(self, request: data_pb2.NextTasksRequest, context: object) -> data_pb2.NextTasksResponse:
        _check_range(request)
        if request.purpose == types_pb2.PURPOSE_TRAIN:
            drawn = await self._engine.next_tasks(
                run=_run(request.run),
                policy=request.policy or DEFAULT_POLICY,
                first_draw=request.first_draw,
                num=request.num,
                ledger_position=request.ledger_position,
            )
        elif request.purpose in (types_pb2.PURPOSE_EVAL, types_pb2.PURPOSE_EXPORT):
            in_order = await self._engine.tasks_in_order(
                split=request.split or Split.TEST, first_draw=request.first_draw, num=request.num
            )
            drawn = [(draw, task, DEFAULT_PLAN) for draw, task in in_order]
        else:
            raise field_error("purpose", "be TRAIN, EVAL or EXPORT", request.purpose)
        response = _encode(drawn)
        purpose = types_pb2.Purpose.Name(request.purpose).removeprefix("PURPOSE_").lower()
        count(TASKS, purpose, amount=len(response.tasks))
        return response

    async def Snapshot(self, request: data_pb2.SnapshotRequest, context: object) -> data_pb2.SnapshotResponse:
        state, position = await self._engine.snapshot(_run(request.run))
        return data_pb2.SnapshotResponse(state=state, ledger_position=position)

    async def Restore(self, request: data_pb2.RestoreRequest, context: object) -> data_pb2.RestoreResponse:
        position = await self._engine.restore(_run(request.run), request.state)
        return data_pb2.RestoreResponse(ledger_position=position)

    async def GetPrivateExtras(
        self, request: data_pb2.GetPrivateExtrasRequest, context: object
    ) -> data_pb2.GetPrivateExtrasResponse:
        _run(request.run)
        if not request.task_id:
            raise field_error("task_id", "name a task", request.task_id)
        if not 1 <= len(request.names) <= NAMES_MAX:
            raise field_error("names", f"have 1 to {NAMES_MAX} entries", len(request.names))
        found = await self._engine.private_extras(
            split=request.split, task_id=request.task_id, names=frozenset(request.names)
        )
        return data_pb2.GetPrivateExtrasResponse(extras=encode_extras(found))

    async def ForgetRun(self, request: data_pb2.ForgetRunRequest, context: object) -> data_pb2.ForgetRunResponse:
        await self._engine.forget(_run(request.run))
        return data_pb2.ForgetRunResponse()


def encode_task(task: PoolTask) -> types_pb2.Task:
    """Return the protobuf message of a task, which has only its public part."""
    return types_pb2.Task(
        task_id=task.task_id,
        messages=[types_pb2.Message(role=m.role, content=m.content) for m in task.messages],
        tools=task.tools,
        oracle_ref=task.oracle_ref,
        split=task.split,
        labels=dict(task.labels),
        agent=task.agent,
        scorers=task.scorers,
        extras=encode_extras(task.extras),
    )


def _encode(tasks: PlannedTasks) -> data_pb2.NextTasksResponse:
    """Return the tasks with their plans, as many as fit."""
    response = data_pb2.NextTasksResponse()
    num_bytes = 0
    for draw, task, plan in tasks:
        drawn = data_pb2.DrawnTask(draw=draw, task=encode_task(task))
        if plan != DEFAULT_PLAN:
            drawn.plan.CopyFrom(encode_plan(plan))
        num_bytes += drawn.ByteSize()
        if response.tasks and num_bytes > REPLY_BYTES_MAX:
            break
        response.tasks.append(drawn)
    return response


def _check_range(request: data_pb2.NextTasksRequest) -> None:
    if not 1 <= request.num <= NUM_TASKS_MAX:
        raise field_error("num", f"be in [1, {NUM_TASKS_MAX}]", request.num)
    if request.first_draw < 0:
        raise field_error("first_draw", "be >= 0", request.first_draw)


def _run(run: str) -> str:
    if not run:
        raise field_error("run", "name a run", run)
    return run
