"""Adapters as peft writes them: merged exactly, served right by the torch engine, and rejected by name if they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.engine import KvPolicy, WeightsMismatch
from rollmesh.services.inference.engines.adapters import merge_adapter
from rollmesh.services.inference.node import InferenceNode
from rollmesh.services.weights.config import DepotConfig
from rollmesh.services.weights.node import DepotNode
from rollmesh.shared.errors import WeightsRejected
from rollmesh.shared.registry import Extension
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.versions import PolicyVersion
from rollmesh.shared.weights.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BuiltManifest,
    build_manifest,
    version_owner,
)
from rollmesh.shared.weights.probes import Probe
from rollmesh.shared.weights.transfer import TransferConfig, upload
from rollmesh.trainer.model_files import WEIGHTS_NAME, write_model_folder

peft = pytest.importorskip("peft")
PROMPT = np.arange(1, 13, dtype=np.int32)
ACCESS = Access(token="t")
NETWORK = TransferConfig(same_host=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(build_tiny_model(TinyModelConfig(num_layers=2), seed=1), build_tokenizer(), folder)
    return folder


def adapted(model: Path, folder: Path, **options: Any) -> tuple[Any, dict[str, Path]]:
    """Return a model with a random adapter, whose B is not zero, and the two files of the adapter."""
    settings = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"], **options}
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), peft.LoraConfig(**settings))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    wrapped.save_pretrained(folder)
    return wrapped, {name: folder / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"target_modules": "all-linear", "r": 1}])
def test_the_merged_weights_are_those_of_peft(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    wrapped, files = adapted(model, tmp_path / "adapter", **options)
    merged = merge_adapter({WEIGHTS_NAME: model / WEIGHTS_NAME, **files}, tmp_path / "merged")
    found, expected = load_file(merged[WEIGHTS_NAME]), wrapped.merge_and_unload().state_dict()
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in found)
    base = load_file(model / WEIGHTS_NAME)
    assert sum(not torch.equal(found[name], base[name]) for name in found) >= 4


def logprobs(wrapped: Any) -> np.ndarray[Any, Any]:
    """Return the log-probs of the prompt under a model; entry 0 is 0."""
    ids = torch.from_numpy(PROMPT.astype(np.int64))[None]
    with torch.no_grad():
        table = wrapped(input_ids=ids).logits[0].float().log_softmax(-1)
    return np.concatenate([[0.0], table[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()]).astype(np.float32)


async def test_an_adapter_travels_alone_and_the_torch_engine_scores_under_it(model: Path, tmp_path: Path) -> None:
    """The second version has the chunks of the first one and a small adapter; its probes are the log-probs of peft's own model."""
    wrapped, files = adapted(model, tmp_path / "adapter")
    base = {WEIGHTS_NAME: model / WEIGHTS_NAME}
    probes = [Probe(token_ids=PROMPT, logprobs=logprobs(wrapped)).encode()]
    built = [build_manifest(base), build_manifest(base, adapter=files, probes=probes, probe_tolerance=1e-4)]
    engine = Extension("torch", {"model": str(model), "context_max": 64})
    settings = InferenceConfig(directory=str(tmp_path / "node"), engine=engine, transfer=NETWORK)
    depot = DepotNode(DepotConfig(directory=str(tmp_path / "depot")), node_id="d", access=ACCESS)
    async with depot, InferenceNode(settings, node_id="i", access=ACCESS) as node:
        fetched = []
        for step, one in enumerate(built):
            version = PolicyVersion(policy="main", step=step, weights_digest=one.weights_digest)
            fetched.append(await uploaded(depot, node, version, one))
            await node.keeper.activate(version, KvPolicy.RECOMPUTE)
        (result,) = await node.engine.score([PROMPT])
        assert result.version == version
        np.testing.assert_allclose(result.logprobs, logprobs(wrapped), atol=1e-4)
        assert fetched[1] < 0.2 * fetched[0], "only the adapter crossed the network"


async def uploaded(depot: DepotNode, node: InferenceNode, version: PolicyVersion, built: BuiltManifest) -> int:
    """Upload a version and prepare it. Return the bytes that the node fetched."""
    async with open_channel(depot.address, access=ACCESS) as channel:
        await upload(channel, built, owner=version_owner(version), config=NETWORK)
    return await node.keeper.prepare(version, [depot.address])


async def test_an_adapter_that_does_not_fit_leaves_the_node_as_it_is(model: Path, tmp_path: Path) -> None:
    _, files = adapted(model, tmp_path / "adapter")
    _change_config(files, r=8)
    base = {WEIGHTS_NAME: model / WEIGHTS_NAME}
    built = [build_manifest(base), build_manifest(base, adapter=files)]
    engine = Extension("torch", {"model": str(model), "context_max": 64})
    settings = InferenceConfig(directory=str(tmp_path / "node"), engine=engine, transfer=NETWORK)
    depot = DepotNode(DepotConfig(directory=str(tmp_path / "depot")), node_id="d", access=ACCESS)
    async with depot, InferenceNode(settings, node_id="i", access=ACCESS) as node:
        good, bad = (
            PolicyVersion(policy="main", step=n, weights_digest=one.weights_digest) for n, one in enumerate(built)
        )
        await uploaded(depot, node, good, built[0])
        await node.keeper.activate(good, KvPolicy.RECOMPUTE)
        with pytest.raises(WeightsRejected, match=r"for rank 8 .* are expected"):
            await uploaded(depot, node, bad, built[1])
        assert node.state.active == good


def _change_config(files: dict[str, Path], **changes: Any) -> None:
    config = json.loads(files[ADAPTER_CONFIG].read_text())
    files[ADAPTER_CONFIG].write_text(json.dumps({**config, **changes}))


def _change_weights(files: dict[str, Path], change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = load_file(files[ADAPTER_WEIGHTS])
    change(state)
    save_file(state, files[ADAPTER_WEIGHTS])


def _poison(state: dict[str, torch.Tensor]) -> None:
    next(iter(state.values()))[0, 0] = float("nan")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: _change_config(f, use_dora=True), "use_dora is not supported; merge"),
        (lambda f: _change_config(f, peft_type="IA3"), "peft_type IA3"),
        (lambda f: _change_config(f, bias="all"), "bias all"),
        (lambda f: _change_config(f, r=0), "r must be >= 1"),
        (lambda f: f[ADAPTER_CONFIG].write_text("[]"), "not the configuration of a LoRA adapter"),
        (lambda f: f[ADAPTER_WEIGHTS].write_bytes(b"nonsense"), "adapter_model.safetensors is not readable"),
        (lambda f: _change_weights(f, lambda s: s.pop(max(s))), "only one of lora_A and lora_B"),
        (lambda f: _change_weights(f, lambda s: s.update(other=torch.ones(1))), "first other: it was made for another model"),
        (lambda f: _change_weights(f, _poison), "NaN or infinite"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_adapter_is_named(
    model: Path, tmp_path: Path, damage: Callable[[dict[str, Path]], object], message: str
) -> None:
    _, files = adapted(model, tmp_path / "adapter")
    damage(files)
    with pytest.raises(WeightsMismatch, match=message):
        merge_adapter({WEIGHTS_NAME: model / WEIGHTS_NAME, **files}, tmp_path / "merged")
