"""Imitation of given tokens that turns into reinforcement as the policy solves the prompt: the policy shift of RED
(2025, arXiv:2508.16677; code: millioniron/OpenRLHF-Millioniron-, openrlhf/models/loss.py).

    given token   loss = - r A,   r = pi / sg[pi + (1 - pi) rho]

rho in [0, 1] is the accuracy of the own samples of the prompt, the column `accuracy` of the estimator `red`, A the
advantage of the solution, and the denominator the assumed probability of the token under the author of the solution:

    rho = 0   the author is the policy, r = 1, and the gradient is - A grad log pi: imitation
    rho = 1   the author is certain of the token, r = pi, and the gradient is - A pi grad log pi: unlikely tokens count little

The average is that of the given tokens (`learner.normalization`); log-probs are at temperature 1, because given tokens
were not sampled. The weight of a sample scales its tokens, as in `imitation`.

Source: the formula of the paper was not available. The code has this denominator in a line that is disabled, without
the stop-gradient, and trains r = pi. Without the stop-gradient, r is constant for rho = 0 and nothing is imitated,
which contradicts the abstract, so the stop-gradient is our choice.
"""  # noqa: E501, W505

from __future__ import annotations

from torch import Tensor

from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats


class ShiftedImitation(LossTerm):
    """The term. It has no options."""

    needs = ("accuracy",)
    needs_behavior = False
    where = "external"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `author_ratio`, the ratio r."""
        pi = inputs.logprobs.exp()
        author = (pi + (1 - pi) * inputs["accuracy"]).detach()
        ratio = pi / author.clamp(min=1e-30)
        return -(inputs["token_weight"] * ratio * inputs["advantages"]).sum(), {"author_ratio": ratio.detach()}
