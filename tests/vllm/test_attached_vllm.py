"""What a real vLLM server does to a node that attaches to it: it ends, lacks a flag, or runs a model that it updates
wrongly.

The conformance suite has the rest. `make suite NAME=vllm` runs these tests.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.services.inference.engine import EngineBroken, GenerateDelta, GenerateRequest, KvPolicy
from rollmesh.services.inference.engines.attached.vllm_server import VllmServerConfig, VllmServerEngine
from rollmesh.shared.domain.trajectory import FinishReason, SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import ConfigError
from tests.vllm_process import VllmProcess, needs_vllm_server

pytestmark = [pytest.mark.slow, needs_vllm_server]

CONTEXT = 200
VOCAB = 112
V0 = PolicyVersion(policy="main", step=0, weights_digest="d0")


def checkpoint(folder: Path, *, tied: bool) -> Path:
    """Write a tiny model with tokenizer, and weights in the folder `0`. Return `folder`."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB, tie_word_embeddings=tied, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, intermediate_size=64, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM
    model(config).save_pretrained(folder / "0")
    config.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab={chr(200 + i): i for i in range(VOCAB)}, merges=[]))
    for each in (folder, folder / "0"):
        tokenizer.save(str(each / "tokenizer.json"))
    return folder


@contextmanager
def attached(folder: Path, *, tied: bool = False, **flags: Any) -> Iterator[tuple[VllmProcess, VllmServerEngine]]:
    model = checkpoint(folder, tied=tied)
    server = VllmProcess(model, context_max=CONTEXT + 1, **flags)
    config = VllmServerConfig(
        url=server.url, model=str(model), weights_dir=str(folder / "shared"), context_max=CONTEXT, flush_tokens=1, poll_s=0.2,
        dead_s=2.0, call_s=5.0,
    )  # fmt: skip
    try:
        yield server, VllmServerEngine(config)
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"dev_mode": False}, "lacks a route.*VLLM_SERVER_DEV_MODE=1"),
        ({"logprobs_mode": "raw_logprobs"}, "returns raw_logprobs.*--logprobs-mode processed_logprobs"),
        ({"tied": True}, "tied embeddings on a CPU"),
    ],
)
async def test_a_vllm_server_that_would_serve_wrong_numbers_is_rejected(
    tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    with attached(tmp_path, **flags) as (_, engine):
        with pytest.raises(ConfigError, match=message):
            await engine.start()
        await engine.close()


async def test_the_death_of_a_vllm_server_ends_its_requests_and_breaks_the_engine(tmp_path: Path) -> None:
    with attached(tmp_path) as (server, engine):
        await engine.start()
        await engine.prepare(V0, {"model.safetensors": tmp_path / "0" / "model.safetensors"})
        await engine.activate(V0, KvPolicy.RECOMPUTE)
        deltas: list[GenerateDelta] = []
        first, ended = asyncio.Event(), asyncio.Event()

        def emit(delta: GenerateDelta) -> None:
            deltas.append(delta)
            first.set()
            if delta.finish is not None:
                ended.set()

        request = GenerateRequest(
            request_id="r", token_ids=np.array([1, 2, 3], np.int32), params=SamplingParams(max_tokens=CONTEXT)
        )
        engine.submit(request, emit)
        await asyncio.wait_for(first.wait(), 30)
        server.kill()
        await asyncio.wait_for(ended.wait(), 10)
        assert (deltas[-1].finish, server.url in deltas[-1].error) == (FinishReason.ERROR, True)
        async with asyncio.timeout(30):
            while True:
                try:
                    await engine.score([np.array([1, 2, 3], np.int32)])
                except EngineBroken as err:
                    if "restart the node" in str(err):
                        break
        await engine.close()
