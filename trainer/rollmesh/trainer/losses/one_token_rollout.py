"""Supervised fine-tuning as a policy gradient of single tokens (OTR, One-Token Rollout, 2025-09, arXiv:2509.26313; no
public code).

At each given token x with the state s, draw K tokens a_1, ..., a_K from a flattened policy, and reward those that are x:

    a_j ~ softmax(logits / temperature)
    R(a) = 1 if a = x, `miss_reward` otherwise
    loss = - (1 / K) sum over j of R(a_j) log pi(a_j | s)         averaged over the tokens of the term

The draws and the rewards have no gradient. It needs no generation, because the distribution of the next token is known.
With temperature 1 and K -> infinity the gradient of the loss is -(1 - miss_reward) pi(x) grad log pi(x): that of
supervised fine-tuning times the probability of the token, so that a token that the policy never draws hardly changes it.
A higher temperature draws unlikely tokens more often.

K = 256 and the temperature 1.3 are those of the paper. It has a reward below 1 for a miss, and a term that lowers the
tokens of misses, so a negative one; its value is not established; configuration. Log-probs are at temperature 1, because
given tokens were not sampled. By default the term has the external tokens (`where`), so `rollmesh sft` trains with
`learner: {loss: [one_token_rollout]}`, and a run of reinforcement learning may add it for given solutions.

The uniform numbers behind the draws are a function of the number of optimizer steps so far, which the checkpoint holds,
and of sample and position. So micro-batches, parts of the vocabulary layer, ranks and a resume draw the same tokens.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.shared.config.settings import PositiveFloat, PositiveInt, Settings
from rollmesh.trainer.features import Feature, FeatureInputs, FeatureRequest
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats

COLUMN = "one_token_rollout"


class OneTokenRolloutOptions(Settings):
    """Options of the term."""

    draws: PositiveInt = 256
    """Tokens drawn per position (K)."""
    temperature: PositiveFloat = 1.3
    """Temperature of the draws (kappa), relative to that of the policy."""
    miss_reward: Annotated[float, Meta(lt=1)] = -0.1
    """Reward of a drawn token that is not the given one (beta). Below 0: drawn errors become less likely."""


class OneTokenRollout(LossTerm):
    """The term with its count of optimizer steps."""

    Options: ClassVar[type[Settings]] = OneTokenRolloutOptions
    features: Mapping[str, FeatureRequest]
    needs = (COLUMN,)
    needs_behavior = False
    where = "external"

    def __init__(self, *, options: OneTokenRolloutOptions) -> None:
        self.options = options
        self.features = {COLUMN: FeatureRequest(DrawnTokens(self), "current", grad=True)}
        self.steps = 0
        """Optimizer steps so far, this one included."""

    def prepare(self, columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Count the optimizer step. Returns no columns."""
        self.steps += 1
        return {}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `hit`, the share of its draws that are the given token."""
        loss, hits = inputs[COLUMN].unbind(-1)
        return (inputs["token_weight"] * loss).sum(), {"hit": hits.detach()}

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class DrawnTokens(Feature):
    """The feature [m, 2]: the loss of the token, and the share of its draws that are the token itself."""

    by_token = True

    def __init__(self, term: OneTokenRollout) -> None:
        self.term = term

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        options, given = self.term.options, inputs.token_ids[:, None]
        logprobs = inputs.logits.log_softmax(-1)
        with torch.no_grad():
            cumulative = (inputs.logits / options.temperature).softmax(-1).cumsum(-1)
            uniform = torch.as_tensor(self._uniform(inputs), dtype=cumulative.dtype, device=cumulative.device)
            drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
            drawn.clamp_(max=cumulative.shape[-1] - 1)  # a product that was rounded up to the total
            hits = (drawn == given).to(logprobs.dtype)
            rewards = hits + options.miss_reward * (1 - hits)
        loss = -(rewards * logprobs.gather(-1, drawn)).mean(-1)
        return torch.stack([loss, hits.mean(-1)], dim=-1)

    def _uniform(self, inputs: FeatureInputs) -> NDArray[np.float64]:
        """Return [m, K] numbers in [0, 1). The measurement of the memory has tokens without columns."""
        sample, position = (
            inputs.columns.get(name, torch.zeros_like(inputs.token_ids)).cpu().numpy()
            for name in ("sample", "position")
        )
        draws = np.arange(self.term.options.draws)
        return uniform(np.array([[self.term.steps]]), sample[:, None], position[:, None], draws[None, :])


def uniform(*keys: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """Return numbers in [0, 1) of the broadcast shape of the keys: equal for equal keys, and otherwise as if
    independent. They are outputs of the mixing function of SplitMix64 (Steele et al. 2014)."""
    state = np.zeros(np.broadcast_shapes(*(key.shape for key in keys)), np.uint64)
    for key in keys:
        state = state + (key.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    found: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found
