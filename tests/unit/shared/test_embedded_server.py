"""The embedded nats-server keeps its port, dies with its parent, and says why it does not start."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from nats.aio.client import Client

from rollmesh.shared.bus.bus import BusUnavailable
from rollmesh.shared.bus.embedded_server import EmbeddedServer
from rollmesh.shared.bus.jetstream_bus import JetStreamBus, JetStreamConfig
from rollmesh.shared.bus.login import BusLogin

LOGIN = BusLogin(user="rollmesh", password="t")


async def test_the_port_is_kept_over_restarts(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path, login=LOGIN) as server:
        url = server.url
        assert await server.restart() == url
        server.kill()
        assert server.pid is None
    async with EmbeddedServer(tmp_path, login=LOGIN) as again:
        assert again.url == url


async def test_a_taken_port_is_named_with_the_remedy(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path, login=LOGIN) as server:
        port = int(server.url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(
            BusUnavailable, match=rf"process {os.getpid()} .* has port {port}: stop it, or remove .*/port"
        ):
            await server.start()
        assert server.pid is None


async def test_a_second_server_over_the_same_folder_is_refused_before_it_opens_the_store(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path, login=LOGIN):
        with pytest.raises(BusUnavailable, match="another nats-server runs over this folder"):
            await EmbeddedServer(tmp_path, login=LOGIN).start()


async def test_a_wrong_password_is_refused(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path, login=LOGIN) as server:
        with pytest.raises(BusUnavailable, match="login"):
            await JetStreamBus.connect(server.url, login=BusLogin(user="rollmesh", password="wrong"))


async def test_a_limit_that_meets_a_failing_attempt_ends_the_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt waits with `asyncio.wait_for`, which before Python 3.12 drops a cancellation that comes with the
    failure."""

    lost: list[str] = []

    async def fail_as_the_limit_comes(client: Client, _server: object) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if lost:
                raise
            lost.append("the limit")
            raise ConnectionRefusedError("refused just then") from None

    monkeypatch.setattr(Client, "_connect_to_server", fail_as_the_limit_comes)
    async with asyncio.timeout(5.0):
        with pytest.raises(BusUnavailable, match="refused just then"):
            await JetStreamBus.connect("nats://127.0.0.1:1", config=JetStreamConfig(connect_s=0.1))


async def test_the_file_with_the_password_is_private(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path, login=LOGIN):
        assert stat.S_IMODE((tmp_path / "nats.conf").stat().st_mode) == 0o600


PARENT = """
import asyncio, sys
from rollmesh.shared.bus.embedded_server import EmbeddedServer
from rollmesh.shared.bus.login import BusLogin
async def main():
    server = EmbeddedServer(sys.argv[1], login=BusLogin(user="rollmesh", password="t"))
    await server.start()
    print(server.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_the_server_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, str(tmp_path), stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    death = os.pidfd_open(pid)
    died = asyncio.Event()
    asyncio.get_running_loop().add_reader(death, died.set)
    parent.kill()
    await parent.wait()
    await asyncio.wait_for(died.wait(), 10)
    asyncio.get_running_loop().remove_reader(death)
    os.close(death)
