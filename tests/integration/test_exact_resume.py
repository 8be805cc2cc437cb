"""Exact: N updates equal N/2 updates, a checkpoint, a new process' trainer, and N/2 more, bit for bit, on recorded
batches.

Through the learner's own engine, for recipes with each kind of state, in the suite recipes for every recipe, and for
both optimizers. Weights, optimizer state, commit digest,
metrics and the published bytes are compared; what a process has besides (torch's generators, the thread's state) is
disturbed in between.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from rollmesh.demo.muon import Muon
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh.config import MeshConfig
from rollmesh.services.learner.engine import Position, Restored, StepResult, find_engine
from rollmesh.shared.codec.trajectory import episode_from_bytes, episode_to_bytes, summary_of
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome, Reward, TrainingSample
from rollmesh.trainer.model_files import write_model_folder
from rollmesh.trainer.recipe import recipe_names
from tests.unit.trainer.representatives import REPRESENTATIVES, kinds_of

from .learner_world import episode


def trainable(recipe: str) -> MeshConfig | None:
    """Return the configuration of a recipe that can train on the recorded samples, which have no further outputs of the
    engine, and no given tokens. None for the others."""
    config = config_from_dict(MeshConfig, {"recipe": recipe})
    if config.rollout.outputs or all(term.where == "external" for term in config.learner.loss):
        return None
    return config


CONFIGS = {name: config for name in recipe_names() if (config := trainable(name)) is not None}
RECIPES = [pytest.param(name, marks=() if name in REPRESENTATIVES else pytest.mark.slow) for name in CONFIGS]
FURTHER: dict[str, dict[str, Any]] = {
    "mssr": {"estimator": {"options": {"first_visit": "train"}}},
    "wsrl": {"update_rule": {"options": {"warmup_updates": 1}}},
}
"""Settings with which a recipe trains in a few updates, each on other tasks."""

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)
NUM_UPDATES = 4
Batch = tuple[list[TrainingSample], list[GroupContext]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Batches as the sample stream holds them: one file of encoded episodes per update, of mixed staleness."""
    folder = tmp_path_factory.mktemp("recorded")
    for k in range(1, NUM_UPDATES + 1):
        for group in range(3):
            for index in range(4):
                steps = tuple(sorted({max(0, k - 1 - (index + group) % 3), k - 1}))
                made = episode(f"u{k}g{group}", index, steps=steps, reward=float((index + group + k) % 2))
                (folder / f"{k}.{group}.{index}").write_bytes(episode_to_bytes(made))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(build_tiny_model(SMALL, seed=1), build_tokenizer(), folder)
    return folder


def batch(recorded: Path, k: int) -> Batch:
    samples: list[TrainingSample] = []
    members: list[tuple[str, MemberOutcome]] = []
    for path in sorted(recorded.glob(f"{k}.*")):
        made = episode_from_bytes(path.read_bytes())
        (one,) = made.samples
        oldest = min(s.version.step for s in made.segments if s.version is not None)
        samples.append(
            TrainingSample(
                sample=one,
                segments=made.segments,
                group=made.key.group,
                task=made.key.task,
                staleness=k - 1 - oldest,
                sampling_params=made.sampling_params,
            )
        )
        extra = Reward(name="format", value=float(len(members) % 3 == 0))
        is_first = made.key.group not in {group for group, _ in members}
        summary = replace(summary_of(made, one), greedy=is_first)  # some recipes need a greedy member
        seen = MemberOutcome(sample_id=one.sample_id, rewards=(*one.rewards, extra), end="ready", summary=summary)
        members.append((made.key.group, seen))
    names = sorted({group for group, _ in members})
    return samples, [
        GroupContext(group=name, task=f"task-{name}", members=tuple(m for group, m in members if group == name))
        for name in names
    ]


def opened(folder: Path, model: Path, recipe: str) -> Restored:
    learner = {"directory": str(folder), "model": str(model), "seed": 3, **FURTHER.get(recipe, {})}
    config = config_from_dict(MeshConfig, {"recipe": recipe, "learner": learner}).learner
    return find_engine(config.engine)(config)


def advance(restored: Restored, recorded: Path, updates: int) -> list[StepResult]:
    results = []
    for k in range(restored.engine.step + 1, restored.engine.step + updates + 1):
        results.append(restored.engine.update(k, *batch(recorded, k)))
        restored.log.append(k, results[-1].used_ids, incarnation=0, outcome="APPLIED")
    return results


def save(restored: Restored) -> Path:
    position = Position(
        update=restored.engine.step, digest=restored.log.digest, head=LedgerHead(position=restored.engine.step)
    )
    return restored.engine.save(restored.log, position, data_snapshot=b"")


def disturb() -> None:
    """What another process would not share."""
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    torch.rand(7)


def test_the_recipes_of_make_test_have_each_kind_of_state() -> None:
    kinds = {name: kinds_of(config) for name, config in CONFIGS.items()}
    assert set().union(*kinds.values()) == set().union(*(kinds[name] for name in REPRESENTATIVES if name in kinds))


@pytest.mark.parametrize("recipe", RECIPES)
def test_n_updates_equal_half_a_checkpoint_and_half(recipe: str, recorded: Path, model: Path, tmp_path: Path) -> None:
    straight = opened(tmp_path / "straight", model, recipe)
    expected = advance(straight, recorded, NUM_UPDATES)
    assert [result.applied for result in expected] == [recipe != "wsrl"] + [True] * (NUM_UPDATES - 1)
    first = opened(tmp_path / "halves", model, recipe)
    found = advance(first, recorded, NUM_UPDATES // 2)
    save(first)
    disturb()
    second = opened(tmp_path / "halves", model, recipe)
    found += advance(second, recorded, NUM_UPDATES // 2)

    assert found == expected, "verdicts and metrics"
    assert second.log.digest == straight.log.digest
    one, two = save(straight), save(second)
    for name in ("model.safetensors", "trained.jsonl"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    assert_equal(torch.load(one / "optimizer.pt"), torch.load(two / "optimizer.pt"))


def test_muon_and_adamw_go_on_from_their_saved_state_bit_for_bit(tmp_path: Path) -> None:
    """The optimizers of the warm start: it keeps no checkpoints, a recipe that used them would."""

    def make() -> tuple[nn.Module, Muon, torch.optim.AdamW]:
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8))
        matrices = [p for p in net.parameters() if p.ndim == 2]
        others = [p for p in net.parameters() if p.ndim != 2]
        return net, Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3, fused=True)

    def step(net: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], k: int) -> None:
        inputs = torch.from_numpy(np.random.default_rng(k).standard_normal((16, 8)).astype(np.float32))
        (net(inputs) - inputs.flip(1)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    straight, *optimizers = make()
    for k in range(8):
        step(straight, tuple(optimizers), k)
    first, *halves = make()
    for k in range(4):
        step(first, tuple(halves), k)
    torch.save([first.state_dict(), *(o.state_dict() for o in halves)], tmp_path / "half.pt")
    disturb()
    second, *restored = make()
    state: list[Any] = torch.load(tmp_path / "half.pt", weights_only=True)
    second.load_state_dict(state[0])
    for optimizer, saved in zip(restored, state[1:], strict=True):
        optimizer.load_state_dict(saved)
    for k in range(4, 8):
        step(second, tuple(restored), k)
    assert_equal(straight.state_dict(), second.state_dict())
    for one, two in zip(optimizers, restored, strict=True):
        assert one.state_dict()["state"], "an optimizer without state proves nothing"
        assert_equal(one.state_dict(), two.state_dict())


def assert_equal(one: Any, two: Any) -> None:
    """Nested states, tensors bit for bit."""
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            assert_equal(one[key], two[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for left, right in zip(one, two, strict=True):
            assert_equal(left, right)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    else:
        assert one == two
