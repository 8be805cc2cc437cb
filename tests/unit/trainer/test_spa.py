"""Contributions of turns: the head, the rewards that they become, and members without states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome, Outcome, Reward, TrainingSample
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.config import LossTermChoice, OptimizerConfig, UpdateConfig
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.estimators.base import UNDECIDED
from rollmesh.trainer.losses import LossInputs
from rollmesh.trainer.update import BatchTrainer

from .builders import action, batch_of, group, member, minibatches, prompt, training_sample
from .gradient_check import plugins_of

GOOD, BAD = 40, 41
SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)


def spa(**options: Any) -> Any:
    return make_estimator(Extension("spa", {"warmup_updates": 0, **options}))


def sample(name: str, *turns: Sequence[int]) -> TrainingSample:
    """Return a sample with these turns, and observations between them. Turn n is segment 2 n + 1."""
    path = [prompt([20])]
    for turn in turns:
        path += [action(turn, [-4.7] * len(turn), parent=len(path) - 1)]
        path += [replace(prompt([30]), parent=len(path) - 1)]
    return training_sample(name, path[:-1])


def scored(of: TrainingSample, reward: float, *, failed: Sequence[int] = (), episode: str = "") -> MemberOutcome:
    """Return the member of a sample. `failed` are the turns whose action was not executed."""
    made = member(of.sample.sample_id, {"r": reward}, of=of, episode=episode)
    outcomes = tuple(Reward(name="executed", value=0.0, segment=2 * turn + 1) for turn in failed)
    return replace(made, rewards=(*made.rewards, *outcomes))


def batch_with(values: Any, samples: Sequence[TrainingSample], *members: MemberOutcome) -> UpdateBatch:
    """Return one group with the contribution of each token's turn."""
    made = batch_of(samples, [group("g0", *members)])
    made.table.columns["progress_values"] = np.asarray(values, np.float32)
    return made


# The head -------------------------------------------------------------------------------------------------------------


def test_contributions_are_summed_over_the_ends_of_turns() -> None:
    """Sample 0 has the turns (0, 0, 1), sample 1 the turn (0): with weights (1, 0) and bias 0 the head returns the
    first state. Both samples count alike, also if a step is cut between them."""
    plugins = plugins_of(LossTermChoice("progress"))
    head: Any = plugins.make_modules(lambda: 2, seed=0)["progress"]
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0]]))
        head.bias.zero_()
    columns = {
        "sample": torch.tensor([0, 0, 0, 1]),
        "turn": torch.tensor([0, 0, 1, 0]),
        "reward": torch.tensor([1.0, 1.0, 1.0, 0.0]),
        "source": torch.zeros(4),
        "behavior": torch.zeros(4),
        "token_weight": torch.full((4,), 0.25),
    }
    columns |= plugins.loss.prepare(columns)
    after = torch.tensor([[9.0, 0], [0.25, 0], [0.5, 0], [2.0, 0]], requires_grad=True)

    def loss_of(*tokens: int) -> tuple[torch.Tensor, list[float]]:
        part = {name: values[list(tokens)] for name, values in columns.items()}
        loss, stats = plugins.loss(
            LossInputs(torch.zeros(len(tokens)), part, -after[list(tokens)], after[list(tokens)])
        )
        return loss, stats["progress"].tolist()

    loss, progress = loss_of(0, 1, 2, 3)
    assert loss.item() == pytest.approx(0.5 * (0.75 - 1) ** 2 + 0.5 * 2**2)
    assert progress == [0, 0.25, 0.5, 2]
    assert loss_of(0, 1, 2)[0].item() + loss_of(3)[0].item() == pytest.approx(loss.item())
    loss.backward()  # type: ignore[no-untyped-call]
    assert after.grad is None, "the policy is not changed"
    # d/dw of both samples: 2 * 0.5 * (-0.25) * 0.75 + 2 * 0.5 * 2 * 2
    assert head.weight.grad[0, 0].item() == pytest.approx(-0.1875 + 4)


# Rewards of turns -----------------------------------------------------------------------------------------------------


def test_spa_equals_the_hand_computed_value() -> None:
    """Contributions (0.5, 0.25) and (0.125, 0.25), all actions executed: returns (1.75, 0.75) and (1.375, 0.75)."""
    samples = [sample("s0", [21, 21], [21]), sample("s1", [21], [21])]
    members = scored(samples[0], 1.0), scored(samples[1], 0.0)
    found = spa()(batch_with([0.5, 0.5, 0.25, 0.125, 0.25], samples, *members))
    assert found.advantages.tolist() == [0.375, 0.375, 0, -0.375, 0]
    assert found.metrics == {"contribution_error": pytest.approx((0.25 + 0.375) / 2), "executed_share": 1.0}
    half = spa(discount=0.5)(batch_with([0.5, 0.5, 0.25, 0.125, 0.25], samples, *members))
    assert half.advantages.tolist() == [0.375, 0.375, 0, -0.375, 0], "the second turns agree"
    warm = spa(warmup_updates=1)(batch_with([0.5, 0.5, 0.25, 0.125, 0.25], samples, *members))
    assert not warm.advantages.any()
    assert spa().of_group(group("g0", *members)) == {"s0": UNDECIDED, "s1": UNDECIDED}


def test_members_that_are_not_leased_or_not_scored_and_samples_of_one_episode() -> None:
    """s1 is not leased, so its two turns have 0.5 each of its reward 1; s2 failed; s3 is of the episode of s0."""
    samples = [sample("s0", [21], [21]), sample("s2", [21]), sample("s3", [21], [21])]
    failed = scored(samples[1], 1.0)
    failed = replace(failed, rewards=(replace(failed.rewards[0], outcome=Outcome.INFRA_FAILURE),))
    other = scored(sample("s1", [21], [21]), 1.0)
    members = scored(samples[0], 1.0, episode="e"), other, failed, scored(samples[2], 0.0, episode="e")
    found = spa()(batch_with([0.25, 0.25, 9.0, 0.75, 0.25], samples, *members))
    assert found.dropped == {1: "UNSCORED"}
    # returns with 0.5 per turn: s0 (1.5, 0.75), s1 (2, 1), s3 (2, 0.75); s0 and s3 have the baseline (2, 1)
    assert found.advantages.tolist() == [-0.5, -0.25, 0, 0, -0.25]
    alone = spa()(batch_with([0.25, 0.25], samples[:1], members[0]))
    assert alone.advantages.tolist() == [1.5, 0.75], "no member to compare with"


def trajectories(seed: int, number: int) -> tuple[list[TrainingSample], list[GroupContext]]:
    """Return samples of three turns of one token, whose reward is the share of GOOD ones."""
    rng = np.random.default_rng(seed)
    tokens = np.where(rng.random((number, 3)) < 0.5, GOOD, BAD)
    samples = [sample(f"s{n}", *([int(t)] for t in row)) for n, row in enumerate(tokens)]
    rewards = (tokens == GOOD).mean(1).tolist()
    return samples, [group("g0", *(scored(s, r) for s, r in zip(samples, rewards, strict=True)))]


@pytest.mark.row("S021")
def test_contributions_predict_the_outcome_of_held_out_trajectories_and_become_rewards_of_turns() -> None:
    """The head learns from 20 trajectories, and each GOOD turn gets a third of the reward of others that it has not
    seen. An action that was not executed has 0.5 less than the same turn with an executed one."""
    config = UpdateConfig(
        estimator=Extension("spa", {"warmup_updates": 1000}),
        loss=(LossTermChoice("ppo_clip"), LossTermChoice("progress")),
        update_rule=minibatches(1),
        optimizer=OptimizerConfig(lr=1e-6, modules_factor=2e4, warmup_updates=0),
    )
    made = BatchTrainer(build_tiny_model(SMALL, seed=1), config, seed=7)
    for k in range(1, 51):
        made.update(k, *trajectories(0, 20))
    samples, groups = trajectories(1, 8)
    of = batch_of(samples, groups)
    of.table.columns.update(made._computed(of.table, "start"))
    good = np.array([s.segments[2 * turn + 1].token_ids[0] == GOOD for s in samples for turn in range(3)])
    outcomes = np.array([m.rewards[0].value for m in groups[0].members])
    assert np.abs(of.sums(of["progress_values"]) - outcomes).max() < 0.15, "outcomes differ by a third"
    assert of["progress_values"][good].min() > of["progress_values"][~good].max() + 0.2
    # The same trajectories, whose first action was not executed in sample 0
    failed = [
        scored(s, float(r), failed=[0] if n == 0 else [])
        for n, (s, r) in enumerate(zip(samples, outcomes, strict=True))
    ]
    with_failure = batch_with(of["progress_values"], samples, *failed)
    before, after = spa()(of).advantages.reshape(8, 3), spa()(with_failure).advantages.reshape(8, 3)
    assert after[0].tolist() == pytest.approx([before[0][0] - 0.5, before[0][1], before[0][2]], abs=1e-6)
    steps, first = before[:, 0] - before[:, 1], good.reshape(8, 3)[:, 0]
    assert steps[first].min() > steps[~first].max() + 0.2, "the first turn has its own reward"
