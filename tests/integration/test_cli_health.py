"""`rollmesh health` against a server: a probe needs an address and no token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollmesh.cli.commands.health import check_health
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.net.ports import lasting_ports
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.server import RpcServer, ServerConfig

from .up_mesh import COMMAND, END_S


async def check(address: str, *options: str) -> tuple[int | None, str]:
    """Return exit code and output of the command."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "health", "--address", address, *options, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(END_S):
        output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_a_server_that_serves_is_healthy_and_one_that_is_gone_is_not() -> None:
    async with RpcServer(ServerConfig(stop_s=0.0), access=Access(token="secret")) as server:
        await server.start()
        address = server.address
        assert await check(address) == (0, f"{address} server: SERVING\n")
        code, output = await check(address, "--service", "rollmesh.v1.NoSuchService")
        assert (code, "NOT_FOUND" in output) == (1, True)
    code, output = await check(f"127.0.0.1:{lasting_ports(1)[0]}", "--timeout-s", "0.3")
    assert (code, "DEADLINE_EXCEEDED" in output or "UNAVAILABLE" in output) == (1, True), output
    assert "it is not running, or it needs --set security.ca=FILE" in output


@pytest.mark.parametrize(("run", "address"), [(None, ""), (Path("runs/x"), "127.0.0.1:1")])
def test_exactly_one_of_folder_and_address_is_named(run: Path | None, address: str) -> None:
    with pytest.raises(ConfigError, match="--address HOST:PORT"):
        check_health(run, address, [], service="", timeout_s=1.0)
