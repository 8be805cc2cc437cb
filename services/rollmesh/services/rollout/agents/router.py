"""Let the model ask other models of different prices, by a tag in its text, until it answers.

Router-R1 (2025-06, arXiv:2506.09033; code: ulab-uiuc/Router-R1, `router_r1/llm_agent/generation.py`):

    <search>MODEL: question</search>          the model asks; generation stops behind the tag
    <information>answer</information>         is appended to its text, without loss, and it continues
    <answer>...</answer>                      ends the episode

MODEL is the name of an endpoint, in any case. Its price is metered and stored with the episode, where the scorer
`routing` reads it. A model that does not exist, and a question that is empty, get <information>None</information>, as
in the code, and cost nothing. A turn without a tag, or with another one after it, ends the episode, and is malformed:
the reward of the format is that of the scorer `format` (recipe `router_r1`). `models` describes the models by name,
such as by price, speed and strengths; the descriptions are written before the question.

Deviations: the code tells the model that its action was invalid and lets it try again. The questions of the code are
wrapped in a further prompt per model; here they are sent as they are.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec.structs import replace

from rollmesh.services.rollout.agent import Agent, LimitReached, Task
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.config.settings import NonEmptyStr, PositiveInt, Settings
from rollmesh.shared.domain.text import elements
from rollmesh.shared.domain.trajectory import Message, Role, Source

STOPS = ("</search>", "</answer>")
INFORMATION = "\n\n<information>{text}</information>\n\n"


class RouterOptions(Settings):
    """Settings of the agent `router`."""

    models: dict[NonEmptyStr, str] = {}
    """Name of an endpoint -> its description. Empty: all endpoints, without descriptions."""
    asks_max: PositiveInt = 4
    """Most questions of an episode."""
    answer_tokens: PositiveInt = 256
    """Token limit of an answer of another model."""


class RouterAgent(Agent):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = RouterOptions

    def __init__(self, *, options: RouterOptions) -> None:
        self._options = options

    async def run(self, task: Task, env: Environment) -> None:
        options = self._options
        known = {name.casefold(): name for name in options.models or env.endpoints}
        missing = sorted(set(known.values()).difference(env.endpoints))
        if missing:
            raise ValueError(
                f"`rollout.agent.options.models` names {', '.join(missing)}, which the table `endpoints` does not "
                f"have; known: {', '.join(env.endpoints) or 'none'}"
            )
        if options.models:
            *before, last = task.messages
            described = "\n".join(f"{name}: {text}" for name, text in options.models.items())
            env.context([*before, replace(last, content=f"Models:\n{described}\n\n{last.content}")])
        for _ in range(options.asks_max):
            turn = await env.generate(stop=(*env.format.turn_ends, *STOPS))
            if not turn.text.rstrip().endswith(STOPS[0]):
                return
            if not env.turns_left:
                raise LimitReached("turns")
            answer = await self._answer_of(env, turn.text, known)
            text = INFORMATION.format(text=answer)
            env.append(
                env.encode(text),
                role=Role.OBSERVATION,
                source=Source.TOOL,
                messages=[Message(role=env.format.tool_role, content=answer)],
            )
        await env.generate(stop=(*env.format.turn_ends, *STOPS))

    async def _answer_of(self, env: Environment, text: str, known: dict[str, str]) -> str:
        """Return the answer of the model that a turn asks."""
        name, _, question = (elements(text, "search") or [""])[-1].partition(":")
        name, question = name.strip().casefold(), question.strip()
        if name not in known or not question:
            return "None"
        said = await env.ask(known[name], question, max_tokens=self._options.answer_tokens)
        return said.text.strip() or "None"
