"""Let the model answer again after a wrong answer, without saying what is wrong (UFO, arXiv:2507.14295; code:
lichengliu03/unary-feedback, `ragen/env/metamathqa/env.py`).

The agent asks the reward service after each answer. It stops at the first right one, without an observation, and
after `attempts_max` answers. After a wrong one the model observes a fixed text. Any task with one turn can be wrapped.
The scorer `try_again` rewards early success and answers that differ. An evaluation has the same attempts, as that of
the paper, so `correct` is the success within `attempts_max`. Deviation: the text is an observation with the
tool role of the chat format, where the authors write a message of the user.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from rollmesh.services.rollout.agent import Agent, Task
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.config.settings import NonEmptyStr, PositiveInt, Settings
from rollmesh.shared.domain.trajectory import FinishReason


class TryAgainOptions(Settings):
    """Settings of the agent `try_again`."""

    reward: NonEmptyStr = "correct"
    """Name of the reward in `reward.scorers` that tells a right answer."""
    success_min: float = 1.0
    """Value of the reward from which an answer is right."""
    attempts_max: PositiveInt = 5
    """Maximum number of answers. It needs one call less in `rollout.limits.score_calls_max`."""
    feedback: NonEmptyStr = "Incorrect. Please think again."
    """What the model observes after a wrong answer."""


class TryAgainAgent(Agent):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = TryAgainOptions

    def __init__(self, *, options: TryAgainOptions) -> None:
        self._options = options

    async def run(self, task: Task, env: Environment) -> None:
        options = self._options
        for attempt in range(options.attempts_max):
            turn = await env.generate()
            if turn.finish is not FinishReason.STOP or attempt + 1 == options.attempts_max or not env.turns_left:
                return
            value = (await env.score(options.reward))[options.reward]
            if value is None:
                raise ValueError(
                    f"the reward `{options.reward}` is not applicable to task {task.task_id}, so that it is unknown "
                    "whether the answer is right; name another reward in `rollout.agent.options.reward`"
                )
            if value >= options.success_min:
                return
            env.observe(options.feedback)
