"""The versions that the inference nodes of a mesh serve, hold or have prepared: precision, size, kind and base, from
their manifests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rollmesh.app.mesh_client import CALL_S_MAX, FleetClient, MeshAddress
from rollmesh.shared.codec.trajectory import decode_version
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import MeshError
from rollmesh.shared.rpc.channel import ChannelConfig, open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.weights.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rollmesh.shared.weights.precision import precision_text
from rollmesh.v1 import coordinator_pb2, weights_pb2, weights_pb2_grpc

Manifest = weights_pb2.WeightManifest
_COLUMNS = ("version", "digest", "kind", "precision", "size", "base", "nodes")


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One version. Without a manifest, because the depot has deleted it, everything but the nodes is empty."""

    version: str
    digest: str
    kind: str = ""
    """`full` or `adapter`."""
    precision: str = ""
    size_bytes: int = 0
    """Bytes of the whole state dict, and of the adapter if it has one."""
    adapter_bytes: int = 0
    base: str = ""
    """The listed version with the files of the base of an adapter; empty if there is none, or for whole weights."""
    nodes: dict[str, str] = {}
    """`active`, `held` or `prepared`, by node."""


async def versions_of(mesh: MeshAddress, client: FleetClient) -> list[VersionRow]:
    """Return the versions of a mesh, newest first. Raises MeshError if no server responds."""
    nodes = (await client.status()).nodes
    found: dict[PolicyVersion, dict[str, str]] = defaultdict(dict)
    for node in nodes:
        for held in node.held:
            found[decode_version(held)][node.node_id] = "held"
        for state in ("prepared", "active"):
            if node.HasField(state):
                found[decode_version(getattr(node, state))][node.node_id] = state
    depots = [node.address for node in nodes if node.kind == coordinator_pb2.NODE_KIND_DEPOT]
    manifests: dict[PolicyVersion, Manifest] = {}
    for address in depots:
        async with open_channel(address, access=mesh.access, config=ChannelConfig(deadline_s=CALL_S_MAX)) as channel:
            stub = weights_pb2_grpc.WeightServiceStub(channel)
            for version in found:
                request = weights_pb2.GetManifestRequest(weights_digest=version.weights_digest)
                with suppress(MeshError), typed_errors():  # deleted, or a depot that does not respond
                    manifests.setdefault(version, (await stub.GetManifest(request)).manifest)
    order = sorted(found, key=lambda v: (v.policy, v.incarnation, v.step), reverse=True)
    return [row(version, found[version], manifests) for version in order]


def row(version: PolicyVersion, nodes: dict[str, str], manifests: Mapping[PolicyVersion, Manifest]) -> VersionRow:
    """Describe one version. `manifests` are those of all versions, among which the base of an adapter is looked up."""
    empty = VersionRow(version=str(version), digest=version.weights_digest, nodes=nodes)
    manifest = manifests.get(version)
    if manifest is None:
        return empty
    adapter = [file for file in manifest.files if file.name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    full = manifest.kind == Manifest.KIND_FULL
    bases = (str(other) for other, one in manifests.items() if not full and list(one.files) == _base_files(manifest))
    return msgspec.structs.replace(
        empty,
        kind="full" if full else "adapter",
        precision=precision_text(manifest),
        size_bytes=sum(file.size_bytes for file in manifest.files),
        adapter_bytes=sum(file.size_bytes for file in adapter),
        base=next(bases, ""),
    )


def _base_files(manifest: Manifest) -> list[weights_pb2.WeightFile]:
    return [file for file in manifest.files if file.name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]


def weights_table(rows: Sequence[VersionRow]) -> RenderableType:
    """Return the text for a terminal."""
    if not rows:
        return Text("no inference node has weights")
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for one in rows:
        size = f"{one.size_bytes / 1e6:.3g} MB" + (
            f", adapter {one.adapter_bytes / 1e6:.3g} MB" if one.adapter_bytes else ""
        )
        nodes = ", ".join(f"{node} {state}" for node, state in sorted(one.nodes.items()))
        known = bool(one.kind)
        table.add_row(
            one.version,
            one.digest[:12],
            one.kind or "not at the depot",
            one.precision or "-",
            size if known else "-",
            one.base or ("its own files" if one.kind == "adapter" else "-"),
            nodes,
        )
    return table
