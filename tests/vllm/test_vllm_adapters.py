"""Adapters and deltas on a real vLLM: an adapter travels alone, vLLM scores and samples under it as peft does, and full versions follow."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.engine import GenerateDelta, GenerateRequest, KvPolicy
from rollmesh.services.inference.node import InferenceNode
from rollmesh.services.weights.node import DepotNode
from rollmesh.shared.errors import WeightsRejected
from rollmesh.shared.registry import Extension
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.trajectory import SamplingParams
from rollmesh.shared.versions import PolicyVersion
from rollmesh.shared.weights.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BuiltManifest,
    build_manifest,
    version_owner,
)
from rollmesh.shared.weights.probes import Probe
from rollmesh.shared.weights.transfer import upload

from ..conformance.vllm_kit import needs_vllm
from ..integration.weight_mesh import ACCESS, NETWORK, SERVER, depot
from .test_vllm_fleet import save_models

peft = pytest.importorskip("peft")
pytestmark = [needs_vllm, pytest.mark.slow]
PROMPT = np.arange(5, 25, dtype=np.int32)
TOLERANCE = 1e-3
"""Nats between vLLM and transformers, both in float32."""
WEIGHTS = "model.safetensors"


def adapted(model: Path, folder: Path, *, seed: int, **options: Any) -> tuple[Any, dict[str, Path]]:
    """Return peft's model with a random adapter, which is not merged, and the two files of the adapter."""
    settings = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"], **options}
    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(Qwen3ForCausalLM.from_pretrained(model), peft.LoraConfig(**settings))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    wrapped.save_pretrained(folder)
    return wrapped, {name: folder / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}


def logprobs(model: Any, token_ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the log-prob of each token under a model of transformers or peft; entry 0 is 0."""
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    with torch.inference_mode():
        table = model(input_ids=ids).logits[0].float().log_softmax(-1)
    return np.concatenate([[0.0], table[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()]).astype(np.float32)


class Fleet:
    """A depot and one node with vLLM."""

    def __init__(self, source: DepotNode, node: InferenceNode) -> None:
        self.source, self.node = source, node
        self.steps = 0

    async def prepare(self, built: BuiltManifest) -> tuple[PolicyVersion, int]:
        """Upload and prepare a version. Return it with the bytes that the node fetched."""
        version = PolicyVersion(policy="main", step=self.steps, weights_digest=built.weights_digest)
        self.steps += 1
        async with open_channel(self.source.address, access=ACCESS) as channel:
            await upload(channel, built, owner=version_owner(version), config=NETWORK)
        return version, await self.node.keeper.prepare(version, [self.source.address])

    async def serve(self, built: BuiltManifest) -> int:
        version, fetched_bytes = await self.prepare(built)
        await self.node.keeper.activate(version, KvPolicy.RECOMPUTE)
        assert self.node.state.active == version
        return fetched_bytes

    async def check(self, model: Any) -> None:
        """Compare the scores, and the log-probs of sampled tokens, with those of `model`."""
        (scored,) = await self.node.engine.score([PROMPT])
        np.testing.assert_allclose(scored.logprobs, logprobs(model, PROMPT), atol=TOLERANCE)
        deltas = await self.generate()
        sampled = np.concatenate([delta.token_ids for delta in deltas])
        found = np.concatenate([delta.logprobs_model for delta in deltas if delta.logprobs_model is not None])
        expected = logprobs(model, np.concatenate([PROMPT, sampled]))[len(PROMPT) :]
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
        scores = [logprobs(one, PROMPT) for one in (plain, first, second)]
        assert min(float(np.abs(scores[a] - scores[b]).max()) for a, b in ((0, 1), (0, 2), (1, 2))) > 100 * TOLERANCE

        probe = Probe(token_ids=PROMPT, logprobs=logprobs(first, PROMPT)).encode()
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
