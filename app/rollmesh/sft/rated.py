"""Choose conversations among rated samples, as `rollmesh rollout --out` and `rollmesh show --out` write them.

A line has the conversation of a sample, its task and its rewards. Two ways to use them:

    difficulty  keep the right answers to tasks that are neither too easy nor too hard: long reasoning is learned from
                few of them (RedStar, arXiv:2501.11284)
    critique    train on the criticism of a judge, which is the evidence of its reward, of each solution to a problem
                (one-shot critique fine-tuning, arXiv:2506.03295): (problem, solution) -> critique

The thresholds of the first paper, and the prompt of the second, are not established; these are the project's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rollmesh.shared.config.settings import Settings, Share
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.trajectory import WHOLE_SAMPLE
from rollmesh.shared.errors import InvalidInput, field_error

CRITIQUE = "{problem}\n\nA solution:\n{solution}\n\nCriticize the solution: say whether it is right, and why."
"""Prompt of a critique."""


class RatedConfig(Settings):
    """How conversations are chosen among rated samples."""

    reward: str = ""
    """Name of the reward by which samples are chosen. Empty: all are."""
    reward_min: float = 1.0
    """Least value of the reward of a chosen sample."""
    share_min: Share = 0.0
    """Least share of the samples of a task with `reward_min`, for its samples to be chosen. With `share_max` it selects
    tasks by their difficulty."""
    share_max: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Greatest share of the samples of a task with `reward_min`."""
    critique: str = ""
    """Name of a reward whose evidence is a critique of the solution. The conversations are then problem and solution,
    and the critique as the trained answer. Empty: the conversations of the samples are trained."""

    def check_fields(self) -> None:
        if self.share_min > self.share_max:
            raise ValueError(f"`share_min` must be <= share_max = {self.share_max:g}, got {self.share_min:g}")
        if not self.reward and (self.share_min > 0 or self.share_max < 1):
            raise ValueError("`reward` must name the reward by which `share_min` and `share_max` are counted, got ''")


class _Reward(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a reward that is read here."""

    name: str
    value: float
    outcome: str = "ok"
    """The evidence of another one is its cause."""
    segment: int = WHOLE_SAMPLE
    evidence: str = ""


class _Rated(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a line that is read here."""

    task: str
    messages: list[dict[str, Any]]
    rewards: list[_Reward]


def chosen_lines(path: Path, config: RatedConfig) -> Iterator[tuple[int, bytes]]:
    """Yield number and text of each chosen line, as a conversation. Raises InvalidInput that names file, line and
    field, OSError, or InvalidInput if no line is chosen."""
    rated: list[tuple[int, bytes, _Rated, float | None]] = []
    right: defaultdict[str, list[bool]] = defaultdict(list)
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            one = msgspec.json.decode(line, type=_Rated)
        except UNDECODABLE as err:
            raise InvalidInput(
                f"{path}:{number}: not a rated sample: {err}; write the file with `rollmesh rollout --out`, or remove "
                "`rated` for plain conversations"
            ) from err
        value = _value(one, config.reward)
        rated.append((number, line, one, value))
        if value is not None:
            right[one.task].append(value >= config.reward_min)
    num_chosen = 0
    for number, line, one, value in rated:
        if config.reward:
            outcomes = right[one.task]
            if value is None or value < config.reward_min:
                continue
            if not config.share_min <= sum(outcomes) / len(outcomes) <= config.share_max:
                continue
        if config.critique:
            critique = _critique(one, config.critique)
            if not critique:
                continue
            line = msgspec.json.encode({"messages": _criticized(one.messages, critique, f"{path}:{number}")})
        num_chosen += 1
        yield number, line
    if not num_chosen:
        raise InvalidInput(
            f"{path}: none of {len(rated)} samples is chosen by `rated`: {msgspec.json.encode(config).decode()}; "
            "compare it with the rewards of the file, or widen it"
        )


def _value(one: _Rated, name: str) -> float | None:
    """Return the value of a reward of the whole sample; None without one that counts."""
    found = (reward for reward in one.rewards if reward.name == name and reward.segment == WHOLE_SAMPLE)
    return next((reward.value for reward in found if reward.outcome == "ok"), None)


def _critique(one: _Rated, name: str) -> str:
    found = (reward.evidence for reward in one.rewards if reward.name == name and reward.outcome == "ok")
    return next((text for text in found if text.strip()), "")


def _criticized(messages: Sequence[dict[str, Any]], critique: str, where: str) -> list[dict[str, str]]:
    problem = "\n\n".join(str(one.get("content", "")) for one in messages if one.get("role") in ("system", "user"))
    solution = "\n\n".join(str(one.get("content", "")) for one in messages if one.get("role") == "assistant")
    if not problem or not solution:
        must = "have a problem of the user and a solution of the assistant"
        raise field_error(f"{where}: messages", must, None)
    asked = CRITIQUE.format(problem=problem, solution=solution)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": critique}]
