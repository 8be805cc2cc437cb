"""Further outputs of an engine in a whole mesh: the loss of a recipe trains with them, and an external trainer gets
their bytes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from rollmesh.client import Client
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.services.inference.engine import Emit, GenerateDelta, GenerateRequest
from rollmesh.services.learner.metrics_log import read_metrics
from rollmesh.services.reward.item import ScoreItem
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.testing.fake_engine import FakeEngine
from rollmesh.trainer.model_files import write_model_folder
from rollmesh.v1 import types_pb2

from ..chaos.world import mesh_config, save_model_folder
from .external_trainer_mesh import mesh_without_learner
from .test_client import WEIGHTS, run_spec
from .test_mesh import Operator

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)
SHARE = 0.2
"""Share of the tokens that `grpo_high_entropy` selects."""
EMITTED: dict[str, list[GenerateDelta]] = defaultdict(list)
"""Deltas of `RecordingEngine` by request."""


class Parity:
    """Rewards half of the noise of an untrained model."""

    async def score(self, item: ScoreItem) -> float:
        return float(len(item.response()) % 2)


class RecordingEngine(FakeEngine):
    """Records what it emits."""

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        def recorded(delta: GenerateDelta) -> None:
            EMITTED[request.request_id].append(delta)
            emit(delta)

        super().submit(request, recorded)


async def test_a_mesh_trains_with_the_entropy_that_its_engine_returns(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_model_folder(build_tiny_model(SMALL, seed=1), build_tokenizer(), model)
    base = mesh_config(model, batch_groups=2, group_size=4, updates_max=2)
    tree = msgspec.to_builtins(base) | {"recipe": "grpo_high_entropy", "recipe_applied": False, "model": str(model)}
    tree["inference"] |= {"engine": {"name": "torch", "options": {"context_max": 256}}}
    tree["rollout"] |= {"agent": "single_turn"}
    tree["reward"] |= {"scorers": [{"name": f"{__name__}:Parity", "reward": "correct"}]}
    tree["learner"] = {"tensorboard": False}
    del tree["rollout"]["outputs"]
    config = config_from_dict(MeshConfig, tree)
    async with Mesh(config, run_dir=tmp_path / "run") as mesh:
        await Operator(mesh).finished()
    lines = read_metrics(next((tmp_path / "run").rglob("metrics.jsonl")))
    assert [(line.update, line.outcome) for line in lines.values()] == [(1, "APPLIED"), (2, "APPLIED")]
    for line in lines.values():
        found, num = line.metrics["high_entropy_share"], line.metrics["tokens/trained"]
        # At least a fifth of each minibatch, rounded up; two minibatches. Without entropy, or with a constant one, it
        # is 0 or 1.
        assert found is not None
        assert num is not None
        assert SHARE <= found <= SHARE + 2 / num + 1e-6


async def test_a_batch_has_the_outputs_that_the_engine_emitted(tmp_path: Path) -> None:
    base = mesh_config(save_model_folder(tmp_path / "model"), engine=f"{__name__}:RecordingEngine")
    config = msgspec.structs.replace(base, rollout=msgspec.structs.replace(base.rollout, outputs=("entropy",)))
    EMITTED.clear()
    async with (
        mesh_without_learner(config, tmp_path / "mesh") as mesh,
        Client(mesh.gateway_address, token=mesh.access.token) as client,
        asyncio.timeout(60),
    ):
        run = await client.create_run(run_spec())
        async with await run.attach() as trainer:
            await trainer.publish(WEIGHTS)
            batch = await anext(trainer.batches())
    emitted = {_joined(deltas) for deltas in EMITTED.values()}
    segments = [segment for sample in batch.samples for segment in sample.path()]
    sampled = [segment for segment in segments if segment.source == types_pb2.SEGMENT_SOURCE_POLICY]
    assert len(sampled) == 8 * 3, "turns of eight episodes"
    for segment in sampled:
        entropy = segment.arrays["entropy"]
        assert (entropy.dtype, list(entropy.shape)) == ("f32le", [len(segment.token_ids) // 4])
        assert (segment.token_ids, segment.logprobs, entropy.inline) in emitted
    assert not any(segment.arrays for segment in segments if segment.source != types_pb2.SEGMENT_SOURCE_POLICY)


def _joined(deltas: Sequence[GenerateDelta]) -> tuple[bytes, bytes, bytes]:
    """Return tokens, log-probs and entropy of one request as bytes."""
    columns = [(d.token_ids, d.logprobs, d.arrays["entropy"]) for d in deltas if len(d.token_ids)]
    tokens, logprobs, entropy = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return tokens.astype("<i4").tobytes(), logprobs.astype("<f4").tobytes(), entropy.astype("<f4").tobytes()
