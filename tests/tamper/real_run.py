"""Ledgers of real runs: the whole mesh in one process with a fake model, and the heads of each ledger that were stored
elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.app.run_folder import RunFolder
from rollmesh.app.samples.stored_heads import stored_heads
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.services.coordinator.audit_chain import StoredHead
from rollmesh.services.reward.finalizer import Finalizer, FinalizerDecision, Group, Verdict
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.trainer.checkpoint_files import META_NAME, TRAINED_NAME, list_checkpoints
from tests.chaos.world import mesh_config
from tests.integration.test_mesh import HoldOne, Operator, policy
from tests.tamper.ledger_copy import RawRecord, read_raw

GEOMETRY: dict[str, Any] = {"batch_groups": 2, "group_size": 2, "batch_lease_s": 30.0, "episode_lease_s": 30.0}


def _stream_config(model: Path, **run: Any) -> MeshConfig:
    """Payloads in the stream, because the copies that are tampered with are copies of streams."""
    config = mesh_config(model, finalizer=f"{__name__}:DropFirst", **run)
    return msgspec.structs.replace(config, bus=msgspec.structs.replace(config.bus, payloads="stream"))


class DropFirst(Finalizer):
    """Drop the first member of every second group."""

    def decide(self, group: Group) -> Verdict:
        is_odd = int(group.group.removeprefix("g")) % 2 == 1
        dropped = {group.members[0].sample_id: "FIRST"} if is_odd and len(group.members) > 1 else {}
        return Verdict(decision=FinalizerDecision.KEEP, dropped=dropped)


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """A ledger, its heads that were stored elsewhere, and the payloads in its sample stream."""

    name: str
    run: str
    records: list[RawRecord]
    heads: list[StoredHead]
    payloads: dict[int, RawRecord]
    """Payloads by sequence."""
    last_payload: int
    """Sequence of the newest payload that was ever stored."""
    checkpoint: dict[str, bytes]
    """The files of the newest checkpoint that an audit reads, by name; empty if the run has none."""
    checkpoint_name: str = ""
    """Name of its folder."""

    @property
    def newest(self) -> int:
        """Position of the newest stored head."""
        return max(stored.head.position for stored in self.heads)


async def resumed(folder: Path, model: Path) -> RealRun:
    """A run with a replay log that stops in the middle, loses its newest checkpoint, and is resumed under another
    limit: it rolls back, and has a second trainer."""
    replay = {"max_staleness": "unlimited", "share": 0.5, "capacity_groups": 8}
    run = GEOMETRY | {"replay": replay} | {"eval_every": 2, "eval_tasks": 2, "eval_s_max": 1.0}
    async with Mesh(_stream_config(model, **run, updates_max=50), run_dir=folder) as mesh:
        await Operator(mesh).until(lambda s: policy(s).checkpoint_update >= 3)
    shutil.rmtree(list_checkpoints(folder / "checkpoints")[-1])
    async with Mesh(_stream_config(model, **run, updates_max=6), run_dir=folder) as mesh:
        await Operator(mesh).finished()
        return await _read("roll-back", mesh)


async def overtaken(folder: Path, model: Path, beyond: str) -> RealRun:
    """A run in which others overtake one episode: it is dropped, or its old tokens are masked."""
    hold = HoldOne()
    made = _stream_config(model, **GEOMETRY, max_staleness=1, beyond=beyond, updates_max=7)
    async with Mesh(made, run_dir=folder, options={"rollout-0": {"at": hold}}) as mesh:
        operator = Operator(mesh)
        await operator.until(lambda s: policy(s).published_step >= 3)
        hold.go.set()
        await operator.finished()
        return await _read(beyond, mesh)


async def exported(folder: Path, model: Path) -> RealRun:
    """A run that exports its samples. Its head is that of its last state, as `rollmesh rollout` stores it."""
    async with Mesh(_stream_config(model, group_size=2, export_groups=8, export_split="train"), run_dir=folder) as mesh:
        operator = Operator(mesh)
        state = await operator.until(lambda s: bool(s.ended))
        head = LedgerHead(position=state.ledger_position, hash=state.ledger_hash)
        return await _read("export", mesh, StoredHead("summary.json", head))


MAKERS: dict[str, Callable[[Path, Path], Awaitable[RealRun]]] = {
    "roll-back": resumed,
    "drop": lambda folder, model: overtaken(folder, model, "drop"),
    "mask": lambda folder, model: overtaken(folder, model, "mask"),
    "export": exported,
}


async def _read(name: str, mesh: Mesh, *heads: StoredHead) -> RealRun:
    assert mesh.nats is not None
    bus = await JetStreamBus.connect(mesh.nats.url, login=BusLogin.of(mesh.access))
    try:
        streams = run_streams(mesh.run)
        records = await read_raw(await bus.open(streams.ledger.name))
        log: Any = await bus.open(streams.samples.name)
        payloads = {r.seq: RawRecord(payload=r.payload, msg_id=r.msg_id) async for r in log.read_range()}
        last = (await log.info()).last_seq
    finally:
        await bus.close()
    folder = RunFolder(mesh.layout.run_dir)
    newest = folder.newest_checkpoint()
    found = [*stored_heads(folder, mesh.run, newest), *heads]
    return RealRun(
        name=name,
        run=mesh.run,
        records=records,
        heads=found,
        payloads=payloads,
        last_payload=last,
        checkpoint={file: (newest / file).read_bytes() for file in (META_NAME, TRAINED_NAME)} if newest else {},
        checkpoint_name=newest.name if newest else "",
    )
