"""The tool-calling agent that samples further continuations from before an uncertain token of its answer.

CURE, critical-token-guided re-concatenation (2025-08, arXiv:2508.11016; code: bytedance/CURE), stage 1:

    y     ~ pi(. | x)                          n_1 answers per prompt
    t     ~ Uniform(the `num_top` valid tokens of y with the largest entropy of pi(. | x, y[:t]))
    y'_j  ~ pi(. | x, y[:t])                   j = 1..n_2 continuations of each answer

All n_1 (1 + n_2) answers are one group: n_1 is `run.group_size`, and each episode has 1 + n_2 samples, so that the mean
over episodes is that over answers. The continuations begin with given tokens without loss, as the code makes y[:t] a
part of the prompt. A token is valid if its text has at least `chars_min` characters without white space around it, it
is not special, and it is not the first token of the answer. Without a valid token the continuations begin at the
prompt. The token at t is sampled again. An evaluation has one answer. Stage 2 is a run with the recipe `dapo` from the
weights of this one.

Deviations: an answer with tool calls may branch in any of its turns, and the tools of a continuation have the state
before this turn. A tag, such as one around a tool call, counts as special. The code takes entropies of the policy at
temperature 1 in a second pass; here they are those of the distribution that was sampled from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from rollmesh.services.rollout.agent import Task, Turn
from rollmesh.services.rollout.agents.draws import drawing
from rollmesh.services.rollout.agents.tool_calling import ToolCallingAgent, act
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.config.settings import PositiveInt, Settings
from rollmesh.shared.domain.trajectory import IntArray, Purpose, Role
from rollmesh.shared.errors import InvalidInput

ENTROPY = "entropy"
"""The output of the engine that the agent reads."""


class CureOptions(Settings):
    """Settings of the agent `cure`."""

    num_continuations: PositiveInt = 3
    """Continuations of each answer, n_2. `rollout.limits` count the turns and tokens of all of them."""
    num_top: PositiveInt = 20
    """Valid tokens of largest entropy of which one is drawn."""
    chars_min: PositiveInt = 2
    """Fewest characters of a valid token."""


class CureAgent(ToolCallingAgent):
    """Answer, then answer again from before a token of high entropy."""

    Options: ClassVar[type[CureOptions]] = CureOptions

    def __init__(self, *, options: CureOptions) -> None:
        self._options = options

    async def run(self, task: Task, env: Environment) -> None:
        if env.purpose is not Purpose.TRAIN:
            await act(task, env)
            return
        played: list[tuple[Environment, Turn]] = []
        await act(task, env, played=played)
        before, given = self._place(env, played)
        for _ in range(self._options.num_continuations):
            if not env.turns_left or not before.tokens_left:
                return
            twin = await before.fork()
            if given.size:
                twin.append(given, role=Role.ACTION)
            await act(task, twin, opening=twin.decode(given))

    def _place(self, env: Environment, played: Sequence[tuple[Environment, Turn]]) -> tuple[Environment, IntArray]:
        """Return the branch before the turn of the drawn token, and the tokens [n] of the turn before the token. Raises
        InvalidInput if the engine did not return entropies."""
        if any(ENTROPY not in turn.arrays for _, turn in played):
            raise InvalidInput("the agent `cure` reads the output `entropy` of the engine; add it to rollout.outputs")
        places = [(n, at) for n, (_, turn) in enumerate(played) for at in range(turn.token_ids.size)][1:]
        entropies = np.concatenate([turn.arrays[ENTROPY] for _, turn in played])[1:]
        top: list[tuple[int, int]] = []
        for number in np.argsort(-entropies, kind="stable").tolist():
            turn, at = played[places[number][0]][1], places[number][1]
            if len(top) == self._options.num_top:
                break
            if self._is_valid(env, turn.token_ids[at : at + 1]):
                top.append(places[number])
        turn_number, at = drawing(env).choice(top) if top else (0, 0)
        before, turn = played[turn_number]
        return before, turn.token_ids[:at]

    def _is_valid(self, env: Environment, token: IntArray) -> bool:
        text = env.decode(token)
        special = np.array_equal(env.encode(text, markup=True), token) and not np.array_equal(env.encode(text), token)
        return not special and len(text.strip()) >= self._options.chars_min
