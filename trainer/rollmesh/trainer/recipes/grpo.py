"""GRPO for stale data, and its close relatives.

Compare each sample with its group; push tokens up or down while their probability stays near that of the policy that
sampled them; two AdamW steps per batch; every token of a step counts alike; no KL term.

The clip against the behaviour policy is the default because it survives the largest staleness of the corrections here.
"""

from __future__ import annotations

from rollmesh.trainer.advantages.of_recipes import RECIPE_ADVANTAGES
from rollmesh.trainer.losses import DecoupledPpoConfig, PpoClipConfig, TisConfig
from rollmesh.trainer.optim import OptimizerConfig
from rollmesh.trainer.update import UpdateConfig

_OPTIMIZER = OptimizerConfig(lr=1e-6, betas=(0.9, 0.95), clip_norm=1.0, warmup_updates=3)
"""The learning rate of a real model. A tiny one names its own."""

GRPO = UpdateConfig(
    advantage=RECIPE_ADVANTAGES["grpo"],
    loss=PpoClipConfig(clip_low=0.2, clip_high=0.28),
    optimizer=_OPTIMIZER,
    num_minibatches=2,
)
"""Group mean and std, clip-higher against the behaviour policy."""

DR_GRPO = UpdateConfig(
    advantage=RECIPE_ADVANTAGES["dr_grpo"],
    loss=PpoClipConfig(clip_low=0.2, clip_high=0.28),
    optimizer=_OPTIMIZER,
    num_minibatches=2,
)
"""The same without dividing by the std: small reward differences stay small."""

GDPO = UpdateConfig(
    advantage=RECIPE_ADVANTAGES["gdpo"],
    loss=PpoClipConfig(clip_low=0.2, clip_high=0.28),
    optimizer=_OPTIMIZER,
    num_minibatches=2,
)
"""Each reward normalised by itself, then weighted: for several rewards of unequal weight."""

GRPO_DECOUPLED = UpdateConfig(
    advantage=RECIPE_ADVANTAGES["grpo_decoupled"],
    loss=DecoupledPpoConfig(clip_low=0.2, clip_high=0.28, weight_max=2.0),
    optimizer=_OPTIMIZER,
    num_minibatches=2,
)
"""Clip around the policy at the start of the update, stale tokens weighted: staleness does not use up the trust region."""

GRPO_TIS = UpdateConfig(
    advantage=RECIPE_ADVANTAGES["grpo_tis"],
    loss=TisConfig(weight_max=2.0),
    optimizer=_OPTIMIZER,
    num_minibatches=2,
)
"""Policy gradient with truncated importance weights: for nearly on-policy data and sampler-trainer mismatch."""
