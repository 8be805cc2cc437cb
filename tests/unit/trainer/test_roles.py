"""The estimator that compares samples of the same role."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome, SampleSummary
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.estimators.base import UNDECIDED

from .builders import action, batch_of, group, member, prompt, training_sample

Played = Sequence[tuple[str, str, float]]
"""(episode, role, reward) of each sample."""


def played(name: str, samples: Played) -> GroupContext:
    return group(
        name,
        *(
            replace(member(f"{name}-{n}", {"r": value}, episode=f"{name}.{episode}"), summary=SampleSummary(role=role))
            for n, (episode, role, value) in enumerate(samples)
        ),
    )


def advantages(*groups: GroupContext, **options: object) -> tuple[list[float], dict[str, float]]:
    """Return the advantages of an update with one token per sample, and the metrics."""
    samples = [
        training_sample(one.sample_id, [prompt([1]), action([2], [-1.0])], of=each.group)
        for each in groups
        for one in each.members
    ]
    estimate = make_estimator(Extension("roles", options))(batch_of(samples, groups))
    return estimate.advantages.tolist(), dict(estimate.metrics)


SELF_PLAY: Played = [("a", "proposer", 0.5), ("a", "solver", 1.0), ("a", "solver", 0.0), ("b", "proposer", 1.0)]


@pytest.mark.row("S079")
def test_each_role_has_its_scope() -> None:
    """By hand: the proposers keep their rewards; the solvers of an episode are (1 - 1/2) / (1/2) and (0 - 1/2) / (1/2).
    A solver of another episode is not compared with them."""
    other: Played = [("c", "proposer", 0.0), ("c", "solver", 1.0), ("c", "solver", 1.0)]
    found, _ = advantages(
        played("g", SELF_PLAY), played("h", other), scope="none", scopes={"solver": "episode"}, epsilon=1e-9
    )
    assert found == pytest.approx([0.5, 1.0, -1.0, 1.0, 0.0, 0.0, 0.0])


@pytest.mark.row("S090")
def test_roles_of_a_game_are_normalized_apart_over_the_batch() -> None:
    """By hand: the attackers won 2 and 0, the defenders -2 and 0. A common mean of 0 would praise each attacker."""
    games = [played(name, [("a", "attacker", won), ("a", "defender", -won)]) for name, won in (("g", 2.0), ("h", 0.0))]
    found, metrics = advantages(*games, epsilon=1e-9)
    assert found == pytest.approx([1.0, -1.0, -1.0, 1.0])
    assert metrics == {"attacker_reward": 1.0, "defender_reward": -1.0}
    centered, _ = advantages(*games, std=False)
    assert centered == pytest.approx([1.0, -1.0, -1.0, 1.0])


def test_every_episode_counts_once_in_the_mean_of_its_role() -> None:
    samples: Played = [("a", "", 0.0), ("a", "", 0.0), ("b", "", 3.0)]
    found, _ = advantages(played("g", samples), scope="group", std=False)
    assert found == pytest.approx([-1.5, -1.5, 1.5])


def test_a_reward_that_only_one_role_has_does_not_change_the_other() -> None:
    game = played("g", [("a", "attacker", 1.0), ("a", "defender", 0.0)])
    first, second = game.members
    extra = member("x", {"faithful": 0.5}).rewards
    changed = replace(game, members=(replace(first, rewards=(*first.rewards, *extra)), second))
    assert advantages(changed, scope="none")[0] == pytest.approx([1.5, 0.0])


def test_what_a_finalizer_reads_is_undecided_for_roles_of_the_batch() -> None:
    estimator = make_estimator(Extension("roles", {"scopes": {"solver": "episode"}}))
    found = estimator.of_group(played("g", SELF_PLAY))
    assert [found[f"g-{n}"] for n in (0, 3)] == [UNDECIDED, UNDECIDED]
    assert np.isclose(found["g-1"], 1.0, rtol=1e-3)
    assert make_estimator(Extension("roles", {"scope": "group"})).group_size.least == 2
    assert not make_estimator("roles").of_group(played("g", []))


def test_a_sample_without_a_reward_is_dropped() -> None:
    broken = MemberOutcome(sample_id="g-0", rewards=(), end="ready")
    sample = training_sample("g-0", [prompt([1]), action([2], [-1.0])], of="g")
    estimate = make_estimator("roles")(batch_of([sample], [group("g", broken)]))
    assert dict(estimate.dropped) == {0: "UNSCORED"}
