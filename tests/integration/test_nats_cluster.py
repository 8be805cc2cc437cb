"""Streams with three copies on a cluster of real servers: what is acknowledged survives the loss of a server, and
mistakes are reported."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from rollmesh.app.certificates import make_certificates
from rollmesh.shared.bus.bus import BusUnavailable, StreamLog
from rollmesh.shared.bus.jetstream_bus import (
    JetStreamBus,
    JetStreamConfig,
    NotOneCluster,
    TooFewServers,
    check_servers,
)
from rollmesh.shared.bus.link import NoJetStream
from rollmesh.shared.bus.permissions import COORDINATOR
from rollmesh.shared.bus.run_streams import StreamLimits, run_streams
from rollmesh.shared.rpc.access import Tls

from ..nats_cluster import MESH, NatsCluster
from .coordinator_mesh import eventually

LEDGER = run_streams("r", StreamLimits(num_replicas=3)).ledger
IMPATIENT = JetStreamConfig(deadline_s=3.0, attempt_s=1.0)
SLOW = pytest.mark.slow  # `make suite NAME=chaos-cluster` has such outages


class Writer:
    """Appends records, each directly after the one before, as the coordinator does."""

    def __init__(self, log: StreamLog) -> None:
        self.num_acked = 0
        self._log = log
        self._task = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while True:
            await self._log.append(
                f"{self.num_acked}".encode(),
                msg_id=f"m{self.num_acked}",
                expected_last_seq=self.num_acked,
                deadline_s=60.0,
            )
            self.num_acked += 1

    async def until_more(self, num: int) -> None:
        """Wait until `num` more records are acknowledged."""
        goal = self.num_acked + num
        while self.num_acked < goal:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


async def leader_of(bus: JetStreamBus) -> str:
    return next(iter(await bus.copies(LEDGER.name)))


async def check_records(log: StreamLog, num_acked: int) -> None:
    """Every acknowledged record is there, once, in order; the last one may be there without an acknowledgment."""
    records = [record async for record in log.read_range()]
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    assert [record.payload for record in records] == [f"{n}".encode() for n in range(len(records))]
    assert num_acked <= len(records) <= num_acked + 1


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[NatsCluster]:
    async with NatsCluster(tmp_path / "nats") as cluster:
        yield cluster


@pytest.mark.timeout(60)
async def test_a_ledger_goes_on_when_the_server_that_leads_it_is_killed(cluster: NatsCluster) -> None:
    bus = await cluster.connect(COORDINATOR)
    log = await bus.create(LEDGER)
    assert len(await bus.copies(LEDGER.name)) == 3
    writer = Writer(log)
    await writer.until_more(100)
    killed = await leader_of(bus)
    cluster.servers[killed].kill()
    await writer.until_more(100)
    assert await leader_of(bus) != killed
    await writer.stop()
    await check_records(log, writer.num_acked)
    await bus.close()


@SLOW
@pytest.mark.timeout(180)
@pytest.mark.parametrize("outage", ["stopped", "cut", "without its peers"])
async def test_a_client_leaves_a_server_that_cannot_perform_its_requests(cluster: NatsCluster, outage: str) -> None:
    bus = await cluster.connect(COORDINATOR)
    log = await bus.create(LEDGER)
    writer = Writer(log)
    await writer.until_more(100)
    name = cluster.name_at(bus.server)
    match outage:
        case "stopped":
            cluster.servers[name].signal(signal.SIGSTOP)
        case "cut":
            await cluster.cut(name)
        case _:
            await cluster.cut_routes(name)
    await writer.until_more(100)
    assert cluster.name_at(bus.server) != name
    cluster.servers[name].signal(signal.SIGCONT)
    await cluster.join(name)
    await cluster.until_current(name, limit_s=60.0)
    await writer.until_more(10)
    await writer.stop()
    await check_records(log, writer.num_acked)
    await bus.close()


@SLOW
@pytest.mark.timeout(180)
async def test_without_a_majority_an_append_waits_and_is_not_acknowledged(
    cluster: NatsCluster, caplog: pytest.LogCaptureFixture
) -> None:
    bus = await cluster.connect(COORDINATOR)
    log = await bus.create(LEDGER)
    assert await log.append(b"0", msg_id="m0", expected_last_seq=0) == 1
    for name in ("a", "b"):
        cluster.servers[name].kill()
    waiting = await log.append_pipelined(b"1", msg_id="m1", expected_last_seq=1, deadline_s=90.0)
    with pytest.raises(BusUnavailable, match="no ack for m2 within the deadline"):
        await log.append(b"2", msg_id="m2", expected_last_seq=2, deadline_s=5.0)
    assert not waiting.done()

    async def is_logged() -> bool:
        return "less than a majority of the servers stores nothing" in caplog.text

    await eventually(is_logged)
    for name in ("a", "b"):
        cluster.servers[name].start()
    assert await waiting == 2
    assert [record.payload async for record in log.read_range()] in ([b"0", b"1"], [b"0", b"1", b"2"])
    await bus.close()


@pytest.mark.timeout(60)
async def test_servers_and_clients_of_a_cluster_use_tls(tmp_path: Path) -> None:
    def tls(name: str) -> Tls:
        made = make_certificates(tmp_path / name)
        return Tls(ca=Path(made.ca), certificate=Path(made.certificate), key=Path(made.key))

    async with NatsCluster(tmp_path / "nats", tls=tls("own")) as cluster:
        bus = await cluster.connect(COORDINATOR)
        log = await bus.create(LEDGER)
        assert await log.append(b"x", msg_id="m") == 1
        await bus.close()
        login = cluster.login(COORDINATOR)
        foreign = type(login)(user=login.user, password=login.password, tls=tls("foreign"))
        with pytest.raises(BusUnavailable, match=r"certificate.*compare the clock of this host"):
            await JetStreamBus.connect(cluster.url_of("a"), login=foreign, config=IMPATIENT)


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
async def test_a_stream_waits_for_servers_of_a_new_cluster(
    cluster: NatsCluster, caplog: pytest.LogCaptureFixture
) -> None:
    for server in cluster.servers.values():
        server.kill()
        shutil.rmtree(server.folder / "jetstream")  # then the others do not know it
    cluster.servers["a"].start()
    cluster.servers["b"].start()
    bus = await cluster.connect(COORDINATOR, "a", config=JetStreamConfig(connect_s=30.0))
    creating = asyncio.create_task(bus.create(LEDGER))
    async with asyncio.timeout(30.0):
        while "waits for servers" not in caplog.text:  # noqa: ASYNC110 (only the log says it)
            await asyncio.sleep(0.05)
    assert not creating.done()
    cluster.servers["c"].start()
    assert await (await creating).append(b"x", msg_id="m") == 1
    await bus.close()


async def test_too_few_servers_for_the_copies_is_reported_with_the_setting(tmp_path: Path) -> None:
    async with NatsCluster(tmp_path / "nats", names=("a",), member=False) as single:
        bus = await single.connect(COORDINATOR)
        with pytest.raises(
            TooFewServers, match=r"cannot keep 3 copies of RM_r_LEDGER .*coordinator\.streams\.num_replicas"
        ):
            await bus.create(LEDGER)
        await bus.close()


@pytest.mark.parametrize("where", ["server", "account"])
async def test_missing_jetstream_is_reported_with_the_remedy(tmp_path: Path, where: str) -> None:
    async with NatsCluster(tmp_path / "nats", names=("a",), member=False) as single:
        server = single.servers["a"]
        server.kill()
        conf = server.folder / "nats.conf"
        tree = json.loads(conf.read_text())
        del tree["accounts"][MESH]["jetstream"]
        if where == "server":
            del tree["jetstream"]
        conf.write_text(json.dumps(tree, indent=2))
        server.start()
        with pytest.raises(
            NoJetStream, match=r"has no JetStream .*configure `jetstream` for the server and its account"
        ):
            await single.connect_patiently(COORDINATOR)


@pytest.mark.timeout(60)
async def test_a_server_that_is_not_in_the_cluster_is_not_used(
    tmp_path: Path, cluster: NatsCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with NatsCluster(tmp_path / "other", names=("d",), member=False, passwords=cluster.passwords) as other:
        both = f"{cluster.url_of('a')},{other.url}"
        with pytest.raises(NotOneCluster, match=r"are not of one cluster: .*not in a cluster"):
            await check_servers(both, cluster.login(COORDINATOR))
        stranger = other.servers["d"]
        stranger.kill()
        bus = await JetStreamBus.connect(both, login=cluster.login(COORDINATOR))
        log = await bus.create(LEDGER)
        stranger.start()
        cluster.servers["a"].kill()
        with pytest.raises(BusUnavailable):
            await log.append(b"x", msg_id="m", deadline_s=3.0)
        cluster.servers["a"].start()
        assert await log.append(b"x", msg_id="m", deadline_s=30.0) == 1
        assert "is of cluster (none), expected lab-nats: remove it from `bus.url`" in caplog.text
        await bus.close()
