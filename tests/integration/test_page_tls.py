"""The live page with certificates: HTTPS only, and certificates of browsers if the configuration requires them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollmesh.app.certificates import make_certificates
from rollmesh.services.gateway.page.config import PageConfig
from rollmesh.services.gateway.page.parts import PageParts
from rollmesh.services.gateway.page.server import LivePage
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.rpc.access import Access, Tls
from rollmesh.testing.memory_bus import MemoryBus

TOKEN = "a token of the test"
LIMIT_S = 30.0


@asynccontextmanager
async def tls_page(folder: Path, **settings: Any) -> AsyncIterator[tuple[LivePage, Tls]]:
    """Serve the page of a gateway without a coordinator."""
    made = await asyncio.to_thread(make_certificates, folder / "certs")
    tls = Tls(ca=Path(made.ca), certificate=Path(made.certificate), key=Path(made.key))
    stub: Any = None
    page = LivePage(
        PageConfig(**settings),
        access=Access(TOKEN, tls),
        run=stub,
        coordinator=stub,
        bus=MemoryBus(),
        folder=folder,
        parts=PageParts(),
        call_s=1.0,
        clock=SystemClock(),
    )
    page.start()
    try:
        yield page, tls
    finally:
        await page.close()


async def status(url: str, context: ssl.SSLContext) -> int:
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout) as client, client.get(url, ssl=context) as response:
        return response.status


async def test_the_page_uses_the_certificates_of_the_mesh(tmp_path: Path) -> None:
    async with tls_page(tmp_path) as (page, tls):
        assert page.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=tls.ca)
        assert await status(page.url, context) == 200
        assert await status(f"{page.url}api/mesh", context) == 401
        async with aiohttp.ClientSession() as client:
            async with client.post(f"{page.url}api/login", json={"token": TOKEN}, ssl=context) as response:
                assert "Secure" in response.headers["set-cookie"]
            with pytest.raises(aiohttp.ClientError):
                await client.get(page.url.replace("https", "http"))


async def test_browsers_without_a_certificate_are_rejected_if_the_configuration_says_so(tmp_path: Path) -> None:
    async with tls_page(tmp_path, client_certificates=True) as (page, tls):
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
            await status(page.url, ssl.create_default_context(cafile=tls.ca))
        assert await status(page.url, tls.ssl_context()) == 200
        assert await status(f"{page.url}api/mesh", tls.ssl_context()) == 401, "the token is needed too"


async def test_without_certificates_only_loopback_is_served(tmp_path: Path) -> None:
    stub: Any = None
    page = LivePage(
        PageConfig(address="10.0.0.1:8080"),
        access=Access(TOKEN),
        run=stub,
        coordinator=stub,
        bus=MemoryBus(),
        folder=tmp_path,
        parts=PageParts(),
        call_s=1.0,
        clock=SystemClock(),
    )
    with pytest.raises(ConfigError, match="without TLS"):
        page.start()
    await page.close()
