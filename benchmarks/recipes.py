"""Which tokens to train, on one tiny task, seed by seed: all (`grpo`), the fifth with the highest entropy
(`grpo_high_entropy`), or a random fifth as a control.

An untrained model of one layer writes 16 tokens; its reward is the share of digits among the characters. The loop has
no mesh (`bare_loop`): engine, trainer, episodes and scorers are those of a run. All arms have the same initial model,
tasks, learning rate and number of updates, and are on-policy.

How to read it: `first`, `at 40` and `last` are mean rewards of the samples of 5 updates: the first ones, 36 to 40, and
the last ones. `share` is the share of the sampled tokens with a gradient, over all updates. A difference whose sign
changes between seeds means nothing.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.race.bare_loop import BareLoop
from benchmarks.report import Report
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh import MeshConfig
from rollmesh.services.learner.engine import StepResult
from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.trainer.losses.high_entropy import HighEntropy, HighEntropyOptions
from rollmesh.trainer.model_files import write_model_folder

ARMS: Mapping[str, Mapping[str, Any]] = {
    "all": {"recipe": "grpo"},
    "high entropy": {"recipe": "grpo_high_entropy"},
    "random": {"recipe": "grpo", "loss": [f"{__name__}:RandomTokens"]},
}
SEEDS = (0, 1, 2)
UPDATES = 100
EDGE = 5
"""Number of updates whose rewards are averaged: at the start, up to update 40, and at the end."""
LEARNING_RATE = 3e-3
MODEL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)


class DigitShare(Scorer):
    """The reward: the share of digits among the characters, 0 for an empty response."""

    async def score(self, item: ScoreItem) -> float:
        text = item.response()
        return sum(c.isdigit() for c in text) / len(text) if text else 0.0


class RandomTokens(HighEntropy):
    """The loss of `grpo_high_entropy` on random tokens: uniform numbers take the place of the entropies."""

    needs = ()

    def __init__(self, *, options: HighEntropyOptions) -> None:
        super().__init__(options=options)
        self._generator = torch.Generator().manual_seed(0)

    def prepare(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        random = torch.rand(len(columns["token_weight"]), generator=self._generator)
        return super().prepare({**columns, "entropy": random})


def run(quick: bool) -> Report:
    updates = 2 if quick else UPDATES
    report = Report("recipes", f"{updates} updates of 4x8 samples of 16 tokens, untrained model, lr {LEARNING_RATE}")
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        for seed in SEEDS[:1] if quick else SEEDS:
            model = Path(folder) / f"model{seed}"
            model.mkdir()
            write_model_folder(build_tiny_model(MODEL, seed=seed), build_tokenizer(), model)
            for arm in ARMS:
                out = Path(folder) / f"{arm}-{seed}"
                out.mkdir()
                results = asyncio.run(_train(_config(arm, seed), model, out, updates))
                report.rows.append({"seed": seed, "tokens trained": arm, **_row(results)})
    return report


def _config(arm: str, seed: int) -> MeshConfig:
    settings = ARMS[arm]
    loss = {"loss": settings["loss"]} if "loss" in settings else {}
    return config_from_dict(
        MeshConfig,
        {
            "recipe": settings["recipe"],
            "run": {"seed": seed, "batch_groups": 4, "group_size": 8, "eval_every": 0},
            "data": {"source": {"name": "calc", "options": {"level_max": 2}}},
            "rollout": {"agent": "single_turn", "sampling": {"max_tokens": 16}},
            "reward": {"scorers": [{"name": f"{__name__}:DigitShare", "reward": "correct"}]},
            "inference": {"engine": {"options": {"context_max": 256}}},
            "learner": {"optimizer": {"lr": LEARNING_RATE}, "tensorboard": False, **loss},
        },
    )


async def _train(config: MeshConfig, model: Path, folder: Path, updates: int) -> list[StepResult]:
    async with BareLoop(config, model, folder) as loop:
        return [await loop.update() for _ in range(updates)]


def _row(results: list[StepResult]) -> dict[str, Any]:
    rewards = [result.metrics["reward/correct"] for result in results]
    return {
        "first": f"{fmean(rewards[:EDGE]):.3f}",
        "at 40": f"{fmean(rewards[:40][-EDGE:]):.3f}",
        "last": f"{fmean(rewards[-EDGE:]):.3f}",
        "share": f"{fmean(result.metrics.get('high_entropy_share', 1.0) for result in results):.3f}",
    }
