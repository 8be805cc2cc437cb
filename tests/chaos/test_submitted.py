"""Real processes, ended by SIGKILL in turn, while a client submits a thousand tasks: each is answered once."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import msgspec
import pytest

from rollmesh.client import Client
from rollmesh.services.coordinator.core import facts as f
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.net.retry import RetryConfig
from rollmesh.v1 import run_pb2, types_pb2

from .verdict import settle
from .world import HOSTS, World, mesh_config, save_model_folder, world

NUM_TASKS, PER_CALL, GROUP_SIZE, BATCH_GROUPS = 1000, 25, 2, 16
VICTIMS = (
    "coordinator",
    "services",
    "nats",
    "gateway",
    "rollout-0",
    "coordinator",
    "inference-0",
    "learner",
    "services",
)
"""`services` has the data service and the reward service."""
STEP_S = 120.0


def tasks(first: int) -> list[types_pb2.Task]:
    prompt = types_pb2.Message(role="user", content="1+1")
    return [
        types_pb2.Task(task_id=f"t{number}", messages=[prompt], tools=["calculator"])
        for number in range(first, first + PER_CALL)
    ]


def has_answered(least: int, state: run_pb2.RunState) -> bool:
    return state.submitted.answered >= least


def is_replaced(mesh: World, pid: int) -> bool:
    return pid not in mesh.pids.values() and len(mesh.pids) == len(HOSTS)


async def submit(mesh: World) -> None:
    """Submit all tasks, each call twice, as a client that loses responses, and faster than they are answered."""
    retry = RetryConfig(retry_s=STEP_S)
    async with Client(mesh.layout.gateway, token=mesh.layout.access.token, retry=retry) as client:
        run = client.run(mesh.layout.run)
        for first in range(0, NUM_TASKS, PER_CALL):
            of_call = tasks(first)
            keys = [types_pb2.AnswerKey(task_id=one.task_id, answers=["2"]) for one in of_call]
            for finish in (False, first + PER_CALL == NUM_TASKS):
                await run.submit_tasks(of_call, keys, finish=finish)
            await mesh.until_state(f"answers to {first}", partial(has_answered, first - 200), limit_s=STEP_S)


async def kill_in_turn(mesh: World) -> None:
    """Kill each victim after an equal part of the tasks."""
    for turn, victim in enumerate(VICTIMS):
        least = turn * NUM_TASKS // len(VICTIMS)
        await mesh.until_state(f"{least} answers for {victim}", partial(has_answered, least), limit_s=STEP_S)
        if victim == "nats":
            mesh.kill_nats_server()
            pid = mesh.pids["nats"]
        else:
            pid = mesh.kill(victim)
        await mesh.until(
            f"{victim} is replaced",
            partial(is_replaced, mesh, pid),
            limit_s=STEP_S,
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_thousand_submitted_tasks_under_kills_are_answered_once(tmp_path: Path) -> None:
    model = save_model_folder(tmp_path / "model")
    made = mesh_config(
        model,
        submitted_tasks=True,
        updates_max=0,
        batch_groups=BATCH_GROUPS,
        group_size=GROUP_SIZE,
        max_staleness=63,
        group_s_max=600.0,
        batch_lease_s=60.0,
    )
    data = msgspec.structs.replace(made.data, source=Extension("submitted"))
    config = msgspec.structs.replace(made, data=data)
    async with world(tmp_path, config) as mesh:
        await mesh.until_state("the run exists", lambda s: s.submitted.open == 0, limit_s=STEP_S)
        async with asyncio.TaskGroup() as group:
            group.create_task(submit(mesh))
            group.create_task(kill_in_turn(mesh))
        state = await mesh.until_state("the end", lambda s: bool(s.ended), limit_s=240.0)
        print(state.samples, state.submitted)
        verdict = await settle(mesh, updates=state.policies[0].applied_step, limit_s=240.0)
    assert (state.ended, state.submitted.answered) == ("TASKS_EXHAUSTED", NUM_TASKS)
    samples = verdict.audit.samples
    drawn = Counter(fact.task.task_id for fact in verdict.facts if isinstance(fact, f.GroupReserved))
    assert drawn.keys() == {f"t{number}" for number in range(NUM_TASKS)}
    assert samples.reserved == samples.trained + samples.stale == drawn.total() * GROUP_SIZE, verdict.audit.reasons
    # A trainer that returns to a checkpoint makes samples of later weights void, and their tasks are drawn again.
    if not any(isinstance(fact, f.RolledBack) for fact in verdict.facts):
        assert (set(drawn.values()), samples.stale) == ({1}, 0), verdict.audit.reasons
    assert (
        sum(code == -signal.SIGKILL for _, code in mesh.exits) == len(VICTIMS) - 1
    )  # the host of nats exits by itself
    print(verdict.audit.to_text(), f"exits: {mesh.exits}", sep="\n")
