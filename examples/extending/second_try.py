"""An agent: ask for a second answer, and train on both turns."""

import msgspec

from rollmesh.services.rollout.agent import Agent


class SecondTryOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request: str = "Check your answer and answer again."


class SecondTry(Agent):
    Options = SecondTryOptions

    def __init__(self, *, options):
        self.request = options.request

    async def run(self, task, env):
        await env.generate()
        env.observe(self.request)
        await env.generate()
