"""FAPO: a right answer with a wrong step earns less than a clean one (2025-10, arXiv:2510.22543; code: yyDing1/FAPO).

    R = -1   wrong answer
         0   right answer, and the judge finds a wrong step (a flawed positive)
         1   right answer without one

With a baseline of the group, a flawed positive helps while most answers are wrong, and costs while most are clean. Only
right answers are judged. The reward `flawed` is 1 or 0 for them, so its mean is the share of flawed positives; give it
no weight. Deviations: the judge does not get the answer key, because the answer is right; a reply that is not as asked
is an infra failure, where the code counts it as clean.
"""

from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.services.reward.scorers.extract import AnswerOptions, Extractor
from rollmesh.shared.domain.trajectory import Outcome, Reward

QUESTION = """\
[Problem]
{task}

[Solution in steps; its answer is right]
{steps}

Review the solution step by step. Return JSON: {{"first_error": INDEX}}, the index of the earliest wrong step, or -1 if there is none."""  # noqa: E501


class FlawedPositivesOptions(AnswerOptions):
    endpoint: str = "judge"
    flawed: float = 0.0
    """Reward of a flawed positive."""


class FlawedPositives(Scorer):
    Options = FlawedPositivesOptions
    rewards = ("flawed",)

    def __init__(self, *, options):
        self.options, self.extractor = options, Extractor(options)

    def use_endpoints(self, endpoints):
        self.endpoints = endpoints

    async def score(self, item):
        if item.answer_key is None or not item.answer_key.answers:
            return not_applicable("the task has no answer key")
        answer = self.extractor.find(item)
        if answer not in item.answer_key.answers:
            not_judged = Reward(name="flawed", value=0.0, outcome=Outcome.NOT_APPLICABLE)
            return [Reward(name="", value=-1.0, answer=answer or ""), not_judged]
        steps = [step for step in item.response("episode").split("\n\n") if step.strip()]
        question = QUESTION.format(
            task=item.task.messages[-1].content, steps="\n".join(f"[{n}] {step}" for n, step in enumerate(steps))
        )
        said = await self.endpoints.ask(self.options.endpoint, question, json=True)
        first = int(said.value["first_error"])
        if not -1 <= first < len(steps):
            raise ValueError(f"the judge returned step {first} of {len(steps)} steps")
        value = 1.0 if first == -1 else self.options.flawed
        return [
            Reward(name="", value=value, evidence=f"first wrong step: {first}", answer=answer),
            Reward(name="flawed", value=float(first != -1)),
        ]
