"""A bus whose sample streams keep their payloads in files of this host, where that loses nothing (`payload_files`).

The stream of a run and its files are one `SampleStream`: the sequence of a record tells which of the two holds it. Readers take both, so
that a run can be resumed with the other kind, and a worker on another host appends to the stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from rollmesh.shared.bus.bus import Bus, BusUnavailable, StreamInfo, StreamLog, StreamRecord, StreamSpec, check_append
from rollmesh.shared.bus.payload_files import PayloadFiles, PayloadWriter, in_file
from rollmesh.shared.bus.run_streams import run_of_samples
from rollmesh.shared.errors import FailedPrecondition
from rollmesh.shared.telemetry.logs import apart

PayloadsIn = Literal["auto", "stream", "files"]
"""Where the payloads of a run are stored."""
CALL_BYTES = 4 * 1024 * 1024
"""Payload bytes of one call of a writer."""
IDLE_S = 60.0
"""Time without an append after which a writer completes its file, so that it can be removed."""


class WrongHost(FailedPrecondition):
    """The payload is in a file of the run's host, and this process is on another one."""

    reason = "WRONG_HOST"


class _Waiting(NamedTuple):
    payload: bytes
    stored: asyncio.Future[int]


class SampleStream:
    """The sample stream of a run and, on the host that has them, its payload files. Implements `StreamLog`."""

    def __init__(self, stream: StreamLog, files: PayloadFiles | None, writer: PayloadWriter | None) -> None:
        """Appends go to `writer`, or to the stream without one."""
        self._stream = stream
        self.files = files
        """None on another host."""
        self._writer = writer
        self._waiting: deque[_Waiting] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        return self._stream.name

    async def append(
        self,
        payload: bytes,
        *,
        msg_id: str,
        expected_last_seq: int | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """Store one record. In a file a repeated `msg_id` is another record: only the reported one counts."""
        if self._writer is None or expected_last_seq is not None:
            return await self._stream.append(
                payload, msg_id=msg_id, expected_last_seq=expected_last_seq, headers=headers, deadline_s=deadline_s
            )
        check_append(msg_id, headers)
        waiting = _Waiting(payload, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._writing is None:
            self._writing = asyncio.create_task(
                self._write_all(self._writer), name=f"append {self.name}", context=apart()
            )
        return await waiting.stored

    async def append_pipelined(
        self,
        payload: bytes,
        *,
        msg_id: str,
        expected_last_seq: int | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
    ) -> asyncio.Future[int]:
        return await self._stream.append_pipelined(
            payload, msg_id=msg_id, expected_last_seq=expected_last_seq, headers=headers, deadline_s=deadline_s
        )

    async def read(self, seq: int) -> StreamRecord:
        """As the stream's. Raises also UnreadableRecord for a position in a file, and WrongHost without the files."""
        return await (self._read_file(seq) if in_file(seq) else self._stream.read(seq))

    async def read_direct(self, seq: int) -> StreamRecord:
        """As `read`."""
        return await (self._read_file(seq) if in_file(seq) else self._stream.read_direct(seq))

    async def _read_file(self, seq: int) -> StreamRecord:
        if self.files is None:
            raise WrongHost(
                f"payload {seq} of {self.name} is in a file of the run's host, which this process does not have; read it from the "
                "gateway there, or resume the run with `bus.payloads: stream`"
            )
        payload = self.files.read_cached(seq)
        if payload is None:
            payload = await asyncio.to_thread(self.files.read, seq)
        return StreamRecord(seq=seq, payload=payload, msg_id="")

    def read_range(self, from_seq: int = 1) -> AsyncIterator[StreamRecord]:
        return self._stream.read_range(from_seq)

    def follow(self, from_seq: int = 1) -> AsyncIterator[StreamRecord]:
        return self._stream.follow(from_seq)

    async def last(self) -> StreamRecord | None:
        return await self._stream.last()

    async def purge_below(self, seq: int) -> None:
        """Remove records of the stream. Files are removed one by one: `files.remove`."""
        await self._stream.purge_below(seq)

    async def info(self) -> StreamInfo:
        """Return the state of the stream, without files."""
        return await self._stream.info()

    async def close(self) -> None:
        """Complete the current file. Appends in progress are stored or cancelled."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])
        for waiting in self._waiting:
            if not waiting.stored.done():
                waiting.stored.set_exception(BusUnavailable(f"{self.name} was closed with appends in flight"))
        self._waiting.clear()
        self._release()

    async def _write_all(self, writer: PayloadWriter) -> None:
        """Write what waits, several payloads per call."""
        try:
            while self._waiting:
                await self._write(writer, self._take())
        finally:
            self._writing = None
            self._release_later()

    def _take(self) -> list[_Waiting]:
        """Remove and return the oldest payloads of one call, without those that no caller waits for; at least one if any is left."""
        taken: list[_Waiting] = []
        num_bytes = 0
        while self._waiting and (not taken or num_bytes + len(self._waiting[0].payload) <= CALL_BYTES):
            waiting = self._waiting.popleft()
            if not waiting.stored.done():
                taken.append(waiting)
                num_bytes += len(waiting.payload)
        return taken

    async def _write(self, writer: PayloadWriter, batch: list[_Waiting]) -> None:
        if not batch:
            return
        call = asyncio.ensure_future(asyncio.to_thread(writer.append, [one.payload for one in batch]))
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:  # one thread at a time uses the writer, so wait for it
            await asyncio.wait([call])
            raise
        finally:
            _resolve(batch, call)

    def _release_later(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._release)

    def _release(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._writer is not None and self._writing is None:
            self._writer.release()


def _resolve(batch: list[_Waiting], call: asyncio.Future[list[int]]) -> None:
    error = BusUnavailable("the append was interrupted; append again") if not call.done() else call.exception()
    for index, waiting in enumerate(batch):
        if waiting.stored.done():
            continue
        if error is None:
            waiting.stored.set_result(call.result()[index])
        else:
            waiting.stored.set_exception(error)


class PayloadBus:
    """`bus`, whose sample streams are `SampleStream`s. Implements `Bus`."""

    def __init__(self, bus: Bus, folder: Path | None, *, write: bool, bytes_max: int) -> None:
        """`folder` holds one folder per run, None on another host. `write` says whether appends go there, up to `bytes_max` per run."""
        self._bus = bus
        self._folder = folder
        self._write = write
        self._bytes_max = bytes_max
        self._streams: dict[str, SampleStream] = {}

    async def create(self, spec: StreamSpec) -> StreamLog:
        return await self._with_files(await self._bus.create(spec))

    async def open(self, name: str) -> StreamLog:
        return await self._with_files(await self._bus.open(name))

    async def names(self) -> list[str]:
        return await self._bus.names()

    async def delete(self, name: str) -> None:
        if (run := run_of_samples(name)) and self._folder is not None:
            if (known := self._streams.pop(name, None)) is not None:
                await known.close()
            await asyncio.to_thread(PayloadFiles(self._folder / run).remove_all)
        await self._bus.delete(name)

    async def close(self) -> None:
        for stream in self._streams.values():
            await stream.close()
        await self._bus.close()

    async def _with_files(self, stream: StreamLog) -> StreamLog:
        """Return the stream of a run that exists. Its folder is created here, because a writer must not create that of a deleted run."""
        run = run_of_samples(stream.name)
        if not run:
            return stream
        if self._write and self._folder is not None:
            await asyncio.to_thread((self._folder / run).mkdir, 0o700, True, True)
        if stream.name not in self._streams:
            files = PayloadFiles(self._folder / run) if self._folder is not None else None
            writer = PayloadWriter(files, bytes_max=self._bytes_max) if files is not None and self._write else None
            self._streams[stream.name] = SampleStream(stream, files, writer)
        return self._streams[stream.name]
