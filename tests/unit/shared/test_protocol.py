"""Which releases work together, and that a change of the protos raises the version that says so."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from rollmesh.shared.domain.protocol import PROTOCOL, UNREPORTED, ProtocolMismatch, ProtocolVersion, check_protocol
from rollmesh.v1 import (
    coordinator_pb2,
    data_pb2,
    events_pb2,
    inference_pb2,
    reward_pb2,
    run_pb2,
    sandbox_pb2,
    types_pb2,
    weights_pb2,
)

PROTOS = Path(__file__).parents[3] / "protos"
MODULES = (
    coordinator_pb2,
    data_pb2,
    events_pb2,
    inference_pb2,
    reward_pb2,
    run_pb2,
    sandbox_pb2,
    types_pb2,
    weights_pb2,
)


def version(text: str) -> ProtocolVersion:
    return ProtocolVersion.parse(text)


@pytest.mark.parametrize(("node", "coordinator"), [("1.1", "1.1"), ("1.0", "1.1"), ("2.6", "2.7"), ("2.0", "2.0")])
def test_equal_versions_and_a_node_one_minor_older_work_together(node: str, coordinator: str) -> None:
    check_protocol(version(node), version(coordinator), node_name="node a")


@pytest.mark.parametrize(
    ("node", "coordinator", "remedy"),
    [
        ("1.2", "1.1", "upgrade the coordinator first, or install its release"),
        ("1.0", "1.2", r"it accepts 1\.1 to 1\.2; install its release on the host of the node"),
        ("2.0", "1.9", "stop the mesh, install one release on every host"),
        ("1.9", "2.0", "stop the mesh, install one release on every host"),
    ],
)
def test_other_versions_are_rejected_with_both_versions_and_the_remedy(
    node: str, coordinator: str, remedy: str
) -> None:
    with pytest.raises(ProtocolMismatch, match=remedy) as caught:
        check_protocol(
            version(node), version(coordinator), node_name="node a", node_build="0.3", coordinator_build="0.2"
        )
    said = str(caught.value)
    assert f"node a (rollmesh 0.3) has protocol {node}, and the coordinator (rollmesh 0.2) has {coordinator}:" in said


def test_a_peer_that_reports_no_version_is_of_the_first_protocol() -> None:
    assert version("") == UNREPORTED == ProtocolVersion(major=1, minor=0)
    assert version(str(PROTOCOL)) == PROTOCOL


def test_protos_that_differ_from_those_of_the_last_release_have_a_higher_version() -> None:
    (released,) = PROTOS.glob("released-*.binpb")
    match = re.fullmatch(r"released-(\d+\.\d+)", released.stem)
    assert match is not None, released
    stored = descriptor_pb2.FileDescriptorSet.FromString(released.read_bytes())
    before = {file.name: file for file in stored.file if file.name.startswith("rollmesh/")}
    now = {}
    for module in MODULES:
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        now[file.name] = file
    assert len(now) == len(list(PROTOS.glob("rollmesh/v1/*.proto")))
    for file in (*before.values(), *now.values()):
        file.ClearField("source_code_info")
        for message in _messages(file.message_type):
            for field in message.field:
                field.ClearField("json_name")  # protoc writes it, and the runtime leaves it out
    if before != now:
        assert version(match[1]) < PROTOCOL, "the protos have changed: raise PROTOCOL in shared/domain/protocol.py"


def _messages(found: Iterable[descriptor_pb2.DescriptorProto]) -> Iterator[descriptor_pb2.DescriptorProto]:
    for message in found:
        yield message
        yield from _messages(message.nested_type)
