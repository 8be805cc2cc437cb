"""An agent: answer; if the tokens of the answer were uncertain, answer again from a given beginning, and keep the more
likely answer."""

import msgspec

from rollmesh.services.rollout.agent import Agent
from rollmesh.shared.domain.trajectory import Role


class CarefulOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    entropy_max: float = 1.0
    """Mean entropy of a certain answer, in nats."""
    beginning: str = "<answer>"
    """Beginning of the second answer."""


class Careful(Agent):
    Options = CarefulOptions

    def __init__(self, *, options):
        self.options = options

    async def run(self, task, env):
        other = await env.fork()
        first = await env.generate()
        if first.arrays["entropy"].mean() <= self.options.entropy_max:
            env.sample()
            return
        given = other.encode(self.options.beginning)
        other.append(given, role=Role.ACTION)  # not sampled, so it is not trained on
        second = await other.generate()
        # Both answers under the prompt alone, without the given beginning.
        scored = [await env.logprobs(turn.token_ids, under=task.messages) for turn in (first, second)]
        means = [answer.logprobs.mean() for answer in scored]
        kept = env if means[0] >= means[1] else other
        kept.sample()
