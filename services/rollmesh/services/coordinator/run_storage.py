"""What a run stores outside of this process: its three streams on the bus, and its folder here with snapshots.

JetStream reserves the whole limit of a stream on disk. So a run that has ended releases what its streams do not use,
and a marker in its folder records the end, so that a starting coordinator need not recover it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from rollmesh.services.coordinator.core.fleet import WeightGoal
from rollmesh.services.coordinator.snapshots import SnapshotStore
from rollmesh.shared.bus.bus import Bus, StreamLog, StreamSpec, UnknownStream
from rollmesh.shared.bus.run_streams import MIB, RunStreams, StreamLimits, run_streams
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.errors import DiskFull, InvalidInput, UnknownRun
from rollmesh.shared.store.disk import disk_full_errors
from rollmesh.shared.store.private_files import private_folder
from rollmesh.shared.store.whole_files import write_whole

LEDGER_ROOM_BYTES = 16 * MIB
"""Bytes reserved for the ledger of a run that ends: the end itself, and later a trainer may still attach, commit,
report and publish. If the ledger is full, they are added to its limit."""
ROOM_BYTES = MIB
"""Bytes reserved for its other streams."""
_MARKER = "ended.json"


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has ended and is not led."""

    reason: str
    position: int
    """Position of the last record in its ledger."""
    goal: WeightGoal
    """What its nodes should serve while no run is live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStreams:
    """The streams of a run that its coordinator uses."""

    ledger: StreamLog
    samples: StreamLog
    dead: StreamLog


class RunStorage:
    """The streams and folders of all runs of a coordinator."""

    def __init__(self, bus: Bus, folder: Path, limits: StreamLimits) -> None:
        self._bus = bus
        self._folder = folder
        self._limits = limits

    async def make(self, run: str) -> bool:
        """Create the streams of a run, or reserve their full limits again. If one fails, remove those that this call
        created.

        Return whether the ledger is new: otherwise the run has facts that must remain.

        Raises InvalidInput for a name that no stream can have, and DiskFull.
        """
        created: list[str] = []
        streams = run_streams(run, self._limits)
        try:
            for spec in _each(streams):
                if not await self._exists(spec.name):
                    created.append(spec.name)
                await self._bus.create(spec)
        except BaseException as error:
            for name in created:
                await asyncio.shield(self._delete_made(name))
            if isinstance(error, DiskFull):
                raise _disk_full(run, self._limits, error) from error
            raise
        return streams.ledger.name in created

    async def open(self, run: str) -> OpenStreams:
        """Raise UnknownRun if the run has no streams."""
        specs = _known_streams(run, self._limits)
        try:
            return OpenStreams(
                ledger=await self._bus.open(specs.ledger.name),
                samples=await self._bus.open(specs.samples.name),
                dead=await self._bus.open(specs.dead.name),
            )
        except UnknownStream as error:
            raise UnknownRun(f"there is no run {run!r}; CreateRun first", run=run) from error

    async def shrink(self, run: str) -> None:
        """Reduce the reserved room to little more than what the streams contain. Raises DiskFull if a full ledger
        cannot get that."""
        specs = _known_streams(run, self._limits)
        for spec in _each(specs):
            room, over = (LEDGER_ROOM_BYTES, LEDGER_ROOM_BYTES) if spec is specs.ledger else (ROOM_BYTES, 0)
            with suppress(UnknownStream):
                held = (await (await self._bus.open(spec.name)).info()).num_bytes
                await self._bus.create(replace(spec, bytes_max=min(spec.bytes_max + over, held + room)))

    async def extend(self, run: str) -> None:
        """Raise the limit of the ledger of a live run to the configured one. Raises DiskFull."""
        spec = _known_streams(run, self._limits).ledger
        if (await (await self._bus.open(spec.name)).info()).bytes_max < spec.bytes_max:
            await self._bus.create(spec)

    async def delete(self, run: str) -> bool:
        """Remove streams and folder. Return whether there were any."""
        found = False
        for spec in _each(_known_streams(run, self._limits)):
            found = await self._exists(spec.name) or found
            await self._bus.delete(spec.name)
        folder = self._folder / run
        if await asyncio.to_thread(folder.is_dir):
            found = True
            await asyncio.to_thread(shutil.rmtree, folder)
        return found

    async def _delete_made(self, stream: str) -> None:
        """Remove an empty stream if it was created. A bus also removes the files of a stream that does not exist."""
        if await self._exists(stream):
            await self._bus.delete(stream)

    async def _exists(self, stream: str) -> bool:
        try:
            await self._bus.open(stream)
        except UnknownStream:
            return False
        return True

    # The folder -------------------------------------------------------------------------------------------------------

    def runs(self) -> Iterator[str]:
        """Return every run that has a folder here."""
        private_folder(self._folder)
        yield from (path.name for path in sorted(self._folder.iterdir()) if path.is_dir())

    def make_folder(self, run: str) -> None:
        """Create the folder of a run that is led. A restarted coordinator recovers the runs with a folder. Raises
        DiskFull."""
        with disk_full_errors(self._folder):
            private_folder(self._folder / run)

    def snapshots(self, run: str) -> SnapshotStore:
        return SnapshotStore(self._folder / run)

    def mark_ended(self, run: str, ended: Ended) -> None:
        """Record that the run needs no recovery."""
        path = self._folder / run / _MARKER
        write_whole(path, msgspec.json.encode(ended))

    def unmark_ended(self, run: str) -> None:
        """Remove that record. Call this before the run is led."""
        (self._folder / run / _MARKER).unlink(missing_ok=True)

    def ended(self, run: str) -> Ended | None:
        """Return how the run ended; None if it must be recovered."""
        try:
            return msgspec.json.decode((self._folder / run / _MARKER).read_bytes(), type=Ended)
        except (OSError, *UNDECODABLE):
            return None


def _each(specs: RunStreams) -> tuple[StreamSpec, ...]:
    return (specs.samples, specs.ledger, specs.dead)


def _known_streams(run: str, limits: StreamLimits) -> RunStreams:
    """Raise UnknownRun for a name that is not valid for a run."""
    try:
        return run_streams(run, limits)
    except InvalidInput as error:
        raise UnknownRun(f"there is no run {run[:64]!r}: {error}", run=run) from error


def _disk_full(run: str, limits: StreamLimits, error: DiskFull) -> DiskFull:
    wanted = sum(spec.bytes_max for spec in _each(run_streams(run, limits))) // MIB
    return DiskFull(
        f"the streams of run {run} need {wanted} MiB reserved at NATS ({error}); lower "
        "`coordinator.streams.samples_bytes_max` or `coordinator.streams.ledger_bytes_max`, raise "
        "`bus.embedded.store_bytes_max`, or remove ended runs with `rollmesh delete` (DeleteRun)",
        run=run,
    )
