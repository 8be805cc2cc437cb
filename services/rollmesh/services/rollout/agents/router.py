"""The agent that routes questions to other models, by tags in its answer.

Router-R1 (2025-06, arXiv:2506.09033; code: ulab-uiuc/Router-R1): the policy thinks, asks named models of different
price, and aggregates what they return.

    ... <search>NAME: QUESTION</search>                 the policy writes it; generation stops here
    <information>TEXT</information>                     the answer of the endpoint NAME, given, without loss
    ... <answer>...</answer>                            ends the episode

The models are endpoints of the configuration, so that each call is metered and priced with the episode. With
`descriptions`, the conversation begins with `intro` and one line per model, such as its price and strengths, before the
last message of the task. A call of an unknown model, without a colon or beyond `calls_max` gets an error in its place.
An evaluation routes as training does. The reward, which reads the price of the calls, is not a part of the agent.

Deviations: the wording of the prompt is an option; answers are cut by `rollout.limits.observation_chars_max`, where the
code counts tokens. The code ends an episode with malformed tags after a message; here the error is the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rollmesh.services.rollout.agent import Agent, Task
from rollmesh.services.rollout.environment import Environment
from rollmesh.services.rollout.tools import shorten
from rollmesh.shared.config.settings import NonEmptyStr, PositiveInt, Settings
from rollmesh.shared.domain.trajectory import FinishReason, Message, Role, Source

INTRO = (
    "Answer the question. Reason inside <think>...</think>. To ask a model, write <search>NAME: QUESTION</search>; "
    "what it returns follows inside <information>...</information>. Ask as often as you need, and prefer cheap models. "
    "Give the answer inside <answer>...</answer>. The models:"
)


class RouterOptions(Settings):
    """Settings of the agent `router`."""

    descriptions: Mapping[str, str] = {}
    """Endpoint -> what the policy reads about it. Empty: all endpoints, and the prompt is that of the task."""
    intro: str = INTRO
    """Text before the descriptions."""
    open: NonEmptyStr = "<search>"
    """Begins a call."""
    close: NonEmptyStr = "</search>"
    """Ends a call."""
    result: str = "\n\n<information>{text}</information>\n\n"
    """What is appended after a call."""
    calls_max: PositiveInt = 4
    """Calls of an episode."""
    observation_chars_max: PositiveInt = 2000
    """Maximum length of the answer of a model, characters. The middle of a longer one is replaced by a mark."""

    def check_fields(self) -> None:
        if self.result.count("{text}") != 1:
            raise ValueError(f"`result` must contain {{text}} exactly once, got {self.result!r}")


class RouterAgent(Agent):
    """Generate up to a call, ask the model that it names, and continue after its answer."""

    Options: ClassVar[type[RouterOptions]] = RouterOptions

    def __init__(self, *, options: RouterOptions) -> None:
        self._options = options

    async def run(self, task: Task, env: Environment) -> None:
        options = self._options
        names = tuple(options.descriptions) or env.endpoints
        if options.descriptions:
            models = "\n".join(f"{name}: {text}" for name, text in options.descriptions.items())
            *before, last = task.messages
            prompt = Message(role=last.role, content=f"{options.intro}\n{models}\n\n{last.content}")
            env.context([*before, prompt])
        calls = 0
        while True:
            turn = await env.generate(stop=[options.close, *env.format.turn_ends])
            said, closed, _ = turn.text.rpartition(options.close)
            if turn.finish is not FinishReason.STOP or not closed:
                return
            calls += 1
            text = await self._result(said.rpartition(options.open)[2], env, names, calls)
            given = env.encode(options.result.replace("{text}", shorten(text, options.observation_chars_max)))
            env.append(given, role=Role.OBSERVATION, source=Source.TOOL)

    async def _result(self, call: str, env: Environment, names: tuple[str, ...], calls: int) -> str:
        """Return what a model answers to a call, or an error for the policy."""
        name, colon, question = (part.strip() for part in call.partition(":"))
        if calls > self._options.calls_max:
            return f"error: at most {self._options.calls_max} calls; give the answer"
        if not colon or not question:
            return "error: a call must be NAME: QUESTION"
        if name not in names:
            return f"error: there is no model {name!r}; models: {', '.join(names)}"
        return (await env.ask(name, question)).text
