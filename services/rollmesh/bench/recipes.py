"""Two recipes on one tiny task, seed by seed: `grpo` against `grpo_high_entropy`, which trains a fifth of the tokens.

An untrained model of one layer writes 16 tokens; its reward is the share of digits among the characters. The loop has no mesh
(`bare_loop`): engine, trainer, episodes and scorers are those of a run. Both arms have the same initial model, tasks, learning rate and
number of updates, and are on-policy.

How to read it: `first`, `mean` and `last` are mean rewards of the samples of the first 5, of all and of the last 5 updates. `tokens` is
the share of the sampled tokens with a gradient, over all updates. A difference between the arms that changes its sign between seeds
means nothing.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from rollmesh.bench.bare_loop import BareLoop
from rollmesh.bench.report import Report
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh import MeshConfig
from rollmesh.services.learner.engine import StepResult
from rollmesh.services.reward.item import ScoreItem
from rollmesh.shared.config import config_from_dict
from rollmesh.trainer.model_files import write_model_folder

RECIPES = ("grpo", "grpo_high_entropy")
SEEDS = (0, 1, 2)
UPDATES = 40
EDGE = 5
"""Number of updates at the start and at the end whose rewards are averaged."""
LEARNING_RATE = 3e-3
MODEL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)


class DigitShare:
    """The reward: the share of digits among the characters, 0 for an empty response."""

    async def score(self, item: ScoreItem) -> float:
        text = item.response()
        return sum(c.isdigit() for c in text) / len(text) if text else 0.0


def run(quick: bool) -> Report:
    updates = 2 if quick else UPDATES
    report = Report("recipes", f"{updates} updates of 4x8 samples of 16 tokens, untrained model, lr {LEARNING_RATE}")
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        for seed in SEEDS[:1] if quick else SEEDS:
            model = Path(folder) / f"model{seed}"
            model.mkdir()
            write_model_folder(build_tiny_model(MODEL, seed=seed), build_tokenizer(), model)
            for recipe in RECIPES:
                out = Path(folder) / f"{recipe}-{seed}"
                out.mkdir()
                results = asyncio.run(_train(_config(recipe, seed), model, out, updates))
                report.rows.append({"seed": seed, "recipe": recipe, **_row(results)})
    return report


def _config(recipe: str, seed: int) -> MeshConfig:
    return config_from_dict(
        MeshConfig,
        {
            "recipe": recipe,
            "run": {"seed": seed, "batch_groups": 4, "group_size": 8, "eval_every": 0},
            "data": {"source": {"name": "calc", "options": {"level_max": 2}}},
            "rollout": {"agent": "single_turn", "sampling": {"max_tokens": 16}},
            "reward": {"scorers": [{"name": f"{__name__}:DigitShare", "reward": "correct"}]},
            "inference": {"engine": {"options": {"context_max": 256}}},
            "learner": {"optimizer": {"lr": LEARNING_RATE}, "tensorboard": False},
        },
    )


async def _train(config: MeshConfig, model: Path, folder: Path, updates: int) -> list[StepResult]:
    async with BareLoop(config, model, folder) as loop:
        return [await loop.update() for _ in range(updates)]


def _row(results: list[StepResult]) -> dict[str, Any]:
    rewards = [result.metrics["reward/correct"] for result in results]
    return {
        "first": f"{fmean(rewards[:EDGE]):.3f}",
        "mean": f"{fmean(rewards):.3f}",
        "last": f"{fmean(rewards[-EDGE:]):.3f}",
        "tokens": f"{fmean(result.metrics.get('high_entropy_share', 1.0) for result in results):.3f}",
    }
