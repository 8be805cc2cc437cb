"""What a node meets that cannot join, or whose mesh has ended: an error within seconds, or within the limit it was
given."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from rollmesh.app.certificates import make_certificates
from rollmesh.mesh.joining import JoinOptions, open_joined, speaks_tls, until_away
from rollmesh.shared.errors import ConfigError, Unavailable
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.server import RpcServer

SECONDS_MAX = 10.0


async def test_without_certificates_a_tls_mesh_is_refused_within_seconds_with_the_remedy(tmp_path: Path) -> None:
    made = await asyncio.to_thread(make_certificates, tmp_path / "certs")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    context.load_verify_locations(made.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    token = tmp_path / "token"
    token.write_text("secret" * 8)
    token.chmod(0o600)
    async with server, asyncio.timeout(SECONDS_MAX):
        with pytest.raises(ConfigError, match="accepts TLS connections only.*security.ca=FILE"):
            await open_joined(JoinOptions(kind="reward", address=address, token_file=token))


async def test_a_server_without_tls_is_seen_as_one() -> None:
    async with RpcServer(None, access=Access("secret" * 8)) as server:
        await server.start()
        async with asyncio.timeout(SECONDS_MAX):
            assert not await speaks_tls(server.address)


async def test_nothing_that_listens_is_no_tls() -> None:
    assert not await speaks_tls("127.0.0.1:9")


async def test_a_coordinator_that_stays_away_ends_the_wait() -> None:
    async with asyncio.timeout(SECONDS_MAX):
        with pytest.raises(Unavailable, match="has not answered for .* the mesh counts as ended"):
            await until_away("127.0.0.1:9", Access("secret" * 8), limit_s=0.2)
