"""Periodic work for a run: write snapshots, archive records behind them, and purge payloads that no client can need.

A payload in the stream is purged if its sequence is below those of all live groups *in the stored state*, and below the
end of the stream one safety term ago, because workers store a payload first and report it later. A payload file is
removed as a whole, if no live group has a payload in it and its size has not changed for that term. A run that has
ended accepts no report, so it needs no such term.

`retain_share` keeps a copy of the payloads of whole groups of a removed file. Readers find it at the same positions.
It changes neither which files are removed nor when.

Payloads of the replay log are copied before their file is removed, and the copy is removed when neither the log nor a
live group has it. A stream is not purged from the oldest of them on.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain

from google.protobuf.message import DecodeError

from rollmesh.services.coordinator.archiver import Archiver
from rollmesh.services.coordinator.config import RunLimits
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.state import State
from rollmesh.services.coordinator.driver import RunDriver
from rollmesh.services.coordinator.snapshots import SnapshotStore, encode_snapshot
from rollmesh.shared.bus.bus import StreamLog
from rollmesh.shared.bus.payload_bus import SampleStream
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.errors import DiskFull, MeshError
from rollmesh.shared.store.payload_files import NoPayloadFile, PayloadFiles, UnreadableRecord, file_of, in_file
from rollmesh.v1 import types_pb2

REPORT_TERMS = 2.0
"""Number of episode lease terms after which a stored payload has been reported or never will be."""
_log = logging.getLogger(__name__)


class Housekeeper:
    """Snapshots and purges one run."""

    def __init__(
        self,
        driver: RunDriver,
        store: SnapshotStore,
        samples: StreamLog,
        *,
        clock: Clock,
        limits: RunLimits,
        position: int,
        archiver: Archiver | None = None,
        may_link: Callable[[], bool] = lambda: True,
    ) -> None:
        """`position`: that of the snapshot from which the run was recovered. Without an `archiver` every record stays
        in the stream. `may_link`: whether every worker notices that its file was removed although it has another name;
        one of protocol 1.0 does not."""
        self._driver = driver
        self._store = store
        self._samples = samples
        self._clock = clock
        self._limits = limits
        self._snapshot_position = position
        self._archiver = archiver
        self._may_link = may_link
        self._stream_ends: deque[tuple[float, int]] = deque()
        self._purged_below = 0
        self._files = samples.files if isinstance(samples, SampleStream) else None
        self._file_sizes: dict[int, tuple[int, float]] = {}
        """Size of each payload file, and since when it has been observed."""

    async def run(self) -> None:
        """Run periodically. Failed work is retried in the next period."""
        while True:
            await self._clock.sleep(self._limits.housekeeping_s)
            for work in (self.snapshot_if_due, self.purge, self.archive):
                try:
                    await work()
                except (MeshError, OSError) as error:  # the other work does not need it
                    _log.warning("housekeeping failed, will retry: run=%s: %s", self._driver.run, error)

    async def snapshot_if_due(self) -> bool:
        """Write a snapshot if `snapshot_records` have been stored since the last one."""
        return await self._snapshot(records=self._limits.snapshot_records)

    async def _snapshot(self, records: int) -> bool:
        body, position = await self._driver.read(lambda core, at: self._encode_if_due(core, at, records))
        if not body:
            return False
        await asyncio.to_thread(self._store.save, body, position)
        self._snapshot_position = position
        return True

    async def archive(self) -> None:
        """Archive one segment of the records behind the newest snapshot if that is due. If too few records are behind
        it, first write another one: `snapshot_records` large records may be more than the stream can hold."""
        if self._archiver is not None:
            if self._archiver.needs_snapshot(self._snapshot_position):
                await self._snapshot(records=1)
            await self._archiver.step(self._snapshot_position)

    async def put_away(self) -> None:
        """Write a snapshot of the last state of an ended run, and purge the payloads of groups that are not live."""
        await self._snapshot(records=1)
        await self.purge()

    def _encode_if_due(self, core: Core, head: LedgerHead, records: int) -> tuple[bytes, int]:
        if head.position - self._snapshot_position < records:
            return b"", head.position
        return encode_snapshot(core.state, head), head.position

    async def purge(self) -> int:
        """Purge payloads that are not needed. Return the sequence of the stream below which they are purged."""
        if self._files is not None:
            await self._purge_files(self._files)
        self._stream_ends.append((self._clock.monotonic_s(), (await self._samples.info()).last_seq))
        below = await self._driver.read(self._mark)
        if below > self._purged_below:
            await self._samples.purge_below(below)
            self._purged_below = below
        return self._purged_below

    def _mark(self, core: Core, _: LedgerHead) -> int:
        """Return the sequence below which to purge. It is read between two decisions, so no later report can be
        accepted for a purged payload."""
        # A reader of an export may begin at the start of the stream at any time.
        if core.state.spec is None or core.state.spec.exports:
            return 0
        term_s = 0.0 if core.state.ended else REPORT_TERMS * core.state.spec.episode_lease_s
        settled = self._settled_end(self._clock.monotonic_s() - term_s)
        below = min(settled + 1, lowest_live(core.state) or settled + 1)
        self._driver.purged_below = max(self._driver.purged_below, below)
        return below

    async def _purge_files(self, files: PayloadFiles) -> None:
        now_s, sizes = self._clock.monotonic_s(), await asyncio.to_thread(files.sizes)
        known = self._file_sizes
        self._file_sizes = {
            n: known[n] if n in known and known[n][0] == size else (size, now_s) for n, size in sizes.items()
        }
        unneeded, logged, needed = await self._driver.read(self._unneeded)
        for number in unneeded:
            held = [sequence for sequence in logged if file_of(sequence) == number]
            if held and not await asyncio.to_thread(self._hold, files, held):
                continue
            if self._limits.retain_share and sizes[number]:
                await asyncio.to_thread(self._keep, files, number)
            await asyncio.to_thread(files.remove, number)
        await asyncio.to_thread(files.release, needed)

    def _hold(self, files: PayloadFiles, sequences: list[int]) -> bool:
        """Copy payloads of the replay log. Return False if the file that has them must remain for now, because the disk
        is full. A payload that cannot be read is lost with or without its file."""
        for sequence in sequences:
            try:
                files.hold(sequence)
            except (NoPayloadFile, UnreadableRecord) as error:
                _log.warning("payload of the replay log is lost: run=%s cause=%s", self._driver.run, error)
            except (DiskFull, OSError) as error:
                _log.warning("payloads of the replay log not copied: run=%s cause=%s", self._driver.run, error)
                return False
        return True

    def _keep(self, files: PayloadFiles, number: int) -> None:
        """Keep what `retain_share` names of a file. A failure does not delay its removal, which frees the disk."""
        try:
            wanted = None if self._limits.retain_share >= 1 else self._is_retained
            files.keep(number, wanted, may_link=self._may_link())
            files.limit_kept(self._limits.retained_bytes_max)
        except (MeshError, OSError) as error:
            _log.warning("payloads not kept: run=%s file=%d cause=%s", self._driver.run, number, error)

    def _is_retained(self, payload: bytes) -> bool:
        try:
            return retained(types_pb2.Episode.FromString(payload).key, self._limits.retain_share)
        except DecodeError:  # a worker stored something else
            return False

    def _unneeded(self, core: Core, _: LedgerHead) -> tuple[list[int], set[int], set[int]]:
        """Return the files to remove, the positions that the replay log has, and all positions that are needed. As in
        `_mark`, no later report can be accepted for a payload in the files."""
        logged = set(_logged_sequences(core.state))
        needed = logged | set(_live_sequences(core.state))
        if core.state.spec is None or core.state.spec.exports:
            return [], logged, needed
        term_s = 0.0 if core.state.ended else REPORT_TERMS * core.state.spec.episode_lease_s
        before_s = self._clock.monotonic_s() - term_s
        live = {file_of(sequence) for sequence in _live_sequences(core.state) if in_file(sequence)}
        found = [n for n, (_, since_s) in self._file_sizes.items() if n not in live and since_s <= before_s]
        self._driver.purged_files.update(found)
        return found, logged, needed

    def _settled_end(self, before: float) -> int:
        """Return the end of the stream at the newest observation not after `before`; 0 if there was none."""
        while len(self._stream_ends) > 1 and self._stream_ends[1][0] <= before:
            self._stream_ends.popleft()
        when, end = self._stream_ends[0]
        return end if when <= before else 0


def retained(key: types_pb2.EpisodeKey, share: float) -> bool:
    """Return whether the payloads of an episode's group are kept: the same groups whenever it is asked."""
    digest = hashlib.sha256(f"{key.run}/{key.group}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def lowest_live(state: State) -> int:
    """Return the lowest payload sequence of a live group, or of the replay log, in the stream; 0 if there is none."""
    sequences = chain(_live_sequences(state), _logged_sequences(state))
    return min((sequence for sequence in sequences if not in_file(sequence)), default=0)


def _live_sequences(state: State) -> Iterator[int]:
    return (e.payload.sequence for g in state.groups.values() for e in g.episodes.values() if e.payload.sequence)


def _logged_sequences(state: State) -> Iterator[int]:
    """Return the payloads of the replay log; none of a run that has ended and cannot be reopened."""
    if state.ended and not state.reopens:
        return iter(())
    groups = (entry.group for entry in state.replay.entries.values())
    return (e.payload.sequence for group in groups for e in group.episodes.values() if e.payload.sequence)
