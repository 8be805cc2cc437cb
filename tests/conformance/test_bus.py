"""The contract of a bus, tested on the in-memory bus and on JetStream with a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest
from opentelemetry import trace

from rollmesh.shared.bus.bus import (
    Bus,
    BusUnavailable,
    Discard,
    StreamFull,
    StreamInfo,
    StreamLog,
    StreamRecord,
    StreamSpec,
    UnknownRecord,
    UnknownStream,
    WrongLastSequence,
)
from rollmesh.shared.bus.embedded_server import EmbeddedServer, EmbeddedServerConfig
from rollmesh.shared.bus.jetstream_bus import JetStreamBus, JetStreamConfig
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.bus.stream_reader import StreamReader
from rollmesh.shared.errors import InvalidInput, PayloadTooLarge
from rollmesh.testing.memory_bus import MemoryBus, MemoryStream

PAYLOAD_BYTES_MAX = 1024 * 1024
LOGIN = BusLogin(user="rollmesh", password="bus-password")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    config = EmbeddedServerConfig(payload_bytes_max=PAYLOAD_BYTES_MAX)
    async with EmbeddedServer(tmp_path / "nats", login=LOGIN, config=config) as server:
        yield server


@pytest.fixture
async def jetstream(server: EmbeddedServer) -> AsyncIterator[JetStreamBus]:
    bus = await JetStreamBus.connect(server.url, login=LOGIN)
    yield bus
    await bus.close()


@pytest.fixture(params=["memory", "jetstream"])
def bus(request: pytest.FixtureRequest) -> Bus:
    if request.param == "memory":
        return MemoryBus(payload_bytes_max=PAYLOAD_BYTES_MAX)
    found: Bus = request.getfixturevalue("jetstream")
    return found


def spec(name: str = "S", **changes: Any) -> StreamSpec:
    return StreamSpec(**{"name": name, "bytes_max": 1 << 20, "discard": Discard.NEW, **changes})


async def filled(bus: Bus, num_records: int) -> StreamLog:
    log = await bus.create(spec())
    futures = [await log.append_pipelined(b"p%d" % n, msg_id=f"m{n}") for n in range(1, num_records + 1)]
    assert [await future for future in futures] == list(range(1, num_records + 1))
    return log


async def take(records: Any, count: int) -> list[StreamRecord]:
    taken = []
    async with aclosing(records), asyncio.timeout(20):
        async for record in records:
            taken.append(record)
            if len(taken) == count:
                break
    return taken


async def test_sequences_start_at_one_and_records_read_back(bus: Bus) -> None:
    log = await bus.create(spec())
    assert await log.append(b"one", msg_id="a", headers={"Kind": "x"}) == 1
    assert await log.append(b"", msg_id="b") == 2
    assert await log.read(1) == StreamRecord(seq=1, payload=b"one", msg_id="a", headers={"Kind": "x"})
    assert await log.last() == StreamRecord(seq=2, payload=b"", msg_id="b")


async def test_streams_are_listed_by_name(bus: Bus) -> None:
    assert await bus.names() == []
    for name in ("B", "A"):
        await bus.create(spec(name))
    assert await bus.names() == ["A", "B"]
    await bus.delete("A")
    assert await bus.names() == ["B"]


async def test_a_repeated_message_id_is_stored_once(bus: Bus) -> None:
    log = await bus.create(spec())
    assert await log.append(b"x", msg_id="a") == 1
    assert await log.append(b"x", msg_id="b") == 2
    assert await log.append(b"x", msg_id="a") == 1
    assert (await log.info()).num_records == 2


async def test_only_the_writer_that_knows_the_end_may_append(bus: Bus) -> None:
    log = await bus.create(spec())
    assert await log.append(b"1", msg_id="a1", expected_last_seq=0) == 1
    with pytest.raises(WrongLastSequence):
        await log.append(b"x", msg_id="b1", expected_last_seq=0)
    assert await log.append(b"2", msg_id="a2", expected_last_seq=1) == 2
    with pytest.raises(WrongLastSequence):
        await log.append(b"x", msg_id="a4", expected_last_seq=7)
    assert (await log.info()).last_seq == 2


async def test_a_retry_with_an_expected_sequence_finds_its_own_record(bus: Bus) -> None:
    log = await bus.create(spec())
    assert await log.append(b"1", msg_id="a1", expected_last_seq=0) == 1
    assert await log.append(b"1", msg_id="a1", expected_last_seq=0) == 1
    assert await log.append(b"2", msg_id="a2", expected_last_seq=1) == 2
    assert await log.append(b"1", msg_id="a1", expected_last_seq=0) == 1


async def test_a_retry_past_the_dedup_window_still_finds_its_own_record(bus: Bus) -> None:
    log = await bus.create(spec(dedup_s=0.1))
    assert await log.append(b"1", msg_id="a1", expected_last_seq=0) == 1
    assert await log.append(b"2", msg_id="a2", expected_last_seq=1) == 2
    probe = 2
    async with asyncio.timeout(20):
        while await log.append(b"probe", msg_id="probe") == probe + 1 == 3:  # until the window has expired
            pass
    assert await log.append(b"1", msg_id="a1", expected_last_seq=0) == 1
    with pytest.raises(WrongLastSequence):
        await log.append(b"1", msg_id="other", expected_last_seq=0)


async def test_pipelined_appends_keep_their_order(bus: Bus) -> None:
    log = await bus.create(spec())
    futures = [await log.append_pipelined(b"x", msg_id=f"m{n}", expected_last_seq=n) for n in range(500)]
    assert [await future for future in futures] == list(range(1, 501))


async def test_a_pipelined_refusal_fails_its_followers_too(bus: Bus) -> None:
    log = await bus.create(spec())
    futures = [await log.append_pipelined(b"x", msg_id=f"m{n}", expected_last_seq=n) for n in (0, 5, 6)]
    outcomes = await asyncio.gather(*futures, return_exceptions=True)
    assert outcomes[0] == 1
    assert [type(outcome) for outcome in outcomes[1:]] == [WrongLastSequence, WrongLastSequence]


async def test_a_full_stream_refuses_and_takes_again_after_a_purge(bus: Bus) -> None:
    log = await bus.create(spec(bytes_max=10_000))
    futures = [await log.append_pipelined(bytes(1000), msg_id=f"m{n}") for n in range(20)]
    outcomes = await asyncio.gather(*futures, return_exceptions=True)
    seq = sum(isinstance(outcome, int) for outcome in outcomes)
    assert 5 <= seq <= 10
    assert {type(outcome) for outcome in outcomes[seq:]} == {StreamFull}
    await log.purge_below(4)
    assert await log.append(bytes(1000), msg_id="after") == seq + 1


async def test_a_full_stream_that_discards_old_records_goes_on(bus: Bus) -> None:
    log = await bus.create(spec(bytes_max=10_000, discard=Discard.OLD))
    for n in range(50):
        await log.append(bytes(1000), msg_id=f"m{n}")
    info = await log.info()
    assert info.last_seq == 50
    assert info.first_seq > 40
    assert info.num_bytes <= 10_000


async def test_a_payload_over_the_limit_is_refused_and_harms_nothing(bus: Bus) -> None:
    log = await bus.create(spec(bytes_max=1 << 24))
    for num_bytes in (PAYLOAD_BYTES_MAX + 1, PAYLOAD_BYTES_MAX * 2):
        with pytest.raises(PayloadTooLarge):
            await log.append(bytes(num_bytes), msg_id=f"big{num_bytes}")
    large = PAYLOAD_BYTES_MAX - 4096
    assert await log.append(bytes(large), msg_id="large") == 1
    assert len((await log.read(1)).payload) == large


async def test_a_payload_that_fits_only_without_its_headers_is_refused_in_peace(jetstream: JetStreamBus) -> None:
    log = await jetstream.create(spec(bytes_max=1 << 24))
    with pytest.raises(PayloadTooLarge):
        await log.append(bytes(PAYLOAD_BYTES_MAX - 10), msg_id="m")
    assert await log.append(b"x", msg_id="n") == 1


async def test_a_range_ends_where_the_stream_ended(bus: Bus) -> None:
    log = await filled(bus, 300)
    assert [r.seq async for r in log.read_range(1)] == list(range(1, 301))
    assert [r.payload async for r in log.read_range(299)] == [b"p299", b"p300"]
    assert [r async for r in log.read_range(301)] == []


async def test_a_range_of_an_empty_stream_is_empty(bus: Bus) -> None:
    log = await bus.create(spec())
    assert [r async for r in log.read_range()] == []
    assert await log.last() is None
    info = await log.info()
    assert (info.first_seq, info.last_seq, info.num_records) == (1, 0, 0)


async def test_a_purge_removes_only_what_is_below(bus: Bus) -> None:
    log = await filled(bus, 10)
    await log.purge_below(8)
    assert [r.seq async for r in log.read_range(1)] == [8, 9, 10]
    with pytest.raises(UnknownRecord):
        await log.read(7)
    await log.purge_below(11)
    info = await log.info()
    assert (info.first_seq, info.last_seq, info.num_records) == (11, 10, 0)
    assert [r async for r in log.read_range(1)] == []
    assert await log.append(b"x", msg_id="next", expected_last_seq=10) == 11


async def test_a_stream_that_forbids_purging_keeps_its_records(bus: Bus) -> None:
    log = await bus.create(spec(deny_purge=True))
    await log.append(b"x", msg_id="a")
    with pytest.raises(InvalidInput):
        await log.purge_below(2)
    again = await bus.create(spec(deny_purge=False, bytes_max=2 << 20))  # a new release, with other limits
    with pytest.raises(InvalidInput):
        await again.purge_below(2)
    info = await again.info()
    assert (info.num_records, info.deny_purge, info.bytes_max) == (1, True, 2 << 20)
    assert not (await (await bus.create(spec(name="other"))).info()).deny_purge


async def test_a_follower_gets_old_and_new_records_once_in_order(bus: Bus) -> None:
    log = await filled(bus, 5)
    task = asyncio.create_task(take(log.follow(3), 300))
    for n in range(6, 303):
        await log.append(b"x", msg_id=f"m{n}")
    assert [r.seq for r in await task] == list(range(3, 303))


async def test_two_followers_are_independent(bus: Bus) -> None:
    log = await filled(bus, 3)
    both = await asyncio.gather(take(log.follow(1), 3), take(log.follow(2), 2))
    assert [[r.seq for r in records] for records in both] == [[1, 2, 3], [2, 3]]


async def test_a_direct_read_gives_what_the_leader_gives(bus: Bus) -> None:
    log = await bus.create(spec())
    for payload in (b"", bytes(range(256)) * 40):
        seq = await log.append(payload, msg_id=f"m{len(payload)}", headers={"kind": "k"})
        assert await log.read_direct(seq) == await log.read(seq)
    with pytest.raises(UnknownRecord, match="no record 3"):
        await log.read_direct(3)


async def test_unknown_streams_and_records_are_named(bus: Bus) -> None:
    with pytest.raises(UnknownStream, match="NONE"):
        await bus.open("NONE")
    log = await bus.create(spec())
    with pytest.raises(UnknownRecord, match="no record 1"):
        await log.read(1)


async def test_creating_again_adjusts_the_limits_and_keeps_the_records(bus: Bus) -> None:
    await (await bus.create(spec(bytes_max=10_000))).append(b"x", msg_id="a")
    log = await bus.create(spec(bytes_max=100_000))
    assert await log.append(bytes(50_000), msg_id="b") == 2
    assert (await (await bus.open("S")).info()).num_records == 2


async def test_a_deleted_stream_is_gone(bus: Bus) -> None:
    await filled(bus, 3)
    await bus.delete("S")
    await bus.delete("S")
    with pytest.raises(UnknownStream):
        await bus.open("S")
    log = await bus.create(spec())
    assert await log.append(b"x", msg_id="m1") == 1


async def test_a_new_stream_has_no_records_of_a_deleted_one_that_the_server_could_not_remove(
    server: EmbeddedServer, jetstream: JetStreamBus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """nats-server renames the folder of a deleted stream, and ignores that another folder of that name is left of an
    earlier removal."""
    await filled(jetstream, 3)
    in_the_way = next((tmp_path / "nats").rglob("streams")) / ".S" / "msgs"
    in_the_way.mkdir(parents=True)
    await jetstream.delete("S")
    creating = asyncio.create_task(jetstream.create(spec()))
    async with asyncio.timeout(20):
        while "has not removed the records of the deleted stream S" not in caplog.text:
            await jetstream.names()
    in_the_way.rmdir()
    in_the_way.parent.rmdir()
    log = await creating
    assert await log.info() == StreamInfo(first_seq=1, last_seq=0, num_records=0, num_bytes=0, bytes_max=1 << 20)
    assert await log.append(b"x", msg_id="m1", expected_last_seq=0) == 1


@pytest.mark.parametrize(
    ("msg_id", "headers"), [("", {}), ("a\r\nb", {}), ("a", {"K": "v\n"}), ("a", {"Nats-Msg-Id": "b"})]
)
async def test_what_cannot_be_a_header_is_refused(bus: Bus, msg_id: str, headers: dict[str, str]) -> None:
    log = await bus.create(spec())
    with pytest.raises(InvalidInput):
        await log.append(b"x", msg_id=msg_id, headers=headers)


async def test_the_trace_context_travels_with_the_record(bus: Bus) -> None:
    log = await bus.create(spec())
    parent = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(parent)):
        await log.append(b"x", msg_id="a")
    assert (await log.read(1)).headers["traceparent"] == f"00-{0xABC:032x}-{0xDEF:016x}-01"


async def test_a_closed_bus_ends_its_followers_and_takes_nothing(bus: Bus) -> None:
    log = await filled(bus, 1)
    follower = asyncio.create_task(take(log.follow(1), 2))
    assert await log.append(b"x", msg_id="m1") == 1
    await bus.close()
    with pytest.raises(BusUnavailable):
        await log.append(b"x", msg_id="late")
    with pytest.raises(BusUnavailable):
        await follower


async def test_the_streams_of_a_run_can_be_made(bus: Bus) -> None:
    streams = run_streams("r1")
    for one in (streams.samples, streams.ledger, streams.dead):
        assert await (await bus.create(one)).append(b"x", msg_id="a") == 1
    with pytest.raises(InvalidInput, match=r"r\.1"):
        run_streams("r.1")


# The server is killed -------------------------------------------------------------------------------------------------


async def test_appends_survive_kills_of_the_server_each_stored_once_in_order(
    server: EmbeddedServer, jetstream: JetStreamBus
) -> None:
    log = await jetstream.create(spec(bytes_max=1 << 26))
    futures: list[asyncio.Future[int]] = []
    killed = asyncio.Event()

    async def write() -> None:
        for n in range(2000):
            futures.append(await log.append_pipelined(b"%d" % n, msg_id=f"m{n}", expected_last_seq=n))
            if n in (700, 1400):
                server.kill()
                killed.set()

    writer = asyncio.create_task(write())
    for _ in range(2):
        await killed.wait()
        killed.clear()
        await server.start()
    await writer
    assert [await future for future in futures] == list(range(1, 2001))
    assert [r.payload async for r in log.read_range()] == [b"%d" % n for n in range(2000)]


async def test_a_follower_survives_a_kill_of_the_server(server: EmbeddedServer, jetstream: JetStreamBus) -> None:
    log = await filled(jetstream, 100)
    records = log.follow(1)
    first = [(await anext(records)).seq for _ in range(50)]
    server.kill()
    await server.start()
    await log.append(b"after", msg_id="after")
    assert first + [r.seq for r in await take(records, 51)] == list(range(1, 102))


async def test_an_append_fails_at_its_deadline_while_the_server_is_away_and_can_be_repeated(
    server: EmbeddedServer, jetstream: JetStreamBus
) -> None:
    log = await filled(jetstream, 1)
    server.kill()
    with pytest.raises(BusUnavailable, match="m2"):
        await log.append(b"x", msg_id="m2", deadline_s=0.3)
    await server.start()
    assert await log.append(b"x", msg_id="m2", expected_last_seq=1) == 2
    assert (await log.info()).num_records == 2


async def test_a_second_writer_fences_the_first_across_a_restart(
    server: EmbeddedServer, jetstream: JetStreamBus
) -> None:
    first = await jetstream.create(spec())
    await first.append(b"x", msg_id="first-1", expected_last_seq=0)
    other_bus = await JetStreamBus.connect(server.url, login=LOGIN)
    second = await other_bus.open("S")
    assert await second.append(b"x", msg_id="second-2", expected_last_seq=1) == 2
    await server.restart()
    with pytest.raises(WrongLastSequence):
        await first.append(b"x", msg_id="first-2", expected_last_seq=1)
    await other_bus.close()


async def test_cancelled_appends_leave_room_for_others(server: EmbeddedServer) -> None:
    bus = await JetStreamBus.connect(server.url, login=LOGIN, config=JetStreamConfig(inflight_max=4))
    log = await bus.create(spec())
    server.kill()
    tasks = [asyncio.create_task(log.append(b"x", msg_id=f"m{n}", deadline_s=0.2)) for n in range(10)]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {BusUnavailable}
    await server.start()
    assert await log.append(b"x", msg_id="after") >= 1
    await bus.close()


async def removable(bus: Bus, num_records: int, name: str = "D") -> StreamLog:
    """Return a stream whose records can be removed one by one, unlike those that a bus creates."""
    if isinstance(bus, JetStreamBus):
        await bus._link.js.add_stream(name=name, subjects=[name], allow_direct=True)
    else:
        await bus.create(spec(name))
    log = await bus.open(name)
    for number in range(1, num_records + 1):
        await log.append(b"x", msg_id=f"m{number}")
    return log


async def remove(bus: Bus, log: StreamLog, removed: set[int]) -> None:
    if isinstance(bus, JetStreamBus):
        for seq in removed:
            await bus._link.js.delete_msg(log.name, seq)
    else:
        assert isinstance(log, MemoryStream)
        for seq in removed:
            del log._records[seq]


@pytest.mark.parametrize("deleted", [{4}, {1}, {2, 3, 4}, {1, 2, 3, 4}], ids=str)
async def test_a_range_of_a_damaged_stream_ends_with_the_records_that_are_left(bus: Bus, deleted: set[int]) -> None:
    log = await removable(bus, 4)
    await remove(bus, log, deleted)
    async with asyncio.timeout(20):
        assert [record.seq async for record in log.read_range()] == sorted({1, 2, 3, 4} - deleted)
    info = await log.info()
    assert (info.first_seq, info.last_seq) == (min({1, 2, 3, 4} - deleted, default=5), 4)
    last = await log.last()
    assert (last.seq if last else 0) == max({1, 2, 3, 4} - deleted, default=0)


ALL = set(range(1, 13))
"""The sequences of a stream that is read in batches of 4."""


@pytest.fixture
async def jetstream_of_4(server: EmbeddedServer) -> AsyncIterator[JetStreamBus]:
    bus = await JetStreamBus.connect(server.url, login=LOGIN, config=JetStreamConfig(pull_batch=4))
    yield bus
    await bus.close()


@pytest.fixture(params=["memory", "jetstream_of_4"])
def small_batches(request: pytest.FixtureRequest) -> Bus:
    """A bus whose readers request 4 records at once, so that a gap can begin before, at and after the end of a
    request."""
    if request.param == "memory":
        return MemoryBus()
    found: Bus = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("removed", [{12}, {6, 7, 8, 9}, set(range(4, 13)), ALL - {12}, ALL], ids=str)
async def test_a_reader_passes_records_that_are_removed_while_it_reads(small_batches: Bus, removed: set[int]) -> None:
    """The records are removed after each number of delivered ones. What the reader has requested may still be
    delivered."""

    async def read(records: AsyncIterator[StreamRecord], after: int) -> None:
        """Read to the end of a range, or to the record after the gap; remove `removed` after `after` records."""
        got: list[int] = []
        async for record in records:
            got.append(record.seq)
            if len(got) == after:
                await remove(bus, log, removed)
                gone.set()
            if record.seq == 13:
                break
        assert got == sorted(got)
        assert set(got) >= ALL - removed, f"removed after {after}, got {got}"

    bus = small_batches
    for after in (1, 3, 4, 7):
        gone = asyncio.Event()
        log = await removable(bus, 12, f"RANGE-{after}")
        async with asyncio.timeout(60), aclosing(cast(AsyncGenerator[StreamRecord, None], log.read_range())) as records:
            await read(records, after)
        gone.clear()
        log = await removable(bus, 12, f"FOLLOW-{after}")
        async with asyncio.timeout(60), aclosing(cast(AsyncGenerator[StreamRecord, None], log.follow())) as records:
            following = asyncio.create_task(read(records, after))
            await gone.wait()
            await log.append(b"x", msg_id="after the gap")
            await following


async def test_a_purge_of_the_rest_of_a_stream_ends_a_range(small_batches: Bus) -> None:
    log = await filled(small_batches, 12)
    got = []
    async with asyncio.timeout(20):
        async for record in log.read_range():
            got.append(record.seq)
            if len(got) == 2:
                await log.purge_below(13)
    assert got[:2] == [1, 2]
    assert await log.last() is None


async def test_a_range_that_gets_no_record_fails_at_its_deadline(
    server: EmbeddedServer, jetstream: JetStreamBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(jetstream, 2)
    bus = await JetStreamBus.connect(server.url, login=LOGIN, config=JetStreamConfig(deadline_s=2.5, pull_batch=1))
    log = await bus.open("S")
    request, requested = StreamReader._request, list[str]()

    async def only_the_first(reader: StreamReader, consumer: str, inbox: str) -> bool:
        requested.append(consumer)
        return len(requested) > 1 or await request(reader, consumer, inbox)

    monkeypatch.setattr(StreamReader, "_request", only_the_first)
    with pytest.raises(BusUnavailable, match=r"S gave no record after 1 for 2.5 s, though it holds record 2"):
        [record async for record in log.read_range()]
    await bus.close()
