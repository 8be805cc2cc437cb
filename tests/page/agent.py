"""An agent of two turns, with an observation between them that contains markup."""

from __future__ import annotations

from rollmesh.services.rollout.agent import Agent, Environment, Task


class MarkupTurns(Agent):
    """Generates, observes a text with markup, and generates again."""

    async def run(self, task: Task, env: Environment) -> None:
        await env.generate()
        env.observe("<b>observed</b><script>window.owned = 3</script>")
        await env.generate()
