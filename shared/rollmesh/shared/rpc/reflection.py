"""Server reflection, v1 and v1alpha.

grpcio-reflection ships v1alpha only. v1 has the same messages in another package: the bytes are equal, so the same
servicer serves both, and v1's descriptor is v1alpha's with the package renamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import _async as reflection_aio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

V1ALPHA = "grpc.reflection.v1alpha"
V1 = "grpc.reflection.v1"


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Let `server` describe the named services and reflection to tools such as grpcurl."""
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(v1_file().SerializeToString())  # adding the same file again changes nothing
    names = [*service_names, f"{V1ALPHA}.ServerReflection", f"{V1}.ServerReflection"]
    servicer = reflection_aio.ReflectionServicer(names, pool)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    server.add_generic_rpc_handlers((_v1_handler(servicer),))


def v1_file() -> descriptor_pb2.FileDescriptorProto:
    """The descriptor of reflection v1."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = V1
    for message in file.message_type:
        for field in message.field:
            if field.type_name:  # setting it, even to nothing, would make a scalar field a message
                field.type_name = _renamed(field.type_name)
    for method in file.service[0].method:
        method.input_type, method.output_type = _renamed(method.input_type), _renamed(method.output_type)
    return file


def _renamed(type_name: str) -> str:
    return type_name.replace(f".{V1ALPHA}.", f".{V1}.")


def _v1_handler(servicer: Any) -> grpc.GenericRpcHandler[Any, Any]:
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(f"{V1}.ServerReflection", {"ServerReflectionInfo": method})
