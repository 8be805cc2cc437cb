"""Call every method of every server of a mesh with malformed requests, and collect the responses that no client should
get."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import rollmesh.v1
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.reflection import v1_file
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2

from .requests import Case, Sizes, cases

for module in pkgutil.iter_modules(rollmesh.v1.__path__):
    if module.name.endswith("_pb2"):  # so that the descriptors of every service are registered
        importlib.import_module(f"rollmesh.v1.{module.name}")

CALL_S = 1.0
"""Deadline of a call. Streams without an end, and long polls, use it up."""
AT_ONCE = 16
"""Number of concurrent calls to a server."""
RESPONSES_MAX = 3
FORBIDDEN = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
assert health_pb2, "imported for its descriptors"
LAST = ("StopRun", "Drain", "DeleteRun")
"""Methods with which a plausible request ends something."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A response that is a bug of the server."""

    server: str
    method: str
    case: str
    answer: str


@dataclass(kw_only=True)
class Result:
    """The result of a walk."""

    num_calls: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)


async def servers_of(coordinator: str, access: Access) -> dict[str, str]:
    """The address of every gRPC server of a mesh by the id of its node."""
    async with open_channel(coordinator, access=access) as channel:
        stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        fleet = await stub.GetFleet(coordinator_pb2.GetFleetRequest(), timeout=10.0)
    return {"coordinator": coordinator, **{node.node_id: node.address for node in fleet.nodes if node.address}}


async def methods_of(address: str, access: Access) -> list[MethodDescriptor]:
    """The methods that a server has by its reflection, those that end something last."""
    async with open_channel(address, access=access) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        names = [
            s.name async for answer in stub.ServerReflectionInfo(asked) for s in answer.list_services_response.service
        ]
    pool: Any = descriptor_pool.Default()
    pool.AddSerializedFile(v1_file().SerializeToString())
    found = [method for name in names for method in pool.FindServiceByName(name).methods]
    return sorted(found, key=lambda method: method.name in LAST)


async def walk(
    servers: Mapping[str, str],
    access: Access,
    plausible: Mapping[str, Any],
    foreign: Mapping[str, Any],
    sizes: Sizes,
    *,
    every: int = 1,
) -> Result:
    """Call every method of `servers` with every case; with `every` n, a plausible request and each n-th of the others.

    `plausible` and `foreign` are as for `cases`.
    """
    result = Result()

    async def of_server(server: str, address: str) -> None:
        methods = await methods_of(address, access)
        async with open_channel(address, access=access) as channel:
            for last in (False, True):
                last_or_not = [m for m in methods if (m.name in LAST) is last]
                calls = _calls(server, last_or_not, plausible, foreign, sizes, every)
                await _call_all(channel, calls, result)

    async with asyncio.TaskGroup() as group:
        for server, address in servers.items():
            group.create_task(of_server(server, address))
    return result


Call = tuple[str, MethodDescriptor, Case]


def _calls(
    server: str,
    methods: Sequence[MethodDescriptor],
    plausible: Mapping[str, Any],
    foreign: Mapping[str, Any],
    sizes: Sizes,
    every: int,
) -> Iterator[Call]:
    number = 0
    for method in methods:
        # Any client may drain a node: a valid request, after which the mesh has no such node.
        others = {name: value for name, value in foreign.items() if (method.name, name) != ("Drain", "node_id")}
        for case in cases(method.full_name, method.input_type, plausible, others, sizes):
            number += 1
            if case.name in ("empty", "plausible") or number % every == 0:
                yield server, method, case


async def _call_all(channel: grpc.aio.Channel, calls: Iterable[Call], result: Result) -> None:
    left = iter(calls)

    async def work() -> None:
        for call in left:
            await _call(channel, call, result)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())


async def _call(channel: grpc.aio.Channel, call: Call, result: Result) -> None:
    server, method, case = call
    path = f"/{method.containing_service.full_name}/{method.name}"
    code, text = grpc.StatusCode.OK, ""
    begin: Any = (
        channel.unary_stream
    )  # on the wire all kinds of calls are equal, and this kind of client writes all at once
    stream = begin(path, response_deserializer=_decoder(method))(case.raw, timeout=CALL_S)
    try:
        responses = 0
        async for response in stream:
            text = text or _failure(response)
            responses += 1
            if responses == RESPONSES_MAX:
                break
    except grpc.aio.AioRpcError as error:
        code, text = error.code(), error.details() or ""
    finally:
        stream.cancel()
    result.num_calls += 1
    result.codes[code.name] += 1
    if code in FORBIDDEN or (code is grpc.StatusCode.OK and text):
        finding = Finding(server=server, method=path, case=case.name, answer=f"{code.name}: {text[:300]}")
        result.findings.append(finding)


def _decoder(method: MethodDescriptor) -> Any:
    return message_factory.GetMessageClass(method.output_type).FromString


def _failure(message: Message) -> str:
    """The text of a failure inside a response that a status must not have either."""
    if isinstance(message, types_pb2.Failure):
        forbidden = {code.value[0] for code in FORBIDDEN}
        return f"{message.code} {message.reason}: {message.message}" if message.code in forbidden else ""
    for one, value in message.ListFields():
        if one.message_type is None or one.message_type.GetOptions().map_entry:
            continue
        for part in value if one.is_repeated else (value,):
            if found := _failure(part):
                return found
    return ""
