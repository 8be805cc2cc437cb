"""A stored expert trajectory as an environment: the model acts, and the observations are those that the expert saw.

UI-S1 (2025-09, arXiv:2509.11543; code: X-PLUG/MobileAgent, UI-S1/verl/utils/dataset/universal_multiround.py) simulates
online episodes on stored ones. The own turns of the model stay in the dialogue while they equal those of the expert.
At step t of T, with a_t the action in the turn of the model and e_t that of the expert:

    r_t = 1 if a_t = e_t;   `kind_reward` if the kinds are equal;   `parsed_reward` if there is an action;   0 otherwise
    a_t = e_t                       the stored observation follows, and step t + 1
    a_t != e_t, patches left        the dialogue goes back before the turn, and the turn of the expert is given in its place
    a_t != e_t otherwise            the episode ends

A given turn has the source DATASET and no loss. The turn that it replaces ends a sample, in which it is trained with
its reward. `patches` is the budget of an episode; -1 has no limit, and an evaluation has none. `thoughts` gives the
thought of the expert with its action. The rewards are `step` per turn (r_t), and for the episode `progress`, the share
of the steps before the first departure, and `solved`, whether there is none. In an evaluation they are the semi-online
metrics of the paper (SOP). The estimator is `ui_s1`.

    trajectory: [{"action": "<act>tap 3</act>", "thought": "...", "observation": "..."}, ...]

A task has its trajectory as the private extra that `trajectory` names; the prompt is what the expert saw first. An
evaluation has no private extras, so it reads the public extra of this name, or evaluates tasks of another agent. The
observations are texts. `grade` compares; override it for actions that are equal without equal texts. The scores 0.5 and
0.1 are those of the published code, whose reward also has 0.1 for a thought, 0.9 for the action, and an image match.
"""  # noqa: E501, W505

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from rollmesh.services.rollout.agent import Agent, Task
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.config.settings import Settings, Share
from rollmesh.shared.domain.extras import ExtraName
from rollmesh.shared.domain.trajectory import FinishReason, Purpose, Role, Source
from rollmesh.shared.errors import InvalidInput

STEP, PROGRESS, SOLVED = "step", "progress", "solved"
"""Names of the rewards."""
NO_LIMIT = -1
SEARCHED_CHARS_MAX = 4096
"""Characters at the end of a turn in which the action is found, so that no text takes long to search."""


class ExpertStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a stored trajectory."""

    action: str
    """The action as the model has to write it."""
    thought: str = ""
    """Text before the action."""
    observation: str = ""
    """What the expert saw after it."""


class ExpertReplayOptions(Settings):
    """Settings of the agent `expert_replay`."""

    trajectory: ExtraName = "trajectory"
    """Private extra of a task that is the list of its steps. Name its field in
    `data.source.options.private_extras`."""
    patches: Annotated[int, Meta(ge=NO_LIMIT)] = 2
    """Departures of an episode after which the turn of the expert is given. -1: all."""
    thoughts: bool = True
    """Whether a given turn has the thought of the expert."""
    pattern: str = r"(?s)<act>(?P<action>\s*(?P<kind>\w+).*?)</act>"
    """Regular expression that finds the action in the last 4,096 characters of a turn, its last match: the group
    `action`, and if there is one the group `kind`."""
    kind_reward: Share = 0.5
    """Reward of an action of the same kind that differs."""
    parsed_reward: Share = 0.1
    """Reward of an action of another kind."""

    def check_fields(self) -> None:
        try:
            groups = re.compile(self.pattern).groupindex
        except re.error as error:
            raise ValueError(f"`pattern` must be a regular expression, got {self.pattern!r}: {error}") from None
        if "action" not in groups:
            raise ValueError(f"`pattern` must have the group `action`, got {self.pattern!r}; write (?P<action>...)")


class ExpertReplayAgent(Agent):
    """Let the model act in the place of an expert, and restore the action of the expert after a departure."""

    Options: ClassVar[type[ExpertReplayOptions]] = ExpertReplayOptions

    def __init__(self, *, options: ExpertReplayOptions) -> None:
        self._options = options
        self._pattern = re.compile(options.pattern)

    @property
    def private_extras(self) -> tuple[str, ...]:
        """The trajectory."""
        return (self._options.trajectory,)

    async def run(self, task: Task, env: Environment) -> None:
        options = self._options
        steps = self.steps(task, env)
        patches = 0 if env.purpose is Purpose.EVAL else options.patches
        matched = departed = 0
        try:
            for number, expert in enumerate(steps):
                before = env.branch()
                turn = await env.generate()
                ended = turn.finish is FinishReason.STOP
                reward = self.grade(env.format.without_end(turn.text), expert) if ended else 0.0
                env.reward(STEP, reward, turn=-1)
                if reward >= 1.0:
                    matched += not departed
                elif number + 1 < len(steps) and (departed < patches or patches == NO_LIMIT):
                    departed += 1
                    env = before
                    said = expert.thought + expert.action if options.thoughts else expert.action
                    given = env.encode(said, end=True, markup=True)
                    env.append(given, role=Role.ACTION, source=Source.DATASET)
                else:
                    departed += 1
                    return
                if number + 1 < len(steps):
                    env.observe(expert.observation)
        finally:
            env.reward(PROGRESS, matched / len(steps), evidence=f"{departed} departures", episode=True)
            env.reward(SOLVED, float(matched == len(steps)), episode=True)

    def steps(self, task: Task, env: Environment) -> Sequence[ExpertStep]:
        """Return the steps of the trajectory of a task. Raise PermissionDenied in an evaluation without a public extra,
        and InvalidInput for a task without one, and for one that is not a list of steps."""
        name = self._options.trajectory
        stored = task.extras[name] if name in task.extras else env.private_extra(name)
        try:
            steps: list[ExpertStep] = msgspec.convert(stored, Annotated[list[ExpertStep], Meta(min_length=1)])
        except msgspec.ValidationError as error:
            raise InvalidInput(
                f"the extra `{name}` of the task {task.task_id} must be a list of steps with `action`, and optionally "
                f"`thought` and `observation`: {error}"
            ) from None
        return steps

    def grade(self, said: str, expert: ExpertStep) -> float:
        """Return the reward of a turn in [0, 1]; 1 if its action is that of the expert."""
        found, wanted = self._action(said), self._action(expert.action)
        if found is None:
            return 0.0
        if wanted is not None and found["action"].split() == wanted["action"].split():
            return 1.0
        kind = found.groupdict().get("kind")
        same = kind is not None and wanted is not None and kind == wanted.groupdict().get("kind")
        return self._options.kind_reward if same else self._options.parsed_reward

    def _action(self, text: str) -> re.Match[str] | None:
        found = list(self._pattern.finditer(text[-SEARCHED_CHARS_MAX:]))
        return found[-1] if found else None
