"""Failures of the environment: each is reported in one clear message, the run continues or stops with its cause, and
nothing is lost.

docs/reliability.md lists them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from rollmesh.cli.__main__ import app
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.mesh.run_layout import open_layout
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.services.coordinator.recovery import recover
from rollmesh.services.coordinator.snapshots import SnapshotStore
from rollmesh.services.learner import publisher as publisher_module
from rollmesh.services.learner.compute import ComputeThread
from rollmesh.services.learner.config import LearnerConfig, PublishConfig
from rollmesh.services.learner.engine import ExportedWeights, Restored
from rollmesh.services.learner.publisher import Publisher
from rollmesh.services.rollout.config import WorkerConfig
from rollmesh.services.rollout.sample_log import BusSampleLog
from rollmesh.shared.bus.bus import BusUnavailable
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.domain.trajectory import FloatArray, IntArray
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import DataLoss, DiskFull, MeshError, PayloadTooLarge, WeightsRejected
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.testing import fake_trainer
from rollmesh.testing.fake_trainer import FakeTrainerOptions
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.v1 import run_pb2, run_pb2_grpc
from tests.tamper.ledger_copy import made, store

from .test_cli import CONFIG, mine  # noqa: F401  (a fixture)
from .test_mesh import Operator, config, model, policy  # noqa: F401  (a fixture)

MIB = 1 << 20
BROKEN_FROM = 3
"""The update at which a trainer's weights go wrong."""

# Before the run -------------------------------------------------------------------------------------------------------


def test_a_bus_that_no_process_serves_ends_the_command_with_its_address(mine: Path) -> None:  # noqa: F811
    (mine / "mine.yaml").write_text(CONFIG + 'bus: {url: "nats://127.0.0.1:1"}\n')
    done = CliRunner().invoke(app, ["train", str(mine / "mine.yaml"), "--out", str(mine / "run")])
    assert done.exit_code == 1
    assert "nats://127.0.0.1:1" in done.output
    assert "is the server running" in done.output
    assert "Traceback" not in done.output


async def test_a_port_that_another_process_has_taken_is_named(tmp_path: Path, model: Path) -> None:  # noqa: F811
    made = config(model)
    layout = open_layout(made, run_dir=tmp_path / "run", base_dir=tmp_path)
    host, port = layout.coordinator.split(":")
    with socket.socket() as other:
        other.bind((host, int(port)))
        other.listen()
        with pytest.raises(MeshError, match=layout.coordinator):
            async with Mesh(made, run_dir=tmp_path / "run"):
                pytest.fail("two servers on one port")


# Invalid weights ------------------------------------------------------------------------------------------------


class Diverged(fake_trainer.FakeTrainer):
    """From update BROKEN_FROM on its weights are NaN; `honest` trainers score their probes with them."""

    honest = True

    def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        scored = super().score(sequences)
        return [row * np.float32("nan") for row in scored] if self.step >= BROKEN_FROM and self.honest else scored

    def export_weights(self, folder: Path) -> ExportedWeights:
        exported = super().export_weights(folder)
        if self.step >= BROKEN_FROM:
            for path in exported.files.values():
                raw = bytearray(path.read_bytes())
                raw[-4:] = np.float32("nan").tobytes()
                path.write_bytes(raw)
        return exported


class DivergedUnnoticed(Diverged):
    honest = False


def patient(made: MeshConfig) -> MeshConfig:
    """Nodes may be silent for long: what is tested here must not depend on how busy the machine is."""
    limits = msgspec.structs.replace(made.coordinator.fleet, suspect_after_s=30.0, dead_after_s=60.0)
    return msgspec.structs.replace(made, coordinator=msgspec.structs.replace(made.coordinator, fleet=limits))


def opening(kind: type[Diverged], options: FakeTrainerOptions | None = None) -> dict[str, Any]:
    def open_engine(config: LearnerConfig) -> Restored:
        restored = fake_trainer.FakeTrainer.open(config, options)
        restored.engine.__class__ = kind
        return restored

    return {"open_engine": open_engine}


async def test_a_learner_that_sees_its_weights_are_nan_publishes_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    options = FakeTrainerOptions(vocab_size=112)
    opened = opening(Diverged, options)["open_engine"](LearnerConfig(directory=str(tmp_path)))
    engine = opened.engine
    assert isinstance(engine, Diverged)
    engine.step = BROKEN_FROM
    compute = ComputeThread(tmp_path)
    publisher = Publisher(compute, compute, PublishConfig(), tmp_path / "publishing")
    try:
        with pytest.raises(WeightsRejected, match=rf"main@{BROKEN_FROM}.* NaN or infinite.*remove the checkpoints"):
            await publisher.copy(engine, PolicyVersion(policy="main", step=BROKEN_FROM, incarnation=0))
    finally:
        await compute.close(5.0)


@pytest.mark.parametrize("value", ["nan", "inf"])
async def test_a_tensor_that_no_probe_shows_to_be_broken_is_named_and_not_uploaded(tmp_path: Path, value: str) -> None:
    """As a row of an embedding that no probe uses."""
    options = FakeTrainerOptions(vocab_size=112)
    opened = opening(DivergedUnnoticed, options)["open_engine"](LearnerConfig(directory=str(tmp_path)))
    compute = ComputeThread(tmp_path)
    publisher = Publisher(compute, compute, PublishConfig(), tmp_path / "publishing")
    version = PolicyVersion(policy="main", step=0, incarnation=0)
    try:
        copying = asyncio.create_task(publisher.copy(opened.engine, version))
        copy = await copying
        for path in copy.exported.files.values():
            raw = path.read_bytes()
            path.write_bytes(raw[:-4] + np.float32(value).tobytes())
        untouched = SimpleNamespace(version=version)  # without an upload
        with pytest.raises(WeightsRejected, match=r"tensor \w+ of main@0.0 has a value that is NaN or infinite"):
            await publisher.publish(untouched, copying, asyncio.Event())  # type: ignore[arg-type]
    finally:
        await compute.close(5.0)


async def test_nan_weights_that_are_published_never_become_active_and_the_learner_gets_the_reason(
    tmp_path: Path,
    model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher_module, "first_not_finite", lambda _: "")  # as a trainer that does not look
    made = patient(config(model, stall_s=2.0, updates_max=0, batch_lease_s=60.0, episode_lease_s=60.0))
    async with Mesh(made, run_dir=tmp_path / "run", options={"learner": opening(DivergedUnnoticed)}) as mesh:
        operator = Operator(mesh)
        stalled = await operator.until(lambda s: "was rejected by the nodes" in s.stalled)
        refused = dict(policy(stalled).refused)
        assert refused
        assert all("NaN or infinite" in cause for cause in refused.values())
        at_learner = mesh.service("learner").progress.refused
        await operator.until(lambda _: set(refused) <= set(at_learner))
        facts = await operator.facts()
        report = await operator.audit()
    steps = [span.step for x in facts if isinstance(x, f.EpisodeScored) for s in x.samples for span in s.steps]
    assert max(steps) == BROKEN_FROM - 1, "no token was sampled by refused weights"
    assert report.holds, report.to_text()


# Records that are damaged ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [2, 4])
async def test_a_flipped_bit_in_the_ledger_is_named_by_stream_and_sequence(tmp_path: Path, damaged: int) -> None:
    """Even where the damaged bytes would decode to another, wrong decision."""
    whole: list[f.Fact] = [
        f.RunCreated(spec=RunSpec(run="r")),
        *(f.GroupReserved(group=f"g{n}", purpose=f.Purpose.TRAIN, draw=n) for n in range(4)),
    ]
    records = made([fact] for fact in whole)
    flipped = bytearray(records[damaged - 1].payload)
    flipped[-1] ^= 1
    records[damaged - 1] = replace(records[damaged - 1], payload=bytes(flipped))
    bus = await store(records)
    log = await bus.open(run_streams("r").ledger.name)
    with pytest.raises(DataLoss, match=f"RM_r_LEDGER: record {damaged} is damaged"):
        await recover(log, SnapshotStore(tmp_path))
    report = await audit_run(bus, "r")
    assert not report.holds
    assert f"record {damaged} is damaged" in report.to_text()


async def test_a_payload_over_the_limit_fails_at_once_and_is_not_sent_again() -> None:
    bus = MemoryBus(payload_bytes_max=1000)
    await bus.create(run_streams("r").samples)
    clock = ManualClock()
    samples = BusSampleLog(bus, WorkerConfig(), clock)
    with pytest.raises(PayloadTooLarge, match="send less at once"):
        async with asyncio.timeout(5):  # a retry would sleep on a clock that does not advance
            await samples.append("r", bytes(1001), message_id="a")
    assert await samples.append("r", bytes(1000), message_id="b") == 1


# Clients that do not read, messages that are large --------------------------------------------------------------------


async def test_a_watcher_that_never_reads_and_large_messages_leave_the_run_alone(tmp_path: Path, model: Path) -> None:  # noqa: F811
    async with Mesh(config(model), run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        async with open_channel(mesh.gateway_address, access=mesh.access) as channel:
            stub = run_pb2_grpc.RunServiceStub(channel)
            deaf = [stub.WatchRun(run_pb2.WatchRunRequest(run=mesh.run)) for _ in range(3)]
            fits = run_pb2.StopRunRequest(run="no-such-run", reason="x" * (8 * MIB - 100))
            with pytest.raises(MeshError) as caught:
                await operator.call("StopRun", fits)
            assert caught.value.reason == "PAYLOAD_TOO_LARGE", "gRPC reads it, and the server says what the limit is"
            assert "must have at most 6291456 bytes" in caught.value.message
            with pytest.raises(MeshError) as caught:
                await operator.call("StopRun", run_pb2.StopRunRequest(run="no-such-run", reason="x" * (8 * MIB)))
            assert caught.value.code.name == "RESOURCE_EXHAUSTED"
            assert "message_bytes_max" in caught.value.message
            await operator.finished()
            for call in deaf:
                call.cancel()
        report = await operator.audit()
    assert report.holds, report.to_text()


# A full disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 2 MiB, or of as many as the test's parameter says."""
    layout = tmp_path / "small"
    layout.mkdir()
    size = f"size={getattr(request, 'param', 2)}m"
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(layout)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    yield layout
    subprocess.run(["umount", "-l", str(layout)], check=True)


async def test_a_full_disk_under_the_checkpoints_stops_the_learner_with_its_cause_and_loses_nothing(
    tmp_path: Path,
    model: Path,  # noqa: F811
    small_disk: Path,
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    os.symlink(small_disk, run_dir / "checkpoints")
    (small_disk / "ballast").write_bytes(bytes(2 * MIB - 8192))
    async with Mesh(config(model), run_dir=run_dir) as mesh:
        operator = Operator(mesh)
        with pytest.raises(DiskFull, match="no space left on the device"):
            await operator.finished()
        (small_disk / "ballast").unlink()
        await mesh.restart("learner")
        await operator.finished()
        report = await operator.audit()
    assert report.holds, report.to_text()
    assert report.updates == 8


@pytest.mark.parametrize("small_disk", [96], indirect=True)
async def test_a_disk_that_fills_under_the_streams_stops_the_run_in_time_and_loses_nothing(
    tmp_path: Path,
    model: Path,  # noqa: F811
    small_disk: Path,
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    os.symlink(small_disk, run_dir / "nats")
    made = config(model, updates_max=6)
    async with Mesh(made, run_dir=run_dir) as mesh:
        operator = Operator(mesh)
        await operator.until(lambda state: policy(state).applied_step >= 2)
        (small_disk / "ballast").write_bytes(bytes(48 * MIB))
        with pytest.raises(DiskFull, match="disk_free_bytes_min"):
            await operator.finished()
    (small_disk / "ballast").unlink()
    async with Mesh(made, run_dir=run_dir) as mesh:
        operator = Operator(mesh)
        await operator.finished()
        report = await operator.audit()
    assert report.holds, report.to_text()
    assert report.updates == 6


@pytest.mark.parametrize("small_disk", [96], indirect=True)
async def test_a_run_continues_when_a_full_disk_of_the_streams_has_room_again(
    tmp_path: Path,
    model: Path,  # noqa: F811
    small_disk: Path,
) -> None:
    """Without the guard, nats-server stores nothing more on this disk until it is restarted."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    os.symlink(small_disk, run_dir / "nats")
    made = config(model, updates_max=12)
    made = msgspec.structs.replace(
        made,
        bus=msgspec.structs.replace(
            made.bus, embedded=msgspec.structs.replace(made.bus.embedded, disk_free_bytes_min=0)
        ),
    )
    async with Mesh(made, run_dir=run_dir) as mesh:
        operator = Operator(mesh)
        await operator.until(lambda state: policy(state).applied_step >= 2)
        assert mesh.nats is not None
        before = mesh.nats.pid
        finished = asyncio.create_task(operator.finished())
        fill(small_disk / "ballast")
        bus = await JetStreamBus.connect(mesh.nats.url, login=BusLogin.of(mesh.access))
        dead = await bus.open(run_streams(mesh.run).dead.name)
        with pytest.raises(BusUnavailable):
            await dead.append(bytes(8192), msg_id="while the disk is full", deadline_s=1.0)
        assert not finished.done()
        (small_disk / "ballast").unlink()
        await finished
        assert mesh.nats.pid != before
        await dead.append(bytes(8192), msg_id="when there is room again")
        await bus.close()
        report = await operator.audit()
    assert report.holds, report.to_text()
    assert report.updates == 12


def fill(path: Path) -> None:
    """Write a file until its disk is full."""
    for size in (MIB, 4096):
        with path.open("ab", buffering=0) as file, suppress(OSError):
            while file.write(bytes(size)):
                pass
