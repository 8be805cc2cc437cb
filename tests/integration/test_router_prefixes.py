"""The router of a whole mesh with two torch nodes: it finds prefixes, reads loads, and follows versions and drains."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.services.inference.node import InferenceNode
from rollmesh.shared.clients.generated import Target
from rollmesh.shared.clients.inference import InferenceRouter
from rollmesh.shared.clients.prefix_index import BLOCK_TOKENS
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import SamplingParams
from rollmesh.trainer.model_files import write_model_folder
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc

from ..chaos.world import mesh_config
from .test_engine_outputs import SMALL, Parity
from .test_mesh import Operator

PROMPT = np.random.default_rng(0).integers(20, 100, 200).astype(np.int32)
CONTEXT = 512
UPDATES = 3


def config(model: Path) -> MeshConfig:
    write_model_folder(
        build_tiny_model(TinyModelConfig(**msgspec.to_builtins(SMALL)), seed=1), build_tokenizer(), model
    )
    base = mesh_config(model, batch_groups=2, group_size=4, updates_max=UPDATES)
    tree = msgspec.to_builtins(base) | {"model": str(model), "learner": {"tensorboard": False}}
    tree["inference"] |= {"engine": {"name": "torch", "options": {"context_max": CONTEXT}}}
    tree["rollout"] |= {"agent": "single_turn"}
    tree["reward"] |= {"scorers": [{"name": f"{Parity.__module__}:Parity", "reward": "correct"}]}
    return config_from_dict(MeshConfig, tree)


async def test_the_router_of_a_mesh_finds_prefixes_and_leaves_a_node_that_drains(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    async with Mesh(config(model), run_dir=tmp_path / "run") as mesh:
        await Operator(mesh).finished()
        nodes: dict[str, InferenceNode] = {f"inference-{i}": mesh.service(f"inference-{i}") for i in range(2)}
        worker: Any = mesh.service("rollout-0")
        async with InferenceRouter(worker.fleet, access=mesh.access) as router:

            async def send() -> tuple[str, int]:
                """Return the node that served the prompt, and how many of its tokens the node had."""
                before = {name: node.engine.load().tokens_generated for name, node in nodes.items()}
                answer = await router.generate(PROMPT, SamplingParams(max_tokens=4), target=Target(step=UPDATES))
                (served,) = [n for n, node in nodes.items() if node.engine.load().tokens_generated > before[n]]
                assert [segment.version for segment in answer.segments] == [nodes[served].state.active]
                return served, answer.num_prompt_cached

            first, cached = await send()
            assert cached < BLOCK_TOKENS, "another prompt may begin with the same tokens"
            for _ in range(3):
                node, cached = await send()
                assert node == first
                assert cached >= len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
            known = {node.node_id: node for node in router._pool._nodes.values()}
            assert known[first].stream.load.kv_tokens_max == 64 * CONTEXT
            assert [version for version, _ in known[first].served] == [nodes[first].state.active]

            revision = worker.fleet.revision
            async with worker._open_node(worker.coordinator) as channel:
                stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
                await stub.Drain(coordinator_pb2.DrainRequest(node_id=first))
            async with asyncio.timeout(20):
                while any(node.node_id == first for node in worker.fleet.nodes()):
                    revision = await worker.fleet.changed(since=revision)
            moved, cached = await send()
            assert moved != first
            assert cached < BLOCK_TOKENS
