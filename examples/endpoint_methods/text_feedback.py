"""RLTF-SD: learn to answer at once as well as after a critique (2026-02, arXiv:2602.02482).

    y0 ~ pi(. | x0),   c0 from the critic,   y1 ~ pi(. | x0, y0, c0)
    A_i = R(y1_i) - mean_j R(y0_j)
    loss = - A_i log pi(y1_i | x0)          without importance weights

The baseline is the mean of the first answers, so the second ones are trained as far as they are better than those. The
log-prob is that of the second answer directly after the task, without first answer and critique. There is no critique
in an evaluation, so it measures the first answer. If all answers are right, A is 0. Deviations: the first answers are
not trained, and neither is the model of critiques (RLTF-FM).
"""

import numpy as np

from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.services.reward.scorers.extract import AnswerOptions, compile_pattern
from rollmesh.services.rollout.agent import Agent
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.domain.trajectory import Purpose, Reward
from rollmesh.shared.store.jsonl import last_match
from rollmesh.trainer.estimators.base import GroupSize, episode_weights, turn_rewards, usable_rewards
from rollmesh.trainer.estimators.turns import TurnEstimator
from rollmesh.trainer.losses import LossTerm

QUESTION = "Task: {task}\nAnswer: {answer}\nWhat is wrong with this answer? Do not give the solution."


class CritiquedOptions(Settings):
    endpoint: str = "critic"


class Critiqued(Agent):
    """The agent: answers, reads a critique, and answers again."""

    Options = CritiquedOptions

    def __init__(self, *, options):
        self.endpoint = options.endpoint

    async def run(self, task, env):
        turn = await env.generate()
        if env.purpose is Purpose.EVAL:
            return
        answer = env.format.without_end(turn.text)
        critique = await env.ask(self.endpoint, QUESTION.format(task=task.messages[-1].content, answer=answer))
        env.observe(critique.text)
        await env.generate()


class AnswerOfTurn(Scorer):
    """The scorer: 1 for each turn whose answer is accepted, else 0."""

    Options = AnswerOptions

    def __init__(self, *, options):
        self.pattern = compile_pattern("pattern", options.pattern)

    async def score(self, item):
        if item.answer_key is None or not item.answer_key.answers:
            return not_applicable("the task has no answer key")
        rewards = []
        for turn in item.turns:
            answer = (last_match(self.pattern, turn.text) or "").strip()
            value = float(answer in item.answer_key.answers)
            rewards.append(Reward(name="", value=value, segment=turn.segment, answer=answer))
        return rewards


class FirstTurnBaseline(TurnEstimator):
    """The advantage: of the second turn against the mean reward of the first turns of the group; 0 for the first
    turn."""

    group_size = GroupSize(least=2)

    def of_turns(self, group):
        members = [m for m in group.members if usable_rewards(m) is not None and m.summary.turns]
        if not members:
            return {}
        rewards = [turn_rewards(member, self.weights) for member in members]
        baseline = episode_weights(members) @ np.array([of_member[0] for of_member in rewards])
        return {
            member.sample_id: np.concatenate([[0.0], of_member[1:] - baseline])
            for member, of_member in zip(members, rewards, strict=True)
        }


class FirstPromptGradient(LossTerm):
    """The loss term: the gradient of the log-prob of the answer after the task alone."""

    needs = ("first_prompt",)
    needs_behavior = False

    def __call__(self, inputs):
        logprobs = inputs["first_prompt"]
        loss = -(inputs["token_weight"] * inputs["advantages"] * logprobs).sum()
        return loss, {"first_prompt_logprob": logprobs.detach()}
