"""Grow the branches of an episode to a tree under a budget of leaves, without branches that are similar.

A level extends every live branch by one step:

    share    = the leaves that remain, divided evenly among the live branches
    children = min(width, share) continuations of a branch, which are extended at the same time
    pruned   = a child that is similar to an earlier child of its branch, unless it has finished

A finished child is a leaf. A branch with a share of 1 continues without a fork, so that the tree never has more leaves
than the budget. The share of a pruned child goes to the branches that stay. If all branches have finished before the
budget is used up, the tree continues at its root. Leaves become samples of the episode by default, also those that a
limit cut; pruned branches do not, because nothing is known of their outcome.

A subclass defines the step and what is similar. It may also define `children`, to fork elsewhere than at the end of a
branch, such as at uncertain tokens of its last turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from rollmesh.services.rollout.agent_types import LimitReached
from rollmesh.services.rollout.environment import Environment


@dataclass(slots=True)
class TreeBranch:
    """The end of a path of the tree, and what its last step has added."""

    env: Environment
    depth: int = 0
    """Number of its steps."""
    text: str = ""
    """What its last step has added, for the comparison with other branches."""
    finished: bool = False
    """Whether it is a leaf."""


class RolloutTree:
    """A tree that grows from the end of `root`, which itself is not extended."""

    def __init__(self, root: Environment, *, leaves: int, width: int) -> None:
        self.num_leaves = 0
        self.num_pruned = 0
        self._root = TreeBranch(root)
        self._leaves = leaves
        self._width = width

    async def step(self, branch: TreeBranch) -> None:
        """Extend a branch, and set its `text`, or `finished`."""
        raise NotImplementedError

    def similar(self, one: TreeBranch, other: TreeBranch) -> bool:
        """Return whether one of two branches is enough."""
        return False

    def may_fork(self) -> bool:
        """Return whether the tree still forks. Otherwise its live branches continue to their ends."""
        return True

    async def children(self, branch: TreeBranch, num: int) -> list[TreeBranch]:
        """Return `num` branches that continue `branch`. They have not been extended."""
        if num == 1 and branch is not self._root:
            return [branch]
        return [TreeBranch(await branch.env.fork(), branch.depth) for _ in range(num)]

    async def grow(self) -> None:
        """Grow until the tree has its leaves. Raises `LimitReached`, and infra failures."""
        live: list[TreeBranch] = []
        while self.num_leaves < self._leaves and (live or self.may_fork()):
            live = await self._level(live or [self._root])

    async def _level(self, live: list[TreeBranch]) -> list[TreeBranch]:
        """Extend each branch; return the branches that are live then."""
        forks = self.may_fork()
        shares = evenly(self._leaves - self.num_leaves, len(live))
        widths = [min(self._width, share) if forks else 1 for share in shares]
        families = [await self.children(branch, num) for branch, num in zip(live, widths, strict=True)]
        await together(self.step(child) for family in families for child in family)
        stay: list[TreeBranch] = []
        for branch, family in zip(live, families, strict=True):
            kept: list[TreeBranch] = []
            for child in family:
                if child.finished:
                    self.num_leaves += 1
                elif any(self.similar(child, other) for other in kept):
                    self.num_pruned += 1
                    child.env.abandon(branch.env)
                else:
                    kept.append(child)
            stay += kept
        return stay


def evenly(total: int, parts: int) -> list[int]:
    """Return `parts` numbers with the sum `total` that differ by at most 1, the larger ones first."""
    least, more = divmod(total, parts)
    return [least + (number < more) for number in range(parts)]


def overlap(one: AbstractSet[str], other: AbstractSet[str]) -> float:
    """Return the share of the items of two sets that both have (Jaccard); 1 for two empty sets."""
    return len(one & other) / len(one | other) if one or other else 1.0


async def together(steps: Iterable[Awaitable[None]]) -> None:
    """Wait for all steps. Then raise the first error, an infra failure before a limit."""
    found = await asyncio.gather(*steps, return_exceptions=True)
    errors = [error for error in found if error is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, LimitReached)), errors[0])
