"""Advantages of the steps of a tree of rollouts, against values by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollmesh.shared.codec.trajectory import summary_of
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    Episode,
    EpisodeKey,
    GroupContext,
    MemberOutcome,
    Outcome,
    Reward,
    Sample,
    SamplingParams,
    Segment,
    TrainingSample,
)
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.config import PackingConfig
from rollmesh.trainer.estimators import Estimator, make_estimator
from rollmesh.trainer.estimators.tree import fuse, tree_of
from rollmesh.trainer.packing import pack

from .builders import action, batch_of, group, member, prompt

Paths = dict[str, tuple[str, ...]]
"""Leaf -> the names of the steps from the root to it."""


def estimator(**options: Any) -> Estimator:
    return make_estimator(Extension("tree", options))


class Forked:
    """An episode whose samples are the leaves of a tree, named by letters: `ab` is a step after `a`.

    Each step has two tokens with the log-prob of `logprobs`, or -1. An observation precedes every step but the first.
    """

    def __init__(self, name: str, rewards: Mapping[str, float], logprobs: Mapping[str, float] | None = None) -> None:
        segments: list[Segment] = [prompt(range(20, 60))]
        at: dict[str, int] = {"": 0}
        for leaf in rewards:
            for length in range(1, len(leaf) + 1):
                step, parent = leaf[:length], at[leaf[: length - 1]]
                if step not in at:
                    if length > 1:
                        segments.append(replace(prompt([23 + len(segments)]), parent=parent))
                        parent = len(segments) - 1
                    at[step] = len(segments)
                    tokens = [ord(step[-1]), 22]
                    segments.append(action(tokens, [(logprobs or {}).get(step, -1.0)] * 2, parent=parent))
        self.name, self.segments, self.rewards = name, segments, rewards
        self.samples = tuple(Sample(sample_id=f"{name}/{leaf}", leaf=at[leaf]) for leaf in rewards)
        key = EpisodeKey(run="r", task="t", group="g", episode=name)
        self.episode = Episode(
            key=key, segments=tuple(segments), sampling_params=(SamplingParams(),), samples=self.samples
        )

    def members(self) -> list[MemberOutcome]:
        return [
            MemberOutcome(
                sample_id=sample.sample_id,
                rewards=(Reward(name="r", value=value),),
                end="ready",
                episode=self.name,
                summary=summary_of(self.episode, sample),
            )
            for sample, value in zip(self.samples, self.rewards.values(), strict=True)
        ]

    def leased(self) -> list[TrainingSample]:
        return [
            TrainingSample(
                sample=sample,
                segments=self.episode.path_segments(sample),
                indices=self.episode.path(sample.leaf),
                group="g",
                task="t",
                episode=self.name,
                staleness=0,
                sampling_params=self.episode.sampling_params,
            )
            for sample in self.samples
        ]


def batch(*trees: Forked, update: int = 1, without: Sequence[str] = ()) -> UpdateBatch:
    """Return the batch of one group of episodes, without the leases `without`."""
    context = group("g", *(m for tree in trees for m in tree.members()))
    leased = [s for tree in trees for s in tree.leased() if s.sample.sample_id not in without]
    return batch_of(leased, [context], update=update)


def per_step(made: Estimator, of: UpdateBatch) -> dict[str, list[float]]:
    """Return sample id -> the advantages of its steps."""
    found = made(of).advantages.reshape(-1, 2)
    assert (found[:, 0] == found[:, 1]).all(), "both tokens of a step have its advantage"
    parts = np.split(found[:, 0], np.cumsum(of.lengths // 2)[:-1])
    return {s.sample.sample_id: part.tolist() for s, part in zip(of.samples, parts, strict=True)}


TREE = {"ax": 1.0, "ay": 1.0, "bx": 1.0, "by": 0.0, "bz": 0.0, "cx": 0.0, "cy": 0.0}
"""Step a leads to successes, b to one of three, c to failures: V(a) = 1, V(b) = 1/3, V(c) = 0, V(root) = 3/7."""


@pytest.mark.row("S086")
def test_the_value_of_a_step_is_the_mean_of_its_leaves_and_its_advantage_is_relative_to_its_parent() -> None:
    tree = Forked("e", TREE)
    steps = tree_of(tree.members(), np.array(list(TREE.values()))).steps
    fuse(steps, "leaves", 1.0)
    first = [steps[n] for n in steps[0].children]
    assert [(len(step.leaves), step.value) for step in first] == [(2, 1.0), (3, pytest.approx(1 / 3)), (2, 0.0)]
    assert steps[0].value == pytest.approx(sum(len(step.leaves) * step.value for step in first) / 7)
    found = per_step(estimator(baseline="parent", shared_steps="each"), batch(tree))
    assert found["e/ax"] == pytest.approx([1 - 3 / 7, 0.0], abs=1e-6)
    assert found["e/bx"] == pytest.approx([1 / 3 - 3 / 7, 1 - 1 / 3])
    assert found["e/by"] == pytest.approx([1 / 3 - 3 / 7, -1 / 3])
    assert found["e/cx"] == pytest.approx([-3 / 7, 0.0])
    assert found["e/bx"][0] < 0 < found["e/bx"][1], "a step after which most fail is negative inside a path of success"
    # a shared step is stored once: 1 prompt, 3 first steps, 7 observations and 7 leaves, where the paths have 4 each
    assert len(tree.episode.segments) == 18 < sum(len(s.segments) for s in tree.leased()) == 28
    # and it counts once: its tokens in all samples have its advantage together
    once = per_step(estimator(baseline="parent"), batch(tree))
    assert sum(once[f"e/b{leaf}"][0] for leaf in "xyz") == pytest.approx(1 / 3 - 3 / 7)
    assert once["e/bx"][1] == pytest.approx(1 - 1 / 3)


@pytest.mark.row("S125")
def test_values_are_fused_upward_and_normalized_per_depth() -> None:
    # softmax over the mean log-probs: ax has the weight 1/4 and ay 3/4, so that V(a) = 1/4; b has one child: V(b) = 1
    tree = Forked("e", {"ax": 1.0, "ay": 0.0, "bz": 1.0}, {"ax": -1.0, "ay": -1.0 + math.log(3.0)})
    of = batch(tree)
    made = estimator(fuse="probability", baseline="depth", scale_by_std=True, shared_steps="each")
    found = per_step(made, of)
    # depth 0: 1/4 and 1, mean 0.625, deviation 0.375; depth 1: 1, 0, 1, mean 2/3, deviation sqrt(2) / 3
    assert found["e/ax"] == pytest.approx([-1.0, 0.5**0.5], rel=1e-4)
    assert found["e/ay"] == pytest.approx([-1.0, -(2.0**0.5)], rel=1e-4)
    assert found["e/bz"] == pytest.approx([1.0, 0.5**0.5], rel=1e-4)
    centered = per_step(estimator(fuse="probability", baseline="depth", shared_steps="each"), of)
    assert centered["e/ax"] == pytest.approx([0.25 - 0.625, 1 / 3])
    # without weights, V(a) is 1/2
    plain = per_step(estimator(fuse="leaves", baseline="depth", shared_steps="each"), of)
    assert plain["e/ax"] == pytest.approx([-0.25, 1 / 3])
    # the prompt of 40 tokens, the two tokens of a, and one observation and two tokens per sample of a; b is separate
    packing = PackingConfig(row_tokens=128, micro_batch_tokens=256, shared_row_tokens=128)
    shared = of.table.sequences[:2]
    assert [s.num_tokens for s in pack(shared, packing)] == [40 + 2 + 2 * 3]
    assert sum(len(s.token_ids) for s in shared) == 2 * 45


@pytest.mark.parametrize(
    ("fuse", "sharpness", "value"), [("leaves", 1.0, 0.6), ("children", 1.0, 0.75), ("probability", 0.0, 0.75)]
)
def test_a_step_is_the_mean_of_its_leaves_or_of_its_children(fuse: str, sharpness: float, value: float) -> None:
    # V(a) = 1 of one leaf, V(b) = 1/2 of four leaves
    tree = Forked("e", {"ax": 1.0, "bw": 1.0, "bx": 1.0, "by": 0.0, "bz": 0.0})
    found = per_step(estimator(fuse=fuse, sharpness=sharpness, baseline="root"), batch(tree))
    assert found["e/ax"] == pytest.approx([1 - value, 1 - value])


def test_turns_between_forks_are_one_step_and_an_episode_without_forks_has_the_advantage_of_its_group() -> None:
    # e: a, then b, then a fork; f and g do not fork. V(root) = (1 + 0 + 1 + 0) / 4
    trees = Forked("e", {"abx": 1.0, "aby": 0.0}), Forked("f", {"abc": 1.0}), Forked("g", {"a": 0.0})
    found = per_step(estimator(shared_steps="each"), batch(*trees))
    assert found["e/abx"] == [0.0, 0.0, 0.5]
    assert found["f/abc"] == [0.5, 0.5, 0.5]
    assert found["g/a"] == [-0.5]
    both = per_step(estimator(shared_steps="each", baseline="both"), batch(*trees))
    assert both["e/abx"] == [0.0, 0.0, 1.0]
    assert both["f/abc"] == [1.0, 1.0, 1.0]
    scaled = per_step(estimator(shared_steps="each", scale_by_std=True), batch(*trees))
    assert scaled["f/abc"] == pytest.approx([1.0, 1.0, 1.0], rel=1e-5)


def test_a_sample_that_ends_inside_the_path_of_another_is_a_leaf_of_that_step() -> None:
    tree = Forked("e", {"a": 0.0, "ab": 1.0, "c": 1.0})
    found = per_step(estimator(shared_steps="each"), batch(tree))
    # V(a) = 1/2, V(root) = 2/3
    assert found == {
        "e/a": pytest.approx([-1 / 6]),
        "e/ab": pytest.approx([-1 / 6, 0.5]),
        "e/c": pytest.approx([1 / 3]),
    }
    by_children = per_step(estimator(fuse="probability", baseline="root", shared_steps="each"), batch(tree))
    assert by_children["e/ab"] == pytest.approx([0.5 - 0.75, 1 - 0.75])


def test_members_that_are_not_leased_are_leaves_and_a_shared_step_counts_once_among_the_others() -> None:
    of = batch(Forked("e", TREE), without=["e/by", "e/ax"])
    found = per_step(estimator(), of)
    assert found["e/ay"] == pytest.approx([4 / 7, 0.0], abs=1e-6)
    assert found["e/bx"] == pytest.approx([(1 / 3 - 3 / 7) / 2, 2 / 3])


def test_a_failure_of_the_infrastructure_is_not_a_leaf() -> None:
    tree = Forked("e", {"ax": 1.0, "ay": 0.0, "b": 1.0})
    members = tree.members()
    members[1] = replace(members[1], rewards=(Reward(name="r", value=0.0, outcome=Outcome.INFRA_FAILURE),))
    of = batch_of(tree.leased(), [group("g", *members)])
    made = estimator()
    assert made(of).dropped == {1: "UNSCORED"}
    assert per_step(made, of) == {"e/ax": [0.0, 0.0], "e/ay": [0.0, 0.0], "e/b": [0.0]}, "both others have reward 1"
    assert set(made.of_group(of.groups[0])) == {"e/ax", "e/b"}
    assert made.of_group(GroupContext(group="g", task="t", members=())) == {}


@pytest.mark.parametrize("options", [{}, {"baseline": "depth", "scale_by_std": True}, {"fuse": "probability"}])
def test_equal_rewards_and_a_single_leaf_have_no_gradient(options: dict[str, Any]) -> None:
    made = estimator(**options)
    for rewards in ({"ax": 0.1, "ay": 0.1, "b": 0.1}, {"ab": 0.7}):
        tree = Forked("e", rewards, {"ax": -0.3})
        assert set(made.of_group(group("g", *tree.members())).values()) == {0.0}


def test_members_without_a_summary_are_steps_of_their_own() -> None:
    tree = Forked("e", {"ax": 1.0, "ay": 0.0})
    context = group(
        "g", *(member(s.sample_id, {"r": r}, episode="e") for s, r in zip(tree.samples, (1, 0), strict=True))
    )
    found = per_step(estimator(), batch_of(tree.leased(), [context]))
    assert found == {"e/ax": [0.5, 0.5], "e/ay": [-0.5, -0.5]}


def test_pruning_by_width_keeps_the_best_and_the_worst_leaves() -> None:
    tree = Forked("e", {"ax": 1.0, "ay": 0.5, "bx": 0.4, "by": 0.0})
    of = batch(tree)
    found = estimator(keep_leaves=0.5)(of)
    assert found.dropped == {1: "PRUNED", 2: "PRUNED"}
    # V(a) = 0.75 and V(root) = 0.475 still count all leaves; step a counts once in the sample that is left
    assert per_step(estimator(keep_leaves=0.5), of)["e/ax"] == pytest.approx([0.75 - 0.475, 0.25])
    assert estimator()(of).dropped == {}
    assert estimator(keep_leaves=0.0)(batch(Forked("e", {"a": 1.0}))).dropped == {}


def test_pruning_by_depth_masks_turns_in_a_window_that_moves_to_the_root() -> None:
    tree = Forked("e", {"abcd": 1.0, "abce": 0.0})
    made = estimator(prune_depths=[2, 3], prune_slide_updates=10)
    for update, pruned in ((1, {2, 3}), (10, {2, 3}), (11, {1, 2}), (20, {1, 2}), (21, {0, 1}), (99, {0, 1})):
        of = batch(tree, update=update)
        mask = made(of).token_mask
        assert mask is not None
        assert set(of["turn"][~mask].tolist()) == pruned
    assert estimator()(batch(tree)).token_mask is None


def test_metrics_count_the_steps() -> None:
    assert estimator()(batch(Forked("e", TREE))).metrics == {"steps": 10.0, "shared_steps": 3.0}
