"""Adapters as peft writes them: merged exactly, served right by the torch engine, and rejected by name if they do not
fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.engine import KvPolicy, WeightsMismatch
from rollmesh.services.inference.engines.common.adapters import merge_adapter
from rollmesh.services.inference.node import InferenceNode
from rollmesh.services.weights.config import DepotConfig
from rollmesh.services.weights.node import DepotNode
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import WeightsRejected
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.weights.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    build_manifest,
)
from rollmesh.shared.weights.probes import Probe
from rollmesh.shared.weights.transfer import TransferConfig
from rollmesh.trainer.model_files import WEIGHTS_NAME, write_model_folder

pytest.importorskip("peft")
from . import peft_adapters
from .peft_adapters import model_logprobs, upload_and_prepare

PROMPT = np.arange(1, 13, dtype=np.int32)
ACCESS = Access(token="t")
NETWORK = TransferConfig(same_host=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(build_tiny_model(TinyModelConfig(num_layers=2), seed=1), build_tokenizer(), folder)
    return folder


def adapted(model: Path, folder: Path, **options: Any) -> tuple[Any, dict[str, Path]]:
    settings = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"], **options}
    return peft_adapters.adapted(model, folder, seed=3, std=0.05, **settings)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"target_modules": "all-linear", "r": 1}])
def test_the_merged_weights_are_those_of_peft(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    wrapped, files = adapted(model, tmp_path / "adapter", **options)
    merged = merge_adapter({WEIGHTS_NAME: model / WEIGHTS_NAME, **files}, tmp_path / "merged")
    found, expected = load_file(merged[WEIGHTS_NAME]), wrapped.merge_and_unload().state_dict()
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in found)
    base = load_file(model / WEIGHTS_NAME)
    assert sum(not torch.equal(found[name], base[name]) for name in found) >= 4


async def test_an_adapter_travels_alone_and_the_torch_engine_scores_under_it(model: Path, tmp_path: Path) -> None:
    """The second version has the chunks of the first one and a small adapter; its probes are the log-probs of peft's
    own model."""
    wrapped, files = adapted(model, tmp_path / "adapter")
    base = {WEIGHTS_NAME: model / WEIGHTS_NAME}
    probes = [Probe(token_ids=PROMPT, logprobs=model_logprobs(wrapped, PROMPT)).encode()]
    built = [build_manifest(base), build_manifest(base, adapter=files, probes=probes, probe_tolerance=1e-4)]
    engine = Extension("torch", {"model": str(model), "context_max": 64})
    settings = InferenceConfig(directory=str(tmp_path / "node"), engine=engine, transfer=NETWORK)
    depot = DepotNode(DepotConfig(directory=str(tmp_path / "depot")), node_id="d", access=ACCESS)
    async with depot, InferenceNode(settings, node_id="i", access=ACCESS) as node:
        fetched = []
        for step, one in enumerate(built):
            version = PolicyVersion(policy="main", step=step, weights_digest=one.weights_digest)
            fetched.append(await upload_and_prepare(depot, node, version, one, ACCESS))
            await node.keeper.activate(version, KvPolicy.RECOMPUTE)
        (result,) = await node.engine.score([PROMPT])
        assert result.version == version
        np.testing.assert_allclose(result.logprobs, model_logprobs(wrapped, PROMPT), atol=1e-4)
        assert fetched[1] < 0.2 * fetched[0], "only the adapter crossed the network"


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
        await upload_and_prepare(depot, node, good, built[0], ACCESS)
        await node.keeper.activate(good, KvPolicy.RECOMPUTE)
        with pytest.raises(WeightsRejected, match=r"for rank 8 .* are expected"):
            await upload_and_prepare(depot, node, bad, built[1], ACCESS)
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
