"""The critic of whole turns of the estimator `archer`: two heads Q(s, a) and two heads V(s), their targets, their
buffer of turns, and their optimizer. `estimators/archer.py` states the formula. `implicit_critic.py` has the heads of
`riql`, which learn from the same buffer.

The heads read states that no longer change, so a turn in the buffer is worth as much as a new one. All of this is in
the checkpoint. Every rank trains an equal critic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollmesh.trainer.regression import regression_loss

Turns = dict[str, Tensor]
"""n turns: `state`, `action` and `next` [n, d]; `reward`, `done`, `q` and `v` [n], the last two the weights of the turn
in the losses of Q and V."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """How the critic learns from its buffer."""

    discount: float
    tau: float
    steps: int
    replay: int
    capacity: int
    lr: float
    clip_norm: float
    huber: float


class TurnCritic:
    """A critic with its memory. Its initial weights and its draws are functions of `seed` and of the number of draws so
    far."""

    def __init__(self, make_pair: Callable[[], CriticPair], seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.pair = make_pair()
        self._seed = seed
        self._optimizer = torch.optim.Adam(self.pair.critic.parameters(), fused=True)
        self.turns: Turns = {}
        self._draws = 0

    @torch.no_grad()
    def advantages(self, state: NDArray[np.float32], action: NDArray[np.float32]) -> tuple[Any, Any]:
        """Return [n] Q(s, a) and [n] V(s) of n turns, of which the advantages are made."""
        q, v = self.pair.estimates(torch.from_numpy(state), torch.from_numpy(action))
        return q.double().numpy(), v.double().numpy()

    def train(self, new: Mapping[str, NDArray[np.float32]], plan: TrainingPlan) -> float:
        """Store turns, keep the newest ones, and take the steps. Return the loss of the last step, NaN without one."""
        added = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in new.items()}
        joined = {name: torch.cat([self.turns[name], v]) if self.turns else v for name, v in added.items()}
        self.turns = {name: values[-plan.capacity :].clone() for name, values in joined.items()}
        count, loss = len(self.turns["reward"]), float("nan")
        if count:
            self.pair.observe(self.turns)
        for _ in range(plan.steps if count else 0):
            rng = np.random.default_rng([self._seed, self._draws])
            self._draws += 1
            chosen = torch.from_numpy(rng.integers(count, size=min(plan.replay, count)))
            loss = self._step({name: values[chosen] for name, values in self.turns.items()}, plan)
        return loss

    def _step(self, drawn: Turns, plan: TrainingPlan) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = plan.lr
        value = self.pair.loss(drawn, plan)
        self._optimizer.zero_grad()
        with torch.enable_grad():
            value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.pair.critic.parameters(), plan.clip_norm)
        self._optimizer.step()
        self.pair.follow(plan.tau)
        return float(value.detach())

    def state(self) -> dict[str, Any]:
        """Return the memory, as `UpdatePart.state`."""
        return {
            "heads": self.pair.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "turns": dict(self.turns),
            "draws": self._draws,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.pair.load_state_dict(state["heads"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.turns, self._draws = dict(state["turns"]), state["draws"]


class Critic(nn.Module):
    """Heads for Q(s, a) and heads for V(s), each of three layers."""

    def __init__(self, size: int, num_q: int, num_v: int) -> None:
        super().__init__()
        self.of_action, self.of_state = ValueHeads(num_q, 2 * size, size), ValueHeads(num_v, size, size)

    def q(self, state: Tensor, action: Tensor) -> Tensor:
        """Return [n, num_q]."""
        found: Tensor = self.of_action(torch.cat([state, action], dim=-1))
        return found

    def v(self, state: Tensor) -> Tensor:
        """Return [n, num_v]."""
        found: Tensor = self.of_state(state)
        return found


class ValueHeads(nn.Module):
    """`count` networks of the same shape, side by side."""

    def __init__(self, count: int, size_in: int, size: int) -> None:
        super().__init__()
        shapes = ((size_in, size), (size, size), (size, 1))
        self.count = count
        self.weights = nn.ParameterList(_uniform(count, *shape, fan_in=shape[0]) for shape in shapes)
        self.biases = nn.ParameterList(_uniform(count, 1, shape[1], fan_in=shape[0]) for shape in shapes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [n, count]."""
        values = inputs.expand(self.count, *inputs.shape)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values = torch.baddbmm(bias, torch.relu(values) if number else values, weight)
        return values.squeeze(-1).T


class CriticPair(nn.Module):
    """A critic, and its target, which has no gradient. The methods are those of `archer`."""

    def __init__(self, size: int, num_q: int = 2, num_v: int = 2) -> None:
        super().__init__()
        self.critic, self.target = Critic(size, num_q, num_v), Critic(size, num_q, num_v)
        self.target.load_state_dict(self.critic.state_dict())
        self.target.requires_grad_(False)

    def estimates(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return [n] min Q(s, a) and [n] min V(s)."""
        return self.critic.q(states, actions).min(-1).values, self.critic.v(states).min(-1).values

    def loss(self, turns: Turns, plan: TrainingPlan) -> Tensor:
        """Return the loss of the heads on drawn turns."""
        return td_loss(self, turns, plan.discount, plan.huber)

    def observe(self, turns: Turns) -> None:
        """Store statistics of all turns of the buffer, before the steps of an update. These heads need none."""

    @torch.no_grad()
    def follow(self, tau: float) -> None:
        """Move the target towards the critic."""
        torch._foreach_lerp_(list(self.target.parameters()), list(self.critic.parameters()), tau)


def td_loss(pair: CriticPair, turns: Turns, discount: float, huber: float = 0.0) -> Tensor:
    """Return the loss of the heads on these turns."""
    critic, target = pair.critic, pair.target
    with torch.no_grad():
        after = target.v(turns["next"]) * (1 - turns["done"])[:, None]
        of_action = turns["reward"][:, None] + discount * after
        of_state = target.q(turns["state"], turns["action"])
    with torch.enable_grad():
        of_q = regression_loss(critic.q(turns["state"], turns["action"]) - of_action, huber).sum(-1)
        of_v = regression_loss(critic.v(turns["state"]) - of_state, huber).sum(-1)
        return weighted_mean(of_q, turns["q"]) + weighted_mean(of_v, turns["v"])


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of values [n] with weights [n]; 0 if all weights are 0."""
    return (weights * values).sum() / weights.sum().clamp(min=1e-9)


def _uniform(*shape: int, fan_in: int) -> nn.Parameter:
    """Return initial values in the range of `nn.Linear`."""
    bound = fan_in**-0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
