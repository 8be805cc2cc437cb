"""DataService over real gRPC, with a ledger on a bus."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.data.config import DataConfig, build_engine
from rollmesh.services.data.servicer import DataServicer
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.bus.embedded_server import EmbeddedServer
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.run_streams import StreamLimits, run_streams
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.errors import (
    CatchingUp,
    CorruptSnapshot,
    InvalidInput,
    MeshError,
    OutOfRange,
    UnknownRun,
    UnknownSplit,
)
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import RpcServer
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.v1 import data_pb2, data_pb2_grpc, events_pb2, reward_pb2, types_pb2

CALC = {
    "source": {"name": "calc", "options": {"num_train": 40, "num_validation": 5, "num_test": 7}},
    "selector": {"name": "thompson"},
}
OK = types_pb2.REWARD_OUTCOME_OK


@asynccontextmanager
async def serving(settings: dict[str, Any], bus: Bus) -> AsyncIterator[data_pb2_grpc.DataServiceAsyncStub]:
    engine = build_engine(config_from_dict(DataConfig, settings), bus=bus, clock=SystemClock())
    try:
        async with RpcServer(access=Access(token="t")) as server:
            server.add(data_pb2_grpc.add_DataServiceServicer_to_server, DataServicer(engine))
            await server.start()
            async with open_channel(server.address, access=Access(token="t")) as channel:
                yield data_pb2_grpc.DataServiceStub(channel)
    finally:
        await engine.close()


@pytest.fixture(params=["memory", "jetstream"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    """A bus with the ledger of run `r`; the second kind is a real nats-server."""
    async with AsyncExitStack() as stack:
        made: Bus = MemoryBus()
        if request.param == "jetstream":
            login = BusLogin(user="rollmesh", password="bus")
            server = await stack.enter_async_context(EmbeddedServer(tmp_path / "nats", login=login))
            made = await JetStreamBus.connect(server.url, login=login)
        stack.push_async_callback(made.close)
        await made.create(run_streams("r", StreamLimits(ledger_bytes_max=1 << 20)).ledger)
        yield made


async def write(bus: Bus, *facts: events_pb2.Fact) -> int:
    ledger = await bus.open(run_streams("r").ledger.name)
    last = (await ledger.info()).last_seq
    payload = events_pb2.LedgerRecord(record_id=f"m{last}", facts=facts).SerializeToString()
    return await ledger.append(payload, msg_id=f"m{last}", expected_last_seq=last)


async def train(bus: Bus, drawn: data_pb2.DrawnTask, *values: float) -> int:
    """Writes what the coordinator writes about a drawn group from admission to decision; the ledger's last sequence."""
    group = f"g{drawn.draw}"
    reserved = events_pb2.GroupReserved(
        group=group, purpose=types_pb2.PURPOSE_TRAIN, policy="main", task=drawn.task, draw=drawn.draw, num_episodes=2
    )
    members = [
        reward_pb2.SampleRewards(
            sample_id=f"{group}.{i}", rewards=[types_pb2.Reward(name="correct", value=value, segment=-1, outcome=OK)]
        )
        for i, value in enumerate(values)
    ]
    decided = events_pb2.GroupFinalized(group=group, decision=reward_pb2.GROUP_DECISION_KEEP, members=members)
    await write(bus, events_pb2.Fact(group_reserved=reserved))
    return await write(bus, events_pb2.Fact(group_finalized=decided))


def ask(first_draw: int, num: int, position: int = 0, **settings: Any) -> data_pb2.NextTasksRequest:
    return data_pb2.NextTasksRequest(
        **{"run": "r", "purpose": types_pb2.PURPOSE_TRAIN, **settings},
        first_draw=first_draw,
        num=num,
        ledger_position=position,
    )


def ask_eval(first_draw: int, num: int, split: str = "") -> data_pb2.NextTasksRequest:
    return ask(first_draw, num, purpose=types_pb2.PURPOSE_EVAL, split=split)


async def test_a_run_draws_learns_restarts_and_goes_on_the_same(bus: Bus) -> None:
    spec = events_pb2.RunSpec(run="r", success_reward="correct")
    position = await write(bus, events_pb2.Fact(run_created=events_pb2.RunCreated(spec=spec)))
    async with serving(CALC, bus) as stub:
        for draw in range(10):
            (drawn,) = (await stub.NextTasks(ask(draw, 1, position))).tasks
            position = await train(bus, drawn, float(drawn.task.labels["level"] == "1"), 0.0)
        expected = await stub.NextTasks(ask(10, 8, position))
        assert await stub.NextTasks(ask(10, 8)) == expected, "asking again neither skips nor repeats"
        snapshot = await stub.Snapshot(data_pb2.SnapshotRequest(run="r"))
        assert snapshot.ledger_position == position
    async with serving(CALC, bus) as stub:
        assert await stub.NextTasks(ask(10, 8)) == expected, "folded from the ledger"
    async with serving(CALC, bus) as stub:
        restored = await stub.Restore(data_pb2.RestoreRequest(run="r", state=snapshot.state))
        assert restored.ledger_position == position
        assert await stub.NextTasks(ask(10, 8)) == expected, "restored from the snapshot"
    other_seed = CALC | {"seed": 1}
    async with serving(other_seed, bus) as stub:
        assert await stub.NextTasks(ask(10, 8)) != expected


async def test_evaluation_takes_the_first_tasks_of_a_split_whatever_the_run_does(bus: Bus) -> None:
    async with serving(CALC, bus) as stub:
        found = await stub.NextTasks(ask_eval(0, 100))
        assert [drawn.draw for drawn in found.tasks] == list(range(7))
        assert {drawn.task.split for drawn in found.tasks} == {"test"}
        validation = await stub.NextTasks(ask_eval(0, 3, "validation"))
        assert len(validation.tasks) == 3
        prompts = [{d.task.messages[0].content for d in part.tasks} for part in (found, validation)]
        assert not prompts[0] & prompts[1]


async def test_the_answer_of_a_file_is_in_no_message(bus: Bus, tmp_path: Path) -> None:
    lines = [{"question": f"q{i}", "answer": f"#### Zanzibar{i}", "level": i % 3} for i in range(20)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {
        "path": str(tmp_path / "mine.jsonl"),
        "answer_pattern": r"#### (\S+)",
        "labels": {"level": "level"},
        "validation_share": 0.2,
        "test_share": 0.2,
    }
    async with serving(
        {"source": {"name": "jsonl", "options": options}, "selector": {"name": "thompson"}}, bus
    ) as stub:
        drawn = await stub.NextTasks(ask(0, 20))
        held_out = await stub.NextTasks(ask_eval(0, 20))
        snapshot = await stub.Snapshot(data_pb2.SnapshotRequest(run="r"))
    assert len(drawn.tasks) == 20
    for message in (drawn, held_out, snapshot):
        assert b"Zanzibar" not in message.SerializeToString()
    assert all(task.task.oracle_ref.startswith("jsonl:tasks@") for task in drawn.tasks)


async def test_what_cannot_be_answered_is_a_typed_error_with_its_remedy(bus: Bus) -> None:
    cases: list[tuple[data_pb2.NextTasksRequest, type[MeshError], str]] = [
        (ask(0, 0), InvalidInput, "num"),
        (ask(0, 1025), InvalidInput, "num"),
        (ask(-1, 1), InvalidInput, "first_draw"),
        (ask(0, 1, run=""), InvalidInput, "run"),
        (ask(0, 1, run="no such run"), InvalidInput, "run"),
        (ask(0, 1, run="unknown"), UnknownRun, "CreateRun first"),
        (ask(0, 1, purpose=types_pb2.PURPOSE_UNSPECIFIED), InvalidInput, "purpose"),
        (ask_eval(0, 1, "dev"), UnknownSplit, "splits with tasks: train, validation, test"),
        (ask_eval(7, 1), OutOfRange, "must be < 7, the number of tasks"),
        (ask(80, 1), OutOfRange, "epochs_max"),
        (ask(0, 1, 5), CatchingUp, "0 of 5"),
    ]
    async with serving(CALC | {"epochs_max": 2, "catch_up_s_max": 0.05}, bus) as stub:
        for request, error, message in cases:
            with pytest.raises(error, match=message), typed_errors():
                await stub.NextTasks(request)
        with pytest.raises(CorruptSnapshot, match="fold the ledger without it"), typed_errors():
            await stub.Restore(data_pb2.RestoreRequest(run="r", state=b"junk"))
