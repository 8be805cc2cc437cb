"""The tool-calling agent that grows a tree of branches per episode, for advantages of single steps (TreePS-RAG,
2026-01, arXiv:2601.06922, no public code; the estimator is `tree`).

A step is a turn and, if the turn ends with a tool call, its result. A step with a call may be continued by several
branches; any other turn is a leaf. `rollout_tree.py` describes how the tree grows under its budget. Of the branches of
one step, those that observe the same are pruned: branches are compared by the items of their observations, such as the
ids of the documents that a search has found, and otherwise by words:

    similar  if  |items of both| / |items of either| > overlap_max

Sources: the paper builds the tree online, with search steps that may branch and answers as leaves, and keeps it diverse
under a fixed budget; according to a summary it prunes branches by the similarity of what they have retrieved. The
measure and its limit, the width, and how the budget is divided are not established: options.

Each branch has separate tool sessions. The limits of the episode (`rollout.limits`) hold for all branches together, so
`turns_max` should be at least `leaves` times `steps_max`. In an evaluation, and in an export of samples, the agent is
`tool_calling`.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet
from typing import ClassVar

from rollmesh.services.rollout.agent import Task
from rollmesh.services.rollout.agents.tool_calling import ToolCallingAgent, parse_call
from rollmesh.services.rollout.environment import Environment
from rollmesh.services.rollout.rollout_tree import RolloutTree, TreeBranch, overlap
from rollmesh.shared.config.settings import NonNegativeInt, PositiveInt, Settings, Share
from rollmesh.shared.domain.trajectory import FinishReason, Purpose


class TreeRolloutsOptions(Settings):
    """Settings of the agent `tree_rollouts`."""

    leaves: PositiveInt = 8
    """Budget of the tree: number of its leaves, which are the samples of the episode."""
    width: PositiveInt = 3
    """Largest number of branches that continue one step."""
    steps_max: PositiveInt = 8
    """Largest number of turns of a path. The call of the last turn is not executed."""
    overlap_max: Share = 0.5
    """Largest overlap of the observations of two branches of one step that both stay. 1 prunes no branch."""
    items: str = r"(?m)^id: (.+)$"
    """Regular expression of the items of an observation; a group, if there is one, is the item. By default the ids of
    the results of the tool `search`. Observations of which neither has an item are compared by words."""
    fork_tokens_max: NonNegativeInt = 0
    """Number of sampled tokens of the tree from which on it does not fork. 0: no limit."""

    def check_fields(self) -> None:
        try:
            groups = re.compile(self.items).groups
        except re.error as error:
            raise ValueError(f"`items` must be a regular expression, got {self.items!r}: {error}") from error
        if groups > 1:
            raise ValueError(f"`items` must have at most one group, got {groups} in {self.items!r}")


class TreeRolloutsAgent(ToolCallingAgent):
    """Grow a tree of turns and tool calls."""

    Options: ClassVar[type[Settings]] = TreeRolloutsOptions

    def __init__(self, *, options: TreeRolloutsOptions) -> None:
        self._options = options

    async def run(self, task: Task, env: Environment) -> None:
        if env.purpose is not Purpose.TRAIN:
            await super().run(task, env)
        else:
            await _ToolTree(task, env, self._options).grow()


class _ToolTree(RolloutTree):
    """The tree of one episode."""

    def __init__(self, task: Task, root: Environment, options: TreeRolloutsOptions) -> None:
        super().__init__(root, leaves=options.leaves, width=options.width)
        self._task, self._options = task, options
        self._num_tokens = 0

    async def step(self, branch: TreeBranch) -> None:
        env = branch.env
        opening = env.opening
        turn = await env.generate()
        self._num_tokens += len(turn.token_ids)
        branch.depth += 1
        call = (
            parse_call(opening + turn.text, env.format, self._task.tools) if turn.finish is FinishReason.STOP else None
        )
        if call is None or branch.depth == self._options.steps_max:
            branch.finished = True
            return
        result = call.rejected or await env.tool(call.name, call.text)
        branch.text = env.shortened(result.text)
        env.observe(result)

    def similar(self, one: TreeBranch, other: TreeBranch) -> bool:
        return overlap(*compared(one.text, other.text, self._options.items)) > self._options.overlap_max

    def may_fork(self) -> bool:
        return not self._options.fork_tokens_max or self._num_tokens < self._options.fork_tokens_max


def compared(one: str, other: str, items: str) -> tuple[AbstractSet[str], AbstractSet[str]]:
    """Return what is compared of two observations: their items, or their words if neither has an item."""
    found = set(re.findall(items, one)), set(re.findall(items, other))
    return found if any(found) else (set(one.split()), set(other.split()))
