"""A run as processes: it survives the crash of each, ends with its supervisor, and resumes from its folder."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from rollmesh.app.certificates import make_certificates
from rollmesh.cli.__main__ import app
from rollmesh.mesh import MeshConfig, Supervisor
from rollmesh.mesh.process_events import FILE, ProcessEvent, read_process_events
from rollmesh.mesh.run_lock import RunFolderBusy
from rollmesh.mesh.security import NetworkConfig, SecurityConfig
from rollmesh.sandbox_runtime import cgroups
from rollmesh.services.sandbox.engines.cleanup import StateDir
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.errors import AddressTaken, ConfigError
from rollmesh.trainer.trained_log import read_trained
from rollmesh.v1 import coordinator_pb2, run_pb2

from ..chaos.joined import joined
from ..chaos.world import World, mesh_config, paced, save_model_folder
from .process_tree import Process, descendants

LIMIT_S = 120.0
GONE_S = 30.0
"""What a busy machine may need after a kill of the supervisor. `make suite NAME=chaos` measures the promised 5 s."""
HOSTS: Mapping[str, Sequence[str]] = {
    "nats": ("nats",),
    "services": ("coordinator", "depot", "reward", "data", "sandbox-0", "gateway"),
    "inference": ("inference-0",),
    "rollout": ("rollout-0",),
    "learner": ("learner",),
}
"""Fewer processes than services, because each costs a second of imports."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model"))


def looking(mesh: Supervisor) -> World:
    """The run from outside."""
    return World(layout=mesh.layout)


def runs(mesh: Supervisor, name: str, before: int = 0) -> bool:
    """Whether a process runs, and is not the one that ran before."""
    return mesh.pids.get(name, before) != before


def trained(update: int, state: run_pb2.RunState) -> bool:
    return bool(state.policies) and state.policies[0].applied_step >= update


async def until(condition: Callable[[], bool], *, limit_s: float = LIMIT_S, of: Sequence[Process] = ()) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, [process for process in of if process.alive]
        await asyncio.sleep(0.02)


@pytest.mark.timeout(400)
async def test_a_run_outlives_the_death_of_each_process_and_tells_of_it(tmp_path: Path, model: Path) -> None:
    events: list[ProcessEvent] = []
    made = paced(mesh_config(model, batch_groups=2, group_size=2, updates_max=0))
    made = msgspec.structs.replace(made, processes=msgspec.structs.replace(made.processes, stop_s=LIMIT_S))
    async with Supervisor(made, run_dir=tmp_path / "run", hosts=HOSTS, on_event=events.append) as mesh:
        run = looking(mesh)
        last = await run.until_state("an update", partial(trained, 1), limit_s=LIMIT_S)
        for name in HOSTS:
            await run.until(f"{name} runs", partial(runs, mesh, name), limit_s=LIMIT_S)
            pid = mesh.pids[name]
            mesh.kill(name)
            await run.until(f"{name} is back", partial(runs, mesh, name, pid), limit_s=LIMIT_S)
            state = await run.until_state("a state", partial(trained, 1), limit_s=LIMIT_S)
            # Within the staleness bound, what was sampled before the kill is enough for `max_staleness` + 1 updates.
            update = state.policies[0].applied_step + made.run.max_staleness + 2
            last = await run.until_state(f"update {update}, with {name}", partial(trained, update), limit_s=LIMIT_S)
        assert set(mesh.pids) == set(HOSTS)
        async with asyncio.timeout(LIMIT_S):
            await mesh.stop_learner()
            await mesh.finished()
    killed = [event.process for event in events if event.what == "ended" and event.code == -signal.SIGKILL]
    assert killed == list(HOSTS)
    assert sorted(e.process for e in events if e.what == "restarting" and "SIGKILL" in e.cause) == sorted(HOSTS)
    assert events == read_process_events(tmp_path / "run" / FILE)
    ends = {event.process: event.code for event in events if event.what == "ended"}
    assert set(ends.values()) == {143}, "asked to stop, and did"
    newest = max((tmp_path / "run/checkpoints").iterdir())
    assert len(list(read_trained(newest / "trained.jsonl"))) >= last.policies[0].applied_step


async def test_what_a_killed_sandbox_service_left_is_removed_if_the_stop_precedes_its_next_start(
    tmp_path: Path, model: Path
) -> None:
    state = StateDir(tmp_path / "run" / "sandbox-0")
    state.acquire()
    state.record_groups("left")
    state.release()
    hierarchy = cgroups.detect_here()
    if hierarchy is not None:
        hierarchy.make("left-0")
    starts_slowly = ("sh", "-c", "exec sleep 60")
    hosts = {"sandbox-0": ("sandbox-0",)}
    async with Supervisor(mesh_config(model), run_dir=tmp_path / "run", hosts=hosts, command=starts_slowly):
        assert state.has_records()
    assert not state.has_records()
    assert hierarchy is None or list(hierarchy.find("left-")) == []


@pytest.mark.timeout(400)
@pytest.mark.slow
async def test_a_mesh_with_certificates_runs_as_processes_and_is_joined_over_tls(tmp_path: Path, model: Path) -> None:
    files = make_certificates(tmp_path / "tls")
    tls = {"ca": files.ca, "certificate": files.certificate, "key": files.key}
    made = msgspec.structs.replace(
        mesh_config(model, batch_groups=2, group_size=2, updates_max=0),
        security=SecurityConfig(**tls, token_file=files.token_file),
        network=NetworkConfig(host="0.0.0.0", advertise="localhost"),
    )
    overrides = [f"security.{name}={path}" for name, path in tls.items()]
    async with Supervisor(made, run_dir=tmp_path / "run", hosts=HOSTS) as mesh:
        run = looking(mesh)
        await run.until_state("an update", partial(trained, 1), limit_s=LIMIT_S)
        async with joined(run, tmp_path, "rollout", "b", *overrides) as node:
            assert (await node.until(coordinator_pb2.NODE_STATE_READY)).node_id == "rollout-b"
            mesh.kill("rollout")
            state = await run.until_state("a state", partial(trained, 1), limit_s=LIMIT_S)
            more = partial(trained, state.policies[0].applied_step + 2)
            await run.until_state("updates by the one that joined", more, limit_s=LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            await mesh.stop_learner()
            await mesh.finished()


async def test_a_config_that_cannot_work_stops_everything_with_the_message_of_the_process(
    tmp_path: Path, model: Path
) -> None:
    made = mesh_config(model)
    made = MeshConfig(**{name: getattr(made, name) for name in made.__struct_fields__} | {"model": "nowhere"})
    broken = {"nats": ("nats",), "inference": ("inference-0",)}
    real = Supervisor(torch_engine(made), run_dir=tmp_path / "run", base_dir=tmp_path, hosts=broken)
    with pytest.raises(ConfigError, match=r"^`model`: .*nowhere does not contain a config\.json"):
        async with asyncio.timeout(LIMIT_S), real as mesh:
            await mesh.finished()
    assert not real.pids


def torch_engine(made: MeshConfig) -> MeshConfig:
    """An engine that needs a model's weights."""
    fields = {name: getattr(made, name) for name in made.__struct_fields__}
    return MeshConfig(**fields | {"inference": type(made.inference)(directory="inference")})


class Hurried(SystemClock):
    """Ten times as fast."""

    def monotonic_s(self) -> float:
        return 10 * super().monotonic_s()

    async def sleep(self, duration_s: float) -> None:
        await super().sleep(duration_s / 10)


async def test_a_folder_has_one_supervisor_and_a_taken_port_is_reported_with_its_owner(
    tmp_path: Path, model: Path
) -> None:
    made = mesh_config(model)
    nats = {"nats": ("nats",)}
    async with Supervisor(made, run_dir=tmp_path / "run", hosts=nats) as mesh:
        with pytest.raises(RunFolderBusy, match=f"process {os.getpid()} executes this run"):
            await Supervisor(made, run_dir=tmp_path / "run", hosts=nats).__aenter__()
        port = tmp_path / "run/nats/port"
        await until(port.exists)
        address = mesh.layout.gateway
    for taken, remedy in ((address, "addresses.json"), (f"127.0.0.1:{port.read_text().strip()}", "nats/port")):
        expected = rf"{taken}: process {os.getpid()} \(.*remove .*/{remedy} to take"
        with (
            socket.create_server(("127.0.0.1", int(taken.rpartition(":")[2]))),
            pytest.raises(AddressTaken, match=expected),
        ):
            await Supervisor(made, run_dir=tmp_path / "run", hosts=nats, clock=Hurried()).__aenter__()


# The command, and the kernel ------------------------------------------------------------------------------------------

AGENT = """
from pathlib import Path

SLOW = Path(__file__).with_name("slow")
CODE = '''
import subprocess
subprocess.Popen(["setsid", "sleep", "611"])
while True: pass
'''


class Agent:
    async def run(self, task, env):
        await env.generate(max_tokens=4)
        await env.tool("python", CODE if SLOW.exists() else "1+1")
"""
CONFIG = """
model: model
run: {name: killed, max_staleness: 1, batch_groups: 1, group_size: 2, updates_max: 10, eval_every: 0, episode_lease_s: 5.0,
  batch_lease_s: 5.0}
data: {source: {name: jsonl, options: {path: tasks.jsonl, tools: [python]}}}
rollout: {agent: "agent.py:Agent"}
reward: {scorers: [{name: exact, reward: correct}], finalizers: [keep_all]}
coordinator: {fleet: {heartbeat_s: 0.5, suspect_after_s: 3.0, dead_after_s: 6.0}}
inference:
  engine: {name: fake, options: {vocab_size: 112}}
learner:
  engine: fake
  publish: {num_probes: 0}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's folder. While a file `slow` is there, every episode fills a jail with code that does not end."""
    model = save_model_folder(tmp_path / "model")
    (model / "config.json").write_text("{}")
    (tmp_path / "agent.py").write_text(AGENT)
    tasks = [json.dumps({"question": f"{n}+{n}", "answer": str(2 * n)}) for n in range(20)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks))
    (tmp_path / "mine.yaml").write_text(CONFIG)
    return tmp_path


@asynccontextmanager
async def command(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmesh.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def updates(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


async def kill_in_the_middle(mine: Path, run: Path) -> list[Process]:
    """Kill a train command with busy sessions and half of its processes stopped; return the processes that it had
    started."""
    async with command("train", str(mine / "mine.yaml"), "--out", str(run)) as train:
        await until(lambda: updates(run) >= 2 or train.returncode is not None)
        (mine / "slow").touch()
        await until(lambda: [p.command for p in descendants(train.pid)].count("sleep 611") >= 2)
        family = descendants(train.pid)
        for process in family[::2]:
            with suppress(ProcessLookupError):  # a session that has ended meanwhile
                os.kill(process.pid, signal.SIGSTOP)
        train.kill()
        await until(lambda: not any(process.alive for process in family), limit_s=GONE_S, of=family)
    (mine / "slow").unlink()
    return family


@pytest.mark.timeout(400)
async def test_nothing_is_left_of_a_train_command_that_is_killed_and_its_run_goes_on(mine: Path) -> None:
    run = mine / "run"
    family = await kill_in_the_middle(mine, run)
    for service in (
        "nats-server",
        "--services learner",
        "--services sandbox-0",
        "sandbox_runtime.launcher",
        "sleep 611",
    ):
        assert any(service in process.command for process in family), service

    before = updates(run)
    async with command("train", str(run), "processes.enabled=false") as train:  # the learner is a process also then
        await until(lambda: updates(run) > before)
        started = [e for e in read_process_events(run / FILE) if e.what == "started" and e.process == "learner"]
        os.kill(started[-1].pid, signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            output, _ = await train.communicate()
    assert train.returncode == 0, output.decode()
    assert "learner was ended by SIGKILL; restarts in 0.2 s (restart 1)" in output.decode()
    assert "finished after 10 updates" in output.decode()
    audit = await asyncio.to_thread(CliRunner().invoke, app, ["audit", str(run)])
    assert audit.exit_code == 0, audit.output
