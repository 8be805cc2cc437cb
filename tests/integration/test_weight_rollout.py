"""Published weights reach inference nodes through the real coordinator, and the router finds them there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.node import InferenceNode
from rollmesh.shared.clients.generated import Generated, Target
from rollmesh.shared.clients.inference import InferenceRouter
from rollmesh.shared.codec.trajectory import encode_version
from rollmesh.shared.fleet import KnownFleet
from rollmesh.shared.registry import Extension
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.trajectory import SamplingParams
from rollmesh.shared.versions import PolicyVersion
from rollmesh.shared.weights.manifest import build_manifest, version_owner
from rollmesh.shared.weights.probes import Probe
from rollmesh.shared.weights.transfer import upload
from rollmesh.v1 import run_pb2

from ..unit.shared.safetensors_files import write_safetensors
from .content_engine import VOCAB, content_logprobs, content_of
from .coordinator_mesh import ACCESS, DEPOT, JOIN, MeshParts, coordinator_mesh
from .weight_mesh import HERE, SERVER

PROMPT = np.array([3, 1, 4, 1, 5], np.int32)


def joining(parts: MeshParts, node_id: str) -> InferenceNode:
    config = InferenceConfig(
        directory=str(parts.folder / node_id),
        engine=Extension("content_engine.py:ContentEngine"),
        server=SERVER,
        membership=JOIN,
    )
    return InferenceNode(config, node_id=node_id, access=ACCESS, coordinator=parts.address, base_dir=HERE)


async def publish(parts: MeshParts, depot: str, step: int) -> PolicyVersion:
    """As a learner does: upload with probes, then announce."""
    files = {"m.safetensors": write_safetensors(parts.folder / f"{step}.safetensors", step)}
    tokens = np.arange(12, dtype=np.int32) % VOCAB
    probe = Probe(token_ids=tokens, logprobs=content_logprobs(content_of(files), tokens))
    built = build_manifest(files, probes=[probe.encode()])
    version = PolicyVersion(policy="main", step=step, weights_digest=built.weights_digest)
    async with open_channel(depot, access=ACCESS) as channel:
        await upload(channel, built, owner=version_owner(version))
    request = run_pb2.PublishVersionRequest(run="r", trainer_epoch=parts.epoch, version=encode_version(version))
    await parts.call(parts.run.PublishVersion, request)
    return version


async def answer(router: InferenceRouter) -> Generated:
    return await router.generate(PROMPT, SamplingParams(max_tokens=16, seed=1), target=Target(), deadline_s=20.0)


async def test_published_weights_reach_every_node_and_late_ones_too(tmp_path: Path) -> None:
    async with coordinator_mesh(tmp_path) as parts, joining(parts, "inf-0") as early:
        assert early.membership is not None
        await early.membership.wait_joined()
        await parts.create()
        await parts.attach()
        depot = early.fleet.address_of(DEPOT)
        assert depot is not None
        version = await publish(parts, depot, 0)
        async with InferenceRouter(early.fleet, access=ACCESS) as router:
            assert (await answer(router)).segments[0].version == version
            async with joining(parts, "inf-1") as late:
                await asyncio.wait_for(in_use(early.fleet, "inf-1"), 20)
                assert late.state.active == version
                await asyncio.gather(*(answer(router) for _ in range(4)))
                assert late.engine.load().tokens_generated == 2 * 16


async def in_use(fleet: KnownFleet, node_id: str) -> None:
    while not any(node.node_id == node_id and node.HasField("active") for node in fleet.nodes()):
        await fleet.changed(since=fleet.revision)
