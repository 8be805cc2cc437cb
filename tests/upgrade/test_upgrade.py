"""Every service of a run is upgraded to the present code, one after the other, while the run goes on, and no sample is
lost.

The old side is the wheel of the commit in `BEFORE`, in a virtual environment that has only rollmesh and reads the other
packages from this one. Services with a fixed address are restarted in place. Of the others, a second node joins with
the present code, and the old one is drained. The run has the torch trainer and engine, a real sandbox, and an agent
with tool calls.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.run_layout import RunLayout, open_layout
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.audit_checkpoint import find_list
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.config.loader import load_config
from rollmesh.shared.domain.protocol import PROTOCOL
from rollmesh.trainer.model_files import write_model_folder
from rollmesh.trainer.trained_log import read_trained
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import run_pb2

from ..chaos.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
BEFORE = "25f20c124de2cbd5e27c877eb030f47266fd3171"
"""The last commit before nodes reported a protocol."""
READY_S = 180.0
END_S = 90.0
AGENT = """
class Agent:
    async def run(self, task, env):
        turn = await env.generate(max_tokens=6)
        result = await env.tool("calculator", f"{len(turn.text)}+1")
        env.observe(result.text)
        await env.generate(max_tokens=6)
"""
SCORER = """
class Scorer:
    async def score(self, item):
        return float(sum(map(ord, item.response())) % 2)
"""
CONFIG = """
model: model
run: {name: upgraded, max_staleness: 2, batch_groups: 2, group_size: 4, updates_max: 0, eval_every: 5, eval_tasks: 4}
counts: {sandbox: 1, inference: 1, rollout: 1}
data:
  source: {name: jsonl, options: {path: tasks.jsonl, tools: [calculator], validation_share: 0.1, test_share: 0.2}}
rollout: {agent: "agent.py:Agent", limits: {context_tokens_max: 256}, worker: {episodes_max: 8}}
reward: {scorers: [{name: "scorer.py:Scorer", reward: correct}], finalizer: {name: keep_all}}
inference: {engine: {name: torch, options: {context_max: 256}}, drain_s: 10}
learner: {checkpoint_every: 3, tensorboard: false}
"""
SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)
IN_PLACE = ("coordinator", "nats", "depot", "gateway")
"""Services that keep their address, in the order of their upgrade. The learner follows at the end."""
SECOND = ("data", "reward", "sandbox", "inference", "rollout")
"""Services of which a second node joins before the first one is drained."""


@pytest.fixture(scope="module")
def old_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the interpreter of an environment with the wheel of `BEFORE`. Skips if the history lacks it."""
    folder = tmp_path_factory.mktemp("before")
    archived = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True, check=False)
    if archived.returncode:
        pytest.skip(f"the history of this clone lacks {BEFORE[:12]}: `git fetch --unshallow`")
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as tree:
        tree.extractall(folder / "source", filter="data")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, folder / "source"], check=True, timeout=300)
    (wheel,) = folder.glob("rollmesh-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=120)
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    subprocess.run([*pip, "install", "--no-deps", "--target", packages, wheel], check=True, timeout=300)
    # A plain path in a .pth file adds the packages there, and does not execute the .pth files there, which name the
    # present rollmesh.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = str(folder / "venv" / "bin" / "python")
    where = "import rollmesh.mesh.host as host, grpc; print(host.__file__)"
    shown = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True, timeout=60).stdout
    assert Path(shown.strip()).is_relative_to(packages), shown
    return python


@dataclass
class Service:
    """One process of the mesh."""

    name: str
    command: tuple[str, ...]
    log: Path
    cwd: Path
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        scripts = sysconfig.get_path("scripts")  # nats-server is there
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                cwd=self.cwd,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def ended(self) -> int:
        assert self.process is not None
        async with asyncio.timeout(END_S):
            return await self.process.wait()

    async def stop(self) -> int:
        """Stop it as a process manager does, and return its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return await self.ended()

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()


@dataclass
class Upgraded:
    """The processes of the run, old and new."""

    layout: RunLayout
    old_python: str
    world: World
    services: dict[str, Service] = field(default_factory=dict)

    async def host(self, name: str, python: str) -> None:
        """Start a service at its place in the run folder."""
        folder = self.layout.base_dir
        command = ("--run-dir", str(self.layout.run_dir), "--config", str(folder / "run.yaml"), "--services", name)
        await self._start(name, (python, "-m", "rollmesh.mesh", *command))

    async def join(self, kind: str) -> str:
        """Let a node of the present code join. Return its id."""
        name = f"{kind}-new"
        await self._start(name, self.serve(sys.executable, kind, "new"))
        return name

    def serve(self, python: str, kind: str, name: str) -> tuple[str, ...]:
        at = ("--join", self.layout.gateway, "--token-file", str(self.layout.run_dir / "token"))
        folder = ("--dir", str(self.layout.base_dir / f"{kind}-{name}"), "--base-dir", str(self.layout.base_dir))
        return (python, "-m", "rollmesh.cli", "serve", kind, *at, "--name", name, *folder)

    async def _start(self, name: str, command: tuple[str, ...]) -> None:
        log = self.layout.folder("logs") / f"{name}.log"
        service = self.services[name] = Service(name, command, log, self.layout.base_dir)
        await service.start()

    async def until_ready(self, name: str) -> None:
        """Wait until the coordinator uses a node, and the node has this release's protocol."""
        node: pb.FleetNode | None = None
        async with asyncio.timeout(READY_S):
            while True:
                node = next((one for one in await self.world.fleet() if one.node_id == name), None)
                if node is not None and node.state == pb.NODE_STATE_READY and node.protocol.minor == PROTOCOL.minor:
                    return
                service = self.services[name]
                assert service.process is not None
                assert service.process.returncode is None, f"{name} ended\n{self.world.logs()}"
                await asyncio.sleep(0.2)

    async def progress(self, num: int = 1) -> run_pb2.RunState:
        """Wait for further updates."""
        now = await self.world.until_state("the state", lambda state: bool(state.policies), limit_s=READY_S)
        goal = now.policies[0].applied_step + num
        return await self.world.until_state(
            f"update {goal}", lambda state: state.policies[0].applied_step >= goal, limit_s=READY_S
        )

    async def drain(self, name: str) -> None:
        """Drain an old node with the command, which waits until it has left."""
        said = await self.run("drain", name, *self.serve(sys.executable, "", "")[5:9], "--wait")
        assert said[0] == 0, said
        assert await self.services.pop(name).ended() == 0

    async def run(self, *arguments: str) -> tuple[int | None, str]:
        """Run `rollmesh ...` of the present code."""
        return await self.execute(sys.executable, "-m", "rollmesh.cli", *arguments)

    async def execute(self, *command: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=self.layout.base_dir, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        async with asyncio.timeout(END_S):
            said, _ = await process.communicate()
        return process.returncode, said.decode()


@asynccontextmanager
async def mesh_of(folder: Path, old_python: str) -> AsyncIterator[Upgraded]:
    """Start every service of a run with the old release; kill what is left at the end."""
    (folder / "model").mkdir()
    write_model_folder(build_tiny_model(SMALL, seed=1), build_tokenizer(), folder / "model")
    (folder / "agent.py").write_text(AGENT)
    (folder / "scorer.py").write_text(SCORER)
    tasks = [{"question": f"{n}+{n}", "answer": str(2 * n)} for n in range(200)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (folder / "run.yaml").write_text(CONFIG)
    config = load_config(MeshConfig, folder / "run.yaml")
    layout = open_layout(config, run_dir=folder / "run", base_dir=folder)
    mesh = Upgraded(layout=layout, old_python=old_python, world=World(layout=layout))
    try:
        for name in (
            "nats",
            "coordinator",
            "depot",
            "reward",
            "data",
            "gateway",
            "sandbox-0",
            "inference-0",
            "rollout-0",
            "learner",
        ):
            await mesh.host(name, old_python)
        yield mesh
    finally:
        for service in mesh.services.values():
            service.kill()
        for service in mesh.services.values():
            if service.process is not None:
                await service.process.wait()


async def test_a_run_is_upgraded_service_by_service(tmp_path: Path, old_python: str) -> None:
    async with mesh_of(tmp_path, old_python) as mesh:
        world = mesh.world
        await world.until_state("two updates", lambda s: s.policies[0].applied_step >= 2, limit_s=READY_S)

        code, said = await mesh.execute(*mesh.serve(sys.executable, "rollout", "early"))
        assert (code, "has protocol" in said, "upgrade the coordinator first" in said) == (2, True, True), said

        for name in IN_PLACE:
            assert await mesh.services[name].stop() == 143, world.logs()
            await mesh.host(name, sys.executable)
            if name not in ("coordinator", "nats"):
                await mesh.until_ready(name)
            await mesh.progress()
        for kind in SECOND:
            old = kind if kind in ("data", "reward") else f"{kind}-0"
            await mesh.until_ready(await mesh.join(kind))
            await mesh.drain(old)
            await mesh.progress()
        assert await mesh.services["learner"].stop() == 143, world.logs()
        await mesh.host("learner", sys.executable)
        state = await mesh.progress(4)

        code, said = await mesh.run("stop", "upgraded", *mesh.serve(sys.executable, "", "")[5:9])
        assert code == 0, said
        assert await mesh.services["learner"].ended() == 0, world.logs()
        ended = await world.until_state("the end", lambda s: bool(s.ended) and s.samples.live == 0, limit_s=END_S)
        check_accounts(ended)
        checkpoints = mesh.layout.run_dir / "checkpoints"
        port = (mesh.layout.folder("nats") / "port").read_text().strip()
        server = await JetStreamBus.connect(f"nats://127.0.0.1:{port}", login=BusLogin.of(mesh.layout.access))
        bus = mesh.layout.with_payloads(server)
        try:
            audit = await audit_run(bus, "upgraded", checkpoint=checkpoints, payloads=True)
        finally:
            await bus.close()
        assert audit.holds, audit.to_text()
        assert audit.checkpoint is not None
        assert (
            audit.checkpoint.updates
            == audit.updates
            == ended.policies[0].applied_step
            >= state.policies[0].applied_step
        )
        ids = [sample for update in read_trained(find_list(checkpoints)) for sample in update.sample_ids]
        assert len(ids) == len(set(ids)) == ended.samples.trained == audit.samples.trained
        print(audit.to_text())
        for name in reversed(list(mesh.services)):
            if name not in ("learner", "nats"):
                assert await mesh.services[name].stop() in (0, 143), (name, world.logs())


def check_accounts(state: run_pb2.RunState) -> None:
    """No sample failed, and every sample that began has its end: trained, too old, or cancelled by the end of the
    run."""
    for counts in (state.samples, state.eval_samples):
        assert counts.failed == counts.filtered == 0, counts
        assert counts.reserved == counts.trained + counts.stale + counts.cancelled + counts.exported, counts
    assert state.samples.trained > 0
