"""The tool-calling agent whose first episode of each training group is a given solution. The model plays the others.

RL-PLUS (2025, arXiv:2508.00222) and RED (2025, arXiv:2508.16677) learn from groups of own rollouts and one solution of
a data set: n - 1 sampled episodes and one given, in a group of `run.group_size` = n. The tokens of the solution have
the source DATASET and no behavior log-probs, and they are trained, so only loss terms that do not need log-probs may
read them (`rl_plus`, `imitation`, `shifted_imitation`). Scorers judge the given episode as any other. Without a given
episode the group has n sampled ones: in an evaluation, in an export, and for a task whose solution is empty or null.

The solution is the private extra of the task that `solution` names, a text: one turn of the model.
`rollout.private_extras` must permit it, as the recipes do. For solutions with several turns, override `give`. A
solution without room in `rollout.limits` fails the attempt, because a part of it would be a wrong answer.
"""

from __future__ import annotations

from typing import ClassVar

from rollmesh.services.rollout.agent import Task
from rollmesh.services.rollout.agents.tool_calling import ToolCallingAgent
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.domain.extras import ExtraName
from rollmesh.shared.domain.trajectory import Purpose, Role, Source
from rollmesh.shared.errors import InvalidInput


class GivenSolutionOptions(Settings):
    """Settings of the agent `given_solution`."""

    solution: ExtraName = "solution"
    """Private extra of a task that is its solution. Name its field in `data.source.options.private_extras`."""


class GivenSolutionAgent(ToolCallingAgent):
    """Give the solution in episode 0 of a training group, and let the model play the others."""

    Options: ClassVar[type[GivenSolutionOptions]] = GivenSolutionOptions

    def __init__(self, *, options: GivenSolutionOptions) -> None:
        self._options = options

    @property
    def private_extras(self) -> tuple[str, ...]:
        """The solution."""
        return (self._options.solution,)

    async def run(self, task: Task, env: Environment) -> None:
        if env.purpose is not Purpose.TRAIN or env.index or not self.give(task, env):
            await super().run(task, env)

    def give(self, task: Task, env: Environment) -> bool:
        """Append the solution of a task; return whether it has one. Raise InvalidInput for a task without the extra,
        for one that is not a text, and for one without room."""
        solution = env.private_text(self._options.solution)
        if not solution:
            return False
        tokens = env.encode(solution, end=True, markup=True)
        if tokens.size > env.tokens_left:
            raise InvalidInput(
                f"the private extra `{self._options.solution}` of the task {task.task_id} must have at most "
                f"{env.tokens_left} tokens, got {tokens.size}; raise rollout.limits.tokens_max and context_tokens_max, "
                "or remove the solution"
            )
        env.append(tokens, role=Role.ACTION, source=Source.DATASET, train=True)
        return True
