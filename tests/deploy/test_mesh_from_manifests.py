"""A mesh of the command lines in the Kubernetes manifests: every pod as a process, with TLS, a NATS server, probes,
drain and grace periods."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from rollmesh.app.certificates import make_certificates
from rollmesh.app.nats_files import NatsPlan, write_nats_files

from ..chaos.world import mesh_config, save_model_folder
from ..integration.up_mesh import COMMAND
from .manifests import config_of, workloads
from .pods import NAMESPACE, START_S, Pod, Pods

OVERLAY = "single-node"
NODES = ("gateway-0", "depot-0", "data-0", "reward-0", "sandbox-0", "inference-0", "rollout-0")
EVERY = ("nats-0", "coordinator-0", *NODES, "learner-0")
TRAINED_S = 180.0
UPDATES = 2
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def pods(tmp_path: Path) -> Pods:
    """A run of two updates with small batches."""
    return prepared(tmp_path, updates_max=UPDATES, batch_groups=2, group_size=2)


def prepared(folder: Path, **run: Any) -> Pods:
    """Return pods over `folder`, with the Secrets, the configuration and the model of a run."""
    made = Pods(folder)
    addresses = [made.address_of(pod) for pod in EVERY]
    make_certificates(folder / "secret", hosts=addresses)
    save_model_folder(folder / "models" / "model")
    (folder / "config").mkdir()
    (folder / "config" / "mesh.yaml").write_text(yaml.safe_dump(mesh_tree(made, run)))
    write_nats(made)
    return made


def mesh_tree(pods: Pods, run: dict[str, Any]) -> dict[str, Any]:
    """Return mesh.yaml of the overlay with a fake engine and trainer, and the paths of this host."""
    fake = msgspec.to_builtins(mesh_config(pods.folder / "models" / "model", **run))
    manifest = yaml.safe_load(pods.local(yaml.safe_dump(config_of(OVERLAY)), "coordinator-0"))
    manifest["telemetry"]["metrics_address"] = "127.0.0.1:0"  # the pods share a host
    kept = {key: manifest[key] for key in ("security", "telemetry")}
    changed = {key: fake[key] for key in ("run", "inference", "rollout", "reward", "learner")}
    changed["run"] |= {
        "episode_lease_s": 60.0,
        "batch_lease_s": 60.0,
    }  # no process is killed here, and the host may be busy
    streams = {"samples_bytes_max": 1 << 28, "ledger_bytes_max": 1 << 27}
    changed["inference"].pop("server")
    return {**kept, **changed, "coordinator": {"streams": streams}}


def write_nats(pods: Pods) -> None:
    """Write the Secrets of NATS by the command in docs/deploy.md."""
    plan = NatsPlan(
        out=pods.folder / "made",
        servers=(f"nats-0={pods.address_of('nats-0')}",),
        meshes=(NAMESPACE,),
        tls="/etc/rollmesh/secret",
        store="/var/lib/nats",
        monitor="0.0.0.0:8222",
    )
    write_nats_files(plan)
    (pods.folder / "nats").mkdir()
    for path in (plan.out / "servers").iterdir():
        text = pods.local(path.read_text(), "nats-0")
        (pods.folder / "nats" / path.name).write_text(text)
    for role in (plan.out / "logins" / NAMESPACE).iterdir():
        mounted = pods.folder / "logins" / role.name / "login"
        mounted.parent.mkdir(parents=True)
        shutil.copy(role, mounted)  # with its mode


@asynccontextmanager
async def running(pods: Pods, *names: str) -> AsyncIterator[dict[str, Pod]]:
    """Run pods; those that remain at the end are killed."""
    found = workloads(OVERLAY)
    started: dict[str, Pod] = {}
    try:
        for name in names:
            workload = found[name.rpartition("-")[0]]
            started[name] = await pods.start(workload, name)
            if name == "coordinator-0":
                await started[name].until_ready()
        yield started
    finally:
        for pod in started.values():
            pod.kill()
        await asyncio.gather(*(pod.process.wait() for pod in started.values()))


async def rollmesh(*arguments: str) -> tuple[int, str]:
    """Return exit code and output of a command."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(60.0):
        said, _ = await process.communicate()
    return process.returncode or 0, said.decode()


async def test_every_service_runs_alone_trains_and_drains_within_its_grace_period(pods: Pods) -> None:
    async with running(pods, *EVERY) as mesh:
        await asyncio.gather(*(mesh[name].until_ready() for name in NODES))
        await mesh["learner-0"].until_finished(TRAINED_S)
        code, said = await rollmesh("status", str(pods.volume("coordinator-0") / "mesh"))
        assert code == 0, said
        assert all(name in said for name in ("inference-0", "rollout-0", "gateway-0")), said
        code, said = await rollmesh("audit", str(pods.volume("coordinator-0") / "mesh"), "--json")
        assert code == 0, said
        assert '"holds": true' in said
        for name in (*reversed(NODES), "coordinator-0", "nats-0"):
            took = await mesh[name].delete()
            assert mesh[name].process.returncode == 0, f"{name} after {took:.1f} s: {mesh[name].log}"
            print(name, f"{took:.1f} s")


async def second(pods: Pods, name: str) -> tuple[int, str]:
    """Start one more replica of a workload and return its exit code and log."""
    pod = await pods.start(workloads(OVERLAY)[name.rpartition("-")[0]], name)
    try:
        async with asyncio.timeout(START_S):
            code = await pod.process.wait()
    finally:
        pod.kill()
    return code, pod.log


async def test_a_second_coordinator_or_depot_is_rejected_and_the_mesh_goes_on(pods: Pods) -> None:
    async with running(pods, "nats-0", "coordinator-0", "depot-0") as mesh:
        await mesh["depot-0"].until_ready()
        code, said = await second(pods, "coordinator-1")
        assert code == 2, said
        assert "a coordinator serves at" in said
        assert "set the number of replicas to 1" in said
        code, said = await second(pods, "depot-1")
        assert code == 2, said
        assert "the mesh has its depot" in said
        assert await mesh["coordinator-0"].serves("ready")
        assert await mesh["depot-0"].serves("ready")
