"""What runs that have ended cost a mesh that stays: no task, no delay of a live run, no disk beyond what they hold.
DeleteRun removes them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from rollmesh.services.coordinator.node import CoordinatorNode
from rollmesh.shared.bus.embedded_server import EmbeddedServerConfig
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import DiskFull, NotReady, Overloaded, RunEnded, RunLive, UnknownRun
from rollmesh.v1 import coordinator_pb2, run_pb2

from .coordinator_mesh import CONFIG, DEPOT, MIB, MeshParts, coordinator_mesh, eventually, spec

SOON = msgspec.structs.replace(CONFIG, run=msgspec.structs.replace(CONFIG.run, ended_idle_s=0.05))
"""An ended run is soon no longer led."""
LATER = msgspec.structs.replace(CONFIG, run=msgspec.structs.replace(CONFIG.run, ended_idle_s=3600.0))


def streams(run: str) -> list[str]:
    specs = run_streams(run)
    return [stream.name for stream in (specs.samples, specs.ledger, specs.dead)]


async def reserved(mesh: MeshParts, run: str) -> dict[str, int]:
    """Bytes that NATS reserves for each stream of a run that exists."""
    js = mesh.bus._client.jetstream()  # type: ignore[attr-defined]
    found = {info.config.name: info.config.max_bytes for info in await js.streams_info()}
    return {name: found[name] for name in streams(run) if name in found}


async def stop(mesh: MeshParts) -> None:
    await mesh.call(mesh.run.StopRun, run_pb2.StopRunRequest(run=mesh.name))


async def delete(mesh: MeshParts, run: str) -> None:
    await mesh.call(mesh.run.DeleteRun, run_pb2.DeleteRunRequest(run=run))


def node_of(mesh: MeshParts) -> CoordinatorNode:
    assert mesh.node is not None
    return mesh.node


async def not_led(mesh: MeshParts, run: str) -> None:
    async def gone() -> bool:
        return run in node_of(mesh).runs.ended and not tasks_of(run)

    await eventually(gone)


def tasks_of(run: str) -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(f"{run} ")]


async def test_an_ended_run_is_led_only_while_it_is_asked_for(tmp_path: Path) -> None:
    async with coordinator_mesh(tmp_path, SOON) as mesh:
        await mesh.begin(updates_max=1)
        digest = await mesh.train(1)
        await mesh.checkpoint(1, digest)
        await mesh.publish(1)
        await not_led(mesh, "r")
        room = await reserved(mesh, "r")
        assert room["RM_r_SAMPLES"] < 2 * MIB
        assert room["RM_r_DEAD"] <= MIB

        state = await mesh.state()
        assert (state.ended, state.samples.trained, state.policies[0].applied_step) == ("UPDATES_MAX", 4, 1)
        await not_led(mesh, "r")
        assert (await mesh.state()).ledger_position == state.ledger_position, "asking for a run records nothing"
        assert "r" in node_of(mesh).runs.ended, "its state was read before"

        node = await mesh.restart_coordinator()
        assert tasks_of("r") == []
        assert (await mesh.state()).samples == state.samples
        await not_led(mesh, "r")
        assert node.runs.goals()["r"].ended

        change = run_pb2.ChangeRunRequest(spec=spec(updates_max=2), change_id="more")
        assert (await mesh.call(mesh.run.ChangeRun, change)).reopened
        assert (await reserved(mesh, "r"))["RM_r_SAMPLES"] == CONFIG.streams.samples_bytes_max
        await mesh.attach(1, digest)
        await mesh.publish(1)
        await mesh.train(2)
        assert (await mesh.state()).policies[0].applied_step == 2


async def test_a_live_run_gets_workers_at_once_beside_ended_ones(tmp_path: Path) -> None:
    """Also while the ended runs are still led, and by a worker that has waited since before the run was there."""
    async with coordinator_mesh(tmp_path, LATER) as mesh:
        for number in range(6):
            mesh.name = f"old-{number}"
            await mesh.begin()
            await stop(mesh)
        mesh.name = "new"
        waiting = asyncio.create_task(mesh.acquire(wait_s=30.0))
        await mesh.create()
        await mesh.attach()
        began_s = time.monotonic()
        await mesh.publish(0)
        leases = await waiting
        assert leases[0].key.run == "new"
        await mesh.generate([*leases, *await mesh.acquire()][:4], step=0)
        assert (await mesh.lease(1)).lease_id
        assert time.monotonic() - began_s < 8.0, "at once, not at the end of a poll, which takes 10 s or more"


async def test_work_of_two_runs_that_comes_at_once_is_not_lost(tmp_path: Path) -> None:
    """The worker gets one run's; the other's goes back without an attempt."""
    async with coordinator_mesh(tmp_path, LATER) as mesh:
        runs = []
        for name in ("a", "b"):
            mesh.name = name
            await mesh.begin(tries_max=1)
            runs.append(name)
        taken = {lease.lease_id: lease for _ in range(6) for lease in await mesh.acquire(num_max=2, wait_s=2.0)}
        assert {lease.key.run for lease in taken.values()} <= set(runs)
        assert all(lease.key.attempt == 1 or lease.key.run for lease in taken.values())
        for name in runs:
            mesh.name = name
            state = await mesh.state()
            assert (state.samples.failed, state.samples.live) == (0, state.samples.reserved)


async def test_many_runs_one_after_the_other_fit_a_store_for_few(tmp_path: Path) -> None:
    """130 MiB each of 400, where ended ones keep 19; none of them is retired by time. Only live ones count for
    `runs_max`."""
    store = EmbeddedServerConfig(store_bytes_max=400 * MIB)
    streams = msgspec.structs.replace(CONFIG.streams, samples_bytes_max=64 * MIB, ledger_bytes_max=64 * MIB)
    config = msgspec.structs.replace(LATER, runs_max=2, streams=streams)
    async with coordinator_mesh(tmp_path, config, store=store) as mesh:
        for number in range(6):
            mesh.name = f"r{number}"
            await mesh.begin()
            await stop(mesh)
        for name in ("live-1", "live-2"):
            await mesh.create(run=name)
        with pytest.raises(Overloaded, match="runs_max"):
            await mesh.create(run="one-more")
        assert await reserved(mesh, "one-more") == {}


async def test_a_run_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    store = EmbeddedServerConfig(store_bytes_max=60 * MIB)
    async with coordinator_mesh(tmp_path, LATER, store=store) as mesh:
        await mesh.create(run="first")
        with pytest.raises(DiskFull) as caught:
            await mesh.create(run="second")
        for remedy in ("coordinator.streams.samples_bytes_max", "bus.embedded.store_bytes_max", "rollmesh delete"):
            assert remedy in str(caught.value)
        assert await reserved(mesh, "second") == {}
        assert not (tmp_path / "coordinator" / "runs" / "second").exists()
        with pytest.raises(UnknownRun):
            await mesh.call(mesh.run.GetRun, run_pb2.GetRunRequest(run="second"))
        await mesh.call(mesh.run.StopRun, run_pb2.StopRunRequest(run="first"))
        assert (await mesh.create(run="second")).created


async def test_a_deleted_run_is_gone_and_its_name_can_be_used_again(tmp_path: Path) -> None:
    async with coordinator_mesh(tmp_path, SOON) as mesh:
        with pytest.raises(UnknownRun):
            await delete(mesh, "r")
        with pytest.raises(UnknownRun):
            await delete(mesh, "not/a name")
        await mesh.begin()
        blobs = depot_blobs(mesh)
        chunk = await mesh.put(b"weights of r", owner="weights:r/main@0.0")
        shared = await mesh.put(b"weights of two runs", owner="weights:r/main@0.0")
        await mesh.put(b"weights of two runs", owner="weights:r2/main@0.0")
        await mesh.train(1)
        with pytest.raises(RunLive, match="StopRun"):
            await delete(mesh, "r")
        await stop(mesh)
        await delete(mesh, "r")
        assert await reserved(mesh, "r") == {}
        assert not (tmp_path / "coordinator" / "runs" / "r").exists()
        left = depot_blobs(mesh)
        assert chunk not in left
        assert {*blobs, shared} <= left
        for verb, request in (
            (mesh.run.GetRun, run_pb2.GetRunRequest(run="r")),
            (mesh.run.DeleteRun, run_pb2.DeleteRunRequest(run="r")),
        ):
            with pytest.raises(UnknownRun):
                await mesh.call(verb, request)

        await mesh.begin(max_staleness=2)
        await mesh.train(1)
        assert (await mesh.state()).policies[0].applied_step == 1
        await stop(mesh)
        await not_led(mesh, "r")
        await delete(mesh, "r")
        with pytest.raises(UnknownRun):
            await mesh.state()


async def test_a_run_is_not_deleted_while_its_weights_cannot_be(tmp_path: Path) -> None:
    async with coordinator_mesh(tmp_path, SOON) as mesh:
        await mesh.begin()
        await stop(mesh)
        await mesh.call(mesh.coordinator.Drain, coordinator_pb2.DrainRequest(node_id="depot-0"))

        async def gone() -> bool:
            nodes = (await mesh.coordinator.GetFleet(coordinator_pb2.GetFleetRequest(kind=DEPOT))).nodes
            return all(node.state != coordinator_pb2.NODE_STATE_READY for node in nodes)

        await eventually(gone)
        with pytest.raises(NotReady, match="depot"):
            await delete(mesh, "r")
        assert (await mesh.state()).ended == "STOPPED"


async def test_a_batch_that_is_out_when_its_run_is_stopped_keeps_the_run_led(tmp_path: Path) -> None:
    async with coordinator_mesh(tmp_path, SOON) as mesh:
        await mesh.begin(batch_lease_s=30.0)
        await mesh.generate(await mesh.acquire(), step=0)
        batch = await mesh.lease(1)
        await stop(mesh)
        await node_of(mesh).runs.retire(0.0)
        assert "r" in node_of(mesh).runs.drivers
        await mesh.commit(1, [batch.lease_id])
        with pytest.raises(RunEnded):
            await mesh.lease(2)
        await not_led(mesh, "r")


def depot_blobs(mesh: MeshParts) -> set[str]:
    depot = mesh.folder / "depot"
    return {path.name for path in depot.iterdir() if len(path.name) == 64}
