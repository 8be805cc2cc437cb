"""Adapters and deltas on a real vLLM: an adapter travels alone, vLLM scores and samples under it as peft does, and full
versions follow."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.engine import GenerateDelta, GenerateRequest, KvPolicy
from rollmesh.services.inference.node import InferenceNode
from rollmesh.services.weights.node import DepotNode
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import WeightsRejected
from rollmesh.shared.weights.manifest import (
    ADAPTER_CONFIG,
    BuiltManifest,
    build_manifest,
)
from rollmesh.shared.weights.probes import Probe

from ..conformance.vllm_kit import needs_vllm
from ..integration.weight_mesh import ACCESS, NETWORK, SERVER, depot
from .test_vllm_fleet import save_models

pytest.importorskip("peft")
from ..unit.inference import peft_adapters
from ..unit.inference.peft_adapters import model_logprobs, upload_and_prepare

pytestmark = [needs_vllm, pytest.mark.slow]
PROMPT = np.arange(5, 25, dtype=np.int32)
TOLERANCE = 1e-3
"""Nats between vLLM and transformers, both in float32."""
WEIGHTS = "model.safetensors"


def adapted(model: Path, folder: Path, *, seed: int, **options: Any) -> tuple[Any, dict[str, Path]]:
    settings = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"], **options}
    return peft_adapters.adapted(model, folder, seed=seed, std=0.1, **settings)


class Fleet:
    """A depot and one node with vLLM."""

    def __init__(self, source: DepotNode, node: InferenceNode) -> None:
        self.source, self.node = source, node
        self.steps = 0

    async def prepare(self, built: BuiltManifest) -> tuple[PolicyVersion, int]:
        """Upload and prepare a version. Return it with the bytes that the node fetched."""
        version = PolicyVersion(policy="main", step=self.steps, weights_digest=built.weights_digest)
        self.steps += 1
        return version, await upload_and_prepare(self.source, self.node, version, built, ACCESS)

    async def serve(self, built: BuiltManifest) -> int:
        version, fetched_bytes = await self.prepare(built)
        await self.node.keeper.activate(version, KvPolicy.RECOMPUTE)
        assert self.node.state.active == version
        return fetched_bytes

    async def check(self, model: Any) -> None:
        """Compare the scores, and the log-probs of sampled tokens, with those of `model`."""
        (scored,) = await self.node.engine.score([PROMPT])
        np.testing.assert_allclose(scored.logprobs, model_logprobs(model, PROMPT), atol=TOLERANCE)
        deltas = await self.generate()
        sampled = np.concatenate([delta.token_ids for delta in deltas])
        found = np.concatenate([delta.logprobs_model for delta in deltas if delta.logprobs_model is not None])
        expected = model_logprobs(model, np.concatenate([PROMPT, sampled]))[len(PROMPT) :]
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)

    async def generate(self) -> list[GenerateDelta]:
        deltas: list[GenerateDelta] = []
        ended = asyncio.Event()

        def emit(delta: GenerateDelta) -> None:
            deltas.append(delta)
            if delta.finish is not None:
                ended.set()

        params = SamplingParams(max_tokens=12, seed=7)
        self.node.engine.submit(GenerateRequest(request_id=f"r{self.steps}", token_ids=PROMPT, params=params), emit)
        await asyncio.wait_for(ended.wait(), 60)
        assert not deltas[-1].error
        return deltas


async def test_adapters_replace_each_other_and_deltas_follow_on_vllm(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_models(model)
    base = {WEIGHTS: model / "0" / WEIGHTS}
    first, first_files = adapted(model / "0", tmp_path / "first", seed=1)
    second, second_files = adapted(model / "0", tmp_path / "second", seed=2, target_modules="all-linear")
    _, wrong_files = adapted(model / "0", tmp_path / "wrong", seed=3)
    config = json.loads(wrong_files[ADAPTER_CONFIG].read_text())
    wrong_files[ADAPTER_CONFIG].write_text(json.dumps({**config, "r": 4}))
    changed = tmp_path / "changed.safetensors"
    state = load_file(base[WEIGHTS])
    state["model.layers.0.mlp.down_proj.weight"] *= 1.5
    save_file(state, changed, metadata={"format": "pt"})
    engine = Extension("vllm", {"model": str(model), "context_max": 64, "slots_max": 4, "kv_bytes": 1 << 27})
    settings = InferenceConfig(directory=str(tmp_path / "node"), engine=engine, transfer=NETWORK, server=SERVER)
    async with depot(tmp_path, versions_max=8) as source, InferenceNode(settings, node_id="i", access=ACCESS) as node:
        fleet = Fleet(source, node)
        plain: Any = Qwen3ForCausalLM.from_pretrained(model / "0")
        whole = await fleet.serve(build_manifest(base))
        await fleet.check(plain)
        scores = [model_logprobs(one, PROMPT) for one in (plain, first, second)]
        assert min(float(np.abs(scores[a] - scores[b]).max()) for a, b in ((0, 1), (0, 2), (1, 2))) > 100 * TOLERANCE

        probe = Probe(token_ids=PROMPT, logprobs=model_logprobs(first, PROMPT)).encode()
        built = build_manifest(base, adapter=first_files, probes=[probe], probe_tolerance=TOLERANCE)
        assert await fleet.serve(built) < 0.5 * whole, "only the adapter crossed the network"
        await fleet.check(first)

        await fleet.serve(build_manifest(base, adapter=second_files))
        await fleet.check(second)

        with pytest.raises(WeightsRejected, match=r"for rank 4 .* are expected"):
            await fleet.prepare(build_manifest(base, adapter=wrong_files))
        await fleet.check(second)

        assert await fleet.serve(build_manifest({WEIGHTS: changed})) < 0.5 * whole, (
            "a delta to the base crossed the network"
        )
        plain.load_state_dict(load_file(changed), strict=False)
        await fleet.check(plain)
