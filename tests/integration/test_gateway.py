"""The gateway: payloads of a lease, whole and sharded; decisions and their errors as the coordinator gave them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import pytest_asyncio

from rollmesh.services.gateway.config import GatewayConfig
from rollmesh.services.gateway.heads import NAME as HEADS
from rollmesh.services.gateway.heads import Heads, read_heads
from rollmesh.services.gateway.node import GatewayNode
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.codec.metadata import sample_meta
from rollmesh.shared.domain.ledger_head import EMPTY, LedgerHead, record_hash
from rollmesh.shared.errors import MeshError, NotPublished, Overloaded, PayloadLost, Unavailable, WrongUpdate
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import coordinator_pb2_grpc, run_pb2, run_pb2_grpc

from .coordinator_mesh import ACCESS, CONFIG, GATEWAY, MeshParts, coordinator_mesh, episode_of, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
_numbers = itertools.count()
CALLS_MAX = 12
"""Calls of one connection to the coordinator of the shared mesh."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshParts]:
    config = msgspec.structs.replace(CONFIG, server=ServerConfig(stop_s=0.0, connection_rpcs_max=CALLS_MAX))
    async with coordinator_mesh(tmp_path_factory.mktemp("mesh"), config) as parts:
        yield parts


@pytest_asyncio.fixture(loop_scope="module")
async def mesh(shared_mesh: MeshParts) -> MeshParts:
    """The shared mesh, about a run of the test's own."""
    return await shared_mesh.another_run(f"run-{next(_numbers)}")


async def leased(mesh: MeshParts, num_groups: int = 2) -> run_pb2.LeaseBatchResponse:
    await mesh.begin(batch_groups=num_groups)
    await mesh.generate(await mesh.acquire(2 * num_groups), step=0)
    return await mesh.lease(1)


async def persistent_commit(mesh: MeshParts, lease_id: str) -> run_pb2.CommitUpdateResponse:
    """As a trainer does it: again while the coordinator is away."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(Unavailable):
                return await mesh.commit(1, [lease_id])


async def test_a_lease_is_fetched_whole_and_again(mesh: MeshParts) -> None:
    batch = await leased(mesh)
    fetched = await mesh.fetch(batch.lease_id)
    assert {s for f in fetched for s in f.sample_ids} == {s.meta.sample_id for s in batch.samples}
    for one in fetched:
        assert {s.sample_id for s in one.episode.samples} >= set(one.sample_ids)
    assert await mesh.fetch(batch.lease_id) == fetched


async def test_payloads_of_the_next_batch_come_as_they_become_ready_and_lease_nothing(mesh: MeshParts) -> None:
    await mesh.begin(batch_groups=2)
    ahead = asyncio.create_task(mesh.prefetch(4))
    await mesh.generate(await mesh.acquire(6), step=0)
    found = {name: one.episode for one in await ahead for name in one.sample_ids}
    assert (await mesh.state()).samples.live == 6
    batch = await mesh.lease(1)
    assert {s.meta.sample_id for s in batch.samples} == set(found), "the first two of three READY groups"
    fetched = {name: one.episode for one in await mesh.fetch(batch.lease_id) for name in one.sample_ids}
    assert found == fetched
    again = {name for one in await mesh.prefetch(2) for name in one.sample_ids}
    assert len(again) == 2
    assert not again & set(found), "leased samples are not READY"


async def test_a_fetch_may_name_the_samples_that_are_missing(mesh: MeshParts) -> None:
    batch = await leased(mesh)
    names = [s.meta.sample_id for s in batch.samples]
    found = await mesh.fetch(batch.lease_id, sample_ids=[names[2], "of another lease"])
    assert [list(one.sample_ids) for one in found] == [[names[2]]]
    shards = [await mesh.fetch(batch.lease_id, index, 2, sample_ids=names[:2]) for index in range(2)]
    assert sorted(name for shard in shards for one in shard for name in one.sample_ids) == sorted(names[:2])


async def test_a_payload_that_cannot_be_read_is_left_to_the_fetch_of_the_lease(mesh: MeshParts) -> None:
    await mesh.begin(group_size=1, batch_groups=2)
    reports = [await mesh.finished(lease, step=0) for lease in await mesh.acquire(2)]
    reports[0].samples[0].steps[0].num_tokens -= 1
    assert await mesh.report(reports) == ["", ""]
    (found,) = await mesh.prefetch(1)
    assert list(found.sample_ids) == [reports[1].samples[0].sample_id]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
async def test_shards_are_the_lease_each_sample_once_and_even(mesh: MeshParts, num_shards: int) -> None:
    batch = await leased(mesh, num_groups=5)
    shards = [await mesh.fetch(batch.lease_id, index, num_shards) for index in range(num_shards)]
    ids = [s for shard in shards for one in shard for s in one.sample_ids]
    assert sorted(ids) == sorted(s.meta.sample_id for s in batch.samples)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


async def test_an_episode_with_several_samples_is_sent_once(mesh: MeshParts) -> None:
    await mesh.begin(group_size=1, batch_groups=1)
    (lease,) = await mesh.acquire(1)
    report = await mesh.finished(lease, step=0)
    episode = episode_of(lease, step=0, num_samples=3)
    stream = await mesh.bus.open(run_streams(mesh.name).samples.name)
    report.payload.sequence = await stream.append(episode.SerializeToString(), msg_id="several")
    del report.samples[:]
    report.samples.extend(sample_meta(episode, sample) for sample in episode.samples)
    assert await mesh.report([report]) == [""]
    batch = await mesh.lease(1)
    (fetched,) = await mesh.fetch(batch.lease_id)
    assert list(fetched.sample_ids) == [sample.sample_id for sample in episode.samples]
    state = await mesh.state()
    assert state.samples.reserved == state.samples.live == 3


async def test_a_payload_that_is_not_what_was_reported_is_answered_with_its_failure(mesh: MeshParts) -> None:
    await mesh.begin(group_size=1, batch_groups=1)
    first, second = await mesh.acquire(1), await mesh.acquire(1)
    report = await mesh.finished(first[0], step=0)
    other = await mesh.finished(second[0], step=0)
    report.payload.sequence = other.payload.sequence
    await mesh.report([report])
    batch = await mesh.lease(1)
    (answer,) = await mesh.fetch(batch.lease_id)
    assert "`episode` must be 'g0.0', got 'g1.0'" in answer.failure.message
    assert list(answer.sample_ids) == [report.samples[0].sample_id]
    assert not answer.HasField("episode")


async def test_the_stamps_in_the_payload_decide_not_what_the_worker_reported(mesh: MeshParts) -> None:
    await mesh.begin(group_size=1, batch_groups=2)
    leases = await mesh.acquire(2)
    reports = [await mesh.finished(lease, step=0) for lease in leases]
    reports[0].samples[0].steps[0].num_tokens -= 1
    assert await mesh.report(reports) == ["", ""]
    batch = await mesh.lease(1)
    found = {one.sample_ids[0]: one for one in await mesh.fetch(batch.lease_id)}
    false, true = (found[report.samples[0].sample_id] for report in reports)
    assert (false.failure.reason, false.HasField("episode")) == ("METADATA_MISMATCH", False)
    assert "`steps` was reported as" in false.failure.message
    assert true.HasField("episode")
    await mesh.commit(1, [batch.lease_id], dropped=list(false.sample_ids))
    letters = await mesh.call(mesh.run.ListDead, run_pb2.ListDeadRequest(run=mesh.name))
    assert [letter.letter.payload_sequence for letter in letters.letters] == [reports[0].payload.sequence]


async def test_a_lost_payload_can_be_dropped_and_the_rest_trained(mesh: MeshParts) -> None:
    batch = await leased(mesh)
    samples = await mesh.bus.open(run_streams(mesh.name).samples.name)
    first = min(s.payload.sequence for s in batch.samples)
    await samples.purge_below(first + 1)
    lost = []
    for index in range(4):
        try:
            await mesh.fetch(batch.lease_id, index, 4)
        except PayloadLost as error:
            lost.append(error.metadata["sample_id"])
    assert len(lost) == 1
    await mesh.commit(1, [batch.lease_id], dropped=lost)
    assert dict((await mesh.state()).samples.reasons) == {"filtered/TEST": 1}


async def test_decisions_and_their_errors_pass_unchanged(mesh: MeshParts) -> None:
    await mesh.begin()
    errors = []
    for stub in (mesh.run, mesh.decisions):
        request = run_pb2.LeaseBatchRequest(run=mesh.name, trainer_epoch=mesh.epoch, update=9)
        with pytest.raises(WrongUpdate) as caught:
            await mesh.call(stub.LeaseBatch, request)
        errors.append((str(caught.value), caught.value.metadata, caught.value.retry_after_s, caught.value.violations))
    assert errors[0] == errors[1]
    assert errors[0][1] == {"next_update": "1"}
    states = [
        (await mesh.call(s.GetRun, run_pb2.GetRunRequest(run=mesh.name))).state for s in (mesh.run, mesh.decisions)
    ]
    for state in states:
        state.ClearField("idle_s")  # grows between the two
    assert states[0] == states[1]


async def test_a_trainer_that_hangs_up_waits_no_longer_at_the_coordinator(mesh: MeshParts) -> None:
    await mesh.begin()
    request = run_pb2.LeaseBatchRequest(run=mesh.name, trainer_epoch=mesh.epoch, update=1, wait_s=30)
    call = mesh.run.LeaseBatch(request)

    async def waits() -> bool:
        return "learner/main" in (await mesh.state()).waiting

    await eventually(waits)
    call.cancel()

    async def forgotten() -> bool:
        return not await waits()

    await eventually(forgotten)


async def test_a_wait_ends_before_the_callers_deadline_and_says_for_what(mesh: MeshParts) -> None:
    await mesh.begin()
    request = run_pb2.LeaseBatchRequest(run=mesh.name, trainer_epoch=mesh.epoch, update=1, wait_s=60)
    batch = await mesh.run.LeaseBatch(request, timeout=5.0)
    assert not batch.lease_id
    assert batch.waiting_for.startswith("READY groups: 0 of 2")


async def test_the_gateway_outlives_its_coordinator(tmp_path: Path) -> None:
    async with coordinator_mesh(tmp_path) as mesh:
        batch = await leased(mesh)
        await mesh.stop_coordinator()
        with pytest.raises(Unavailable):
            await mesh.call(lambda r: mesh.run.GetRun(r, timeout=10), run_pb2.GetRunRequest(run=mesh.name))
        pending = asyncio.create_task(persistent_commit(mesh, batch.lease_id))
        await mesh.start_coordinator()
        assert (await pending).digest

        async def joined() -> bool:
            fleet = await mesh.call(mesh.coordinator.GetFleet, pb.GetFleetRequest(kind=GATEWAY))
            return bool(fleet.nodes)

        await eventually(joined)


async def test_any_gateway_serves_any_lease(mesh: MeshParts) -> None:
    batch = await leased(mesh)
    config = GatewayConfig(server=msgspec.structs.replace(GatewayConfig().server, stop_s=0.0), reads_max=1)
    second = GatewayNode(
        config,
        node_id="g2",
        coordinator=mesh.address,
        access=ACCESS,
        folder=mesh.folder / "g2",
        bus_url=mesh.nats.url,
    )
    async with second, open_channel(second.address, access=ACCESS) as channel:
        request = run_pb2.FetchSamplesRequest(run=mesh.name, trainer_epoch=mesh.epoch, lease_id=batch.lease_id)
        fetched = [one async for one in run_pb2_grpc.RunServiceStub(channel).FetchSamples(request)]
    assert fetched == await mesh.fetch(batch.lease_id)


@asynccontextmanager
async def another_gateway(mesh: MeshParts, name: str, **settings: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a gateway with its own settings."""
    config = GatewayConfig(server=ServerConfig(stop_s=0.0), **settings)
    folder = mesh.folder / name
    node = GatewayNode(config, node_id=name, coordinator=mesh.address, access=ACCESS, folder=folder, bus=mesh.bus)
    async with node, open_channel(node.address, access=ACCESS) as channel:
        yield channel


async def watching(channel: grpc.aio.Channel, run: str, num: int) -> list[Any]:
    """Open streams of WatchRun, each with its first message."""
    calls: list[Any] = [
        run_pb2_grpc.RunServiceStub(channel).WatchRun(run_pb2.WatchRunRequest(run=run)) for _ in range(num)
    ]
    await asyncio.gather(*(call.read() for call in calls))
    return calls


async def test_as_many_streams_as_a_connection_has_calls_leave_every_other_call_alone(mesh: MeshParts) -> None:
    async with another_gateway(mesh, "streams", forwarded_max=CALLS_MAX - 1) as channel:
        run = run_pb2_grpc.RunServiceStub(channel)
        await mesh.begin(batch_groups=1)
        await mesh.generate(await mesh.acquire(2), step=0)
        calls = await watching(channel, mesh.name, CALLS_MAX - 1)
        with pytest.raises(Overloaded, match=rf"{CALLS_MAX - 1} forwarded streams are open"), typed_errors():
            await run.WatchRun(run_pb2.WatchRunRequest(run=mesh.name)).read()
        front = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        with pytest.raises(Overloaded, match="forwarded streams are open"), typed_errors():
            await front.FetchModelFiles(pb.FetchModelFilesRequest()).read()
        assert (await run.GetRun(run_pb2.GetRunRequest(run=mesh.name), timeout=20)).state.run == mesh.name
        outer, mesh.run = mesh.run, run
        try:
            batch = await mesh.lease(1)
            assert await mesh.fetch(batch.lease_id)
            assert (await mesh.commit(1, [batch.lease_id])).digest
        finally:
            mesh.run = outer
        calls.pop().cancel()

        async def free() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                calls.extend(await watching(channel, mesh.name, 1))
            return len(calls) == CALLS_MAX - 1

        await eventually(free)
        for call in calls:
            call.cancel()


async def test_calls_of_lease_batch_that_wait_leave_room_for_short_calls(mesh: MeshParts) -> None:
    await mesh.begin()
    request = run_pb2.LeaseBatchRequest(run=mesh.name, trainer_epoch=mesh.epoch, update=1, wait_s=20.0)
    async with another_gateway(mesh, "waits", forwarded_max=CALLS_MAX - 1) as channel:
        run = run_pb2_grpc.RunServiceStub(channel)
        waiting = [asyncio.ensure_future(run.LeaseBatch(request)) for _ in range(CALLS_MAX)]
        done, pending = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(Overloaded, match=rf"{CALLS_MAX - 1} waiting calls of LeaseBatch are open"), typed_errors():
            await done.pop()
        assert (await run.GetRun(run_pb2.GetRunRequest(run=mesh.name), timeout=20)).state.run == mesh.name
        for call in pending:
            call.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def test_applications_that_wait_leave_room_for_trainers(mesh: MeshParts) -> None:
    await mesh.create(submitted_tasks=True)
    async with another_gateway(mesh, "applications", forwarded_max=CALLS_MAX - 1) as channel:
        run = run_pb2_grpc.RunServiceStub(channel)
        requests = [run_pb2.OpenEpisodeRequest(run=mesh.name, key=f"k{n}", wait_s=20.0) for n in range(CALLS_MAX)]
        waiting = [asyncio.ensure_future(run.OpenEpisode(request)) for request in requests]
        done, pending = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(Overloaded, match=f"{CALLS_MAX - 1} calls of OpenEpisode and FinishEpisode"), typed_errors():
            await done.pop()
        attached = await run.AttachTrainer(run_pb2.AttachTrainerRequest(run=mesh.name), timeout=20)
        lease = run_pb2.LeaseBatchRequest(run=mesh.name, trainer_epoch=attached.trainer_epoch, update=1, wait_s=0.1)
        with pytest.raises(NotPublished), typed_errors():
            await run.LeaseBatch(lease, timeout=20)
        for call in pending:
            call.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


@pytest.mark.slow
async def test_1100_streams_with_the_default_limits_leave_short_calls_alone(tmp_path: Path) -> None:
    async with coordinator_mesh(tmp_path) as mesh, contextlib.AsyncExitStack() as stack:
        await mesh.begin()
        assert mesh.gateway is not None
        opened: list[Any] = []
        for _ in range(2):
            channel = await stack.enter_async_context(open_channel(mesh.gateway.address, access=ACCESS))
            stub = run_pb2_grpc.RunServiceStub(channel)
            opened += [stub.WatchRun(run_pb2.WatchRunRequest(run=mesh.name)) for _ in range(550)]
        async with asyncio.timeout(60):
            got = await asyncio.gather(*(call.read() for call in opened), return_exceptions=True)
        refused = [err for err in got if isinstance(err, grpc.aio.AioRpcError)]
        assert {err.code() for err in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert len(refused) == 1100 - GatewayConfig().forwarded_max
        async with asyncio.timeout(20):
            assert (await mesh.state()).run == mesh.name


async def test_a_shard_index_is_checked_before_anything_is_read(mesh: MeshParts) -> None:
    for index, num in ((1, 1), (-1, 2), (3, 3)):
        with pytest.raises(MeshError) as caught:
            await mesh.fetch("any", index, num)
        assert caught.value.violations[0].field == "shard_index"


async def test_a_gateway_stores_the_head_after_each_commit_and_keeps_it_over_a_restart(mesh: MeshParts) -> None:
    batch = await leased(mesh)
    committed = await mesh.commit(1, [batch.lease_id])
    head = LedgerHead(position=committed.ledger_position, hash=committed.ledger_hash)
    path = mesh.folder / "gateway-0" / HEADS
    assert read_heads(path)[mesh.name] == head
    log = await mesh.bus.open(run_streams(mesh.name).ledger.name)
    assert record_hash((await log.read(head.position)).payload) == head.hash
    again = await mesh.commit(1, [batch.lease_id])
    assert again.digest == committed.digest
    path.write_bytes(path.read_bytes() + b'{"run": "cut sh')
    heads = Heads(mesh.folder / "gateway-0")
    heads.open()
    kept = read_heads(path)
    assert len(path.read_bytes().splitlines()) == len(kept)
    assert kept[mesh.name].position >= head.position
    heads.store("other", LedgerHead(position=1, hash="ab" * 32))
    assert set(read_heads(path)) == {*kept, "other"}
    heads.store("other", EMPTY)
    assert set(read_heads(path)) == {*kept}
    await heads.close()


async def test_a_commit_does_not_wait_for_the_disk_and_every_head_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    syncing, disk = threading.Event(), threading.Event()

    def slow(path: Path) -> None:
        syncing.set()
        assert disk.wait(10)
        synced.append(read_heads(path)["r"].position)

    heads = Heads(tmp_path / "gateway-0")
    heads.open()
    monkeypatch.setattr("rollmesh.services.gateway.heads._sync", slow)
    for position in range(1, 4):
        heads.store("r", LedgerHead(position=position, hash="ab" * 32))
        assert read_heads(tmp_path / "gateway-0" / HEADS)["r"].position == position
        await asyncio.to_thread(syncing.wait, 10)
    assert not synced
    disk.set()
    await heads.close()
    assert synced[-1] == 3
    assert len(synced) == 2  # heads that arrive during a sync share the next one


async def test_a_head_that_cannot_be_stored_is_logged_and_fails_no_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heads = Heads(tmp_path / "gateway-0")
    heads.open()
    (tmp_path / "gateway-0" / HEADS).unlink()
    (tmp_path / "gateway-0" / HEADS).mkdir()
    heads.store("r", LedgerHead(position=7, hash="ab" * 32))
    assert "cannot store ledger head: head=7:abab" in caplog.text
