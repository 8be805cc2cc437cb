"""The agent that answers, reads a critique of its answer, and answers again, while training.

RLTF, reinforcement learning from text feedback (2026-02, arXiv:2602.02482, no public code):

    y0 ~ pi(. | x0),   c0 from the critic,   y1 ~ pi(. | x0, y0, c0)

The critic is an endpoint. Its critique is an observation, so it is not trained in this sample. With `feedback_weight`,
the critique is also a sample with the role `critique`: a conversation whose prompt asks for it, and the tokens of the
critique as a given answer of the source DATASET, which the loss term `imitation` trains (RLTF-FM):

    loss = - log pi(c0 | feedback prompt of x0 and y0)

The prompt is the one that the critic gets. In an evaluation there is no critique, and the first answer is measured. The
estimator is `first_turn_baseline`, the loss term `first_prompt`. The wording of the prompt is not established: option.
"""

from __future__ import annotations

import re
from typing import ClassVar

from rollmesh.services.rollout.agent import Agent, Task
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.config.settings import NonEmptyStr, NonNegativeFloat, Settings
from rollmesh.shared.domain.trajectory import FinishReason, Message, Purpose, Role, Source

CRITIQUE = "critique"
"""Role of the samples that are critiques."""
_PART = re.compile(r"\{(?:task|answer)\}")


class TextFeedbackOptions(Settings):
    """Settings of the agent `text_feedback`."""

    endpoint: NonEmptyStr = "critic"
    """The model of the table `endpoints` that writes critiques."""
    question: str = "Task: {task}\nAnswer: {answer}\nWhat is wrong with this answer? Do not give the solution."
    """The prompt of the critic; `{task}` is the last message of the task, `{answer}` the first answer."""
    feedback_weight: NonNegativeFloat = 1.0
    """Weight of a critique as a sample. 0 does not train critiques (RLTF-SD)."""

    def check_fields(self) -> None:
        if "{answer}" not in self.question:
            raise ValueError(f"`question` must contain {{answer}}, got {self.question!r}")


class TextFeedbackAgent(Agent):
    """Answer, read a critique, and answer again."""

    Options: ClassVar[type[TextFeedbackOptions]] = TextFeedbackOptions

    def __init__(self, *, options: TextFeedbackOptions) -> None:
        self._options = options

    async def run(self, task: Task, env: Environment) -> None:
        options = self._options
        turn = await env.generate()
        if env.purpose is not Purpose.TRAIN or turn.finish is not FinishReason.STOP:
            return
        answer = env.format.without_end(turn.text)
        parts = {"{task}": task.messages[-1].content, "{answer}": answer}
        question = _PART.sub(lambda found: parts[found[0]], options.question)
        critique = await env.ask(options.endpoint, question)
        feedback = env.branch()
        env.observe(critique.text)
        await env.generate()
        env.sample()
        if options.feedback_weight:
            feedback.context([Message(role="user", content=question)])
            tokens = feedback.encode(critique.text, end=True)
            feedback.append(tokens, role=Role.ACTION, source=Source.DATASET, train=True)
            feedback.sample(role=CRITIQUE, weight=options.feedback_weight)
