"""Transcripts of samples that are no longer recent: the search of the ledger has a limit, and a damaged record is an
error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from rollmesh.services.gateway.page import transcripts
from rollmesh.services.gateway.page.history import RunHistory
from rollmesh.services.gateway.page.parts import PageParts
from rollmesh.services.gateway.page.transcripts import Transcripts
from rollmesh.shared.bus.bus import StreamRecord
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import DataLoss, DeadlineExceeded, UnknownSample
from rollmesh.testing.memory_bus import MemoryBus


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


async def test_a_damaged_record_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = MemoryBus()
    log = await bus.create(run_streams("r").ledger)
    await log.append(b"\xff\xff g0.0-0", msg_id="1")
    with pytest.raises(DataLoss, match="audit the run"):
        await Transcripts(bus, PageParts()).read("r", "g0.0-0", RunHistory())
