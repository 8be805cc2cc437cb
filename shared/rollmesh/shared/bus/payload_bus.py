"""A bus whose sample streams keep their payloads in files of this host (`payload_files`), where that loses nothing.

The stream of a run and its files are one `SampleStream`: the sequence of a record tells which of the two holds it.
Readers take both, so that a run can be resumed with the other kind, and a worker on another host appends to the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, Unpack

from rollmesh.shared.bus.bus import (
    AppendOptions,
    Bus,
    BusUnavailable,
    StreamInfo,
    StreamLog,
    StreamRecord,
    StreamSpec,
    UnknownRecord,
    UnknownStream,
    check_append,
)
from rollmesh.shared.bus.payload_writer import PayloadWriter
from rollmesh.shared.bus.run_streams import run_of_samples, run_streams
from rollmesh.shared.errors import FailedPrecondition
from rollmesh.shared.store.payload_files import NoPayloadFile, PayloadFiles, in_file
from rollmesh.shared.telemetry.logs import apart

PayloadsIn = Literal["auto", "stream", "files"]
"""Where the payloads of a run are stored."""
CALL_BYTES = 4 * 1024 * 1024
"""Payload bytes of one call of a writer."""
APPEND_S = 30.0
"""Default deadline of an append to a file, in seconds."""


class WrongHost(FailedPrecondition):
    """What was read is in a file of the run's host, and this process is on another one."""

    reason = "WRONG_HOST"


class _Batch:
    """The payloads of one call of a writer, and the task that makes it."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.num_bytes = 0
        self.task: asyncio.Task[list[int]]


class SampleStream:
    """The sample stream of a run and, on the host that has them, its payload files. Implements `StreamLog`."""

    def __init__(self, stream: StreamLog, files: PayloadFiles | None, writer: PayloadWriter | None) -> None:
        """Appends go to `writer`, or to the stream without one."""
        self._stream = stream
        self.files = files
        """None on another host."""
        self._writer = writer
        self._batch: _Batch | None = None
        """What the next call writes."""
        self._writing = asyncio.Lock()
        """One thread at a time uses the writer, in the order of the batches."""

    @property
    def name(self) -> str:
        return self._stream.name

    async def append(self, payload: bytes, **options: Unpack[AppendOptions]) -> int:
        """Store one record. In a file a repeated `msg_id` is another record: only the reported one counts."""
        if self._writer is None:
            return await self._stream.append(payload, **options)
        check_append(options["msg_id"], options.get("headers"))
        batch = self._batch
        if batch is None or batch.num_bytes + len(payload) > CALL_BYTES:
            batch = self._batch = _Batch()
            batch.task = asyncio.create_task(
                self._write(self._writer, batch), name=f"append {self.name}", context=apart()
            )
        batch.payloads.append(payload)
        batch.num_bytes += len(payload)
        index = len(batch.payloads) - 1
        deadline_s = options.get("deadline_s")
        deadline_s = APPEND_S if deadline_s is None else deadline_s
        done, _ = await asyncio.wait([batch.task], timeout=deadline_s)  # does not cancel it, as others wait for it too
        if not done:
            raise BusUnavailable(
                f"the disk did not store a payload of {self.name} within {deadline_s:g} s; see the disk of the run "
                "folder",
                stream=self.name,
            )
        return batch.task.result()[index]

    async def _write(self, writer: PayloadWriter, batch: _Batch) -> list[int]:
        async with self._writing:
            if self._batch is batch:
                self._batch = None
            return await asyncio.to_thread(writer.append, batch.payloads)

    async def append_pipelined(self, payload: bytes, **options: Unpack[AppendOptions]) -> asyncio.Future[int]:
        return await self._stream.append_pipelined(payload, **options)

    async def read(self, seq: int) -> StreamRecord:
        """As the stream's. Raises also UnreadableRecord for a position in a file, and WrongHost without the files."""
        return await (self._read_file(seq) if in_file(seq) else self._stream.read(seq))

    async def read_direct(self, seq: int) -> StreamRecord:
        """As `read`."""
        return await (self._read_file(seq) if in_file(seq) else self._stream.read_direct(seq))

    async def _read_file(self, seq: int) -> StreamRecord:
        if self.files is None:
            raise WrongHost(
                f"payload {seq} of {self.name} is in a file of the run's host, which this process does not have; read "
                "it from the gateway there, or resume the run with `bus.payloads: stream`"
            )
        try:
            return StreamRecord(seq=seq, payload=await asyncio.to_thread(self.files.read, seq), msg_id="")
        except NoPayloadFile as error:
            raise UnknownRecord(error.message) from error

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
        """Complete the appends in progress and close the current file."""
        async with self._writing:
            if self._writer is not None:
                self._writer.close()


class PayloadBus:
    """`bus`, whose sample streams are `SampleStream`s. Implements `Bus`."""

    def __init__(self, bus: Bus, folder: Path | None, *, write: bool, bytes_max: int) -> None:
        """`folder` holds one folder per run, None on another host. `write` says whether appends go there, up to
        `bytes_max` per run."""
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
        """Remove also the files, unless the ledger of the run has no record: they are then those of a run of this name
        on another NATS, and the creation of this one is rolled back."""
        if (run := run_of_samples(name)) and self._folder is not None:
            if (known := self._streams.pop(name, None)) is not None:
                await known.close()
            files = PayloadFiles(self._folder / run)
            if await self._has_records(run_streams(run).ledger.name):
                await asyncio.to_thread(files.remove_all)
            else:
                with suppress(OSError):  # it has files
                    await asyncio.to_thread(files.folder.rmdir)
        await self._bus.delete(name)

    async def _has_records(self, stream: str) -> bool:
        try:
            return (await (await self._bus.open(stream)).info()).last_seq > 0
        except UnknownStream:
            return False

    async def close(self) -> None:
        for stream in self._streams.values():
            await stream.close()
        await self._bus.close()

    async def _with_files(self, stream: StreamLog) -> StreamLog:
        """Return the stream of a run that exists. Its folder is created here, because a writer must not create that of
        a deleted run."""
        run = run_of_samples(stream.name)
        if not run:
            return stream
        if stream.name not in self._streams:
            files = writer = None
            if self._folder is not None:
                files = PayloadFiles(self._folder / run)
                if self._write:
                    await asyncio.to_thread(files.folder.mkdir, 0o700, True, True)
                    writer = PayloadWriter(files, bytes_max=self._bytes_max)
            self._streams[stream.name] = SampleStream(stream, files, writer)
        return self._streams[stream.name]
