"""The bus over NATS JetStream: an embedded nats-server or a cluster, one URL and a login.

Each stream has one subject, its own name. Reads follow an ephemeral consumer that is created again when it was lost.
Appends go through `append_pipeline`. While the server is unavailable, every call waits up to its deadline, then raises
`BusUnavailable`.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, TypeVar, Unpack

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import api

from rollmesh.shared.bus.append_pipeline import AppendPipeline
from rollmesh.shared.bus.bus import (
    AppendOptions,
    BusUnavailable,
    Discard,
    StreamInfo,
    StreamRecord,
    StreamSpec,
    UnknownRecord,
    UnknownStream,
    check_append,
)
from rollmesh.shared.bus.link import (
    ENABLE_JETSTREAM,
    INSUFFICIENT_STORAGE,
    NO_JETSTREAM,
    NO_PEERS,
    NO_REPLICAS,
    STREAM_NOT_FOUND,
    Link,
    NoJetStream,
    raise_if_cancelled,
)
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.stream_reader import StreamReader, make_record
from rollmesh.shared.config.settings import PositiveFloat, PositiveInt, Settings
from rollmesh.shared.errors import (
    AlreadyExists,
    ConfigError,
    DiskFull,
    FailedPrecondition,
    InvalidInput,
    MeshError,
    NotReady,
)
from rollmesh.shared.telemetry.tracing import trace_headers

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_JETSTREAM_S_MAX = 2.0
"""Time for a server to enable JetStream after its start, in seconds."""
_PEERS_S_MAX = 15.0
"""Time for the servers of a cluster to find each other after their start, in seconds."""
_RETRY_S = 0.1
_QUIET_S = 0.5
"""Seconds without a record after which a range checks whether the rest of its records was removed."""
_RESTORE = "RESTORE"
"""Key of the metadata, and last token of the subject, of a stream that is being restored."""


class TooFewServers(FailedPrecondition):
    """The cluster has fewer servers than the stream has replicas."""

    reason = "TOO_FEW_SERVERS"


class NotOneCluster(ConfigError):
    """The servers of `bus.url` are not servers of one cluster, so that they hold different streams."""

    reason = "NOT_ONE_CLUSTER"


_ONE_CLUSTER = "list the servers of one cluster, or one server"


class JetStreamConfig(Settings):
    """Timeouts and limits of a client of JetStream."""

    deadline_s: PositiveFloat = 30.0
    """Default deadline of a call, including reconnects, in seconds."""
    connect_s: PositiveFloat = 5.0
    """Timeout of the first connection, in seconds, for each server of the URL."""
    attempt_s: PositiveFloat = 5.0
    """Timeout of one request before it is sent again, in seconds."""
    reconnect_wait_s: PositiveFloat = 0.1
    """Pause between attempts to reconnect, in seconds. Their number is unlimited, because a run survives restarts of
    the server."""
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
        link = Link(client, config.attempt_s, config.reconnect_wait_s)
        problems: list[Exception] = []
        limit_s = config.connect_s * len(url.split(","))
        limit = asyncio.timeout(limit_s)

        async def note(err: Exception) -> None:
            _log.debug("nats: %s: %s", type(err).__name__, err)
            if connected:
                link.refused(err)
            else:
                problems.append(err)
                raise_if_cancelled()  # a limit that was lost in an attempt failing just then would end no further one
                if "authorization" in str(err).lower():
                    limit.reschedule(0.0)  # a retry would fail with the same password

        connected = False
        try:
            async with limit:
                await client.connect(**_connect_options(url, login, config, link), error_cb=note)
                await link.begin(several="," in url)
            if "," in url and not link.clustered:
                raise NotOneCluster(
                    f"NATS at {link.server} is not in a cluster, but `bus.url` lists several servers: {_ONE_CLUSTER}"
                )
            await _require_jetstream(link)
            connected = True
        except (OSError, TimeoutError, nats.errors.Error) as err:
            await _close(link)
            why = problems[-1] if problems else err
            raise _unreachable(
                url, login, why if str(why) else TimeoutError(f"no answer within {limit_s:g} s")
            ) from err
        except BaseException:
            await _close(link)
            raise
        return cls(client, link, config, url)

    @property
    def cluster(self) -> str:
        """Name of the cluster; empty if the server is a single one."""
        return self._link.cluster

    @property
    def server(self) -> str:
        """host:port of the connected server."""
        return self._link.server

    async def create(self, spec: StreamSpec) -> JetStreamLog:
        config = _stream_config(spec)
        await self._create(spec, config)
        log = self._log_of(spec.name)
        log.use_subjects(config.subjects or [])
        return log

    async def _create(self, spec: StreamSpec, config: api.StreamConfig) -> None:
        async def create_or_update() -> bool:
            """Return whether the stream has records of one that was deleted."""
            try:
                info = await self._link.js.add_stream(config)
            except nats.js.errors.APIError as err:
                # It exists with other limits; NATS may also say that it has no room, for it looks at that first.
                if not isinstance(err, nats.js.errors.BadRequestError) and err.err_code != INSUFFICIENT_STORAGE:
                    raise
                try:
                    held = (await self._link.js.stream_info(spec.name)).config
                    # NATS never permits a purge again. Earlier releases created ledgers without it.
                    await self._link.js.update_stream(replace(config, deny_purge=config.deny_purge or held.deny_purge))
                except nats.js.errors.NotFoundError:
                    raise err from None
                return False
            return bool(info.did_create) and await self._is_older(info)

        until_s = asyncio.get_running_loop().time() + min(_PEERS_S_MAX, self._config.deadline_s)
        warned = False
        while True:
            try:
                if not await self._link.call(create_or_update, self._config.deadline_s, f"create {spec.name}"):
                    return
            except nats.js.errors.APIError as err:
                if err.err_code != NO_PEERS or asyncio.get_running_loop().time() + _RETRY_S >= until_s:
                    raise _refusal(spec, err) from err
                if not warned:
                    _log.warning("NATS waits for servers to keep %d copies of %s", spec.num_replicas, spec.name)
            else:
                # nats-server 2.15 ignores that it cannot remove a stream while it removes an earlier one of that name.
                await self.delete(spec.name)
                if asyncio.get_running_loop().time() + _RETRY_S >= until_s:
                    raise BusUnavailable(
                        f"NATS creates {spec.name} with the records of a deleted stream; delete its folder in the "
                        "store of nats-server",
                        stream=spec.name,
                    )
                if not warned:
                    _log.warning("NATS has not removed the records of the deleted stream %s; it is retried", spec.name)
            warned = True
            await asyncio.sleep(_RETRY_S)

    async def _is_older(self, created: api.StreamInfo) -> bool:
        """Return whether a record of this stream was stored before the stream was created."""
        if not created.state.messages:
            return created.state.last_seq >= (created.config.first_seq or 1)
        first = await self._link.js.get_msg(created.config.name or "", seq=created.state.first_seq)
        return first.time is not None and created.created is not None and first.time < created.created

    async def open(self, name: str) -> JetStreamLog:
        log = self._log_of(name)
        await log.load_subjects()
        return log

    async def names(self) -> list[str]:
        found: list[str] = []

        async def page() -> list[str]:
            return [info.config.name or "" for info in await self._link.js.streams_info(offset=len(found))]

        while names := await self._link.call(page, self._config.deadline_s, "list the streams"):
            found += names
        return sorted(found)

    async def begin_restore(self, spec: StreamSpec, *, first_seq: int, backup: str) -> tuple[JetStreamLog, bool]:
        """Create a stream whose first record gets the sequence `first_seq`, or find what an interrupted restore of the
        same `backup` left.

        Return its log, and whether it is complete. Until `end_restore` only this log can append to it. Raises
        `AlreadyExists` for any other stream of that name, and as `create`.
        """
        log = self._log_of(spec.name)
        config = replace(
            _stream_config(spec),
            subjects=[f"{spec.subject or spec.name}.{_RESTORE}"],
            first_seq=first_seq,
            metadata={_RESTORE: backup},
        )
        try:
            found = (await log.server_info()).config
        except UnknownStream:
            await self._create(spec, config)
            found = config
        if (found.metadata or {}).get(_RESTORE) != backup:
            raise AlreadyExists(
                f"{spec.name} exists; a restore never overwrites a stream. Delete that run first (`rollmesh delete`), "
                "or use another NATS",
                stream=spec.name,
            )
        log.use_subjects(found.subjects or [])
        return log, spec.name in (found.subjects or [])

    async def end_restore(self, spec: StreamSpec) -> None:
        """Make a restored stream usable. Idempotent."""
        log = self._log_of(spec.name)
        found = (await log.server_info()).config
        config = replace(_stream_config(spec), first_seq=found.first_seq, metadata=found.metadata)
        await self._link.call(
            lambda: self._link.js.update_stream(config), self._config.deadline_s, f"finish {spec.name}"
        )
        log.use_subjects(config.subjects or [])

    async def copies(self, name: str) -> dict[str, bool]:
        """Return whether the copy of a stream is complete, by the server that holds it. Empty while the stream has no
        leader, and without a cluster. Raises `UnknownStream`."""
        cluster = (await self._log_of(name).server_info()).cluster
        if cluster is None or not cluster.leader:
            return {}
        return {cluster.leader: True} | {one.name or "": bool(one.current) for one in cluster.replicas or []}

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
        await _close(self._link)

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
        self._subjects: tuple[str, ...] = (name,)
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

    async def append(self, payload: bytes, **options: Unpack[AppendOptions]) -> int:
        return await (await self.append_pipelined(payload, **options))

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
        seq, begin_s = from_seq - 1, time.monotonic()
        async with aclosing(self._reader().watch(max(1, from_seq), _QUIET_S)) as records:
            async for record in records:
                if record is None:
                    held = await self.last()
                    if held is None or held.seq <= seq:
                        return  # the rest was removed while it was read
                    if time.monotonic() - begin_s >= self._config.deadline_s:
                        raise BusUnavailable(
                            f"{self._name} gave no record after {seq} for {self._config.deadline_s:g} s, though it "
                            f"holds record {held.seq}; see the log of nats-server",
                            stream=self._name,
                            seq=seq + 1,
                        )
                    continue
                seq = record.seq
                if seq <= newest.seq:
                    yield record
                if seq >= newest.seq:
                    return
                begin_s = time.monotonic()

    def follow(self, from_seq: int = 1) -> AsyncGenerator[StreamRecord, None]:
        return self._reader().follow(from_seq)

    async def last(self) -> StreamRecord | None:
        last_seq = (await self.server_info()).state.last_seq
        if last_seq:
            with suppress(UnknownRecord):
                return await self.read(last_seq)
        # It was removed: NATS finds the newest one of a subject.
        found = [raw for subject in self._subjects if (raw := await self._last_of(subject)) is not None]
        return max((_record_of_raw(raw) for raw in found), key=lambda record: record.seq, default=None)

    async def _last_of(self, subject: str) -> api.RawStreamMsg | None:
        try:
            return await self._call(lambda: self._link.js.get_last_msg(self._name, subject), "read the last record")
        except nats.js.errors.NotFoundError as err:
            if err.err_code == STREAM_NOT_FOUND:
                raise self._unknown() from err
            return None

    async def purge_below(self, seq: int) -> None:
        try:
            await self._call(lambda: self._link.js.purge_stream(self._name, seq=seq), f"purge below {seq}")
        except nats.js.errors.NotFoundError as err:
            raise self._unknown() from err
        except nats.js.errors.APIError as err:
            raise InvalidInput(f"{self._name} cannot be purged: {err.description}", stream=self._name) from err

    def use_subjects(self, subjects: Sequence[str]) -> None:
        """Append to the first of these subjects of the stream."""
        self._subjects = tuple(subjects)
        self._pipeline.subject = subjects[0]

    async def load_subjects(self) -> None:
        """Append to the subject that the stream has. Raises `UnknownStream`, `NotReady`."""
        subjects = (await self.server_info()).config.subjects or []
        if self._name not in subjects:
            raise NotReady(
                f"{self._name} is being restored from a backup; wait for `rollmesh restore`, or run it again"
            )
        self.use_subjects(subjects)

    async def server_info(self) -> api.StreamInfo:
        """Return what NATS reports about the stream. Raises `UnknownStream`."""
        try:
            return await self._call(lambda: self._link.js.stream_info(self._name), "ask for its state")
        except nats.js.errors.NotFoundError as err:
            raise self._unknown() from err

    async def info(self) -> StreamInfo:
        info = await self.server_info()
        state = info.state
        return StreamInfo(
            first_seq=state.first_seq if state.messages else state.last_seq + 1,
            last_seq=state.last_seq,
            num_records=state.messages,
            num_bytes=state.bytes,
            bytes_max=limit if (limit := info.config.max_bytes or 0) > 0 else sys.maxsize,
            deny_purge=bool(info.config.deny_purge),
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


def _refusal(spec: StreamSpec, err: nats.js.errors.APIError) -> MeshError:
    if spec.num_replicas > 1 and err.err_code in (NO_PEERS, NO_REPLICAS):
        return TooFewServers(
            f"NATS cannot keep {spec.num_replicas} copies of {spec.name} ({err.description}): it needs a cluster of at "
            "least as many servers "
            "that run, each with JetStream and room; start them, or lower `coordinator.streams.num_replicas`",
            stream=spec.name,
        )
    if err.err_code == INSUFFICIENT_STORAGE:
        return DiskFull(
            f"NATS has no room to reserve {spec.bytes_max} bytes for {spec.name}; lower bytes_max or raise its store "
            "limit"
        )
    return InvalidInput(f"NATS refuses stream {spec.name}: {err.description}", stream=spec.name)


async def check_servers(url: str, login: BusLogin) -> None:
    """Connect to each server of `url`. Servers that cannot be reached are logged, because a cluster works without some
    of them.

    Raises `NotOneCluster`; `NoJetStream`; `BusUnavailable` if no server responds.
    """
    found: dict[str, str] = {}
    problems: list[BusUnavailable] = []
    for one in url.split(","):
        try:
            bus = await JetStreamBus.connect(one, login=login)
        except BusUnavailable as err:
            problems.append(err)
            continue
        found[one] = bus.cluster
        await bus.close()
    if not found:
        raise problems[0]
    for problem in problems:
        _log.warning("%s", problem)
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{one} ({cluster or 'not in a cluster'})" for one, cluster in found.items())
        raise NotOneCluster(f"the servers of `bus.url` are not of one cluster: {listed}; {_ONE_CLUSTER}")


async def _close(link: Link) -> None:
    """nats-py flushes while it closes, and a server that has just died makes that fail: then there is nothing left to
    flush."""
    await link.end()
    with suppress(OSError):
        await link.client.close()


async def _require_jetstream(link: Link) -> None:
    """Raise `NoJetStream` if no server of the cluster answers requests of JetStream. A cluster without a leader answers
    later."""
    cause: Exception | None = None
    try:
        async with asyncio.timeout(_JETSTREAM_S_MAX):
            while True:
                try:
                    await link.js.account_info()
                    return
                except (nats.errors.NoRespondersError, nats.js.errors.ServiceUnavailableError) as err:
                    if isinstance(err, nats.js.errors.APIError) and err.err_code not in (None, *NO_JETSTREAM):
                        return
                    cause = err
                await asyncio.sleep(_RETRY_S)
    except (TimeoutError, nats.errors.Error):
        raise_if_cancelled()
    if cause is not None:
        raise NoJetStream(f"NATS at {link.server} has no JetStream ({cause}); {ENABLE_JETSTREAM}")


def _unreachable(url: str, login: BusLogin | None, why: Exception) -> BusUnavailable:
    remedy = "is the server running, and the login right?"
    if "authorization" in str(why).lower():
        user = login.user if login is not None else "(none)"
        remedy = (
            f"the server rejects the password of user {user}; `bus.login_file` names the file with the login of "
            "this cluster"
        )
    elif isinstance(why, ssl.SSLCertVerificationError):
        remedy = (
            "if a certificate is expired or not yet valid, compare the clock of this host; `rollmesh certs` makes "
            "new ones"
        )
    return BusUnavailable(f"cannot reach NATS at {url} ({why}); {remedy}", url=url)


def _connect_options(url: str, login: BusLogin | None, config: JetStreamConfig, link: Link) -> dict[str, Any]:
    return {
        "servers": url.split(","),
        "user": login.user if login else None,
        "password": login.password if login else None,
        "tls": login.tls.ssl_context() if login and login.tls and url.startswith("tls://") else None,
        "reconnect_time_wait": config.reconnect_wait_s,
        "reconnect_to_server_handler": link.choose_server if "," in url else None,
        "max_reconnect_attempts": -1,
        "ping_interval": 10,
        "inbox_prefix": login.inbox if login else "_INBOX",
        "disconnected_cb": link.disconnected,
        "reconnected_cb": link.reconnected,
        "closed_cb": link.disconnected,
    }


def _stream_config(spec: StreamSpec) -> api.StreamConfig:
    return api.StreamConfig(
        name=spec.name,
        subjects=[spec.subject, spec.name]
        if spec.subject
        else [spec.name],  # the name is for writers of earlier versions
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
