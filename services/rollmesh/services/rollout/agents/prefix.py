"""The tool-calling agent that gives the beginning of a solution while training. The model finishes it.

PrefixRL (2026-01, arXiv:2601.18795, no public code): y is a correct trace of the prompt x, and h a length. The model is
trained on y' ~ pi(. | x, y[:h]), with the reward of the whole text (y[:h], y'). Prompts without a prefix are mixed in
if `probability` is below 1; the share of the paper is not established. All episodes of a group have the same prefix,
because their baseline is that of one prompt: `draw: group`.

DR-PO (2024-04, arXiv:2404.08495; code: Cornell-RL/drpo): with probability beta an episode starts from a random prefix
of a preferred response of the data set, else from the prompt. `draw: episode` is the mixture of the code: each episode
draws both, and h is uniform in 1..n-1.

    h ~ Uniform{max(1, ceil(share_min n)) .. min(n - 1, floor(share_max n))}   with probability `probability`
    h = 0                                                                      otherwise

in tokens; n is the length of the solution, with the tokens that end its turn. The tokens of the prefix have source
DATASET and no loss. Scorers read them as a part of the answer. An evaluation gets no prefix.

The solution is the private extra of the task that `solution` names, a text; an empty one, or null, means that the task
has none. `rollout.private_extras` must permit it, as the recipes do. A prefix ends within the first turn of the model;
for solutions with several turns, override `give`. The distribution of prefix lengths in PrefixRL was not established;
its published summary says that the length sets the difficulty. Traces are given, and not sampled by this agent.
"""

from __future__ import annotations

import math
import random
from typing import ClassVar, Literal

from rollmesh.services.rollout.agent import Task
from rollmesh.services.rollout.agents.draws import drawing
from rollmesh.services.rollout.agents.tool_calling import ToolCallingAgent, act
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.config.settings import Settings, Share
from rollmesh.shared.domain.extras import ExtraName
from rollmesh.shared.domain.trajectory import Purpose, Role, Source


class PrefixOptions(Settings):
    """Settings of the agent `prefix`."""

    solution: ExtraName = "solution"
    """Private extra of a task that is its solution. Name its field in `data.source.options.private_extras`."""
    probability: Share = 1.0
    """Probability of a prefix. The other groups, or episodes, begin at the prompt."""
    share_min: Share = 0.0
    """Shortest prefix, as a share of the solution. At least one token is given."""
    share_max: Share = 1.0
    """Longest prefix, as a share of the solution. At least one token is left."""
    draw: Literal["group", "episode"] = "group"
    """Whether all episodes of a group have the same prefix, or each draws one."""

    def check_fields(self) -> None:
        if self.share_min > self.share_max:
            raise ValueError(f"`share_min` must be <= share_max = {self.share_max:g}, got {self.share_min:g}")


class PrefixAgent(ToolCallingAgent):
    """Append the beginning of a solution, then generate, call and observe until the model answers."""

    Options: ClassVar[type[PrefixOptions]] = PrefixOptions

    def __init__(self, *, options: PrefixOptions) -> None:
        self._options = options

    @property
    def private_extras(self) -> tuple[str, ...]:
        """The solution."""
        return (self._options.solution,)

    async def run(self, task: Task, env: Environment) -> None:
        options, opening = self._options, ""
        if env.purpose is Purpose.TRAIN:
            rng = drawing(env, group=options.draw == "group")
            if rng.random() < options.probability:
                opening = self.give(task, env, rng)
        await act(task, env, opening=opening)

    def give(self, task: Task, env: Environment, rng: random.Random) -> str:
        """Append the beginning of the solution of a task; return the text of it that belongs to the next turn. Raises
        InvalidInput if the task has no such extra, or if it is not a text."""
        solution = env.private_text(self._options.solution)
        tokens = env.encode(solution, end=True, markup=True)
        given = tokens[: self.length(rng, tokens.size) if solution else 0]
        if not given.size:
            return ""
        env.append(given, role=Role.ACTION, source=Source.DATASET)
        return env.decode(given)

    def length(self, rng: random.Random, num_parts: int) -> int:
        """Return how many of `num_parts` parts of a solution are given; 0 if it is too short."""
        least = max(1, math.ceil(self._options.share_min * num_parts))
        most = min(num_parts - 1, math.floor(self._options.share_max * num_parts))
        return rng.randint(least, most) if least <= most else 0
