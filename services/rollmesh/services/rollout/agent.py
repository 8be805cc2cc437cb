"""The agent port. A user implements it to define how a model works on a task.

    class MyAgent(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            while True:
                turn = await env.generate()
                call = parse(turn.text)
                if call is None:
                    return
                result = await env.tool("calculator", call)
                env.observe(result)

The conversation of the task is already in the context when `run` begins. The environment records every token with its
log-prob, version and loss mask; an agent does not need to handle ids. The episode ends when `run` returns or reaches a
limit. `generate` raises a limit as `LimitReached`, which no agent needs to catch. Any other exception is a bug in the
agent: the episode is an infra failure with the traceback. It is retried and never scored 0.

An instance serves many episodes at once, so keep the state of an episode in local variables. Settings come from the
config's `options` as the class's own strict `Options` struct (msgspec), if it has one: `Agent(options=...)`; without
one, `Agent()`. A constructor with a parameter `base_dir` also gets the folder of the configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from rollmesh.services.rollout.agent_types import LimitReached, Task, ToolResult, Turn
from rollmesh.services.rollout.config import APPLICATION, RolloutConfig
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.clients.generated import ScoredTokens
from rollmesh.shared.config.plugin import Plugin, required
from rollmesh.shared.config.registry import Extension, Registry
from rollmesh.shared.config.user_code import takes_arguments
from rollmesh.shared.domain.extras import NAMES_MAX, is_extra_name
from rollmesh.shared.errors import ConfigError, NotFound, located_at

__all__ = [
    "AGENTS",
    "Agent",
    "Environment",
    "LimitReached",
    "ScoredTokens",
    "Task",
    "ToolResult",
    "Turn",
    "agent_of",
    "load_agent",
    "load_agents",
    "permitted_extras",
]


class Agent(Plugin):
    """Base of agents: work on tasks with an environment. Constructed as the module describes."""

    parses_calls: ClassVar[bool] = False
    """Whether it reads tool calls by the words of the chat format, as `tool_calling`."""
    runs_elsewhere: ClassVar[bool] = False
    """Whether a process works on the task that the worker does not contain, as `program`, `url` and `application`. It
    gets no private extras."""

    @property
    def private_extras(self) -> Sequence[str]:
        """Names of the private extras of tasks that it reads with `env.private_extra`. `rollout.private_extras` must
        permit them. A class may have a tuple of this name in place of the property."""
        return ()

    @property
    def environment_extras(self) -> Sequence[str]:
        """Names of those of `private_extras` that are a part of the environment and no solution, such as the report of
        a simulated patient. Evaluations have them, too. A class may have a tuple of this name in place of the
        property."""
        return ()

    @required
    async def run(self, task: Task, env: Environment) -> None:
        """Work on one task until it is finished."""


AGENTS = Registry(
    "agent",
    {
        "tool_calling": "rollmesh.services.rollout.agents.tool_calling:ToolCallingAgent",
        "single_turn": "rollmesh.services.rollout.agents.single_turn:SingleTurnAgent",
        "try_again": "rollmesh.services.rollout.agents.try_again:TryAgainAgent",
        "summarizing": "rollmesh.services.rollout.agents.summarizing:SummarizingAgent",
        "refined_search": "rollmesh.services.rollout.agents.refined_search:RefinedSearchAgent",
        "tree_rollouts": "rollmesh.services.rollout.agents.tree_rollouts:TreeRolloutsAgent",
        "program": "rollmesh.services.rollout.agents.program:ProgramAgent",
        "url": "rollmesh.services.rollout.agents.url:UrlAgent",
        APPLICATION: "rollmesh.services.rollout.agents.application:ApplicationAgent",
        "prefix": "rollmesh.services.rollout.agents.prefix:PrefixAgent",
        "given_solution": "rollmesh.services.rollout.agents.given_solution:GivenSolutionAgent",
        "expert_replay": "rollmesh.services.rollout.agents.expert_replay:ExpertReplayAgent",
        "cure": "rollmesh.services.rollout.agents.cure:CureAgent",
        "continuation": "rollmesh.services.rollout.agents.continuation:ContinuationAgent",
        "maze": "rollmesh.demo.families.maze:MazeAgent",
        "latr": "rollmesh.services.rollout.agents.latr:LatrAgent",
        "text_feedback": "rollmesh.services.rollout.agents.text_feedback:TextFeedbackAgent",
        "red_team": "rollmesh.services.rollout.agents.red_team:RedTeamAgent",
        "consultation": "rollmesh.services.rollout.agents.consultation:ConsultationAgent",
        "perspectives": "rollmesh.services.rollout.agents.perspectives:PerspectivesAgent",
        "two_futures": "rollmesh.services.rollout.agents.two_futures:TwoFuturesAgent",
        "router": "rollmesh.services.rollout.agents.router:RouterAgent",
        "search_self_play": "rollmesh.services.rollout.agents.search_self_play:SearchSelfPlayAgent",
    },
    Agent,
)


def load_agent(chosen: Extension, base_dir: str | Path | None = None) -> Agent:
    """Construct the chosen agent. Raise ConfigError."""
    takes = inspect.signature(AGENTS.find(chosen.name, base_dir)).parameters
    agent: Agent = AGENTS.make(chosen, base_dir, **({"base_dir": base_dir} if "base_dir" in takes else {}))
    if not inspect.iscoroutinefunction(agent.run) or not takes_arguments(agent.run, 2):
        raise ConfigError(
            f"agent `{chosen.name}` must have a method `async def run(self, task, env)`", name=chosen.name
        )
    return agent


def load_agents(config: RolloutConfig, base_dir: str | Path | None = None) -> dict[str, Agent]:
    """Construct every agent of a worker, by the name that a task gives. The empty name is that of the default agent,
    which is the same object as its entry of `rollout.agents` if it has one. Raise ConfigError with the key."""
    made: dict[str, Agent] = {}
    for name, chosen in config.agents.items():
        with located_at(f"rollout.agents.{name}"):
            made[name] = load_agent(chosen, base_dir)
    default = made.get(config.agent.name) or load_agent(config.agent, base_dir)
    for name, agent in {config.agent.name: default, **made}.items():
        permitted_extras(name, agent, config)
    return {"": default, **made}


def permitted_extras(name: str, agent: Agent, config: RolloutConfig) -> tuple[str, ...]:
    """Return the private extras that an agent declares. Raise ConfigError unless `rollout.private_extras` permits them
    all, and permits nothing to an agent that runs elsewhere. `name` is its entry of `rollout.agents`, or that of the
    default agent. An agent may declare others later, so each episode checks them."""
    declared, permitted = agent.private_extras, config.private_extras.get(name, ())
    key = f"rollout.private_extras.{name}"
    if not _are_names(declared):
        raise ConfigError(
            f"agent `{name}`: `private_extras` must be a tuple of at most {NAMES_MAX} names, got {declared!r}", key=key
        )
    if agent.runs_elsewhere and (permitted or declared):
        raise ConfigError(
            f"`{key}`: the agent `{name}` gets no private extras, because it runs in a process that the worker does "
            "not contain; remove the permission, or use a built-in agent or one of a file",
            key=key,
        )
    if missing := [extra for extra in declared if extra not in permitted]:
        raise ConfigError(
            f"agent `{name}` reads the private extra `{missing[0]}` of its tasks, which the configuration does not "
            f"permit; if it may, add `rollout: {{private_extras: {{{name}: [{', '.join(declared)}]}}}}`",
            key=key,
        )
    return tuple(declared)


def _are_names(names: object) -> bool:
    return (
        isinstance(names, (tuple, list))
        and len(names) <= NAMES_MAX
        and all(isinstance(name, str) and is_extra_name(name) for name in names)
    )


def agent_of(task: Task, agents: Mapping[str, Agent]) -> Agent:
    """Return the agent that a task names. Raise NotFound if the worker does not have it."""
    if task.agent not in agents:
        raise NotFound(f"agent `{task.agent}` of the task is not configured; {known_agents(agents)}")
    return agents[task.agent]


def known_agents(names: Iterable[str], place: str = "the task source") -> str:
    """Return the end of an error about an unknown agent: the names that exist, and what to do. `place` has the name."""
    known = ", ".join(name for name in names if name) or "none"
    return f"known: {known}; add it to rollout.agents, or correct the name in {place}"
