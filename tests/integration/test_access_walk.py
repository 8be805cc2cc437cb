"""Nothing of a running mesh answers the unknown: every verb of every service, taken from the descriptors, at every
server.

A verb that is added is walked without a change here. One mesh runs as by default, one with certificates and a token
file.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import pkgutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import rollmesh.v1
from rollmesh.app.certificates import make_certificates
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.mesh.security import SecurityConfig
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.rpc.auth_interceptor import bearer
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.limits import MESSAGE_BYTES_MAX
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc

from ..chaos.world import mesh_config, save_model_folder

LIMIT_S = 60.0
HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
Metadata = Sequence[tuple[str, str]]
STRANGERS: dict[str, Metadata] = {
    "no token": (),
    "a wrong token": (bearer("x" * 43),),
    "an empty token": (("authorization", "Bearer "),),
    "another scheme": (("authorization", "Basic eDp5"),),
}


def services() -> dict[str, list[str]]:
    """Verbs by the full name of their service: all that the protos have."""
    found = {}
    for module in pkgutil.iter_modules(rollmesh.v1.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"rollmesh.v1.{module.name}").DESCRIPTOR
            for service in file.services_by_name.values():
                found[service.full_name] = [method.name for method in service.methods]
    return found


def verbs() -> list[str]:
    return [f"/{service}/{verb}" for service, names in services().items() for verb in names]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> SecurityConfig:
    made = make_certificates(tmp_path_factory.mktemp("tls"))
    return SecurityConfig(ca=made.ca, certificate=made.certificate, key=made.key, token_file=made.token_file)


@pytest.fixture(scope="module")
def anonymous(tls: SecurityConfig) -> grpc.ChannelCredentials:
    """Return the credentials of a client that trusts the mesh and has no certificate."""
    return grpc.ssl_channel_credentials(Path(tls.ca).read_bytes())


def config(model: Path, security: SecurityConfig | None = None, **run: Any) -> MeshConfig:
    made = mesh_config(model, **({"batch_groups": 2, "group_size": 2, "updates_max": 1} | run))
    return msgspec.structs.replace(made, security=security or SecurityConfig())


async def servers(mesh: Mesh) -> dict[str, str]:
    """Address of every gRPC server of the mesh, by the node's id."""
    async with open_channel(mesh.layout.coordinator, access=mesh.access) as channel:
        stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        fleet = await stub.GetFleet(coordinator_pb2.GetFleetRequest(), timeout=LIMIT_S)
    nodes = {node.node_id: node.address for node in fleet.nodes if node.address}
    return {"coordinator": mesh.layout.coordinator, **nodes}


async def status(channel: grpc.aio.Channel, verb: str, metadata: Metadata) -> grpc.StatusCode:
    """What an empty request of `verb` ends with. On the wire all arities are alike; a client that still writes when it
    is refused may only learn that its call is over."""
    begin: Any = channel.unary_stream
    call = begin(verb)(b"", metadata=metadata, timeout=LIMIT_S)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as err:
        return err.code()
    return grpc.StatusCode.OK


async def walk(channel: grpc.aio.Channel, metadata: Metadata) -> dict[str, str]:
    """What each verb ends with."""
    names = verbs()
    ends = await asyncio.gather(*(status(channel, verb, metadata) for verb in names))
    return {verb: end.name for verb, end in zip(names, ends, strict=True)}


async def reflected(channel: grpc.aio.Channel) -> set[str]:
    """Services that a server says it has."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    answers = [answer async for answer in stub.ServerReflectionInfo(asked, timeout=LIMIT_S)]
    return {service.name for answer in answers for service in answer.list_services_response.service}


@asynccontextmanager
async def opened(channel: grpc.aio.Channel) -> AsyncIterator[grpc.aio.Channel]:
    try:
        yield channel
    finally:
        await channel.close(None)


def holders(folder: Path, secret: str) -> Iterator[Path]:
    """Files below `folder` that hold `secret`."""
    for path in folder.rglob("*"):
        if path.is_file() and secret.encode() in path.read_bytes():
            yield path


def check_run_folder(mesh: Mesh) -> None:
    """The token is in its own file and the password in nats.conf, both private; nothing else holds either."""
    folder = mesh.layout.run_dir
    own = [] if mesh.layout.config.security.token_file else [folder / "token"]
    assert list(holders(folder, mesh.access.token)) == own
    password = BusLogin.of(mesh.access).password
    assert list(holders(folder, password)) == [folder / "nats" / "nats.conf"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in [*own, folder / "nats" / "nats.conf"])


def test_the_walk_sees_every_service() -> None:
    assert {"rollmesh.v1.RunService", "rollmesh.v1.CoordinatorService"} <= set(services())
    assert len(verbs()) > 30


async def test_no_verb_of_any_server_answers_without_the_token(tmp_path: Path, model: Path) -> None:
    async with Mesh(config(model), run_dir=tmp_path / "run") as mesh:
        found = await servers(mesh)
        served: set[str] = set()
        for node, address in found.items():
            async with opened(grpc.aio.insecure_channel(address)) as channel:
                for who, metadata in STRANGERS.items():
                    ends = await walk(channel, metadata)
                    assert set(ends.values()) == {"UNAUTHENTICATED"}, (node, who, ends)
                for verb in (REFLECTION, "/grpc.health.v1.Health/Watch"):
                    assert await status(channel, verb, ()) is grpc.StatusCode.UNAUTHENTICATED
                health = health_pb2_grpc.HealthStub(channel)
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            async with open_channel(address, access=mesh.access) as channel:
                served |= await reflected(channel)
    assert set(services()) <= served, "a service that no server of the mesh has was not really walked"


async def test_with_certificates_no_client_without_one_gets_as_far_as_a_token(
    tmp_path: Path, model: Path, tls: SecurityConfig, anonymous: grpc.ChannelCredentials
) -> None:
    """And the mesh itself goes to its end over mutual TLS, NATS included."""
    async with Mesh(config(model, tls, updates_max=2), run_dir=tmp_path / "run") as mesh:
        assert mesh.nats is not None
        assert mesh.nats.url.startswith("tls://")
        good = (bearer(mesh.access.token),)
        for node, address in (await servers(mesh)).items():
            for channel in (grpc.aio.insecure_channel(address), grpc.aio.secure_channel(address, anonymous)):
                async with opened(channel):
                    ends = await walk(channel, good)
                    assert set(ends.values()) == {"UNAVAILABLE"}, (node, ends)
                    assert await status(channel, HEALTH, ()) is grpc.StatusCode.UNAVAILABLE
            assert mesh.access.tls is not None
            certified = grpc.aio.secure_channel(address, mesh.access.tls.channel_credentials())
            async with opened(certified):
                assert set((await walk(certified, ())).values()) == {"UNAUTHENTICATED"}
        async with asyncio.timeout(LIMIT_S):
            await mesh.finished()
        check_run_folder(mesh)


async def test_no_file_and_no_log_line_of_a_finished_run_holds_its_secrets(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with Mesh(config(model, updates_max=2), run_dir=tmp_path / "run") as mesh:
            async with asyncio.timeout(LIMIT_S):
                await mesh.finished()
            check_run_folder(mesh)  # while nats-server has its files
        check_run_folder(mesh)
    assert caplog.text
    for secret in (mesh.access.token, BusLogin.of(mesh.access).password):
        assert secret not in caplog.text
        assert secret not in repr(mesh.layout)


async def test_an_oversized_message_is_refused_in_words_and_the_server_lives(tmp_path: Path, model: Path) -> None:
    async with Mesh(config(model), run_dir=tmp_path / "run") as mesh:
        for address in (await servers(mesh)).values():
            async with opened(grpc.aio.insecure_channel(address)) as channel:
                begin: Any = channel.unary_unary
                call = begin(HEALTH)
                with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as refused:
                    await call(bytes(MESSAGE_BYTES_MAX + 1), timeout=LIMIT_S)
                assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                await call(b"", timeout=LIMIT_S)
