"""Advantage per step of a tree of rollouts (TreePS-RAG, 2026-01, arXiv:2601.06922, no public code; BranchGRPO, 2025-09,
arXiv:2509.06040; code: Fredreic1849/BranchGRPO).

An episode that forks is a tree: its samples are the paths to the leaves, and each leaf is scored on its own path. A
turn is a step, and turns of two samples of an episode are one step if they end in the same segment. The prompt is the
root, so that the trees of several episodes of a group are one tree. With R the rewards of the leaves and L(n) the
leaves below step n or at it,

    V(n) = mean of R over L(n)                                                        `fuse: leaves`
    V(n) = mean of V over the children of n                                           `children`
    V(n) = sum over the children c of softmax_c(sharpness * l_c) V(c)                 `probability`

    A(n) = V(n) - V(parent)                                                           `baseline: parent`
    A(n) = V(n) - V(root),   or the sum of both                                       `root`, `both`
    A(n) = (V(n) - mean of V at the depth of n) / (std of V at this depth + epsilon)  `depth`

l_c is the mean behavior log-prob of the tokens of step c. `scale_by_std` divides by the standard deviation: with
`depth` of V at the depth of the step, otherwise of R in the group.

Sources. TreePS-RAG: V is the mean outcome of the descendant leaves, and advantages of steps follow from V. Which
difference it takes, and its scale, is not established; configuration. `both` is the one of TreeRL (arXiv:2506.11902),
without its division by the square root of the leaves. BranchGRPO: its code fuses by `leaves` or by `probability` with
sharpness 1, subtracts and divides per depth within one tree, and trains each edge once with the value of its child. It
prunes gradients, not rollouts: by depth, in a window that moves towards the root (`prune_depths`), and by width
(`keep_leaves`: the best and the worst leaves).

Deviations. Samples share tokens, and the trainer trains the tokens of a shared step in each sample. `shared_steps: once`
divides the advantage of a step by the number of trained samples that contain it, so that a step counts once, as an edge
does. A run of turns without a fork is one step for `parent`, because V does not change inside it: its turns share the
difference from the step before the run. In an episode without a fork that is the reward minus the mean of the group.
Standard deviations are those of the population. The mean of a step counts leaves, not episodes. `keep_leaves` drops
whole samples, where the code drops only the part after the last fork. In the code the window of depths stops at the
last fork; here it stops at depth 0. A member without usable rewards is not a leaf.
"""  # noqa: E501, W505

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, Settings, Share
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import Estimate, centered
from rollmesh.trainer.estimators.turns import PerTurn, TurnEstimator, spread_turns

if TYPE_CHECKING:  # it imports torch
    from rollmesh.trainer.batch import UpdateBatch

PRUNED = "PRUNED"
"""Reason of a sample that `keep_leaves` leaves out."""
ROOT = 0
"""Number of the root among the steps of a tree."""


class TreeOptions(Settings):
    """Settings of the estimator `tree`."""

    fuse: Literal["leaves", "children", "probability"] = "leaves"
    """How the value of a step follows from those below it."""
    sharpness: NonNegativeFloat = 1.0
    """Factor of the log-probs in the weights of `fuse: probability`. 0 weighs all children equally."""
    baseline: Literal["parent", "root", "both", "depth"] = "parent"
    """What is subtracted from the value of a step."""
    scale_by_std: bool = False
    """Divide by the standard deviation of the values at the depth with `baseline: depth`, otherwise of the rewards in
    the group."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation."""
    shared_steps: Literal["once", "each"] = "once"
    """Whether a step that several samples share counts once, or in each of them."""
    keep_leaves: Share = 1.0
    """Share of the leaves of a group that are trained, half of them the best and half the worst, at least two."""
    prune_depths: tuple[NonNegativeInt, ...] = ()
    """Numbers of the turns, from 0, that are not trained."""
    prune_slide_updates: NonNegativeInt = 0
    """Updates after which `prune_depths` move one turn towards the root, until the first is turn 0. 0 never moves
    them."""


@dataclass(slots=True)
class Step:
    """One step of a tree."""

    parent: int
    depth: int
    """Number of its turn, from 0; -1 for the root."""
    logprob: float = 0.0
    """Mean behavior log-prob of its tokens."""
    children: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    """Rewards of the samples that end at it."""
    leaves: list[float] = field(default_factory=list)
    """Rewards of the samples that contain it."""
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Tree:
    """The steps of a group, and the path of each sample in it. A parent is before its children."""

    steps: tuple[Step, ...]
    paths: Mapping[str, tuple[int, ...]]
    """Sample id -> numbers of its steps, one per turn, without the root."""


class TreeAdvantage(TurnEstimator):
    """Compare the values of steps, which follow from the leaves below them."""

    Options: ClassVar[type[Settings]] = TreeOptions

    def __call__(self, batch: UpdateBatch) -> Estimate:
        options: TreeOptions = self.options
        trees = {group.group: self._tree(group) for group in batch.groups}
        pruned = {name for group in batch.groups for name in self._pruned(group)}
        paths = [trees[s.group].paths.get(s.sample.sample_id, ()) for s in batch.samples]
        trained = [() if s.sample.sample_id in pruned else path for s, path in zip(batch.samples, paths, strict=True)]
        uses = Counter((s.group, step) for s, path in zip(batch.samples, trained, strict=True) for step in path)
        values: dict[str, PerTurn] = {}
        of_steps = {name: self._advantages(tree) for name, tree in trees.items()}
        for sample, path in zip(batch.samples, paths, strict=True):
            if path:
                counts = [max(1, uses[sample.group, step]) for step in path]
                factors = 1.0 / np.array(counts) if options.shared_steps == "once" else np.ones(len(path))
                values[sample.sample.sample_id] = of_steps[sample.group][list(path)] * factors
        found = spread_turns(batch, values)
        dropped = {n: PRUNED for n, s in enumerate(batch.samples) if s.sample.sample_id in pruned and paths[n]}
        steps = [step for tree in trees.values() for step in tree.steps[1:]]
        metrics = {
            "steps": float(len(steps)),
            "shared_steps": float(sum(len(step.leaves) > 1 for step in steps)),
        }
        return replace(
            found, dropped={**found.dropped, **dropped}, token_mask=self._kept_tokens(batch), metrics=metrics
        )

    def of_turns(self, group: GroupContext) -> dict[str, PerTurn]:
        """Return sample id -> advantage per turn, for the members that have usable rewards."""
        tree = self._tree(group)
        of_steps = self._advantages(tree)
        return {name: of_steps[list(path)] for name, path in tree.paths.items()}

    def _tree(self, group: GroupContext) -> Tree:
        members, rewards = self.reward_sums(group)
        tree = tree_of(members, rewards - rewards[:1])  # equal rewards become exactly 0
        fuse(tree.steps, self.options.fuse, self.options.sharpness)
        return tree

    def _advantages(self, tree: Tree) -> NDArray[np.float64]:
        """Return the advantage of each step; 0 for the root."""
        options: TreeOptions = self.options
        values = np.array([step.value for step in tree.steps])
        if options.baseline == "depth":
            return at_depths(tree.steps, options.epsilon if options.scale_by_std else None)
        parents = values[[before_run(tree.steps, n) for n in range(len(values))]]
        baselines = {"parent": (parents,), "root": (values[ROOT],), "both": (parents, values[ROOT])}[options.baseline]
        found: NDArray[np.float64] = np.sum([values - one for one in baselines], axis=0)
        std = float(np.std(tree.steps[ROOT].leaves)) if tree.paths else 0.0
        return found / (std + options.epsilon) if options.scale_by_std else found

    def _pruned(self, group: GroupContext) -> Iterator[str]:
        """Yield the ids of the samples that `keep_leaves` leaves out."""
        members, rewards = self.reward_sums(group)
        num = len(members)
        kept = max(2, int(self.options.keep_leaves * num))
        best_first = np.argsort(-rewards, kind="stable").tolist()
        yield from (members[n].sample_id for n in best_first[kept // 2 : max(kept // 2, num - (kept - kept // 2))])

    def _kept_tokens(self, batch: UpdateBatch) -> NDArray[np.bool_] | None:
        """Return which tokens `prune_depths` leaves, [M]; None for all."""
        options: TreeOptions = self.options
        if not options.prune_depths:
            return None
        moved = (batch.update - 1) // options.prune_slide_updates if options.prune_slide_updates else 0
        depths = np.array(options.prune_depths) - min(moved, *options.prune_depths)
        kept: NDArray[np.bool_] = ~np.isin(batch["turn"], depths)
        return kept


def tree_of(members: Sequence[MemberOutcome], rewards: NDArray[np.float64]) -> Tree:
    """Return the tree of the members of a group, without values. A member without a summary is a separate step."""
    steps = [Step(ROOT, -1)]
    numbers: dict[tuple[str, int | str], int] = {}
    paths: dict[str, tuple[int, ...]] = {}
    for member, reward in zip(members, rewards.tolist(), strict=True):
        episode, path = member.episode or member.sample_id, [ROOT]
        turns: list[tuple[int | str, float]] = [(turn.segment, turn.mean_logprob) for turn in member.summary.turns]
        for key, logprob in turns or [(member.sample_id, 0.0)]:
            parent = path[-1]
            if (episode, key) not in numbers:
                numbers[episode, key] = len(steps)
                steps[parent].children.append(len(steps))
                steps.append(Step(parent, steps[parent].depth + 1, logprob))
            path.append(numbers[episode, key])
        steps[path[-1]].ends.append(reward)
        for number in path:
            steps[number].leaves.append(reward)
        paths[member.sample_id] = tuple(path[1:])
    return Tree(tuple(steps), paths)


def fuse(steps: Sequence[Step], how: Literal["leaves", "children", "probability"], sharpness: float) -> None:
    """Set the values of the steps, from the leaves to the root."""
    for step in reversed(steps):
        below = [steps[child] for child in step.children]
        values = [*(child.value for child in below), *step.ends]
        if how == "leaves" or not values:
            step.value = float(np.mean(step.leaves)) if step.leaves else 0.0
            continue
        logprobs = np.array([child.logprob for child in below])
        ends = [float(logprobs.mean()) if below else 0.0] * len(step.ends)  # a path that ends here has no log-prob
        exponents = (sharpness if how == "probability" else 0.0) * np.array([*logprobs, *ends])
        weights = np.exp(exponents - exponents.max())
        step.value = float(weights @ np.array(values) / weights.sum())


def before_run(steps: Sequence[Step], number: int) -> int:
    """Return the step before the run of steps without a fork that ends with this one."""
    step = steps[number]
    while step.parent != ROOT and len(steps[step.parent].leaves) == len(step.leaves):
        step = steps[step.parent]
    return step.parent


def at_depths(steps: Sequence[Step], epsilon: float | None) -> NDArray[np.float64]:
    """Return for each step its value minus the mean of those at its depth, divided by their standard deviation plus
    `epsilon` if it is given."""
    found = np.zeros(len(steps))
    at: dict[int, list[int]] = defaultdict(list)
    for number, step in enumerate(steps):
        at[step.depth].append(number)
    for numbers in at.values():
        values = np.array([steps[n].value for n in numbers])
        found[numbers] = centered(values, np.full(len(values), 1.0 / len(values)), epsilon)
    return found
