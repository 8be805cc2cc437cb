"""StreamSamples: every scored episode of a run without a learner, once, in order, from anywhere, until the run has
ended."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rollmesh.services.gateway.config import GatewayConfig
from rollmesh.services.gateway.node import GatewayNode
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import HasLearner, InvalidInput, NoLearner, PayloadLost, UnknownRun
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import run_pb2, run_pb2_grpc, types_pb2

from .coordinator_mesh import ACCESS, MeshParts, coordinator_mesh, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
_numbers = itertools.count()
Responses = list[run_pb2.StreamSamplesResponse]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshParts]:
    async with coordinator_mesh(tmp_path_factory.mktemp("mesh")) as parts:
        yield parts


@pytest_asyncio.fixture(loop_scope="module")
async def mesh(shared_mesh: MeshParts) -> MeshParts:
    """The shared mesh, about an export of the test's own: three tasks, each rolled out twice."""
    found = await shared_mesh.another_run(f"export-{next(_numbers)}")
    await found.begin(export_groups=3)
    return found


def stream(mesh: MeshParts, cursor: str = "") -> AsyncIterator[run_pb2.StreamSamplesResponse]:
    found: AsyncIterator[run_pb2.StreamSamplesResponse] = mesh.run.StreamSamples(
        run_pb2.StreamSamplesRequest(run=mesh.name, cursor=cursor), timeout=30.0
    )
    return found


async def streamed(mesh: MeshParts, cursor: str = "", num: int | None = None) -> Responses:
    """All responses, or the first `num`."""
    found: Responses = []
    with typed_errors():
        async for response in stream(mesh, cursor):
            found.append(response)
            if len(found) == num:
                break
    return found


async def generate(mesh: MeshParts, num: int) -> None:
    assert await mesh.generate(await mesh.acquire(num), step=0) == [""] * num


def episodes(responses: Responses) -> list[str]:
    return [response.episode.key.episode for response in responses]


async def test_a_reader_gets_what_was_and_what_comes_and_the_stream_ends_with_the_run(mesh: MeshParts) -> None:
    await generate(mesh, 2)
    reading = asyncio.create_task(streamed(mesh))
    await generate(mesh, 4)
    found = await reading
    assert sorted(episodes(found)) == [f"g{group}.{index}" for group in range(3) for index in range(2)]
    assert {r.episode.purpose for r in found} == {types_pb2.PURPOSE_EXPORT}
    assert all(r.task.task_id == r.episode.key.task and r.task.oracle_ref and r.task.split == "test" for r in found)
    state = await mesh.state()
    assert (state.ended, state.samples.exported, state.samples.live) == ("EXPORTED", 6, 0)


async def test_a_reader_goes_on_after_any_cursor_at_another_gateway_without_skip_or_repeat(mesh: MeshParts) -> None:
    await generate(mesh, 6)  # two of them in each of some records: a cursor tells facts of one record apart
    whole = await streamed(mesh)
    second = GatewayNode(
        GatewayConfig(server=ServerConfig(stop_s=0.0)),
        node_id="g2",
        coordinator=mesh.address,
        access=ACCESS,
        folder=mesh.folder / "g2",
        bus=mesh.bus,
    )
    async with second, open_channel(second.address, access=ACCESS) as channel:
        stub = run_pb2_grpc.RunServiceStub(channel)
        for num, response in enumerate(whole, start=1):
            request = run_pb2.StreamSamplesRequest(run=mesh.name, cursor=response.cursor)
            assert [r async for r in stub.StreamSamples(request)] == whole[num:]


async def test_payloads_outlive_housekeeping_since_a_reader_may_come_late(mesh: MeshParts) -> None:
    await generate(mesh, 6)
    assert mesh.node is not None

    async def ended() -> bool:
        return (await mesh.state()).ended != ""

    await eventually(ended)
    before = await (await mesh.bus.open(run_streams(mesh.name).samples.name)).info()
    await asyncio.sleep(4 * mesh.config.run.housekeeping_s)  # what must not happen has no event to wait for
    after = await (await mesh.bus.open(run_streams(mesh.name).samples.name)).info()
    assert (after.first_seq, after.num_records) == (before.first_seq, before.num_records) == (1, 6)
    assert len(await streamed(mesh)) == 6


async def test_a_reader_passes_a_payload_that_is_lost_by_the_cursor_in_the_error(mesh: MeshParts) -> None:
    await generate(mesh, 6)
    await (await mesh.bus.open(run_streams(mesh.name).samples.name)).purge_below(2)
    with pytest.raises(PayloadLost, match="continues after it") as caught:
        await streamed(mesh)
    assert len(await streamed(mesh, caught.value.metadata["cursor"])) == 5


async def test_an_episode_that_contradicts_its_metadata_comes_as_a_failure_and_the_rest_follows(
    mesh: MeshParts,
) -> None:
    reports = [await mesh.finished(lease, step=0) for lease in await mesh.acquire(6)]
    reports[2].samples[0].steps[0].num_tokens += 1
    reports[2].samples[0].num_tokens += 1
    await mesh.report(reports)
    found = await streamed(mesh)
    assert [r.failure.reason for r in found] == ["", "", "METADATA_MISMATCH", "", "", ""]
    assert (found[2].HasField("episode"), bool(found[2].task.task_id), bool(found[2].cursor)) == (False, True, True)


async def test_a_reader_that_hangs_up_costs_nothing_and_a_stopped_run_ends_the_stream(mesh: MeshParts) -> None:
    await generate(mesh, 2)
    assert len(await streamed(mesh, num=2)) == 2
    await mesh.call(mesh.run.StopRun, run_pb2.StopRunRequest(run=mesh.name, reason="enough"))
    assert len(await streamed(mesh)) == 2


async def test_a_run_with_a_learner_streams_nothing_and_one_without_leases_nothing(mesh: MeshParts) -> None:
    with pytest.raises(NoLearner):
        await mesh.lease(1)
    trains = await mesh.another_run(f"{mesh.name}-trains")
    await trains.begin()
    with pytest.raises(HasLearner, match="lease batches"):
        await streamed(trains)


@pytest.mark.parametrize("cursor", ["1", "1.", "a.b", "-1.0", "1.0.0"])
async def test_a_cursor_that_no_response_held_is_refused(mesh: MeshParts, cursor: str) -> None:
    with pytest.raises(InvalidInput, match="cursor") as caught:
        await streamed(mesh, cursor)
    assert caught.value.violations[0].field == "cursor"


async def test_a_run_that_no_process_made_is_unknown(mesh: MeshParts) -> None:
    with pytest.raises(UnknownRun):
        await streamed(await mesh.another_run("nobody"))
