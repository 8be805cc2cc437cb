"""Tasks that clients submit, over the real services: durable, drawn once, scored with keys that no worker sees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.client import Client
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.shared.errors import (
    InvalidInput,
    NotReady,
    PayloadTooLarge,
    RunEnded,
    TaskConflict,
    TasksNotAccepted,
    UnknownOracle,
    UnknownRun,
)
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.v1 import coordinator_pb2, reward_pb2, reward_pb2_grpc, run_pb2, types_pb2

from .coordinator_mesh import ACCESS, REWARD, MeshParts, coordinator_alone, coordinator_mesh, spec

KEY = "Zanzibar"


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[MeshParts]:
    async with coordinator_mesh(tmp_path) as parts:
        yield parts


def task(task_id: str, prompt: str = "Which island?", **fields: Any) -> types_pb2.Task:
    return types_pb2.Task(task_id=task_id, messages=[types_pb2.Message(role="user", content=prompt)], **fields)


async def submit(
    mesh: MeshParts, *tasks: types_pb2.Task, answers: str = "", finish: bool = False
) -> run_pb2.SubmitTasksResponse:
    """Submit tasks, each with the answer."""
    keys = [types_pb2.AnswerKey(task_id=one.task_id, answers=[answers]) for one in tasks if answers]
    request = run_pb2.SubmitTasksRequest(run=mesh.name, tasks=tasks, answer_keys=keys, finish=finish)
    return await mesh.call(mesh.run.SubmitTasks, request)


async def scored(
    mesh: MeshParts, lease: coordinator_pb2.EpisodeLease, text: str
) -> reward_pb2.RewardServiceScoreResponse:
    """What the reward service gives an answer of the model."""
    answer = types_pb2.Message(role="assistant", content=text)
    segment = types_pb2.Segment(
        parent=-1,
        role=types_pb2.SEGMENT_ROLE_ACTION,
        source=types_pb2.SEGMENT_SOURCE_POLICY,
        token_ids=bytes(8),
        finish=types_pb2.FINISH_REASON_STOP,
        messages=[answer],
        sampling=-1,
        version=types_pb2.PolicyVersion(policy="main"),
    )
    sample = types_pb2.Sample(sample_id=f"{lease.key.episode}.0", finish=types_pb2.FINISH_REASON_STOP)
    item = reward_pb2.ScoreItem(key=lease.key, task=lease.task, samples=[sample], segments=[segment])
    nodes = (await mesh.coordinator.GetFleet(coordinator_pb2.GetFleetRequest(kind=REWARD))).nodes
    async with open_channel(nodes[0].address, access=ACCESS) as channel:
        stub: Any = reward_pb2_grpc.RewardServiceStub(channel)
        request = reward_pb2.RewardServiceScoreRequest(run=mesh.name, items=[item])
        response: reward_pb2.RewardServiceScoreResponse = await mesh.call(stub.Score, request)
        return response


async def test_tasks_become_trajectories_and_only_the_reward_service_gets_the_key(mesh: MeshParts) -> None:
    await mesh.begin(submitted_tasks=True)
    added = await submit(mesh, task("b", scorers=["correct"], labels={"level": "1"}), task("a"), answers=KEY)
    assert (added.num_added, added.submitted.open) == (2, 2)
    leases = await mesh.acquire()
    assert [lease.key.task for lease in leases] == ["b", "b", "a", "a"]
    assert KEY not in str(leases)
    assert leases[0].task.labels == {"level": "1"}
    for text, value in ((f"<answer>{KEY}</answer>", 1.0), ("<answer>Malta</answer>", 0.0)):
        response = await scored(mesh, leases[0], text)
        assert [reward.value for reward in response.samples[0].rewards] == [value], response
        assert KEY not in str(leases)
    assert await mesh.generate(leases, step=0) == [""] * 4
    batch = await mesh.lease(1)
    assert sorted({sample.task for sample in batch.samples}) == ["a", "b"]
    payloads = await mesh.fetch(batch.lease_id)
    assert len(payloads) == 4
    assert KEY not in str([batch, *payloads, await mesh.state()])
    state = await mesh.state()
    assert (state.submitted.open, state.submitted.drawn, state.submitted.answered) == (0, 0, 2)


async def test_a_restart_between_submission_and_draw_loses_nothing_and_repeats_nothing(mesh: MeshParts) -> None:
    """The coordinator is restarted before the draw, between two groups, and before the score. The rest of the mesh
    stores nothing about tasks, so it may be killed as well: here only the first groups are in progress."""
    await mesh.begin(submitted_tasks=True)
    tasks = [task(f"t{number}") for number in range(6)]
    await submit(mesh, *tasks, answers=KEY)
    await mesh.restart_coordinator()
    assert (await submit(mesh, *tasks, answers=KEY)).num_added == 0
    leases = await mesh.acquire()
    await mesh.restart_coordinator()
    response = await scored(mesh, leases[0], f"<answer>{KEY}</answer>")
    assert [reward.value for reward in response.samples[0].rewards] == [1.0]
    await mesh.generate(leases, step=0)
    update = digest = None
    for update in (1, 2, 3):
        batch = await mesh.lease(update)
        digest = (await mesh.commit(update, [batch.lease_id])).digest
        await mesh.publish(update)
        if update < 3:
            await mesh.restart_coordinator()
            await mesh.generate(await mesh.acquire(), step=update)
    assert digest is not None
    await submit(mesh, finish=True)
    await mesh.checkpoint(3, digest)
    state = await mesh.state()
    assert (state.ended, state.samples.reasons["trained"]) == ("TASKS_EXHAUSTED", 12)
    assert (state.submitted.answered, state.submitted.finished) == (6, True)
    report = await audit_run(mesh.bus, mesh.name)
    assert report.holds, report.to_text()


async def test_what_is_rejected_and_by_which_error(mesh: MeshParts) -> None:
    with pytest.raises(UnknownRun):
        await submit(mesh, task("a"))
    await mesh.begin(submitted_tasks=True)
    with pytest.raises(
        InvalidInput, match=r"task a\)\.scorers` must have different names of rewards among \[correct\]"
    ):
        await submit(mesh, task("a", scorers=["other"]))
    with pytest.raises(PayloadTooLarge, match="task `a`"):
        await submit(mesh, task("a", "x" * 1_500_000))
    await submit(mesh, task("a", "x" * 900_000), answers=KEY)
    with pytest.raises(TaskConflict, match="task `a`"):
        await submit(mesh, task("a"), answers=KEY)
    with pytest.raises(TaskConflict):
        await submit(mesh, task("a", "x" * 900_000), answers="Malta")
    await submit(mesh, finish=True)
    with pytest.raises(TasksNotAccepted):
        await submit(mesh, task("c"))
    await mesh.call(mesh.run.StopRun, run_pb2.StopRunRequest(run=mesh.name))
    with pytest.raises(RunEnded):
        await submit(mesh, task("c"))
    assert (await submit(mesh, task("a", "x" * 900_000), answers=KEY)).num_added == 0
    other = await mesh.another_run("other")
    await other.create()
    with pytest.raises(TasksNotAccepted, match="data service"):
        await submit(other, task("a"))


@pytest.mark.parametrize(
    "ref",
    [
        "",
        "submitted:",
        "submitted:r/x-y/a",
        "submitted:no/1-y/a",
        "submitted:r/1-y/a",
        "submitted:r/99-y/a",
        "submitted:r/0-y/a",
        f"submitted:r/{'9' * 5000}-y/a",
        "submitted:r.s/1-y/a",
        "jsonl:a",
    ],
)
async def test_a_reference_without_a_submission_has_no_key(mesh: MeshParts, ref: str) -> None:
    await mesh.begin(submitted_tasks=True)
    with pytest.raises(UnknownOracle):
        await mesh.call(mesh.coordinator.GetAnswerKeys, coordinator_pb2.GetAnswerKeysRequest(oracle_refs=[ref]))


async def test_without_a_reward_node_a_call_can_be_repeated(tmp_path: Path) -> None:
    async with coordinator_alone(tmp_path) as mesh:
        await mesh.call(mesh.decisions.CreateRun, run_pb2.CreateRunRequest(spec=spec(submitted_tasks=True)))
        request = run_pb2.SubmitTasksRequest(run=mesh.name, tasks=[task("a")])
        with pytest.raises(NotReady, match="no reward node"):
            await mesh.call(mesh.decisions.SubmitTasks, request)


async def test_the_gateway_gives_no_key(mesh: MeshParts) -> None:
    from rollmesh.v1 import coordinator_pb2_grpc

    assert mesh.gateway is not None
    async with open_channel(mesh.gateway.address, access=ACCESS) as channel:
        stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetAnswerKeys(coordinator_pb2.GetAnswerKeysRequest(oracle_refs=["submitted:r/1-a/b"]))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_client_submits_in_parts_and_concurrent_calls_add_each_task_once(mesh: MeshParts) -> None:
    await mesh.begin(submitted_tasks=True)
    assert mesh.gateway is not None
    tasks = [task(f"t{number}", "x" * 2000) for number in range(1500)]
    keys = [types_pb2.AnswerKey(task_id=one.task_id, answers=["1"]) for one in tasks]
    async with Client(mesh.gateway.address, token=ACCESS.token) as client:
        run = client.run(mesh.name)
        results: Sequence[run_pb2.SubmittedTasks] = await asyncio.gather(
            *(run.submit_tasks(tasks, keys) for _ in range(3))
        )
    assert {found.open for found in results} == {1500}
