"""Size and cost of the deltas between the versions of a model that is trained here: a part of the bench `weights`.

The model is a Qwen3 made here, which imitates demonstrations of generated tasks with AdamW in float32. After each
update its weights are written to a file as a trainer publishes them, cut into chunks, and each chunk is compared with
its predecessor. A separate process, `python -m benchmarks.weights.delta NAME UPDATES`, trains, because the model takes
2 GB. It prints the figures so far as a line of JSON after each update.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from rollmesh.demo.config import MadeModelConfig, demonstrated_sources
from rollmesh.demo.make_model import Demonstrator
from rollmesh.demo.sft import WarmStartConfig, imitation_step
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.weights.delta import apply_delta, encode_delta
from rollmesh.shared.weights.delta_cache import WORTH
from rollmesh.shared.weights.digests import sha256_hex, sha256_of_file
from rollmesh.shared.weights.fetcher import base_chunks
from rollmesh.shared.weights.manifest import BuiltManifest, build_manifest, parse_manifest
from rollmesh.trainer.config import OptimizerConfig
from rollmesh.trainer.model_files import WEIGHTS_NAME, published_state
from rollmesh.trainer.optim import make_optimizer
from rollmesh.v1 import weights_pb2

LIMIT_S = 1800.0
LEVELS = 3
"""Levels of the tasks that are imitated."""


@dataclass(frozen=True, slots=True)
class ModelCase:
    """A model, how it is trained, and how it is published."""

    shape: TinyModelConfig
    lr: float
    dtype: torch.dtype
    batch_size: int
    """Demonstrations per update."""
    warm_lr: float = 3e-4
    warm_steps: int = 4
    """Steps before the first version, so that the weights are not random; the optimizer begins again after them."""


CASES = {
    "100M": ModelCase(
        shape=TinyModelConfig(
            hidden_size=768, num_layers=14, num_heads=12, num_kv_heads=12, head_dim=64, intermediate_size=2048
        ),
        lr=1e-6,
        dtype=torch.bfloat16,
        batch_size=2,
    ),
    "demo": ModelCase(
        shape=TinyModelConfig(), lr=7e-4, dtype=torch.float32, batch_size=16, warm_lr=4e-3, warm_steps=30
    ),
}


@dataclass(slots=True)
class DeltaFigures:
    """What the deltas of a model cost. Times are CPU seconds of one thread, summed over all chunks."""

    num_parameters: int = 0
    full_bytes: int = 0
    """Bytes of one version."""
    shares: list[float] = field(default_factory=list)
    """Bytes sent per update as a share of `full_bytes`. A chunk whose delta is not worth sending counts whole."""
    changed: list[float] = field(default_factory=list)
    """Share of values whose bits changed, per update."""
    exact: int = 0
    """Updates whose chunks, made from the deltas, all have the digests of the manifest."""
    losses: list[float] = field(default_factory=list)
    """Loss per token of each update, in nats."""
    bytes_measured: int = 0
    encode_s: float = 0.0
    apply_s: float = 0.0
    hash_s: float = 0.0
    """Reading a chunk from its file and hashing it, which a whole chunk costs as well."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def measure(name: str, updates: int) -> DeltaFigures:
    """Train the model of a case in another process and measure its deltas. Raises CalledProcessError,
    TimeoutExpired."""
    command = [sys.executable, "-m", "benchmarks.weights.delta", name, str(updates)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=DeltaFigures)


def train(
    case: ModelCase, updates: int, folder: Path, on_update: Callable[[DeltaFigures], None] = lambda _: None
) -> DeltaFigures:
    """Make the versions 0 to `updates`, and the deltas between them. `on_update` gets the figures so far."""
    model = build_tiny_model(case.shape, seed=0)
    source = MadeModelConfig(tasks=Extension("calc", {"level_max": LEVELS}))
    demonstrator, rng = Demonstrator(demonstrated_sources(source)), np.random.default_rng(0)
    figures = DeltaFigures(num_parameters=sum(p.numel() for p in model.parameters()))
    settings = WarmStartConfig()

    def step(optimizer: torch.optim.Optimizer) -> float:
        demos = [demonstrator.new(1 + int(rng.integers(LEVELS)), rng) for _ in range(case.batch_size)]
        return imitation_step(model, demos, [optimizer], settings)

    warm = make_optimizer(model, OptimizerConfig(lr=case.warm_lr))
    for _ in range(case.warm_steps):
        step(warm)
    del warm
    optimizer = make_optimizer(model, OptimizerConfig(lr=case.lr))
    old = _publish(model, case.dtype, folder / "0")
    for update in range(1, updates + 1):
        figures.losses.append(step(optimizer))
        new = _publish(model, case.dtype, folder / str(update % 2))
        _compare(old, new, case.dtype.itemsize, folder / "chunk", figures)
        old = new
        on_update(figures)
    return figures


@dataclass(frozen=True, slots=True)
class _PublishedBytes:
    manifest: weights_pb2.WeightManifest
    chunks: dict[str, bytes]


def _publish(model: PreTrainedModel, dtype: torch.dtype, folder: Path) -> _PublishedBytes:
    """Write the weights as a trainer does that keeps float32 and publishes `dtype`, and read their chunks."""
    folder.mkdir(exist_ok=True)
    path = folder / WEIGHTS_NAME
    save_file({name: tensor.to(dtype) for name, tensor in published_state(model).items()}, path)
    built: BuiltManifest = build_manifest({WEIGHTS_NAME: path})
    data = path.read_bytes()
    chunks = {digest: data[c.offset : c.offset + c.size_bytes] for digest, c in built.chunks.items()}
    return _PublishedBytes(parse_manifest(built.data), chunks)


def _compare(old: _PublishedBytes, new: _PublishedBytes, value_bytes: int, file: Path, figures: DeltaFigures) -> None:
    """Encode and apply the delta of each chunk of `new`. A chunk that both versions have is not sent."""
    bases = base_chunks(new.manifest, old.manifest)
    sent, changed, exact = 0, 0, True
    for digest, data in new.chunks.items():
        if digest in old.chunks:
            continue
        base = old.chunks[bases[digest]]
        began_s = time.thread_time()
        delta = encode_delta(base, data)
        encoded_s = time.thread_time()
        made = apply_delta(base, delta)
        applied_s = time.thread_time()
        file.write_bytes(data)
        read_s = time.thread_time()
        sha256_of_file(file)
        figures.hash_s += time.thread_time() - read_s
        figures.encode_s += encoded_s - began_s
        figures.apply_s += applied_s - encoded_s
        figures.bytes_measured += len(data)
        sent += len(delta) if len(delta) <= WORTH * len(data) else len(data)
        exact = exact and sha256_hex(made) == digest
        differs = np.frombuffer(base, np.uint8) != np.frombuffer(data, np.uint8)
        changed += int(differs[: len(differs) // value_bytes * value_bytes].reshape(-1, value_bytes).any(axis=1).sum())
    full_bytes = sum(map(len, new.chunks.values()))
    figures.full_bytes = full_bytes
    figures.shares.append(sent / full_bytes)
    figures.changed.append(changed * value_bytes / full_bytes)
    figures.exact += exact


if __name__ == "__main__":
    with TemporaryDirectory(prefix="rollmesh-bench-") as folder_name:
        train(CASES[sys.argv[1]], int(sys.argv[2]), Path(folder_name), lambda found: print(found.as_json(), flush=True))
