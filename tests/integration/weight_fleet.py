"""Inference nodes that join a real coordinator, and versions that a test announces to them as a learner does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.node import InferenceNode
from rollmesh.shared.codec.trajectory import encode_version
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.weights.manifest import build_manifest, version_owner
from rollmesh.shared.weights.probes import Probe
from rollmesh.shared.weights.transfer import upload
from rollmesh.v1 import run_pb2

from .coordinator_mesh import ACCESS, DEPOT, JOIN, MeshParts
from .weight_mesh import HERE, NETWORK, SERVER

CONTENT = Extension("content_engine.py:ContentEngine")


def joining(
    parts: MeshParts, node_id: str, kind: type[InferenceNode] = InferenceNode, *, engine: Extension = CONTENT
) -> InferenceNode:
    """Return a node that joins the mesh when it is entered."""
    config = InferenceConfig(
        directory=str(parts.folder / node_id), engine=engine, server=SERVER, membership=JOIN, transfer=NETWORK
    )
    return kind(config, node_id=node_id, access=ACCESS, coordinator=parts.address, base_dir=HERE)


async def begin(parts: MeshParts, *nodes: InferenceNode) -> str:
    """Wait until the nodes have joined, create the run and attach its trainer. Return the address of the depot."""
    for node in nodes:
        assert node.membership is not None
        await node.membership.wait_joined()
    await parts.create()
    await parts.attach()
    depot = nodes[0].fleet.address_of(DEPOT)
    assert depot is not None
    return depot


async def announce(
    parts: MeshParts, depot: str, step: int, files: dict[str, Path], *, probes: Sequence[Probe] = ()
) -> PolicyVersion:
    """Upload a version and publish it."""
    built = build_manifest(files, probes=[probe.encode() for probe in probes])
    version = PolicyVersion(policy="main", step=step, weights_digest=built.weights_digest)
    async with open_channel(depot, access=ACCESS) as channel:
        await upload(channel, built, owner=version_owner(version, "r"))
    await publish_version(parts, version)
    return version


async def publish_version(parts: MeshParts, version: PolicyVersion) -> None:
    request = run_pb2.PublishVersionRequest(run="r", trainer_epoch=parts.epoch, version=encode_version(version))
    await parts.call(parts.run.PublishVersion, request)


async def serve_all(version: PolicyVersion, *nodes: InferenceNode) -> bool:
    """Return whether all nodes serve a version."""
    return all(node.state.active == version for node in nodes)
