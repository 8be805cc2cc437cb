"""The bus over NATS JetStream: an embedded nats-server or a cluster, one URL and a login.

Each stream has one subject, its own name. Reads follow an ephemeral consumer that is created again when it was lost. Appends go
through `append_pipeline`. While the server is unavailable, every call waits up to its deadline, then raises `BusUnavailable`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import api

from rollmesh.shared.bus.append_pipeline import AppendPipeline
from rollmesh.shared.bus.bus import (
    BusUnavailable,
    Discard,
    StreamInfo,
    StreamRecord,
    StreamSpec,
    UnknownRecord,
    UnknownStream,
    check_append,
)
from rollmesh.shared.bus.link import INSUFFICIENT_STORAGE, STREAM_NOT_FOUND, Link, raise_if_cancelled
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.stream_reader import StreamReader, make_record
from rollmesh.shared.errors import DiskFull, InvalidInput
from rollmesh.shared.settings import PositiveFloat, PositiveInt, Settings
from rollmesh.shared.telemetry.tracing import trace_headers

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class JetStreamConfig(Settings):
    """Timeouts and limits of a client of JetStream."""

    deadline_s: PositiveFloat = 30.0
    """Default deadline of a call, including reconnects, in seconds."""
    connect_s: PositiveFloat = 5.0
    """Timeout of the first connection, in seconds."""
    attempt_s: PositiveFloat = 5.0
    """Timeout of one request before it is sent again, in seconds."""
    reconnect_wait_s: PositiveFloat = 0.1
    """Pause between attempts to reconnect, in seconds. Their number is unlimited, because a run survives restarts of the server."""
    inflight_max: PositiveInt = 256
    """Maximum number of unacknowledged appends of one stream; further appends wait."""
    inflight_bytes_max: PositiveInt = 64 * 1024 * 1024
    """Maximum payload bytes of unacknowledged appends of one stream."""
    pull_batch: PositiveInt = 128
    """Records that a reader requests at once. Each may have the maximum size of a record."""


class JetStreamBus:
    """A connection to JetStream. Create it with `connect`."""

    def __init__(self, client: Client, link: Link, config: JetStreamConfig, url: str) -> None:
        self.url = url
        """As it was connected to."""
        self._client = client
        self._link = link
        self._config = config
        self._streams: dict[str, JetStreamLog] = {}

    @classmethod
    async def connect(
        cls, url: str, *, login: BusLogin | None = None, config: JetStreamConfig | None = None
    ) -> JetStreamBus:
        """Connect to a server or cluster (`url` may list several, comma-separated). Raises `BusUnavailable`."""
        config = config or JetStreamConfig()
        client = Client()
        link = Link(client, config.attempt_s)
        problems: list[Exception] = []
        limit = asyncio.timeout(config.connect_s)

        async def note(err: Exception) -> None:
            _log.debug("nats: %s: %s", type(err).__name__, err)
            if not connected:
                problems.append(err)
                raise_if_cancelled()  # a limit that was lost in an attempt failing just then would end no further one
                if "authorization" in str(err).lower():
                    limit.reschedule(0.0)  # a retry would fail with the same password

        connected = False
        try:
            async with limit:
                await client.connect(**_connect_options(url, login, config, link), error_cb=note)
                await link.listen_for_acks()
            connected = True
        except (OSError, TimeoutError, nats.errors.Error) as err:
            await _close(client)
            why = problems[-1] if problems else err
            raise BusUnavailable(
                f"cannot reach NATS at {url} ({why}); is the server running, and the login right?", url=url
            ) from err
        return cls(client, link, config, url)

    async def create(self, spec: StreamSpec) -> JetStreamLog:
        config = _stream_config(spec)

        async def create_or_update() -> None:
            try:
                await self._link.js.add_stream(config)
            except nats.js.errors.APIError as err:
                # It exists with other limits; NATS may also say that it has no room, for it looks at that first.
                if not isinstance(err, nats.js.errors.BadRequestError) and err.err_code != INSUFFICIENT_STORAGE:
                    raise
                try:
                    await self._link.js.update_stream(config)
                except nats.js.errors.NotFoundError:
                    raise err from None

        try:
            await self._link.call(create_or_update, self._config.deadline_s, f"create {spec.name}")
        except nats.js.errors.APIError as err:
            if err.err_code == INSUFFICIENT_STORAGE:
                raise DiskFull(
                    f"NATS has no room to reserve {spec.bytes_max} bytes for {spec.name}; lower bytes_max or raise its store limit"
                ) from err
            raise InvalidInput(f"NATS refuses stream {spec.name}: {err.description}", stream=spec.name) from err
        return self._log_of(spec.name)

    async def open(self, name: str) -> JetStreamLog:
        log = self._log_of(name)
        await log.info()
        return log

    async def names(self) -> list[str]:
        found: list[str] = []

        async def page() -> list[str]:
            return [info.config.name or "" for info in await self._link.js.streams_info(offset=len(found))]

        while names := await self._link.call(page, self._config.deadline_s, "list the streams"):
            found += names
        return sorted(found)

    async def delete(self, name: str) -> None:
        if (log := self._streams.pop(name, None)) is not None:
            await log.close()
        try:
            await self._link.call(lambda: self._link.js.delete_stream(name), self._config.deadline_s, f"delete {name}")
        except nats.js.errors.NotFoundError:
            return

    async def close(self) -> None:
        for log in self._streams.values():
            await log.close()
        await _close(self._client)

    def _log_of(self, name: str) -> JetStreamLog:
        if name not in self._streams:
            self._streams[name] = JetStreamLog(name, self._link, self._config)
        return self._streams[name]


class JetStreamLog:
    """One stream of JetStream."""

    def __init__(self, name: str, link: Link, config: JetStreamConfig) -> None:
        self._name = name
        self._link = link
        self._config = config
        self._pipeline = AppendPipeline(
            name,
            link,
            self.read,
            inflight_max=config.inflight_max,
            inflight_bytes_max=config.inflight_bytes_max,
        )

    @property
    def name(self) -> str:
        return self._name

    async def append(
        self,
        payload: bytes,
        *,
        msg_id: str,
        expected_last_seq: int | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
    ) -> int:
        future = await self.append_pipelined(
            payload, msg_id=msg_id, expected_last_seq=expected_last_seq, headers=headers, deadline_s=deadline_s
        )
        return await future

    async def append_pipelined(
        self,
        payload: bytes,
        *,
        msg_id: str,
        expected_last_seq: int | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
    ) -> asyncio.Future[int]:
        check_append(msg_id, headers)
        deadline_s = self._config.deadline_s if deadline_s is None else deadline_s
        return await self._pipeline.submit(
            payload, msg_id, expected_last_seq, {**(headers or {}), **trace_headers()}, deadline_s
        )

    async def read(self, seq: int) -> StreamRecord:
        try:
            # Not the direct form: that may answer from a replica that lags, and this read decides who is fenced.
            raw = await self._call(lambda: self._link.js.get_msg(self._name, seq=seq), f"read {seq}")
        except nats.js.errors.NotFoundError as err:
            if err.err_code == STREAM_NOT_FOUND:
                raise self._unknown() from err
            raise UnknownRecord(
                f"{self._name} has no record {seq}: purged, or not yet written", stream=self._name, seq=seq
            ) from err
        return _record_of_raw(raw)

    async def read_direct(self, seq: int) -> StreamRecord:
        async def ask() -> api.RawStreamMsg | None:
            try:
                return await self._link.js.get_msg(self._name, seq=seq, direct=True)
            except (nats.js.errors.NotFoundError, nats.errors.NoRespondersError):
                return None  # a replica that lags, or a stream made without direct reads

        # Raw bytes: the other form wraps them in base64 and JSON, which costs more than all the rest of the way.
        raw = await self._call(ask, f"read {seq}")
        return await self.read(seq) if raw is None else _record_of_raw(raw)

    async def read_range(self, from_seq: int = 1) -> AsyncGenerator[StreamRecord, None]:
        newest = await self.last()  # not the stream's last sequence: that record may have been removed
        if newest is None or from_seq > newest.seq:
            return
        seq = from_seq - 1
        async with aclosing(self._reader().follow(max(1, from_seq))) as records:
            while seq < newest.seq:
                try:
                    async with asyncio.timeout(self._config.deadline_s):
                        record = await anext(records)
                except TimeoutError:
                    raise BusUnavailable(
                        f"{self._name} gave no record after {seq} for {self._config.deadline_s:g} s, though it holds record "
                        f"{newest.seq}; see the log of nats-server",
                        stream=self._name,
                        seq=seq + 1,
                    ) from None
                seq = record.seq
                if seq <= newest.seq:
                    yield record

    def follow(self, from_seq: int = 1) -> AsyncGenerator[StreamRecord, None]:
        return self._reader().follow(from_seq)

    async def last(self) -> StreamRecord | None:
        try:
            raw = await self._call(lambda: self._link.js.get_last_msg(self._name, self._name), "read the last record")
        except nats.js.errors.NotFoundError as err:
            if err.err_code == STREAM_NOT_FOUND:
                raise self._unknown() from err
            return None
        return _record_of_raw(raw)

    async def purge_below(self, seq: int) -> None:
        try:
            await self._call(lambda: self._link.js.purge_stream(self._name, seq=seq), f"purge below {seq}")
        except nats.js.errors.NotFoundError as err:
            raise self._unknown() from err
        except nats.js.errors.APIError as err:
            raise InvalidInput(f"{self._name} cannot be purged: {err.description}", stream=self._name) from err

    async def info(self) -> StreamInfo:
        try:
            state = (await self._call(lambda: self._link.js.stream_info(self._name), "ask for its state")).state
        except nats.js.errors.NotFoundError as err:
            raise self._unknown() from err
        first_seq = state.first_seq if state.messages else state.last_seq + 1
        return StreamInfo(
            first_seq=first_seq, last_seq=state.last_seq, num_records=state.messages, num_bytes=state.bytes
        )

    async def close(self) -> None:
        """Fails what is in flight with `BusUnavailable`."""
        await self._pipeline.close()

    async def _call(self, verb: Callable[[], Awaitable[_T]], what: str) -> _T:
        return await self._link.call(verb, self._config.deadline_s, f"{what} of {self._name}")

    def _reader(self) -> StreamReader:
        return StreamReader(self._name, self._link, batch=self._config.pull_batch, deadline_s=self._config.deadline_s)

    def _unknown(self) -> UnknownStream:
        return UnknownStream(f"there is no stream {self._name}", stream=self._name)


async def _close(client: Client) -> None:
    """nats-py flushes while it closes, and a server that has just died makes that fail: then there is nothing left to flush."""
    with suppress(OSError):
        await client.close()


def _connect_options(url: str, login: BusLogin | None, config: JetStreamConfig, link: Link) -> dict[str, Any]:
    return {
        "servers": url.split(","),
        "user": login.user if login else None,
        "password": login.password if login else None,
        "tls": login.tls.ssl_context() if login and login.tls and url.startswith("tls://") else None,
        "reconnect_time_wait": config.reconnect_wait_s,
        "max_reconnect_attempts": -1,
        "ping_interval": 10,
        "disconnected_cb": link.disconnected,
        "reconnected_cb": link.reconnected,
        "closed_cb": link.disconnected,
    }


def _stream_config(spec: StreamSpec) -> api.StreamConfig:
    return api.StreamConfig(
        name=spec.name,
        subjects=[spec.name],
        retention=api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        max_bytes=spec.bytes_max,
        discard=api.DiscardPolicy.NEW if spec.discard is Discard.NEW else api.DiscardPolicy.OLD,
        duplicate_window=spec.dedup_s,
        deny_delete=True,
        allow_direct=True,
        deny_purge=spec.deny_purge,
        num_replicas=spec.num_replicas,
    )


def _record_of_raw(raw: api.RawStreamMsg) -> StreamRecord:
    assert raw.seq is not None
    return make_record(raw.seq, raw.data, raw.headers)
