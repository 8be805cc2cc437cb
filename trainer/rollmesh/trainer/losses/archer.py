"""ArCHer: the critic of whole turns, trained by temporal differences from a replay buffer of turns.

Actor-Critic Framework with a Hierarchical Structure (Zhou et al. 2024, arXiv:2402.19446; code: YifeiZhou02/ArCHer). A
turn is one action a in the state s, which is all of the conversation before it. With r the reward after the turn, s'
the state before the next turn, and two pairs of heads Q_i, V_i with slowly following targets Q'_i, V'_i:

    loss = sum over i of mean (Q_i(s, a) - r - discount * V'_i(s'))^2 + mean (V_i(s) - Q'_i(s, a))^2         V'_i(s') = 0 after the last turn
    target <- (1 - tau) target + tau head, before every optimizer step

The means are over turns drawn from the buffer, which keeps the newest `capacity` turns of all updates and is in the
checkpoint. The estimator `archer` takes min Q - min V as the advantage of all tokens of a turn, so a reward of the last
turn reaches an early turn that decides it. The heads are trained with the policy and never published, and the policy is
not changed by this term.

Deviations: the critic of the paper is a separate encoder (RoBERTa); here the heads read states of the policy, s at the
first token of the turn before it is read, a after the last token. The buffer holds these states as they were when the
turn was trained, so `capacity` also limits their age. Targets of V take the recorded action; the paper draws a new one
from the policy. r is the reward of the sample, after its last turn. Turns of an optimizer step enter the buffer after
it.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn

from rollmesh.shared.config.settings import PositiveInt, Settings, Share
from rollmesh.trainer.features import Feature, FeatureInputs, FeatureRequest
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats

Transitions = dict[str, Tensor]
"""n turns: `state`, `action` and `next` [n, d], `reward` and `done` [n]."""


class ArcherOptions(Settings):
    """Options of the critic."""

    discount: Share = 0.95
    """Factor of the value of the next turn (gamma)."""
    tau: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """Share of the heads that their targets take over before every optimizer step."""
    capacity: PositiveInt = 4096
    """Largest number of turns in the buffer. Each takes three hidden states of the model, in float32."""
    replay: PositiveInt = 256
    """Turns that are drawn from the buffer for every optimizer step."""


class Archer(LossTerm):
    """The critic with its options and its buffer."""

    Options: ClassVar[type[Settings]] = ArcherOptions
    features: Mapping[str, FeatureRequest]
    needs = ()
    needs_behavior = False

    def __init__(self, *, options: ArcherOptions) -> None:
        self.options = options
        self.features = {"archer_values": FeatureRequest(TurnValues(self), "start")}
        self._buffer: Transitions = {}
        self._seen: list[Transitions] = []
        """Turns of the current step, by micro-batch."""
        self._drawn: Transitions = {}
        self._draws = 0
        self._tokens = 1

    def make_module(self, hidden_size: int) -> nn.Module:
        """Return the heads and their targets."""
        self.module = CriticPair(hidden_size)
        return self.module

    def prepare(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Move the targets, store the turns of the last step, and draw those of this step. Returns no columns."""
        self.module.follow(self.options.tau)
        self._store()
        self._tokens = len(columns["sample"])
        count = len(self._buffer["reward"]) if self._buffer else 0
        if count:
            rng = np.random.default_rng(self._draws)
            chosen = torch.as_tensor(rng.integers(count, size=min(self.options.replay, count)))
            self._drawn = {name: values[chosen] for name, values in self._buffer.items()}
            self._draws += 1
        return {}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the share of the micro-batch, by its tokens, in the loss over the drawn turns; per token `td_loss`,
        the whole loss."""
        self._seen.append(transitions(inputs))
        if not self._drawn:
            return inputs.logprobs.new_zeros(()), {}
        drawn = {name: values.to(inputs.logprobs.device) for name, values in self._drawn.items()}
        loss = td_loss(self.module, drawn, self.options.discount)
        size = len(inputs.logprobs)
        return loss * (size / self._tokens), {"td_loss": loss.detach().expand(size)}

    def exchange(self, in_order: Callable[[list[Transitions]], list[Transitions]]) -> None:
        """Take the turns of the micro-batches of all ranks."""
        self._seen = in_order(self._seen)

    def state(self) -> dict[str, Any]:
        self._store()
        return {"buffer": self._buffer, "draws": self._draws}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._buffer, self._draws = dict(state["buffer"]), state["draws"]

    def _store(self) -> None:
        """Add the turns of the last step, and keep the newest."""
        parts = [part for part in (self._buffer, *self._seen) if part]
        self._seen = []
        if parts:
            joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            self._buffer = {name: values[-self.options.capacity :].clone() for name, values in joined.items()}


class Critic(nn.Module):
    """Two heads for Q(s, a) and two for V(s)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.of_action = nn.ModuleList(_head(2 * size, size) for _ in range(2))
        self.of_state = nn.ModuleList(_head(size, size) for _ in range(2))

    def q(self, state: Tensor, action: Tensor) -> Tensor:
        """Return [n, 2]."""
        both = torch.cat([state, action], dim=-1)
        return torch.cat([head(both) for head in self.of_action], dim=-1)

    def v(self, state: Tensor) -> Tensor:
        """Return [n, 2]."""
        return torch.cat([head(state) for head in self.of_state], dim=-1)


class CriticPair(nn.Module):
    """A critic, and its target, which has no gradient."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.critic, self.target = Critic(size), Critic(size)
        self.target.load_state_dict(self.critic.state_dict())
        self.target.requires_grad_(False)

    @torch.no_grad()
    def follow(self, tau: float) -> None:
        """Move the target towards the critic."""
        for old, new in zip(self.target.parameters(), self.critic.parameters(), strict=True):
            old.lerp_(new, tau)


class TurnValues(Feature):
    """The feature `archer_values` [m, 2]: the smaller Q and the smaller V of the token's turn."""

    reads_hidden = True

    def __init__(self, term: Archer) -> None:
        self.term = term

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        critic = self.term.module.critic
        number, state, action = turn_states(inputs)
        values = torch.stack([critic.q(state, action).min(-1).values, critic.v(state).min(-1).values], dim=-1)
        return values[number]


def turn_states(inputs: FeatureInputs | LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return [m] the number of the turn of each token, and [n, d] the states before the turns and after them, without
    gradient."""
    hidden, after = inputs.hidden, inputs.after
    assert hidden is not None, "a term with a module gets the hidden states"
    assert after is not None, "they come in pairs"
    sample, turn = inputs.columns["sample"], inputs.columns["turn"]
    begins = torch.cat([sample.new_ones(1, dtype=torch.bool), (sample[1:] != sample[:-1]) | (turn[1:] != turn[:-1])])
    number, first = begins.cumsum(0) - 1, begins.nonzero().squeeze(-1)
    last = torch.cat([first[1:], first.new_tensor([len(sample)])]) - 1
    return number, hidden[first].detach(), after[last].detach()


def transitions(inputs: LossInputs) -> Transitions:
    """Return the turns of a micro-batch, on the CPU. The reward of a sample is that of its last turn."""
    number, state, action = turn_states(inputs)
    first = torch.cat([number.new_ones(1, dtype=torch.bool), number[1:] != number[:-1]])
    sample, reward = inputs["sample"][first], inputs["reward"][first]
    done = torch.cat([sample[1:] != sample[:-1], sample.new_ones(1, dtype=torch.bool)]).to(state.dtype)
    found = {
        "state": state,
        "action": action,
        "next": state.roll(-1, 0) * (1 - done)[:, None],
        "reward": reward.to(state.dtype) * done,
        "done": done,
    }
    finite = state.isfinite().all(-1) & action.isfinite().all(-1)
    return {name: values[finite].cpu() for name, values in found.items()}


def td_loss(module: CriticPair, turns: Transitions, discount: float) -> Tensor:
    """Return the loss of the heads on these turns."""
    critic, target = module.critic, module.target
    with torch.no_grad():
        after = target.v(turns["next"]) * (1 - turns["done"])[:, None]
        of_action = turns["reward"][:, None] + discount * after
        of_state = target.q(turns["state"], turns["action"])
    errors = critic.q(turns["state"], turns["action"]) - of_action, critic.v(turns["state"]) - of_state
    return sum((error.square().mean(0).sum() for error in errors), start=errors[0].new_zeros(()))


def _head(size_in: int, size: int) -> nn.Module:
    return nn.Sequential(nn.Linear(size_in, size), nn.ReLU(), nn.Linear(size, 1))
