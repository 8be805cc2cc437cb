"""Access: the token is shown nowhere, and with TLS both sides prove themselves, over real gRPC and a real
nats-server."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.app.certificates import CA, CERTIFICATE, KEY, make_certificates
from rollmesh.shared import errors
from rollmesh.shared.bus.bus import BusUnavailable
from rollmesh.shared.bus.embedded_server import EmbeddedServer
from rollmesh.shared.bus.jetstream_bus import JetStreamBus, JetStreamConfig
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.rpc.access import Access, Tls
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import RpcServer, ServerConfig
from rollmesh.shared.rpc.status import typed_errors

SECRET = "a-secret-that-must-not-be-shown"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return made(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """Certificates of another CA."""
    return made(tmp_path_factory.mktemp("foreign"))


def made(folder: Path) -> Tls:
    make_certificates(folder)
    return Tls(ca=folder / CA, certificate=folder / CERTIFICATE, key=folder / KEY)


def server(access: Access, address: str = "127.0.0.1:0", advertise: str = "") -> RpcServer:
    return RpcServer(ServerConfig(address=address, advertise=advertise, stop_s=0.0), access=access)


async def health(channel: grpc.aio.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    with typed_errors():
        return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=10.0)).status)


def test_no_repr_shows_the_token() -> None:
    access = Access(SECRET)
    for shown in (repr(access), str(access), f"{BusLogin.of(access)}", repr({"access": access})):
        assert SECRET not in shown
        assert BusLogin.of(access).password not in shown


def test_the_check_of_certificates_returns_which_expires_first(tmp_path: Path) -> None:
    make_certificates(tmp_path / "ca", valid_days=9)
    make_certificates(tmp_path / "host", ca_dir=tmp_path / "ca", valid_days=30)
    for folder, days in (("ca", 9), ("host", 9)):
        files = Tls(ca=tmp_path / folder / CA, certificate=tmp_path / folder / CERTIFICATE, key=tmp_path / folder / KEY)
        assert files.check() == pytest.approx(time.time() + days * 86400, abs=300), folder
    make_certificates(tmp_path / "short", ca_dir=tmp_path / "ca", valid_days=2)
    files = Tls(ca=tmp_path / "short" / CA, certificate=tmp_path / "short" / CERTIFICATE, key=tmp_path / "short" / KEY)
    assert files.check() == pytest.approx(time.time() + 2 * 86400, abs=300)


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ValueError, match="`token` must not be empty"):
        Access("")


def test_the_bus_password_is_neither_the_token_nor_the_same_for_another() -> None:
    passwords = {BusLogin.of(Access(token)).password for token in ("one", "two", "one")}
    assert len(passwords) == 2
    assert not passwords & {"one", "two"}


async def test_both_sides_with_certificates_of_one_ca_talk(tls: Tls) -> None:
    access = Access(SECRET, tls)
    async with server(access) as mine:
        await mine.start()
        async with open_channel(mine.address, access=access) as channel:
            assert await health(channel) == health_pb2.HealthCheckResponse.SERVING


async def test_a_server_with_tls_takes_no_client_without_its_cas_certificate(tls: Tls, foreign: Tls) -> None:
    async with server(Access(SECRET, tls)) as mine:
        await mine.start()
        anonymous = grpc.ssl_channel_credentials(tls.ca.read_bytes())
        strangers = Tls(ca=tls.ca, certificate=foreign.certificate, key=foreign.key)
        for channel in (
            grpc.aio.insecure_channel(mine.address),
            grpc.aio.secure_channel(mine.address, anonymous),
            open_channel(mine.address, access=Access(SECRET, strangers)),
        ):
            async with channel:
                with pytest.raises((errors.Unavailable, errors.DeadlineExceeded)):
                    await health(channel)


async def test_a_client_does_not_trust_a_server_of_another_ca(tls: Tls, foreign: Tls) -> None:
    async with server(Access(SECRET, foreign)) as theirs:
        await theirs.start()
        async with open_channel(theirs.address, access=Access(SECRET, tls)) as channel:
            with pytest.raises(errors.Unavailable):
                await health(channel)


async def test_every_interface_is_served_with_tls_and_announced_by_the_advertised_host(tls: Tls) -> None:
    access = Access(SECRET, tls)
    async with server(access, "0.0.0.0:0", advertise="localhost") as mine:
        port = await mine.start()
        assert mine.address == f"localhost:{port}"
        async with open_channel(mine.address, access=access) as channel:
            assert await health(channel) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", ":0"])
async def test_an_address_no_process_can_call_is_refused(tls: Tls, address: str) -> None:
    async with server(Access(SECRET, tls), address) as mine:
        with pytest.raises(errors.ConfigError, match="set `advertise`"):
            await mine.start()


def test_a_missing_file_is_named_with_the_remedy(tls: Tls, tmp_path: Path) -> None:
    gone = Tls(ca=tls.ca, certificate=tls.certificate, key=tmp_path / "gone.key")
    for use in (gone.server_credentials, gone.channel_credentials, gone.ssl_context):
        with pytest.raises(errors.ConfigError, match=r"gone\.key.*rollmesh certs"):
            use()


def test_a_key_of_another_certificate_is_refused(tls: Tls, foreign: Tls) -> None:
    mixed = Tls(ca=tls.ca, certificate=tls.certificate, key=foreign.key)
    with pytest.raises(errors.ConfigError, match="not PEM files of a CA, a certificate and its key"):
        mixed.ssl_context()


async def test_nats_with_tls_takes_only_certified_clients_with_the_password(tls: Tls, tmp_path: Path) -> None:
    login = BusLogin.of(Access(SECRET, tls))
    quick = JetStreamConfig(connect_s=2.0)
    async with EmbeddedServer(tmp_path / "nats", login=login, host="0.0.0.0", advertise="localhost") as nats:
        assert nats.url.startswith("tls://localhost:")
        bus = await JetStreamBus.connect(nats.url, login=login)
        await bus.close()
        unencrypted = nats.url.replace("tls:", "nats:")
        refused = {
            nats.url: BusLogin(user=login.user, password="wrong", tls=tls),
            unencrypted: BusLogin(user=login.user, password=login.password),
        }
        for url, wrong in refused.items():
            with pytest.raises(BusUnavailable):
                await JetStreamBus.connect(url, login=wrong, config=quick)
    assert SECRET not in (tmp_path / "nats" / "nats.conf").read_text()


def test_nats_beyond_loopback_without_tls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="without TLS"):
        EmbeddedServer(tmp_path, login=BusLogin.of(Access(SECRET)), host="0.0.0.0", advertise="me")


@pytest.mark.parametrize("text", ["", "user", "user:", ":password"])
def test_a_login_file_that_is_none_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "login").write_text(text)
    with pytest.raises(errors.ConfigError, match="one line, USER:PASSWORD"):
        BusLogin.read(tmp_path / "login")
