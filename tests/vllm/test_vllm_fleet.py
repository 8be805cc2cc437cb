"""A real vLLM behind an inference node: the probes of a version reject weights that it did not take over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollmesh.services.inference.node import InferenceNode
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import ProbeMismatch
from rollmesh.shared.weights.probes import Probe

from ..conformance.vllm_kit import needs_vllm
from ..integration.coordinator_mesh import MeshParts, coordinator_mesh, eventually
from ..integration.weight_fleet import announce, begin, joining, serve_all

pytestmark = [needs_vllm, pytest.mark.slow]
SIZES = {"context_max": 64, "slots_max": 4}
LIMIT_S = 120.0


def save_models(folder: Path) -> None:
    """Save configuration and two sets of weights of a model with tied embeddings."""
    config = Qwen3Config(
        vocab_size=112, tie_word_embeddings=True, initializer_range=0.15, hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=96, max_position_embeddings=64,
    )  # fmt: skip
    model_class: Any = Qwen3ForCausalLM
    for step in range(2):
        torch.manual_seed(step)
        model_class(config).save_pretrained(folder / str(step))
    config.save_pretrained(folder)  # after a model has added the architecture


def probe_of(folder: Path) -> Probe:
    tokens = np.arange(5, 25, dtype=np.int32)
    model: Any = Qwen3ForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        every = torch.log_softmax(model(torch.tensor(tokens[None])).logits[0].float(), dim=-1).numpy()
    logprobs = np.concatenate(([0.0], every[np.arange(len(tokens) - 1), tokens[1:]])).astype(np.float32)
    return Probe(token_ids=tokens, logprobs=logprobs)


def version_files(model: Path, step: int) -> dict[str, Path]:
    return {"model.safetensors": model / str(step) / "model.safetensors"}


async def test_without_the_repair_the_canary_rejects_a_version_and_the_fleet_keeps_its_weights(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_models(model)
    async with coordinator_mesh(tmp_path) as parts:
        options = {"model": str(model), **SIZES}
        vllm = joining(parts, "a-vllm", engine=Extension("vllm", {**options, "kv_bytes": 1 << 27}))
        torch_node = joining(parts, "b-torch", engine=Extension("torch", options))
        async with vllm, torch_node:
            depot = await begin(parts, vllm, torch_node)
            probes = [probe_of(model / str(step)) for step in range(2)]
            first = await announce(parts, depot, 0, version_files(model, 0), probes=probes[:1])
            await eventually(lambda: active(first, vllm, torch_node), LIMIT_S)
            await parts.train(1)
            engine: Any = vllm.engine
            await engine.repair_tied(False)
            second = await announce(parts, depot, 1, version_files(model, 1), probes=probes[1:])
            await eventually(lambda: is_quarantined(parts, second), LIMIT_S)
            assert isinstance(vllm.state.gate.failure, ProbeMismatch)
            assert vllm.state.active is None
            assert torch_node.state.active == first, "the fleet keeps its weights"


async def active(version: PolicyVersion, *nodes: InferenceNode) -> bool:
    assert [one.state.gate.failure for one in nodes] == [None] * len(nodes)
    return await serve_all(version, *nodes)


async def is_quarantined(parts: MeshParts, version: PolicyVersion) -> bool:
    assert parts.node is not None
    driver = await parts.node.runs.get("r")
    return version in await driver.read(lambda core, _: list(core.state.the_clock.quarantined))
