"""Check a finished run by comparing three independent records.

- the ledger, with its audit;
- the list in the newest checkpoint, which names the samples of the final weights;
- the witness of the trainer, which read the payloads.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.audit_checkpoint import find_list
from rollmesh.services.coordinator.audit_report import AuditReport
from rollmesh.services.coordinator.core.facts import Fact
from rollmesh.services.coordinator.ledger import read_ledger
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.trainer.trained_log import TrainedUpdate, read_trained
from rollmesh.v1 import run_pb2

from .trainer import WITNESS, Witnessed
from .world import World

_REPLAYED = re.compile(r"r\d+\.\d+")
"""Ids of replayed samples."""


@dataclass(frozen=True)
class Verdict:
    """The result of a run."""

    audit: AuditReport
    facts: list[Fact]
    """All facts of the ledger, in order."""
    trained: list[TrainedUpdate]
    lags: dict[int, int]
    """Number of samples in the final weights by staleness, from the stamps of their payloads."""


async def settle(world: World, *, updates: int, limit_s: float) -> Verdict:
    """Wait for the end of the run and check every guarantee."""
    await world.until("the learner is done", world.done.is_set, limit_s=limit_s)
    state = await world.until_state("nothing is live", lambda s: bool(s.ended) and s.samples.live == 0, limit_s=60.0)
    _check_accounts(state)
    server_port = (world.layout.folder("nats") / "port").read_text().strip()
    server = await JetStreamBus.connect(f"nats://127.0.0.1:{server_port}", login=BusLogin.of(world.layout.access))
    bus = world.layout.with_payloads(server)
    checkpoints = world.layout.run_dir / "checkpoints"
    try:
        audit = await audit_run(bus, world.layout.run, checkpoint=checkpoints)
        log = await bus.open(run_streams(world.layout.run).ledger.name)
        facts = [fact async for record in read_ledger(log) for fact in record.facts]
    finally:
        await bus.close()
    assert audit.holds, audit.to_text()
    assert audit.checkpoint is not None
    assert audit.checkpoint.updates == audit.updates == updates
    trained = list(read_trained(find_list(checkpoints)))
    ids = [sample for update in trained for sample in update.sample_ids]
    assert len(ids) == len(set(ids)) == state.samples.trained == audit.samples.trained
    lags = check_witness(world.layout.run_dir, trained, eta=audit.eta)
    return Verdict(audit=audit, facts=facts, trained=trained, lags=lags)


def _check_accounts(state: run_pb2.RunState) -> None:
    for counts in (state.samples, state.eval_samples):
        ends = (counts.trained, counts.stale, counts.filtered, counts.failed, counts.cancelled, counts.exported)
        assert counts.live == 0
        assert counts.reserved == sum(ends), counts


def check_witness(
    run_dir: Path, trained: list[TrainedUpdate], *, eta: int, replay_bound: int | None = None
) -> dict[int, int]:
    """Return the staleness of the samples in the final weights, from the payloads only. Replayed ones are checked by
    their own bound, and are not returned."""
    lines = (run_dir / WITNESS).read_bytes().splitlines()
    seen = [msgspec.json.decode(line, type=Witnessed) for line in lines]
    assert not sum(witnessed.num_forged for witnessed in seen), "tokens that their stamped weights do not draw"
    made = {(witnessed.update, frozenset(witnessed.sample_ids)): witnessed for witnessed in seen}
    lags: Counter[int] = Counter()
    replayed: Counter[int] = Counter()
    for line in trained:
        witnessed = made[line.update, frozenset(line.sample_ids)]
        for name, step in zip(witnessed.sample_ids, witnessed.steps, strict=True):
            (replayed if _REPLAYED.fullmatch(name) else lags)[line.update - 1 - step] += 1
    assert min(lags) >= 0
    assert max(lags) <= eta
    if replay_bound is not None:
        assert replayed, "no sample was replayed"
        assert 1 <= min(replayed) <= max(replayed) <= replay_bound, replayed
    return dict(lags)
