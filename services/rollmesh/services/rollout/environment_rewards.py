"""Collect the rewards that the agent of an episode gives, and reject those that no scorer could use.

All errors are those of the agent and not of the model. Names and ranges are checked by the scorers, which declare them.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollmesh.services.rollout.recorder import Recorder
from rollmesh.shared.codec.checks import check_environment_reward
from rollmesh.shared.domain.environment_reward import ENVIRONMENT_REWARDS_MAX, EnvironmentReward
from rollmesh.shared.domain.text import count_of
from rollmesh.shared.domain.trajectory import ROOT, WHOLE_SAMPLE
from rollmesh.shared.errors import InvalidInput


class EnvironmentRewards:
    """The rewards of one episode, in the order in which they were given."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._rewards: list[EnvironmentReward] = []
        self._branches: dict[tuple[str, int], list[int]] = {}
        """The branches that have a value, by name and segment."""

    def __iter__(self) -> Iterator[EnvironmentReward]:
        return iter(self._rewards)

    def give(self, name: str, value: float, *, head: int, turn: int | None, evidence: str) -> None:
        """Add a reward of the branch that ends at the segment `head`, or of one of its turns. ROOT: of all branches."""
        reward = EnvironmentReward(
            name=_text("name", name),
            value=_number(name, value),
            segment=WHOLE_SAMPLE if turn is None else self._turn(name, head, turn),
            branch=self._branch(head),
            evidence=_text("evidence", evidence),
        )
        try:
            check_environment_reward(reward, "reward")
        except InvalidInput as err:
            raise ValueError(f"the reward {name[:100]!r} is not valid: {err.message}") from None
        if len(self._rewards) == ENVIRONMENT_REWARDS_MAX:
            raise ValueError(
                f"an episode must have at most {ENVIRONMENT_REWARDS_MAX} rewards of its environment, and {name!r} is "
                "one more; give the sum of several, or a reward of the whole sample"
            )
        branches = self._branches.setdefault((reward.name, reward.segment), [])
        if any(self._share_a_sample(reward.branch, other) for other in branches):
            what = "this branch" if turn is None else f"turn {turn} of this branch"
            raise ValueError(
                f"the reward {name!r} of {what} already has a value, and would get {value} too; give each name once "
                "per branch or turn, such as the sum, or use two names"
            )
        branches.append(reward.branch)
        self._rewards.append(reward)

    def _branch(self, head: int) -> int:
        """Return the last action, because a sample ends with it."""
        action = self._recorder.last_action(head)
        return head if action is None else action

    def _turn(self, name: str, head: int, turn: int) -> int:
        turns = self._recorder.turns(head)
        if isinstance(turn, bool) or not isinstance(turn, int) or not -len(turns) <= turn < len(turns):
            must = f"in [{-len(turns)}, {len(turns) - 1}]" if turns else "None"
            found = count_of(len(turns), "turn")
            raise ValueError(f"`turn` of the reward {name!r} must be {must}, got {turn!r}: this branch has {found}")
        return turns[turn]

    def _share_a_sample(self, first: int, second: int) -> bool:
        """Return whether a sample may contain both branches: one continues the other."""
        if ROOT in (first, second):
            return True
        earlier, later = sorted((first, second))
        return earlier in self._recorder.path(later)


def _text(what: str, text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"the {what} of a reward must be a text, got {text!r:.100}")
    return text


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"the value of the reward {name!r} must be a number, got {value!r:.100}") from None
