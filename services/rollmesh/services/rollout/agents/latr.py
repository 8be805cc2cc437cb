"""The agent that forks its answer at uncertain tokens while it samples, and prunes branches that become similar.

LATR, lookahead tree-based rollouts (2025-10, arXiv:2510.24302; code: starreeze/latr). p_1 >= p_2 are the two largest
probabilities of the next token of a branch, and t its position in the answer:

    fork      if  p_2 > second_min  and  p_1 - p_2 < gap_max,  while the tree has fewer than B branches
    prune     a branch, with its descendants, if its r tokens from t on match those r of its parent, for any r of
              `lookahead`:  suffix_match > suffix_max  or  rouge_l > rouge_max,  unless one of them ends within r
    B         = round(eta samples);  eta follows from the number of updates of the weights, by `mix`

The new branch begins with the tokens before t and the one of the two most likely tokens that was not sampled, as given
tokens without loss. All branches of a task are sampled at the same time. A pruned one is cancelled, so the engine frees
its slot, and it is not a sample. The tree does not fork from `fork_tokens_max` on, nor where a limit leaves no
tokens for a branch. The other samples of the episode, and those of a tree that did not fill, are ordinary answers. An
evaluation has one ordinary answer.

Deviations. The code takes the most likely token where a branch does not fork, until the tree is full; here every token
but the forced one is sampled, so that the policy learns from its own tokens. The code trains the tokens before a fork
in each branch; here they are trained in the branch that sampled them, and the forced token is not trained, because
given tokens have no behavior log-probs. A branch is compared when both sequences have r tokens, and not in lockstep. A
token that ends the turn is not forced. Branches of which the parent was pruned, but not they themselves, do not exist,
as in the code. tau_ed of the paper, an edit distance, is not used by the published scripts. One turn, without tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np

from rollmesh.services.rollout.agent import Agent, LimitReached, Task
from rollmesh.services.rollout.environment import Environment
from rollmesh.services.rollout.sequence_match import suffix_match
from rollmesh.shared.common_subsequence import rouge_l
from rollmesh.shared.config.settings import NonNegativeInt, PositiveInt, Settings, Share
from rollmesh.shared.domain.trajectory import Purpose, Segment
from rollmesh.shared.errors import InvalidInput

TOP_IDS, TOP_LOGPROBS = "top_k_ids", "top_k_logprobs"
"""The arrays of the output `top_k`."""


class LatrOptions(Settings):
    """Settings of the agent `latr`. The defaults are those of the published scripts."""

    samples: PositiveInt = 8
    """Samples of an episode."""
    second_min: Share = 0.15
    """Probability that the second token of a fork exceeds, tau_abs."""
    gap_max: Share = 0.25
    """Largest difference of the two probabilities of a fork, tau_rel."""
    lookahead: tuple[PositiveInt, ...] = (20, 30, 50)
    """Numbers of tokens, r, after which a branch is compared with its parent."""
    suffix_max: Share = 0.2
    """Largest `suffix_match` of a branch that stays."""
    rouge_max: Share = 0.5
    """Largest `rouge_l` of a branch that stays."""
    fork_tokens_max: PositiveInt = 1024
    """Position in the answer from which on the tree does not fork."""
    mix: tuple[tuple[NonNegativeInt, Share], ...] = ((0, 1.0), (100, 0.75), (200, 0.5), (300, 0.25))
    """Pairs of a number of updates and the share of the samples, eta, that come from the tree from then on."""

    def check_fields(self) -> None:
        steps = [step for step, _ in self.mix]
        if not steps or steps[0] != 0 or steps != sorted(set(steps)):
            raise ValueError(f"`mix` must have increasing numbers of updates that begin with 0, got {steps}")
        if list(self.lookahead) != sorted(set(self.lookahead)):
            raise ValueError(f"`lookahead` must increase, got {list(self.lookahead)}")

    def tree_share(self, step: int) -> float:
        """Return eta for weights after `step` updates."""
        return [share for start, share in self.mix if start <= step][-1]


class LatrAgent(Agent):
    """Sample a tree of answers, and ordinary ones."""

    Options: ClassVar[type[LatrOptions]] = LatrOptions

    def __init__(self, *, options: LatrOptions) -> None:
        self._options = options

    async def run(self, task: Task, env: Environment) -> None:
        if env.purpose is Purpose.TRAIN:
            await _Lookahead(env, self._options).run()
        else:
            await env.generate()


@dataclass(slots=True, eq=False)
class _Branch:
    env: Environment
    parent: _Branch | None = None
    birth: int = 0
    """Position of the token that it has instead of its parent's."""
    tokens: list[int] = field(default_factory=list)
    """Its answer so far, with the given tokens."""
    forks: bool = True
    """False for an ordinary answer."""
    num_sampled: int = 0
    num_compared: int = 0
    """How many of `lookahead` it has passed."""
    pruned: bool = False
    work: asyncio.Task[None] | None = None


class _Lookahead:
    """The branches of one episode."""

    def __init__(self, env: Environment, options: LatrOptions) -> None:
        self._options = options
        self._start = env.branch()
        self._branches: list[_Branch] = []
        self._tree_size = 1
        """B, known from the first tokens on."""
        self._turns_left = env.turns_left
        self._ends = [env.encode(word, markup=True).tolist()[0] for word in env.format.turn_ends]
        self._no_outputs = False

    async def run(self) -> None:
        """Sample all branches, and make those that stay samples. Raises InvalidInput without the output `top_k`."""
        try:
            async with asyncio.TaskGroup() as self._group:
                self._begin(_Branch(self._start.branch()))
            if self._no_outputs:
                raise InvalidInput(
                    "the agent `latr` reads the output `top_k` of the engine; add it to rollout.outputs, with "
                    "rollout.num_top >= 2"
                )
            async with asyncio.TaskGroup() as self._group:
                for _ in range(min(self._options.samples - len(self._kept()), self._turns_left)):
                    self._begin(_Branch(self._start.branch(), forks=False))
        finally:
            for branch in self._kept():
                if branch.num_sampled:
                    branch.env.sample()

    def _kept(self) -> list[_Branch]:
        return [branch for branch in self._branches if not branch.pruned]

    def _begin(self, branch: _Branch) -> None:
        self._turns_left -= 1
        self._branches.append(branch)
        branch.work = self._group.create_task(self._sample(branch, tuple(branch.tokens)))

    async def _sample(self, branch: _Branch, given: Sequence[int]) -> None:
        try:
            begin = np.asarray(given, dtype=np.int32)
            await branch.env.generate(on_piece=partial(self._read, branch), begin=begin)
        except LimitReached:
            return  # the episode records the limit; the other branches have begun

    def _read(self, branch: _Branch, piece: Segment) -> None:
        """Take the new tokens of a branch: fork at them, and prune what they make similar."""
        if branch is self._branches[0] and not branch.tokens:
            self._begin_ordinary(piece)
        position = len(branch.tokens)
        branch.tokens += piece.token_ids.tolist()
        branch.num_sampled += piece.num_tokens
        for other in [branch, *self._branches]:
            if other.parent is not None and branch in (other, other.parent):
                self._compare(other, other.parent)
        if branch.forks and not branch.pruned:
            for at, token in self._alternatives(branch, piece, position):
                given = [*branch.tokens[:at], token]
                self._begin(_Branch(self._start.branch(), parent=branch, birth=at, tokens=given))

    def _begin_ordinary(self, piece: Segment) -> None:
        """Begin the samples that are not from the tree."""
        options = self._options
        step = piece.version.step if piece.version is not None else 0
        self._tree_size = max(1, round(options.tree_share(step) * options.samples))
        for _ in range(min(options.samples - self._tree_size, self._turns_left)):
            self._begin(_Branch(self._start.branch(), forks=False))

    def _alternatives(self, branch: _Branch, piece: Segment, position: int) -> Iterator[tuple[int, int]]:
        """Yield the positions at which new tokens of a branch are uncertain and the tree has room, with the token that
        was not sampled."""
        if TOP_IDS not in piece.arrays or piece.arrays[TOP_IDS].shape[-1] < 2:
            self._no_outputs = True
            return
        options = self._options
        odds = np.exp(piece.arrays[TOP_LOGPROBS][:, :2])
        uncertain = (odds[:, 1] > options.second_min) & (odds[:, 0] - odds[:, 1] < options.gap_max)
        for row in np.flatnonzero(uncertain).tolist():
            first, second = piece.arrays[TOP_IDS][row, :2].tolist()
            token = second if int(piece.token_ids[row]) == first else first
            size = sum(one.forks for one in self._kept())
            if position + row >= options.fork_tokens_max or size >= self._tree_size or self._turns_left <= 0:
                return
            if position + row + 1 >= self._start.tokens_left:
                return  # the given tokens of the branch would leave no room
            if token not in self._ends:
                yield position + row, token

    def _compare(self, branch: _Branch, parent: _Branch) -> None:
        """Prune a branch that continues as its parent does."""
        options = self._options
        for ahead in options.lookahead[branch.num_compared :]:
            own, theirs = (one.tokens[branch.birth : branch.birth + ahead] for one in (branch, parent))
            if branch.pruned or min(len(own), len(theirs)) < ahead:
                return
            branch.num_compared += 1
            ended = any(token in self._ends for token in (*own, *theirs))
            if not ended and (
                suffix_match(own, theirs) > options.suffix_max or rouge_l(own, theirs) > options.rouge_max
            ):
                self._prune(branch)

    def _prune(self, branch: _Branch) -> None:
        branch.pruned = True
        if branch.work is not None:
            branch.work.cancel()
        for other in self._branches:
            if other.parent is branch and not other.pruned:
                self._prune(other)
