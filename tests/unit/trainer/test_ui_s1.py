"""UI-S1: two levels of advantages on expert trajectories, by hand."""

from __future__ import annotations

from collections.abc import Sequence

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
    Reward,
    Sample,
    SamplingParams,
    Segment,
    Source,
    TrainingSample,
)
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.estimators import Estimator, make_estimator

from .builders import action, batch_of, group, prompt


def estimator(**options: object) -> Estimator:
    return make_estimator(Extension("ui_s1", options), {"step": 1.0})


def given(parent: int) -> Segment:
    """Return a turn of the expert, which no policy sampled and no loss trains."""
    sampled = action([50, 51], [0.0] * 2, parent=parent)
    mask = np.zeros(2, np.uint8)
    return replace(
        sampled, source=Source.DATASET, logprobs=None, version=None, kv_step_oldest=None, sampling=-1, loss_mask=mask
    )


class Played:
    """An episode of `expert_replay` with these rewards of its steps. A reward below 1 is a departure: its turn ends a
    sample, and the turn of the expert continues the dialogue unless it is the last one."""

    def __init__(self, name: str, *rewards: float) -> None:
        segments: list[Segment] = [prompt([20, 21])]
        leaves: list[int] = []
        given_rewards: list[Reward] = []
        parent = 0
        for number, value in enumerate(rewards):
            segments.append(action([30 + number, 22], [-1.0] * 2, parent=parent))
            last = len(segments) - 1
            given_rewards.append(Reward(name="step", value=value, segment=last))
            if value < 1.0:
                leaves.append(last)
                segments.append(given(parent))
                last = len(segments) - 1
            if number + 1 < len(rewards):
                segments.append(replace(prompt([40 + number]), parent=last))
                parent = len(segments) - 1
            elif value >= 1.0:
                leaves.append(last)
        self.name = name
        self.rewards = given_rewards
        self.samples = tuple(Sample(sample_id=f"{name}/{n}", leaf=leaf) for n, leaf in enumerate(leaves))
        key = EpisodeKey(run="r", task="t", group="g", episode=name)
        self.episode = Episode(
            key=key, segments=tuple(segments), sampling_params=(SamplingParams(),), samples=self.samples
        )

    def members(self) -> list[MemberOutcome]:
        return [
            MemberOutcome(
                sample_id=sample.sample_id,
                rewards=tuple(r for r in self.rewards if r.segment in self.episode.path(sample.leaf)),
                end="ready",
                episode=self.name,
                summary=summary_of(self.episode, sample),
            )
            for sample in self.samples
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


def context(*played: Played) -> GroupContext:
    return group("g", *(m for one in played for m in one.members()))


def batch(*played: Played) -> UpdateBatch:
    return batch_of([s for one in played for s in one.leased()], [context(*played)])


def of_steps(made: Estimator, played: Sequence[Played]) -> dict[str, list[float]]:
    """Return sample id -> advantage of each of its turns, given ones included."""
    return {name: values.tolist() for name, values in made.of_turns(context(*played)).items()}  # type: ignore[attr-defined]


@pytest.mark.row("S123")
def test_the_two_levels_by_hand() -> None:
    """Rewards of three steps: all right, wrong at the second one, which a patch replaces, and wrong at the first.

    Returns with the discount 1/2, which a departure ends: 1.75, 1.5, 1; 1, 0.5, 1; 0.1, 1.5, 1. The sums of the
    episodes are 3, 2.5 and 2.1. Without division, the levels of the step are R_t minus its mean at the step.
    """
    played = [Played("a", 1.0, 1.0, 1.0), Played("b", 1.0, 0.5, 1.0), Played("c", 0.1, 1.0, 1.0)]
    steps = of_steps(estimator(episode_weight=0.0, scale_by_std=False), played)
    mean = [(1.75 + 1.0 + 0.1) / 3, (1.5 + 0.5 + 1.5) / 3, 1.0]
    assert steps["a/0"] == pytest.approx([1.75 - mean[0], 1.5 - mean[1], 0.0])
    assert steps["b/0"] == pytest.approx([1.0 - mean[0], 0.5 - mean[1]]), "the sample that ends with the departure"
    assert steps["b/1"] == pytest.approx([1.0 - mean[0], 0.0, 0.0]), "the given turn has no advantage"
    assert steps["c/0"] == pytest.approx([0.1 - mean[0]])
    assert steps["c/1"] == pytest.approx([0.0, 1.5 - mean[1], 0.0])
    whole = of_steps(estimator(step_weight=0.0, scale_by_std=False), played)
    center = (3 + 2.5 + 2.1) / 3
    assert whole["a/0"] == pytest.approx([3 - center] * 3)
    assert whole["b/1"] == pytest.approx([2.5 - center, 0.0, 2.5 - center])
    both = of_steps(estimator(episode_weight=2.0, step_weight=0.5, scale_by_std=False), played)
    for name, values in both.items():
        assert values == pytest.approx([2 * w + 0.5 * s for w, s in zip(whole[name], steps[name], strict=True)])


def test_levels_are_divided_by_their_deviations() -> None:
    """Sums 2 and 1.5, returns 1.5 and 1 of the first and 1 and 1/2 of the second step: each has the deviation 1/4."""
    found = of_steps(estimator(), [Played("a", 1.0, 1.0), Played("b", 1.0, 0.5)])
    assert found["a/0"] == pytest.approx([2.0, 2.0], rel=1e-4)
    assert found["b/0"] == pytest.approx([-2.0, -2.0], rel=1e-4)
    plain = of_steps(estimator(episode_weight=0.0, scale_by_std=False), [Played("a", 1.0, 1.0), Played("b", 1.0, 0.5)])
    assert plain["a/0"] == pytest.approx([0.25, 0.25])
    assert plain["b/0"] == pytest.approx([-0.25, -0.25]), "the reward of a departure is not a future of the step before"


def test_the_level_of_the_published_code_compares_the_rewards_of_all_steps() -> None:
    made = estimator(episode_level="step", step_weight=0.0, scale_by_std=False)
    found = of_steps(made, [Played("a", 1.0, 1.0), Played("b", 1.0, 0.2)])
    assert found["a/0"] == pytest.approx([0.2, 0.2])
    assert found["b/0"] == pytest.approx([0.2, -0.6])


@pytest.mark.row("S123")
def test_a_step_that_two_samples_share_counts_once_and_given_turns_are_not_trained() -> None:
    """The second step departs: its sample and the one after the patch share the first step."""
    played = [Played("a", 1.0, 1.0, 1.0), Played("b", 1.0, 0.5, 1.0)]
    made, of = estimator(scale_by_std=False), batch(*played)
    expected = of_steps(made, played)
    found = made(of)
    rows = dict(
        zip(
            [s.sample.sample_id for s in of.samples],
            np.split(found.advantages, np.cumsum(of.lengths)[:-1]),
            strict=True,
        )
    )
    assert rows["a/0"].tolist() == pytest.approx(np.repeat(expected["a/0"], 2).tolist())
    first, second = expected["b/0"]
    assert rows["b/0"].tolist() == pytest.approx([first / 2] * 2 + [second] * 2)
    assert rows["b/1"].tolist() == pytest.approx([first / 2] * 2 + [expected["b/1"][2]] * 2), "4 tokens, not 6"
    assert found.dropped == {}


def test_steps_that_one_episode_reached_and_equal_episodes_have_no_advantage() -> None:
    found = of_steps(estimator(), [Played("a", 1.0, 1.0), Played("b", 1.0, 1.0)])
    assert all(value == 0.0 for values in found.values() for value in values)
    alone = of_steps(estimator(episode_weight=0.0), [Played("a", 1.0, 1.0), Played("b", 0.5)])
    assert alone["a/0"][1] == 0.0
