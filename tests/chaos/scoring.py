"""Rewards and verdicts of a chaos round: an agent that asks for its reward and gives one, a scorer that compares both,
and a finalizer that drops a member."""

from __future__ import annotations

from rollmesh.services.reward.finalizer import Finalizer, FinalizerDecision, Group, Verdict
from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer
from rollmesh.services.rollout.agent import Environment, Task
from rollmesh.services.rollout.agents.tool_calling import ToolCallingAgent

DROPPED = "EVERY_EIGHTH"
"""Reason of the dropped members."""
DROPPER = "tests.chaos.scoring:DropsLast"
"""The finalizer that drops them."""


class AsksForReward(ToolCallingAgent):
    """Calls tools until it answers, asks whether the answer is right, and gives the verdict as a reward."""

    async def run(self, task: Task, env: Environment) -> None:
        asked = 0.0
        try:
            await super().run(task, env)
            asked = (await env.score("correct"))["correct"] or 0.0
        finally:
            env.reward("asked", asked)


class Compared(Scorer):
    """The mean of the reward at the end and of the one that the agent asked for before. They differ only if a limit
    ended the episode before the agent asked."""

    reads = ("correct", "asked")

    async def score(self, item: ScoreItem) -> float:
        correct, asked = item.reward("correct"), item.reward("asked")
        assert correct is not None
        assert asked is not None
        if asked > correct:
            raise ValueError(f"the agent got {asked}, and the scorer now gives {correct}")
        return (correct + asked) / 2


class DropsLast(Finalizer):
    """Drops the member with the greatest id of each group of at least eight."""

    def decide(self, group: Group) -> Verdict:
        last = max(member.sample_id for member in group.members)
        dropped = {last: DROPPED} if len(group.members) >= 8 else {}
        return Verdict(decision=FinalizerDecision.KEEP, dropped=dropped)
