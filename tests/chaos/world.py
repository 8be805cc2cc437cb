"""A mesh of real processes under its supervisor, which restarts them, and the functions to kill them."""

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

import msgspec

from rollmesh.app.config import TrainConfig
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.process_events import ProcessEvent
from rollmesh.mesh.run_layout import RunLayout, open_layout
from rollmesh.mesh.supervisor import LOGS, Supervisor
from rollmesh.services.coordinator.core.records import ReplaySpec
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.errors import MeshError
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.trainer.model_files import save_tokenizer
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc, run_pb2, run_pb2_grpc

from .traps import FOLDER_VARIABLE, Traps

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
FAKE = "rollmesh.testing.fake_engine"
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
"""Processes, and the services of each."""
LEARNER_APART: Mapping[str, Sequence[str]] = {
    "rest": (*HOSTS["nats"], "coordinator", "gateway", *HOSTS["services"], "inference-0", "inference-1", "rollout-0"),
    "learner": ("learner",),
}
"""The processes of tests that kill only the learner."""


def mesh_config(
    model: Path, *, engine: str = f"{FAKE}:FakeEngine", finalizer: str = "keep_all", **run: Any
) -> MeshConfig:
    """Fake model, trainer and sandbox engine; everything else is real. Short leases, so that an exit is detected
    soon."""
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
            "processes": {"restarts_max": 1000, "backoff_s": 0.05, "backoff_s_max": 0.5, "stop_s": 10.0},
            "coordinator": {
                "fleet": {"heartbeat_s": 0.5, "suspect_after_s": 3.0, "dead_after_s": 6.0},
                "run": {"snapshot_records": 400, "housekeeping_s": 0.5},
                "streams": {"samples_bytes_max": 256 * MIB, "ledger_bytes_max": 128 * MIB},
            },
            "inference": {
                "engine": {"name": engine, "options": {"vocab_size": 112}},
            },
            "rollout": {
                "agent": f"{HERE / 'agent.py'}:SeveralTurns", "model_dir": str(model), "sampling": sampling,
                "worker": {"episodes_max": 128},
            },
            "reward": {"finalizers": [finalizer]},
            "sandbox": {"engine": "fake", "orphan_s": 2.0},
            "learner": {
                "engine": "tests.chaos.trainer:FakeWitness",
                "checkpoint_every": 3,
                "tensorboard": False,
            },
        },
    )  # fmt: skip


REPLAY = ReplaySpec(max_staleness=6, share=0.5, capacity_groups=16)


def with_replay(config: TrainConfig) -> TrainConfig:
    """Return the configuration with a replay log, of which half of each batch is."""
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, replay=REPLAY))


def paced(made: MeshConfig) -> MeshConfig:
    """Return the configuration with a model as slow as a real one, so that a run without an end leaves the processor to
    the rest of a test."""
    engine = made.inference.engine
    slow = msgspec.structs.replace(engine, options={**engine.options, "step_s": 0.1})
    return msgspec.structs.replace(made, inference=msgspec.structs.replace(made.inference, engine=slow))


def as_train_config(mesh: MeshConfig) -> TrainConfig:
    """Return the configuration of `rollmesh train` with these services."""
    fields: dict[str, Any] = {name: getattr(mesh, name) for name in MeshConfig.__struct_fields__}
    return TrainConfig(**fields)


def save_model_folder(folder: Path) -> Path:
    """Write the tokenizer and chat template that workers need."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(build_tokenizer(), folder)
    return folder


@dataclass
class World:
    """The processes of one run under the supervisor of the mesh."""

    layout: RunLayout
    folder_of_traps: Path | None = None
    supervisor: Supervisor | None = None
    """None if the world only watches a run."""
    exits: list[tuple[str, int]] = field(default_factory=list)
    """Host and exit code of every process that exited before the end of the world."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """The learner has ended cleanly."""
    closing: bool = False
    """The world is being stopped: later exits are expected."""

    @property
    def traps(self) -> Traps:
        assert self.folder_of_traps is not None, "only looking"
        return Traps(self.folder_of_traps)

    @property
    def pids(self) -> Mapping[str, int]:
        """The running processes, by host."""
        return self.supervisor.pids if self.supervisor is not None else {}

    def see(self, event: ProcessEvent) -> None:
        """Record an event of the supervisor."""
        if self.closing:
            return
        if event.what == "ended" and event.code is not None:
            self.exits.append((event.process, event.code))
            if (event.process, event.code) == ("learner", 0):
                self.done.set()

    # Kill and stop ----------------------------------------------------------------------------------------------------

    def kill(self, host: str) -> int:
        """Send SIGKILL at any point, and return the process."""
        pid = self.pids[host]
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_nats_server(self) -> int:
        """Kill the server; its host detects it and exits."""
        (ports,) = self.layout.folder("nats").glob("nats-server_*.ports")
        pid = int(ports.stem.rpartition("_")[2])
        os.kill(pid, signal.SIGKILL)
        return pid

    def resume(self, pid: int) -> None:
        """Send SIGCONT."""
        os.kill(pid, signal.SIGCONT)

    # Watch ------------------------------------------------------------------------------------------------------------

    async def until(self, what: str, condition: Callable[[], bool], *, limit_s: float) -> None:
        """Wait until `condition` holds. Fail with the tail of every log."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert not self._gave_up(), f"the supervisor gave up\n{self.logs()}"
            assert time.monotonic() < deadline_s, f"not within {limit_s} s: {what}\n{self.logs()}"
            await asyncio.sleep(POLL_S)

    def _gave_up(self) -> bool:
        return self.supervisor is not None and self.supervisor.failure is not None

    async def until_state(
        self, what: str, condition: Callable[[run_pb2.RunState], bool], *, limit_s: float
    ) -> run_pb2.RunState:
        """Wait until the coordinator reports a state of the run. An unavailable coordinator is retried."""
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
        """Return the state of the run; None if the coordinator does not respond."""
        return await run_state(self.layout)

    async def fleet(self) -> list[coordinator_pb2.FleetNode]:
        async with open_channel(self.layout.coordinator, access=self.layout.access) as channel:
            stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            response = await stub.GetFleet(coordinator_pb2.GetFleetRequest(), timeout=10.0, wait_for_ready=True)
            return list(response.nodes)

    def logs(self, lines: int = 12) -> str:
        """Return the end of each log, for a failure."""
        parts = [f"exits: {self.exits}"]
        for path in sorted((self.layout.run_dir / LOGS).glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {path.name}", *tail]))
        return "\n".join(parts)


async def run_state(layout: RunLayout) -> run_pb2.RunState | None:
    """Return the state of the run at `layout`; None if the coordinator does not respond."""
    async with open_channel(layout.gateway, access=layout.access) as channel:
        stub: Any = run_pb2_grpc.RunServiceStub(channel)
        try:
            with typed_errors():
                response = await stub.GetRun(run_pb2.GetRunRequest(run=layout.run), timeout=2.0)
                found: run_pb2.RunState = response.state
                return found
        except MeshError:
            return None


@asynccontextmanager
async def world(folder: Path, config: MeshConfig, hosts: Mapping[str, Sequence[str]] = HOSTS) -> AsyncIterator[World]:
    """Run all processes of a run in `folder` until exit."""
    layout = open_layout(config, run_dir=folder / "run", base_dir=folder)
    made = World(layout=layout, folder_of_traps=folder / "traps")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    made.supervisor = Supervisor(
        config,
        run_dir=folder / "run",
        base_dir=folder,
        hosts=hosts,
        command=(sys.executable, "-m", "tests.chaos.launch"),
        environment={FOLDER_VARIABLE: str(made.traps.folder), "PYTHONPATH": path},
        on_event=made.see,
    )
    async with made.supervisor:
        try:
            yield made
        finally:
            made.closing = True
