"""Losses, gradients and advantages of recipes against TRL itself: the installed library runs, in its own environment.

Both sides get the same weights, tokens, masks and rewards, and compute everything else themselves, from the forward
pass to the gradient of every parameter. `PAIRS` lists for each recipe the settings of TRL that mean the same. A pair
whose definitions differ has a factor or compares the gradient alone, and says why. For each pair, a changed constant on
our side must be seen.

`make suite NAME=peers` runs it. TRL's environment is `.venv-trl`, which the first run makes in a few minutes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import ceil, sqrt
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from benchmarks.race.trl_environment import TRL, trl_python
from rollmesh.mesh.config import MeshConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import FloatArray
from rollmesh.trainer.config import UpdateConfig
from rollmesh.trainer.estimators import make_estimator

from ..unit.trainer.builders import batch_of
from .played import Ours, Shape, make_batch, samples_of, trained
from .trl_work import GRADIENT, PlayedBatch, TrlRun, TrlWork

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[2]
SEEDS = range(4)
TOLERANCE = 1e-5
"""Largest difference of two float32 computations, relative to the largest entry."""
TRL_EPSILON = 1e-4
"""What TRL adds to a standard deviation."""
CENTERED = Extension("grpo", {"std": "none"})


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Settings of both sides that mean the same, and where they differ.

    The estimator only centers rewards unless `estimator` is given, because TRL divides by another standard deviation:
    the advantages have their own tests."""

    recipe: str
    trl: dict[str, Any]
    changed: Callable[[UpdateConfig], UpdateConfig]
    """Changes one constant of ours, which the comparison must see."""
    ours: Callable[[UpdateConfig], UpdateConfig] = lambda config: config
    """What is set beside the recipe."""
    estimator: Extension | None = CENTERED
    """None is that of the recipe."""
    shape: Shape = field(default_factory=Shape)
    factor: Callable[[PlayedBatch], float] = lambda batch: 1.0
    """TRL's loss over ours."""
    value: bool = True
    """Whether values are compared too."""
    run: dict[str, Any] = field(default_factory=dict)
    """Further fields of TrlRun."""
    entropies: bool = False
    """Our samples carry the entropies of TRL's forward pass, as those of the engine."""


def option(term: str, **options: Any) -> Callable[[UpdateConfig], UpdateConfig]:
    """Set options of a loss term."""

    def change(config: UpdateConfig) -> UpdateConfig:
        assert term in [choice.name for choice in config.loss]
        return replace(
            config,
            loss=tuple(replace(c, options={**c.options, **options}) if c.name == term else c for c in config.loss),
        )

    return change


def weight(term: str, value: float) -> Callable[[UpdateConfig], UpdateConfig]:
    """Set the weight of a loss term."""
    return lambda config: replace(
        config, loss=tuple(replace(c, weight=value) if c.name == term else c for c in config.loss)
    )


def settings(**values: Any) -> Callable[[UpdateConfig], UpdateConfig]:
    """Set fields of the trainer's configuration."""
    return lambda config: msgspec.convert({**msgspec.to_builtins(config), **values}, type(config))


def estimator(**options: Any) -> Callable[[UpdateConfig], UpdateConfig]:
    """Set options of the estimator."""
    return lambda config: replace(
        config, estimator=Extension(config.estimator.name, {**config.estimator.options, **options})
    )


def both(*changes: Callable[[UpdateConfig], UpdateConfig]) -> Callable[[UpdateConfig], UpdateConfig]:
    def change(config: UpdateConfig) -> UpdateConfig:
        for one in changes:
            config = one(config)
        return config

    return change


def sampled(batch: PlayedBatch) -> list[int]:
    """Return the number of sampled tokens of each episode."""
    return [sum(one.mask) for one in batch.episodes]


def selected_share(batch: PlayedBatch) -> float:
    total = sum(sampled(batch))
    return ceil(0.2 * total) / total


def step_share(batch: PlayedBatch) -> float:
    """Return the tokens of the first half of the episodes over half of all tokens."""
    lengths = sampled(batch)
    return sum(lengths[: len(lengths) // 2]) / (sum(lengths) / 2)


CLIP = {"epsilon": 0.2, "epsilon_high": 0.28, "scale_rewards": "none", "beta": 0.0}
FAR = Shape(drift=0.5)
"""Ratios beyond the bounds of the clip on both sides."""
WIDE = Shape(drift=1.5)
"""Ratios beyond 5."""
STALE = Shape(drift=0.3, mismatch=0.3)
"""The sampler differs from the policy before the update."""


def corrected(mode: str, **bounds: float) -> dict[str, Any]:
    bounds_of_trl = {f"vllm_importance_sampling_{name}": value for name, value in bounds.items()}
    return CLIP | {"loss_type": "dapo", "vllm_importance_sampling_mode": mode} | bounds_of_trl


CORRECTS = {"corrects_sampler": True}
PAIRS = {
    "grpo": Pair(
        recipe="grpo",
        trl=CLIP | {"loss_type": "dapo"},
        shape=FAR,
        changed=option("ppo_clip", clip_high=0.5),
    ),
    # With another sampler: the ratio is pi / mu on both sides.
    "grpo_asynchronous": Pair(
        recipe="grpo",
        trl=CLIP,
        shape=STALE,
        run={"trainer": "async_grpo"},
        changed=option("ppo_clip", clip_high=0.5),
    ),
    # The shipped estimator divides by the population deviation plus 1e-6, TRL by the sample deviation plus 1e-4. With
    # the epsilon below, TRL's advantages are ours times sqrt((n - 1) / n).
    "grpo_as_shipped": Pair(
        recipe="grpo",
        estimator=None,
        ours=estimator(epsilon=TRL_EPSILON * sqrt(3 / 4)),
        trl=CLIP | {"loss_type": "dapo", "scale_rewards": "group"},
        shape=FAR,
        factor=lambda batch: sqrt(3 / 4),
        changed=option("ppo_clip", clip_low=0.3),
    ),
    "grpo_temperature": Pair(
        recipe="grpo",
        trl=CLIP | {"loss_type": "dapo", "temperature": 0.7},
        shape=Shape(drift=0.5, temperature=0.7),
        changed=option("ppo_clip", clip_low=0.3),
    ),
    "two_sided_clip": Pair(
        recipe="grpo",
        ours=option("ppo_clip", dual_clip=1.5),
        trl=CLIP | {"loss_type": "dapo", "delta": 1.5},
        shape=WIDE,
        changed=option("ppo_clip", dual_clip=1.8),
    ),
    # `grpo` and `bnpo` average over each micro-batch, so that they equal ours if the step is one micro-batch.
    "grpo_bnpo": Pair(
        recipe="grpo",
        trl=CLIP | {"loss_type": "bnpo"},
        shape=FAR,
        changed=option("ppo_clip", clip_high=0.5),
    ),
    "grpo_micro_batches": Pair(
        recipe="grpo",
        ours=settings(packing={"row_tokens": 8, "micro_batch_tokens": 8}),
        trl=CLIP | {"loss_type": "dapo"},
        shape=FAR,
        run={"steps": 2, "accumulated": 2},
        changed=option("ppo_clip", clip_high=0.5),
    ),
    # With several optimizer steps per batch, TRL divides by the mean number of tokens of the steps, ours by the number
    # of the step.
    "grpo_several_steps": Pair(
        recipe="grpo",
        trl=CLIP | {"loss_type": "dapo"},
        shape=Shape(groups=4, drift=0.5),
        run={"steps": 2},
        factor=step_share,
        changed=option("ppo_clip", clip_high=0.5),
    ),
    "grpo_kl": Pair(
        recipe="grpo_kl",
        trl=CLIP | {"loss_type": "grpo", "epsilon_high": 0.2, "beta": 0.04, "use_bias_correction_kl": False},
        shape=FAR,
        changed=weight("kl", 0.05),
    ),
    # This is TRL's default.
    "grpo_kl_corrected": Pair(
        recipe="grpo_kl",
        ours=option("kl", corrected=True),
        trl=CLIP | {"loss_type": "grpo", "epsilon_high": 0.2, "beta": 0.04, "use_bias_correction_kl": True},
        shape=FAR,
        changed=option("kl", corrected=False),
    ),
    "grpo_entropy": Pair(
        recipe="grpo_entropy",
        trl=CLIP | {"loss_type": "dapo", "entropy_coef": 0.001},
        shape=FAR,
        changed=weight("entropy", 0.0015),
    ),
    # The first step has no entropy to compare with the target, so that the second one has the first bonus.
    "grpo_entropy_target": Pair(
        recipe="grpo_entropy_target",
        ours=option("entropy_target", target=10.0, coefficient=0.1),
        trl=CLIP | {"loss_type": "dapo", "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 10.0},
        shape=FAR,
        run={"repeats": 2},
        changed=option("entropy_target", step=0.006),
    ),
    # TRL sums the selected tokens and divides by all tokens, ours is the mean over the selected ones. TRL takes the
    # entropy of the current policy, ours that of the engine.
    "grpo_high_entropy": Pair(
        recipe="grpo_high_entropy",
        trl=CLIP | {"loss_type": "dapo", "top_entropy_quantile": 0.2},
        shape=FAR,
        factor=selected_share,
        entropies=True,
        changed=option("high_entropy", share=0.25),
    ),
    # TRL's punishment counts the tokens of tools, ours does not: this batch has no tool.
    "dapo": Pair(
        recipe="dapo",
        estimator=None,
        ours=estimator(std="none", limit_tokens=8, buffer_tokens=6),
        trl=CLIP | {"loss_type": "dapo", "mask_truncated_completions": True, "reward_weights": [1.0, 0.5]},
        shape=Shape(drift=0.5, turns=False, truncated=0.3),
        run={"overlong": (8, 6)},
        changed=estimator(buffer_tokens=5),
    ),
    "dr_grpo": Pair(
        recipe="dr_grpo",
        estimator=None,
        trl=CLIP | {"loss_type": "dr_grpo", "max_completion_length": 1024},
        shape=FAR,
        changed=settings(normalization_tokens=512),
    ),
    # TRL counts a masked completion in the number of samples, ours drops it.
    "dr_grpo_truncated": Pair(
        recipe="dr_grpo",
        estimator=Extension("grpo", {"std": "none", "drop_truncated": True}),
        trl=CLIP | {"loss_type": "dr_grpo", "max_completion_length": 1024, "mask_truncated_completions": True},
        shape=Shape(drift=0.5, truncated=0.3),
        factor=lambda batch: sum(not one.truncated for one in batch.episodes) / len(batch.episodes),
        changed=settings(normalization_tokens=512),
    ),
    # TRL trains an episode without a reward with the advantage 0, ours drops it.
    "grpo_unscored": Pair(
        recipe="grpo",
        trl=CLIP | {"loss_type": "dapo"},
        shape=Shape(drift=0.5, unscored=0.3),
        factor=lambda batch: sum(sum(one.mask) for one in batch.episodes if one.rewards) / sum(sampled(batch)),
        changed=option("ppo_clip", clip_high=0.5),
    ),
    "gspo": Pair(
        recipe="gspo",
        trl=CLIP
        | {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        shape=Shape(drift=0.003),
        changed=option("gspo", clip_high=4e-3),
    ),
    "gspo_two_sided": Pair(
        recipe="gspo",
        ours=option("gspo", clip_low=0.05, clip_high=0.05, dual_clip=1.06),
        trl=CLIP
        | {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.05,
            "epsilon_high": 0.05,
            "delta": 1.06,
        },
        shape=FAR,
        changed=option("gspo", dual_clip=1.3),
    ),
    # LUSPO weights samples by their length: the sum over the tokens of a sample, a mean over samples.
    "gspo_as_luspo": Pair(
        recipe="gspo",
        ours=both(
            option("gspo", clip_low=0.05, clip_high=0.06), settings(normalization="constant", normalization_tokens=1)
        ),
        trl=CLIP
        | {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.06},
        shape=FAR,
        changed=option("gspo", clip_high=0.3),
    ),
    "gmpo": Pair(
        recipe="gmpo",
        trl={"epsilon": 0.4, "scale_rewards": "none", "beta": 0.0},
        shape=Shape(drift=0.8),
        run={"trainer": "gmpo"},
        changed=option("gmpo", clip_high=0.1),
    ),
    "cispo": Pair(
        recipe="cispo",
        trl={"loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "none", "beta": 0.0},
        shape=WIDE,
        changed=option("policy_gradient", weight_max=4.0),
    ),
    # Truncated importance sampling is CISPO with another bound, if the sampler is the policy before the update.
    "grpo_tis": Pair(
        recipe="grpo_tis",
        trl={"loss_type": "cispo", "epsilon_high": 2.0, "scale_rewards": "none", "beta": 0.0},
        shape=WIDE,
        changed=option("policy_gradient", weight_max=2.2),
    ),
    "off_policy_mask": Pair(
        recipe="grpo_tis",
        ours=option(
            "policy_gradient",
            reject_level="geometric",
            reject_min=float(np.exp(-0.05)),
            reject_max=1e9,
            reject_only="negative",
        ),
        trl={
            "loss_type": "cispo",
            "epsilon_high": 2.0,
            "scale_rewards": "none",
            "beta": 0.0,
            "off_policy_mask_threshold": 0.05,
        },
        shape=WIDE,
        changed=option("policy_gradient", reject_only="all"),
    ),
    "grpo_decoupled": Pair(
        recipe="grpo_decoupled",
        trl=corrected("token_truncate", clip_max=2.0),
        shape=Shape(drift=0.3, mismatch=0.6),
        run=CORRECTS,
        changed=option("decoupled_ppo", weight_max=1.8),
    ),
    "icepop": Pair(
        recipe="icepop",
        trl=corrected("token_mask", clip_min=0.5, clip_max=5.0),
        shape=Shape(drift=0.3, mismatch=0.9),
        run=CORRECTS,
        changed=option("decoupled_ppo", weight_min=0.3),
    ),
    "grpo_sequence_tis": Pair(
        recipe="grpo_sequence_tis",
        trl=corrected("sequence_truncate", clip_max=2.0),
        shape=STALE,
        run=CORRECTS,
        changed=option("decoupled_ppo", weight_max=1.8),
    ),
    "mis": Pair(
        recipe="mis",
        trl=corrected("sequence_mask", clip_max=2.0),
        shape=STALE,
        run=CORRECTS,
        changed=option("decoupled_ppo", weight_max=6.0),
    ),
    "gspo_with_correction": Pair(
        recipe="mis",
        ours=option("decoupled_ppo", ratio="geometric", clip_low=0.05, clip_high=0.06),
        trl=corrected("sequence_mask", clip_max=2.0)
        | {"importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.06},
        shape=STALE,
        run=CORRECTS,
        changed=option("decoupled_ppo", clip_high=0.1),
    ),
    # TRL differentiates the clipped ratio of the whole sample, ours weights log-probs by the ratio: the gradients agree
    # where nothing is clipped, the values do not. Ours divides the sum over tokens by 1024.
    "rloo": Pair(
        recipe="rloo",
        estimator=None,
        trl={"epsilon": 0.2, "beta": 0.05},
        shape=Shape(drift=0.003, turns=False),
        run={"trainer": "rloo"},
        factor=lambda batch: 1024.0,
        value=False,
        changed=estimator(kl=0.06),
    ),
}


@dataclass(frozen=True, kw_only=True)
class AdvantagePair:
    """An estimator and the settings of TRL with the same advantages, up to a factor."""

    estimator: Extension
    trl: dict[str, Any]
    changed: Extension
    factor: float = 1.0
    shape: Shape = field(default_factory=Shape)
    weights: dict[str, float] = field(default_factory=dict)
    tolerance: float = TOLERANCE


SAMPLE_OF_4, SAMPLE_OF_12 = sqrt(3 / 4), sqrt(11 / 12)
"""Population deviation over sample deviation, of a group and of a batch."""
ADVANTAGES = {
    "none": AdvantagePair(
        estimator=Extension("grpo", {"std": "none"}),
        trl={"scale_rewards": "none"},
        changed=Extension("grpo", {"std": "group"}),
    ),
    "group": AdvantagePair(
        estimator=Extension("grpo", {"epsilon": TRL_EPSILON * SAMPLE_OF_4}),
        trl={"scale_rewards": "group"},
        factor=SAMPLE_OF_4,
        changed=Extension("grpo", {"epsilon": 1e-3}),
    ),
    "batch": AdvantagePair(
        estimator=Extension("grpo", {"std": "batch", "epsilon": TRL_EPSILON * SAMPLE_OF_12}),
        trl={"scale_rewards": "batch"},
        factor=SAMPLE_OF_12,
        changed=Extension("grpo", {"std": "batch", "epsilon": 1e-3}),
    ),
    # An episode without a reward is in no mean on both sides. TRL trains it with the advantage 0, ours drops it.
    "unscored": AdvantagePair(
        estimator=Extension("grpo", {"std": "none"}),
        trl={"scale_rewards": "none"},
        shape=Shape(unscored=0.3),
        changed=Extension("grpo", {"std": "none", "mean": "batch"}),
    ),
    "weighted": AdvantagePair(
        estimator=Extension("grpo", {"std": "none"}),
        trl={"scale_rewards": "none", "reward_weights": [1.0, 0.1]},
        shape=Shape(rewards=("correct", "short")),
        weights={"correct": 1.0, "short": 0.1},
        changed=Extension("grpo", {"std": "group"}),
    ),
    # TRL adds the epsilon to the sample deviations of the group and of the batch, ours one epsilon to the population
    # deviations of both. A member without one of the rewards gets 0 from it on both sides.
    "normalize_then_sum": AdvantagePair(
        estimator=Extension("gdpo", {"epsilon": TRL_EPSILON * SAMPLE_OF_4}),
        trl={"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.1]},
        shape=Shape(rewards=("correct", "short")),
        weights={"correct": 1.0, "short": 0.1},
        factor=SAMPLE_OF_12,
        tolerance=2e-4,
        changed=Extension("gdpo", {"epsilon": 1e-2}),
    ),
    "rloo": AdvantagePair(
        estimator=Extension("rloo"),
        trl={"beta": 0.0},
        shape=Shape(turns=False),
        changed=Extension("grpo", {"std": "none"}),
    ),
}


@dataclass(frozen=True)
class Compared:
    """The batches and TRL's results."""

    batches: dict[str, list[PlayedBatch]]
    results: Path

    def of_trl(self, name: str, seed: int) -> dict[str, Tensor]:
        return load_file(self.results / f"{name}-{seed}.safetensors")


@pytest.fixture(scope="module", autouse=True)
def one_thread_without_progress_bars() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    yield
    enable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """Let TRL compute all losses and advantages in one process."""
    folder = tmp_path_factory.mktemp("trl")
    pairs = {f"loss-{name}": (pair.shape, {"options": pair.trl, **pair.run}) for name, pair in PAIRS.items()}
    pairs |= {
        f"advantage-{name}": (pair.shape, {"options": pair.trl, "trainer": "rloo" if name == "rloo" else "grpo"})
        for name, pair in ADVANTAGES.items()
    }
    batches = {
        name: [make_batch(shape, seed, folder / name / str(seed)) for seed in SEEDS]
        for name, (shape, _) in pairs.items()
    }
    runs = [
        TrlRun(name=name, batches=batches[name], group_size=shape.group_size, rewards=list(shape.rewards), **fields)
        for name, (shape, fields) in pairs.items()
    ]
    work = msgspec.json.encode(TrlWork(runs=runs, results=str(folder)))
    command = [str(trl_python(ROOT)), "-m", "tests.peers.trl_process"]
    done = subprocess.run(command, input=work, cwd=ROOT, capture_output=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return Compared(batches, folder)


def config_of(pair: Pair) -> UpdateConfig:
    config: UpdateConfig = config_from_dict(MeshConfig, {"recipe": pair.recipe}).learner
    if pair.estimator is not None:
        config = replace(config, estimator=pair.estimator)
    return pair.ours(config)


def distance(found: Ours, pair: Pair, batch: PlayedBatch, expected: dict[str, Tensor]) -> tuple[float, float]:
    """Return the difference of the losses, and the largest one of the gradients, both relative to TRL's largest."""
    factor = pair.factor(batch)
    of_trl = {name.removeprefix(GRADIENT): values for name, values in expected.items() if name.startswith(GRADIENT)}
    assert of_trl.keys() == found.gradients.keys()
    scale = max(float(values.abs().max()) for values in of_trl.values())
    assert scale > 1e-6, "TRL's gradient must not be 0"
    gradient = max(float((of_trl[name] - factor * mine).abs().max()) for name, mine in found.gradients.items())
    value = abs(float(expected["loss"]) - factor * found.loss) if pair.value else 0.0
    return value, gradient / scale


def trained_as(config: UpdateConfig, pair: Pair, batch: PlayedBatch, expected: dict[str, Tensor]) -> Ours:
    return trained(
        config,
        batch,
        pair.shape,
        entropies=expected["entropies"] if pair.entropies else None,
        share=pair.run.get("accumulated", 1) / pair.run.get("steps", 1),
        repeats=pair.run.get("repeats", 1),
    )


@pytest.mark.parametrize("name", PAIRS)
def test_a_loss_and_its_gradient_are_those_of_trl(name: str, compared: Compared) -> None:
    """The loss and the gradients of all parameters agree on each batch. A changed constant changes both by more than
    ten times the tolerance on some batch."""
    pair, found, changed = PAIRS[name], [], []
    for seed, batch in enumerate(compared.batches[f"loss-{name}"]):
        expected = compared.of_trl(f"loss-{name}", seed)
        config = config_of(pair)
        found.append(distance(trained_as(config, pair, batch, expected), pair, batch, expected))
        changed.append(distance(trained_as(pair.changed(config), pair, batch, expected), pair, batch, expected))
    (value, gradient), (other_value, other_gradient) = np.max(found, axis=0), np.max(changed, axis=0)
    print(f"{name}: value {value:.1e} ({other_value:.1e}), gradient {gradient:.1e} ({other_gradient:.1e})")
    assert value < TOLERANCE
    assert gradient < TOLERANCE
    assert other_value > 10 * TOLERANCE or not pair.value
    assert other_gradient > 10 * TOLERANCE


def advantages_of(made: Extension, pair: AdvantagePair, batch: PlayedBatch) -> FloatArray:
    """Return [S] the advantages of an estimator, 0 for a dropped sample."""
    of = batch_of(*samples_of(batch, pair.shape))
    estimate = make_estimator(made, pair.weights)(of)
    found = of.first(estimate.advantages)
    found[list(estimate.dropped)] = 0.0
    return found


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_those_of_trl(name: str, compared: Compared) -> None:
    """The advantages agree on each batch, and those of another estimator do not."""
    pair, found, changed = ADVANTAGES[name], [], []
    for seed, batch in enumerate(compared.batches[f"advantage-{name}"]):
        expected = compared.of_trl(f"advantage-{name}", seed)["advantages"].numpy()
        found.append(np.abs(pair.factor * advantages_of(pair.estimator, pair, batch) - expected).max())
        changed.append(np.abs(pair.factor * advantages_of(pair.changed, pair, batch) - expected).max())
    print(f"advantage {name}: {np.max(found):.1e} ({np.max(changed):.1e})")
    assert np.max(found) < pair.tolerance
    assert np.max(changed) > 10 * pair.tolerance


def test_the_library_is_the_one_of_the_race() -> None:
    command = [str(trl_python(ROOT)), "-c", "import trl; print(trl.__version__)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert f"trl=={done.stdout.strip()}" == TRL
