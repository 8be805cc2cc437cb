"""Many consecutive runs on one mesh of processes: all are accepted, and the time from a publication to the next batch
does not grow."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import msgspec
import pytest

from rollmesh.client import Client
from rollmesh.mesh import MeshConfig
from rollmesh.shared.bus.run_streams import StreamLimits
from rollmesh.shared.rpc.access import Access

from ..chaos.world import mesh_config, save_model_folder
from ..integration.up_mesh import rollmesh, up
from .trainer import whole_run

GROWTH_MAX = 1.5
"""Limit relative to the mean over five runs. A run that waits for earlier runs would be several times slower."""


def default_mesh(folder: Path) -> MeshConfig:
    """A mesh whose streams and store have their default sizes."""
    config = mesh_config(save_model_folder(folder / "model"))
    coordinator = msgspec.structs.replace(config.coordinator, streams=StreamLimits())
    return msgspec.structs.replace(config, coordinator=coordinator)


@pytest.mark.slow
@pytest.mark.parametrize(("num_runs", "updates"), [(20, 5), (100, 1)])
async def test_runs_one_after_the_other_stay_as_fast_as_the_first(tmp_path: Path, num_runs: int, updates: int) -> None:
    async with up(default_mesh(tmp_path), tmp_path) as mesh:
        access = Access((await asyncio.to_thread(mesh.token_file.read_text)).strip())
        async with Client(mesh.gateway, token=access.token) as client:
            means = []
            for number in range(num_runs):
                took = await whole_run(client, f"run-{number}", updates_max=updates)
                assert len(took) == updates
                means.append(statistics.mean(took))
        first, last = statistics.mean(means[:5]), statistics.mean(means[-5:])
        print(f"{num_runs} runs: publication to batch {first:.3f} s in the first five, {last:.3f} s in the last five")
        assert last < GROWTH_MAX * first
        where = ("--join", mesh.gateway, "--token-file", str(mesh.token_file))
        ended = await rollmesh("stop", "run-0", *where)
        assert ended == "run run-0 has ended: UPDATES_MAX\n", "a run that has ended keeps its reason"
        assert await rollmesh("delete", "run-0", *where) == "run run-0 is deleted\n"
        listed = await rollmesh("status", *where, "--json")
        runs = {run["run"]: run["ended"] for run in msgspec.json.decode(listed)["runs"]}
        assert runs == {f"run-{number}": "UPDATES_MAX" for number in range(1, num_runs)}
