"""Items and group members for tests of the reward service."""

from __future__ import annotations

from rollmesh.services.reward.item import AnswerKey, ScoreItem, TaskView
from rollmesh.services.reward.scorer_run import ConfiguredScorer, run_scorer
from rollmesh.shared.domain.trajectory import EpisodeKey, MemberOutcome, Message, Outcome, Reward


def item(*said: str, answer: str | None = "42", num_tokens: int = 10) -> ScoreItem:
    """Return an item with these messages of the model, and a tool result after each."""
    messages = [Message(role="user", content="6*7")]
    for text in said:
        messages += [Message(role="assistant", content=text), Message(role="tool", content="<answer>tool</answer>")]
    return ScoreItem(
        key=EpisodeKey(run="r", task="t", group="g", episode="g.0"),
        task=TaskView(task_id="t"),
        answer_key=None if answer is None else AnswerKey(answers=(answer,)),
        messages=tuple(messages),
        sample_id="s",
        num_action_tokens=num_tokens,
    )


def member(sample_id: str, *values: float, outcome: Outcome = Outcome.OK) -> MemberOutcome:
    """Return a scored member with rewards a, b, ... of these values."""
    rewards = tuple(Reward(name=chr(ord("a") + i), value=value, outcome=outcome) for i, value in enumerate(values))
    return MemberOutcome(sample_id=sample_id, rewards=rewards, end="ready")


async def rewards_by(scorer: ConfiguredScorer, scored: ScoreItem) -> tuple[Reward, ...]:
    """Return the rewards of one sample by one scorer."""
    ((rewards, _),) = await run_scorer(scorer, [scored])
    return rewards
