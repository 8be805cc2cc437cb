"""Published weights reach inference nodes through the real coordinator, and the router finds them there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from rollmesh.shared.clients.generated import Generated, Target
from rollmesh.shared.clients.inference import InferenceRouter
from rollmesh.shared.domain.trajectory import SamplingParams
from rollmesh.shared.membership.fleet import KnownFleet

from .coordinator_mesh import ACCESS, coordinator_mesh
from .weight_fleet import announce, begin, joining
from .weight_mesh import content_probe, small

PROMPT = np.array([3, 1, 4, 1, 5], np.int32)


async def answer(router: InferenceRouter) -> Generated:
    return await router.generate(PROMPT, SamplingParams(max_tokens=16, seed=1), target=Target(), deadline_s=20.0)


async def test_published_weights_reach_every_node_and_late_ones_too(tmp_path: Path) -> None:
    async with coordinator_mesh(tmp_path) as parts, joining(parts, "inf-0") as early:
        files = small(tmp_path, 0)
        version = await announce(parts, await begin(parts, early), 0, files, probes=[content_probe(files)])
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
