"""One rank of a trainer in its own process, for tests: makes the updates of some cases and rank 0 saves the results.

python -m tests.unit.trainer.rank_worker FOLDER RANK SIZE [--alone | CASE...]

With `--alone`, rank 0 waits for the others, which end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.mesh.config import MeshConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.trainer.config import (
    ComputeConfig,
    FeatureChoice,
    LossTermChoice,
    OptimizerConfig,
    PackingConfig,
    ReferenceConfig,
    UpdateConfig,
)
from rollmesh.trainer.losses import LossTerm
from rollmesh.trainer.model_files import published_state
from rollmesh.trainer.ranks import Ranks
from rollmesh.trainer.sharding import whole
from rollmesh.trainer.update import BatchTrainer
from tests import remembered_checks
from tests.unit.trainer.builders import random_batch
from tests.unit.trainer.mixtures import recorded, tiny_mixture

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
TIMEOUT_S = 240.0
MIXTURE = "mixture of experts"
REPLAY = "router replay"
SHARED_PREFIX = "shared prefixes"
OTHER_PROMPT = FeatureChoice(
    "other_prompt_logprob", {"omit_roles": ["context"], "prefix_ids": [20, 21, 22]}, under="current", grad=True
)
OWN: dict[str, dict[str, Any]] = {
    "value head with gradient": {"loss": (LossTermChoice("ppo_clip"), LossTermChoice("progress", {"through": True}))},
    "average": {
        "loss": (LossTermChoice("ppo_clip"), LossTermChoice("kl", weight=0.1)),
        "reference": ReferenceConfig(kind="average", decay=0.5),
    },
    "other prompt": {
        "loss": (LossTermChoice("ppo_clip"), LossTermChoice("tests.unit.trainer.rank_worker:OtherPrompt")),
        "features": {"other": OTHER_PROMPT},
    },
    "memory of micro-batches": {
        "loss": (LossTermChoice("ppo_clip"), LossTermChoice("tests.unit.trainer.rank_worker:SeenTokens"))
    },
    "parts computed again": {"compute": ComputeConfig(logprob_chunk_tokens=16, gradient_checkpointing=True)},
    MIXTURE: {"loss": (LossTermChoice("ppo_clip"), LossTermChoice("router", weight=0.1))},
    REPLAY: {
        "loss": (LossTermChoice("decoupled_ppo"), LossTermChoice("kl", weight=0.1)),
        "compute": ComputeConfig(gradient_checkpointing=True),
        "router_replay": True,
    },
    "bfloat16": {
        "loss": (LossTermChoice("ppo_clip"), LossTermChoice("kl", weight=0.1)),
        "compute": ComputeConfig(precision="bfloat16", logprob_chunk_tokens=16, gradient_checkpointing=True),
    },
    SHARED_PREFIX: {
        "packing": PackingConfig(row_tokens=64, micro_batch_tokens=128, shared_row_tokens=128),
        "loss": (LossTermChoice("ppo_clip"), LossTermChoice("kl", weight=0.1)),
    },
    "few micro-batches": {"packing": PackingConfig(row_tokens=64, micro_batch_tokens=4096)},
}
"""Cases that no recipe covers, by name: settings of the update."""


class OtherPrompt(LossTerm):
    """A term with the gradient of a feature of other sequences."""

    needs = ("other",)

    def __call__(self, inputs: Any) -> Any:
        return -(inputs["token_weight"] * inputs["advantages"] * inputs["other"]).sum(), {}


class SeenTokens(LossTerm):
    """A term that keeps the positions of the tokens of each micro-batch, and trains nothing."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.kept: list[int] = []

    def __call__(self, inputs: Any) -> Any:
        self.seen.append(inputs["position"].tolist())
        return 0.0 * inputs.logprobs.sum(), {}

    def exchange(self, in_order: Callable[[list[list[int]]], list[list[int]]]) -> None:
        self.kept += [position for of_batch in in_order(self.seen) for position in of_batch]
        self.seen = []

    def state(self) -> dict[str, Any]:
        return {"kept": list(self.kept)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.kept = list(state["kept"])


def config_of(case: str) -> UpdateConfig:
    """Return the settings of a case, or of the recipe of that name."""
    settings: dict[str, Any] = {
        "packing": PackingConfig(row_tokens=64, micro_batch_tokens=128),
        "optimizer": OptimizerConfig(lr=1e-3, warmup_updates=0),
    }
    if case in OWN:
        return UpdateConfig(
            **(settings | {"update_rule": Extension("minibatches", {"num_minibatches": 2})} | OWN[case])
        )
    recipe = config_from_dict(MeshConfig, {"recipe": case}).learner
    return UpdateConfig(**({name: getattr(recipe, name) for name in UpdateConfig.__struct_fields__} | settings))


def make_trainer(case: str, ranks: Ranks) -> BatchTrainer:
    return BatchTrainer(
        tiny_mixture() if case in (MIXTURE, REPLAY) else build_tiny_model(SMALL, seed=1),
        config_of(case),
        seed=7,
        outputs=["entropy", "routed_experts"],
        encode=lambda _: [20],
        ranks=ranks,
    )


def results_of(case: str, ranks: Ranks, updates: int = 3) -> dict[str, Any]:
    """Return what the updates of a case have produced: results, weights, moments of the gradients, memory and
    log-probs."""
    trainer = make_trainer(case, ranks)
    made = []
    for k in range(1, updates + 1):
        samples, groups = random_batch(3, 3, seed=k, step=k - 1, same_prompt=case == SHARED_PREFIX)
        if case == REPLAY:
            samples = [recorded(sample, np.random.default_rng(k)) for sample in samples]
        made.append(trainer.update(k, samples, groups))
    moments = {
        name: whole(trainer.optimizer.state[p]["exp_avg"]).clone() for name, p in trainer.model.named_parameters()
    }
    memory = trainer.memory()
    return {
        "metrics": [result.metrics for result in made],
        "verdicts": [[(v.sample_id, v.reason) for v in result.verdicts] for result in made],
        "weights": published_state(trainer.model),
        "moments": moments,
        "modules": memory["modules"],
        "reference": memory["reference"],
        "plugins": memory["plugins"],
        "scores": trainer.scores([torch.arange(13, 40).numpy()]),
    }


def join(folder: Path, rank: int, size: int, *, timeout_s: float = TIMEOUT_S) -> Ranks:
    """Join the process group of the ranks, which meet at a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meet'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    return Ranks(rank, size)


def main() -> None:
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    cases = sys.argv[4:]
    if cases == ["--alone"]:
        ranks = join(folder, rank, size, timeout_s=60.0)
        try:
            if rank == 0:
                ranks.from_first(lambda: print("made"))
        finally:
            dist.destroy_process_group()
        return
    ranks = join(folder, rank, size)
    remembered_checks.install(pytest.MonkeyPatch())
    for case in cases:
        found = results_of(case, ranks)
        if rank == 0:
            torch.save(found, folder / f"{case}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
