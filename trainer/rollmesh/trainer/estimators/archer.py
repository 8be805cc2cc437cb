"""Advantage of whole turns from a critic that learns by temporal differences from a replay buffer of turns.

Actor-Critic Framework with a Hierarchical Structure (ArCHer, Zhou et al. 2024, arXiv:2402.19446; code:
YifeiZhou02/ArCHer). A turn is one action a in the state s, which is all of the conversation before it. With r the
reward after the turn, s' the state before the next turn, a' an action that the policy samples in s, and two pairs of
heads Q_i, V_i with slowly following targets Q'_i, V'_i:

    loss = sum over i of mean (Q_i(s, a) - r - discount V'_i(s'))^2 + mean (V_i(s) - Q'_i(s, a'))^2      V'_i(s') = 0 after the last turn
    target <- (1 - tau) target + tau head, after every step
    A    = min(Q_1, Q_2)(s, a) - min(V_1, V_2)(s) - the mean of this over the turns of the batch, for all tokens of the turn

Each update stores its turns in the buffer, which keeps the newest `capacity` ones, and then takes `critic_steps` steps
of Adam on `replay` drawn turns each, before the policy is trained. In the first `warmup_updates` updates A is 0, so
that only the critic is trained. A reward of the last turn reaches an early turn that decides it. No normalization by a
group, so it needs none. s and (s, a) are hidden states at the first and after the last trained token of the turn, under
`learner.reference`, projected at random: the reference does not change, so stored states do not age. Rewards of single
turns count in their turn, and those of the whole sample in its last one. Everything is in the checkpoint.

New actions: an agent may sample a second action in the state of a turn, and record it as a sample with the role
`new_action_role`, whose last turn it is (`services/rollout/agents/new_actions.py` does so). This turn is then the a' of
the loss, and it alone is trained in its sample, with its own advantage, as in the paper. It has no r and no s'. In an
episode without such samples a' is the recorded action, which is an action of the policy of at most `max_staleness`
updates ago.

Deviations: the critic of the paper fine-tunes an encoder (RoBERTa, at 2e-5), where only the heads learn here, on frozen
states; hence the larger rate, which is not of the paper. The buffer of the paper draws a new action in every old state
at every step, here one action is drawn per state. Advantages come from the critic before it has seen the batch, because
heads that were just fitted to a single action of a state would return V(s) = Q(s, a); the paper samples new actions
instead. Centering is not of the paper; it removes the bias of the two minima. The policy loss is the recipe's: the
paper has the sum over the tokens of a turn without a clip.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rollmesh.shared.config.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
    Share,
)
from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.trainer.estimators.base import UNSCORED, Estimate, GroupEstimator
from rollmesh.trainer.estimators.turns import filled_members, turn_returns, undecided_turns

if TYPE_CHECKING:  # they import torch
    from rollmesh.trainer.batch import UpdateBatch
    from rollmesh.trainer.features import FeatureRequest
    from rollmesh.trainer.turn_critic import CriticPair, TurnCritic

STATES = "archer_states"


class ArcherOptions(Settings):
    """Settings of the estimator `archer`."""

    warmup_updates: NonNegativeInt = 20
    """Updates in which all advantages are 0 and only the critic is trained."""
    critic_steps: PositiveInt = 50
    """Optimizer steps of the critic per update."""
    critic_lr: PositiveFloat = 3e-4
    """Learning rate of the heads."""
    clip_norm: PositiveFloat = 1.0
    """Maximum norm of the gradient of the heads."""
    huber: NonNegativeFloat = 0.0
    """Error beyond which the losses of Q and V are linear, for noisy rewards (`regression.py`). 0: squared
    everywhere."""
    discount: Share = 0.95
    """Factor of the value of the next turn (gamma)."""
    tau: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """Share of the heads that their targets take over after every step."""
    capacity: PositiveInt = 16384
    """Largest number of turns in the buffer. A turn takes 12 bytes per dimension, in memory and in the checkpoint."""
    replay: PositiveInt = 256
    """Turns that are drawn from the buffer for every step of the critic."""
    center: bool = True
    """Subtract the mean advantage of the turns of the batch."""
    new_action_role: str = "new_action"
    """Role of samples whose last turn is an action that was sampled in the state of a turn, and not continued."""
    dimensions: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Dimensions of a state. Those of a wider model are projected at random. A token of the batch takes 8 bytes per
    dimension."""
    projection_seed: NonNegativeInt = 0
    """Seed of the projection, and of the critic."""
    under: Literal["reference", "start"] = "reference"
    """Weights of the states. Under `start`, which needs no reference model, states in the buffer are those of older
    policies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTurns:
    """The n turns of a batch with trained tokens, in the order of its tokens."""

    of_token: NDArray[np.int64]
    """[M] the turn of each token."""
    kept: NDArray[np.bool_]
    """[n] whether the sample of the turn has usable rewards."""
    unscored: tuple[int, ...]
    """Numbers of the samples without usable rewards."""
    columns: Mapping[str, NDArray[np.float32]]
    """The columns of `turn_critic.Turns`."""

    @property
    def critics(self) -> NDArray[np.bool_]:
        """[n] whether some loss of the critic reads the turn."""
        finite = [np.isfinite(self.columns[name]).all(-1) for name in ("state", "action", "next")]
        read = self.columns["q"] + self.columns["v"] > 0
        used: NDArray[np.bool_] = np.logical_and.reduce([self.kept, read, *finite])
        return used


class Archer(GroupEstimator):
    """See the module."""

    Options: ClassVar[type[Settings]] = ArcherOptions
    needs = (STATES,)
    needs_behavior = False

    def __init__(self, *, weights: Mapping[str, float], options: ArcherOptions) -> None:
        super().__init__(weights=weights, options=options)
        self._critic: TurnCritic | None = None
        self._before: tuple[NDArray[np.float64], dict[str, float]] = np.zeros(0), {}
        """Advantages of the turns of the last batch, and its metrics, for further estimates of it."""

    @property
    def features(self) -> dict[str, FeatureRequest]:
        from rollmesh.trainer.features import FeatureRequest  # imports torch, which the reward service lacks
        from rollmesh.trainer.turn_states import TurnStates, TurnStatesOptions

        options: ArcherOptions = self.options
        chosen = TurnStatesOptions(dimensions=options.dimensions, projection_seed=options.projection_seed)
        return {STATES: FeatureRequest(TurnStates(options=chosen), options.under)}

    def __call__(self, batch: UpdateBatch) -> Estimate:
        turns = turns_of(batch, self.weights, self.options.new_action_role)
        if batch.repeat == 0:
            self._before = self._of_turns(turns)
        advantages, metrics = self._before
        warm = batch.update > self.options.warmup_updates
        return Estimate(
            advantages=(advantages * warm)[turns.of_token].astype(np.float32),
            dropped=dict.fromkeys(turns.unscored, UNSCORED),
            token_mask=self._trained(batch, turns),
            metrics=metrics,
        )

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return `UNDECIDED` for each member with usable rewards, because the critic decides."""
        return undecided_turns(group)

    def state(self) -> dict[str, Any]:
        return {} if self._critic is None else self._critic.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._critic = None
        if state:
            self._made(state["turns"]["state"].shape[1]).load_state(state)

    def _of_turns(self, turns: BatchTurns) -> tuple[NDArray[np.float64], dict[str, float]]:
        """Return the advantage [n] of each turn, and metrics. Then train the critic with the turns."""
        from rollmesh.trainer.turn_critic import TrainingPlan

        options: ArcherOptions = self.options
        columns, used = turns.columns, turns.critics
        critic = self._made(columns["state"].shape[1])
        q, v = critic.advantages(columns["state"], columns["action"])
        advantages: NDArray[np.float64] = q - v
        bias = float(advantages[used].mean()) if used.any() else 0.0
        metrics = {
            "q_mean": float(q[used].mean()) if used.any() else 0.0,
            "v_mean": float(v[used].mean()) if used.any() else 0.0,
            "advantage_mean": bias,
            "advantage_abs": float(np.abs(advantages[used] - bias).mean()) if used.any() else 0.0,
            "new_action_share": float((columns["q"][used] == 0).mean()) if used.any() else 0.0,
        }
        plan = TrainingPlan(
            discount=options.discount,
            tau=options.tau,
            steps=options.critic_steps,
            replay=options.replay,
            capacity=options.capacity,
            lr=options.critic_lr,
            clip_norm=options.clip_norm,
            huber=options.huber,
        )
        loss = critic.train({name: values[used] for name, values in columns.items()}, plan)
        metrics |= {"td_loss": loss} if np.isfinite(loss) else {}
        weights, further = self.policy_weights(advantages - (bias if options.center else 0.0), used)
        return weights, metrics | further

    def make_pair(self, size: int) -> CriticPair:
        """Return new heads for states of `size` numbers."""
        from rollmesh.trainer.turn_critic import CriticPair

        return CriticPair(size)

    def policy_weights(
        self, advantages: NDArray[np.float64], used: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float64], dict[str, float]]:
        """Return [n] what the policy loss multiplies the tokens of each turn by, given its advantage, and metrics of
        the turns that are `used`."""
        return advantages, {}

    def _made(self, size: int) -> TurnCritic:
        from rollmesh.trainer.turn_critic import TurnCritic

        if self._critic is None:
            self._critic = TurnCritic(lambda: self.make_pair(size), self.options.projection_seed)
        return self._critic

    def _trained(self, batch: UpdateBatch, turns: BatchTurns) -> NDArray[np.bool_] | None:
        """Return [M]: False for the turns before a new action, which its episode has in another sample. None without
        new actions."""
        new = np.array([m.summary.role == self.options.new_action_role for m in batch.members], dtype=bool)
        if not new.any():
            return None
        mask: NDArray[np.bool_] = ~new[batch["sample"]] | (turns.columns["v"] > 0)[turns.of_token]
        return mask


def turns_of(batch: UpdateBatch, weights: Mapping[str, float], new_action_role: str) -> BatchTurns:
    """Return the turns of a batch. In a sample of the role `new_action_role` the last turn is a new action, which has
    no weight in the loss of Q, and the turns before it have no weight at all."""
    sample, turn = batch["sample"], batch["turn"]
    begins = np.append(True, (sample[1:] != sample[:-1]) | (turn[1:] != turn[:-1]))
    first = np.flatnonzero(begins)
    owner = sample[first]
    last = np.append(owner[1:] != owner[:-1], True)
    members = filled_members(batch)
    new = np.array([m.summary.role == new_action_role for m in members], dtype=bool)
    answered = {m.episode for m, is_new in zip(members, new, strict=True) if is_new and m.episode}
    rewards, kept = np.zeros(len(first)), np.zeros(len(first), bool)
    for number, member in enumerate(members):
        at = np.flatnonzero(owner == number)
        own = turn_returns(member, weights, 0.0)
        if own is not None:
            kept[at] = True
            bounds = [*np.minimum(turn[first[at]], len(own) - 1).tolist(), len(own)]
            rewards[at] = [float(own[begin:end].sum()) for begin, end in pairwise(bounds)]
    state, action = np.split(batch[STATES][first].astype(np.float32), 2, axis=1)
    is_new = new[owner]
    recorded = np.array([members[n].episode not in answered for n in owner.tolist()], dtype=bool)
    columns = {
        "state": state,
        "action": action,
        "next": np.where(last[:, None], 0.0, np.roll(state, -1, axis=0)),
        "reward": np.where(is_new, 0.0, rewards),
        "done": last,
        "q": ~is_new,
        "v": np.where(is_new, last, recorded),
    }
    return BatchTurns(
        of_token=np.cumsum(begins) - 1,
        kept=kept,
        unscored=tuple(np.unique(owner[~kept]).tolist()),
        columns={name: np.asarray(values, dtype=np.float32) for name, values in columns.items()},
    )
