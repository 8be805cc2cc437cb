"""The tool-calling agent that also samples, in the state of each of its turns, a second action that is not executed.

While training, each second action is a separate sample with the role `new_action`, which ends after it. The estimator
`archer` reads these samples: the value of a state learns from actions of the current policy, and the new actions are
trained as in the paper (arXiv:2402.19446). The agent needs twice the turns and tokens of `tool_calling`, also in
`rollout.limits`. Name it as `rollmesh.services.rollout.agents.new_actions:NewActionsAgent`.
"""

from __future__ import annotations

from rollmesh.services.rollout.agent import LimitReached, Task
from rollmesh.services.rollout.agents.tool_calling import ToolCallingAgent, parse_call
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.domain.trajectory import FinishReason, Purpose

ROLE = "new_action"
"""Role of the samples that end with a second action."""


class NewActionsAgent(ToolCallingAgent):
    """Generate twice, continue with the first action, call and observe until the model answers."""

    async def run(self, task: Task, env: Environment) -> None:
        if env.purpose is not Purpose.TRAIN:
            await super().run(task, env)
            return
        acted = False
        try:
            while True:
                other = env.branch()  # it calls no tool, so it needs no tool session
                opening = env.opening
                turn = await env.generate()
                acted = True
                await other.generate()
                other.sample(role=ROLE)
                call = (
                    parse_call(opening + turn.text, env.format, task.tools)
                    if turn.finish is FinishReason.STOP
                    else None
                )
                if call is None:
                    return
                if not env.turns_left:
                    raise LimitReached("turns")
                env.observe(call.rejected or await env.tool(call.name, call.text))
        finally:
            if acted:
                env.sample()
