"""A mesh of real processes under a supervisor that starts again whatever ends, and the hands to end it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmesh.services.mesh.config import MeshConfig
from rollmesh.services.mesh.place import Place, open_place
from rollmesh.shared.config import config_from_dict, to_yaml
from rollmesh.shared.errors import MeshError
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.trainer.tokenizer import build_tokenizer, save_tokenizer
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc, run_pb2, run_pb2_grpc

from .traps import FOLDER_VARIABLE, Traps

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
FAKE = "rollmesh.services.inference.engines.fake_engine"
POLL_S = 0.05
MIB = 1 << 20

HOSTS: Mapping[str, Sequence[str]] = {
    "nats": ("nats",),
    "coordinator": ("coordinator",),
    "gateway": ("gateway",),
    "services": ("depot", "reward", "data", "sandbox-0"),
    "inference-0": ("inference-0",),
    "inference-1": ("inference-1",),
    "rollout-0": ("rollout-0",),
    "learner": ("learner",),
}
"""Processes, and the parts each hosts."""
LEARNER_APART: Mapping[str, Sequence[str]] = {
    "rest": (*HOSTS["nats"], "coordinator", "gateway", *HOSTS["services"], "inference-0", "inference-1", "rollout-0"),
    "learner": ("learner",),
}
"""For what is done to the learner alone."""


def mesh_config(model: Path, *, engine: str = f"{FAKE}:FakeEngine", **run: Any) -> MeshConfig:
    """Fake model, trainer and sandbox engine; everything else is the real thing. Short leases, so that the dead are missed soon."""
    sampling = {"max_tokens": 20}
    return config_from_dict(
        MeshConfig,
        {
            "run": {
                "name": "chaos", "max_staleness": 2, "batch_groups": 8, "group_size": 8, "eval_every": 0, "tries_max": 50,
                "episode_lease_s": 4.0, "batch_lease_s": 6.0, "group_s_max": 60.0,
            }
            | run,
            "counts": {"inference": 2},
            "coordinator": {
                "fleet": {"heartbeat_s": 0.5, "suspect_after_s": 3.0, "dead_after_s": 6.0},
                "run": {"snapshot_records": 400, "housekeeping_s": 0.5},
                "streams": {"samples_bytes_max": 256 * MIB, "ledger_bytes_max": 128 * MIB},
            },
            "inference": {
                "engine": engine,
                "engine_config": f"{FAKE}:FakeEngineConfig",
                "engine_options": {"vocab_size": 112},
            },
            "rollout": {
                "agent": f"{HERE / 'agent.py'}:SeveralTurns", "model_dir": str(model), "sampling": sampling,
                "worker": {"episodes_max": 128},
            },
            "reward": {"finalizer": {"name": "keep_all"}},
            "sandbox": {"engine": "fake", "orphan_s": 2.0},
            "learner": {
                "engine": "tests.chaos.trainer:open_trainer",
                "checkpoint_every": 3,
                "tensorboard": False,
            },
        },
    )  # fmt: skip


def save_model_folder(folder: Path) -> Path:
    """What workers need of a model: its tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(build_tokenizer(), folder)
    return folder


@dataclass
class World:
    """The processes of one run. `running` is kept up to date by the supervisor."""

    place: Place
    config_file: Path
    traps: Traps
    hosts: Mapping[str, Sequence[str]]
    running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    exits: list[tuple[str, int]] = field(default_factory=list)
    """Host and exit code of every process that ended."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """The learner has ended in good order."""
    broken: list[str] = field(default_factory=list)
    """Hosts whose config is refused: starting them again would not help."""

    def arguments(self, host: str) -> list[str]:
        return [
            *("--run-dir", str(self.place.run_dir), "--config", str(self.config_file)),
            *("--parts", ",".join(self.hosts[host])),
        ]

    async def supervise(self, host: str) -> None:
        """Starts a host again whenever it ends, unless in good order."""
        environment = {**os.environ, FOLDER_VARIABLE: str(self.traps.folder), "PYTHONUNBUFFERED": "1"}
        while True:
            with (self.place.run_dir / f"{host}.log").open("ab") as log:
                process = self.running[host] = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "tests.chaos.launch", *self.arguments(host)),
                    cwd=ROOT, env=environment, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL,
                )  # fmt: skip
            code = await process.wait()
            self.exits.append((host, code))
            if code == 0:  # done, or drained
                if host == "learner":
                    self.done.set()
                return
            if code == 2:
                self.broken.append(host)
                return

    # Ending things ----------------------------------------------------------------------------------------------------

    def kill(self, host: str) -> int:
        """SIGKILL, in the middle of whatever it does. The process that was killed."""
        process = self.running[host]
        process.kill()
        return process.pid

    def kill_nats_server(self) -> int:
        """The server itself; its host notices and ends, too."""
        (ports,) = self.place.folder("nats").glob("nats-server_*.ports")
        pid = int(ports.stem.rpartition("_")[2])
        os.kill(pid, signal.SIGKILL)
        return pid

    def resume(self, pid: int) -> None:
        """Ends a SIGSTOP."""
        os.kill(pid, signal.SIGCONT)

    # Looking ----------------------------------------------------------------------------------------------------------

    async def until(self, what: str, condition: Callable[[], bool], *, limit_s: float) -> None:
        """Until `condition` holds. Fails with the tail of every log."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert not self.broken, f"refused to start: {self.broken}\n{self.logs()}"
            assert time.monotonic() < deadline_s, f"not within {limit_s} s: {what}\n{self.logs()}"
            await asyncio.sleep(POLL_S)

    async def until_state(
        self, what: str, condition: Callable[[run_pb2.RunState], bool], *, limit_s: float
    ) -> run_pb2.RunState:
        """Until the run is in a state, as the coordinator says. Its absence is no answer and is waited out."""
        deadline_s = time.monotonic() + limit_s
        last: run_pb2.RunState | None = None
        while True:
            last = await self.state() or last
            if last is not None and condition(last):
                return last
            assert time.monotonic() < deadline_s, (
                f"not within {limit_s} s: {what}; the run is in\n{last}\n{self.logs()}"
            )
            await asyncio.sleep(POLL_S)

    async def state(self) -> run_pb2.RunState | None:
        """The run's state; None if nobody says so now."""
        return await run_state(self.place)

    async def fleet(self) -> list[coordinator_pb2.FleetNode]:
        async with open_channel(self.place.coordinator, access=self.place.access) as channel:
            stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            response = await stub.GetFleet(coordinator_pb2.GetFleetRequest(), timeout=10.0, wait_for_ready=True)
            return list(response.nodes)

    def logs(self, lines: int = 12) -> str:
        """The ends of all logs, for a failure."""
        parts = [f"exits: {self.exits}"]
        for path in sorted(self.place.run_dir.glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {path.name}", *tail]))
        return "\n".join(parts)


async def run_state(place: Place) -> run_pb2.RunState | None:
    """The state of the run at `place`; None if nobody says so now."""
    async with open_channel(place.gateway, access=place.access) as channel:
        stub: Any = run_pb2_grpc.RunServiceStub(channel)
        try:
            with typed_errors():
                response = await stub.GetRun(run_pb2.GetRunRequest(run=place.run), timeout=2.0)
                found: run_pb2.RunState = response.state
                return found
        except MeshError:
            return None


@asynccontextmanager
async def world(folder: Path, config: MeshConfig, hosts: Mapping[str, Sequence[str]] = HOSTS) -> AsyncIterator[World]:
    """All processes of a run over `folder`; ended with it."""
    place = open_place(config, run_dir=folder / "run", base_dir=folder)
    config_file = folder / "config.yaml"
    config_file.write_text(to_yaml(config))
    made = World(place=place, config_file=config_file, traps=Traps(folder / "traps"), hosts=hosts)
    supervisors = [asyncio.create_task(made.supervise(host), name=host) for host in hosts]
    try:
        yield made
    finally:
        for task in supervisors:
            task.cancel()
        await asyncio.gather(*supervisors, return_exceptions=True)
        await _end_all(made)


async def _end_all(made: World) -> None:
    """nats-server goes with its host: the kernel tells it of the parent's end."""
    alive = [process for process in made.running.values() if process.returncode is None]
    for process in alive:
        process.kill()
    async with asyncio.timeout(20.0):
        await asyncio.gather(*(process.wait() for process in alive))
