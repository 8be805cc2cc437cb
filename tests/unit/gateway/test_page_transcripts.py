"""Transcripts of samples that are no longer recent: the search of the ledger has a limit, and a damaged record is an
error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from rollmesh.services.gateway.exports import Exports
from rollmesh.services.gateway.page import transcripts
from rollmesh.services.gateway.page.history import RunHistory
from rollmesh.services.gateway.page.parts import PageParts
from rollmesh.services.gateway.page.transcripts import Transcripts
from rollmesh.shared.bus.bus import StreamRecord
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.domain.formats import NewerFormat
from rollmesh.shared.errors import DataLoss, DeadlineExceeded, MeshError, UnknownSample
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.v1 import events_pb2


async def test_a_search_that_takes_too_long_ends_and_others_can_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = MemoryBus()
    log = await bus.create(run_streams("r").ledger)
    endless = True

    async def read_range(from_seq: int = 1) -> AsyncIterator[StreamRecord]:
        if endless:
            await asyncio.Event().wait()
        for record in list[StreamRecord]():
            yield record

    monkeypatch.setattr(log, "read_range", read_range)
    monkeypatch.setattr(transcripts, "READ_S_MAX", 0.05)
    page = Transcripts(bus, PageParts())
    async with asyncio.timeout(10):
        for _ in range(3):  # more than may read at the same time
            with pytest.raises(DeadlineExceeded, match="rollmesh show"):
                await page.read("r", "g0.0-0", RunHistory())
        endless = False
        with pytest.raises(UnknownSample):
            await page.read("r", "g0.0-0", RunHistory())


@pytest.mark.parametrize(
    ("payload", "kind", "what"),
    [
        (b"\xff\xff g0.0-0", DataLoss, "ledger record 1 of r cannot be read: .*audit the run"),
        (
            events_pb2.LedgerRecord(record_id="g0.0-0", format=3).SerializeToString(),
            NewerFormat,
            "ledger record 1 of r has format 3",
        ),
    ],
)
async def test_a_record_that_cannot_be_read_is_reported(payload: bytes, kind: type[MeshError], what: str) -> None:
    bus = MemoryBus()
    log = await bus.create(run_streams("r").ledger)
    await log.append(payload, msg_id="1")
    with pytest.raises(kind, match=what):
        await Transcripts(bus, PageParts()).read("r", "g0.0-0", RunHistory())
    await bus.create(run_streams("r").samples)
    with pytest.raises(kind, match=what):
        await anext(Exports(bus).stream("r", ""))
