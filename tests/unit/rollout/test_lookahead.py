"""The agent `latr`: where its tree forks, what it prunes, and how many different answers it finds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollmesh.services.rollout.agent import load_agent
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.services.rollout.sequence_match import suffix_match
from rollmesh.shared.common_subsequence import rouge_l
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome, Reward, SampleSummary, TurnSummary
from rollmesh.shared.errors import ConfigError
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.recipe import find_recipe, read_recipe
from rollmesh.v1 import coordinator_pb2, types_pb2

from .table_policy import END, Table, TableGenerator, answers, table_mesh

CONFIG = RolloutConfig(outputs=("top_k",), num_top=2, limits=LimitsConfig(turns_max=40))


async def grown(
    table: Table, *, seed: int = 0, step: int = 0, config: RolloutConfig = CONFIG, **options: Any
) -> tuple[LocalMesh, TableGenerator]:
    """Run one episode."""
    mesh, generator = table_mesh(table, step, config=config)
    report = await mesh.runner(load_agent(Extension("latr", options))).run(lease(seed=seed))
    assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_COMPLETED, report.failure
    assert not any(stream.is_open for stream in generator.streams)
    return mesh, generator


def chances(*second: float) -> Table:
    """A policy with two tokens per position: the capital letter has this probability."""

    def table(answer: str) -> Mapping[str, float]:
        if len(answer) == len(second):
            return {END: 1.0}
        small, p = "abcdefghijklmnop"[len(answer)], second[len(answer)]
        return {small: 1.0 - p, small.upper(): p} if p else {small: 1.0}

    return table


@pytest.mark.parametrize(
    ("one", "other", "suffix", "rouge"),
    [
        ("abcd", "abcd", 1.0, 1.0),
        ("abcd", "wxyz", 0.0, 0.0),
        ("xbcd", "ybcd", 0.75, 0.75),
        ("abxy", "xyab", 0.5, 0.5),  # the suffix xy of the first is at the begin of the second
        ("acbd", "abcd", 0.25, 0.75),
        ("cdab", "abcx", 0.5, 0.5),
    ],
)
def test_matches_by_hand(one: str, other: str, suffix: float, rouge: float) -> None:
    tokens = list(map(ord, one)), list(map(ord, other))
    assert suffix_match(*tokens) == suffix_match(*tokens[::-1]) == suffix
    assert rouge_l(*tokens) == rouge_l(*tokens[::-1]) == rouge


@pytest.mark.parametrize(("p_second", "forks"), [(0.4, True), (0.38, True), (0.37, False), (0.15, False)], ids=str)
async def test_a_fork_needs_a_likely_second_token_and_a_small_gap(p_second: float, forks: bool) -> None:
    """The gap of two tokens is 1 - 2 p: above 0.25 for p = 0.37."""
    mesh, generator = await grown(chances(0.0, p_second, 0.0), samples=2)
    root, other = answers(mesh)
    assert generator.streams[1].answer == (f"a{'B' if root[1] == 'b' else 'b'}" if forks else "")
    assert not forks or root[1] != other[1]


async def test_a_third_token_forks_by_the_threshold_of_the_second() -> None:
    """p = 0.2, 0.14, ...: the gap is small, and the second token is unlikely."""

    def table(answer: str) -> Mapping[str, float]:
        return {END: 1.0} if answer else {"a": 0.2, **dict.fromkeys("bcdefgh", 0.8 / 7)}

    _, generator = await grown(table, samples=4)
    assert {stream.answer for stream in generator.streams} == {""}
    _, generator = await grown(table, samples=2, second_min=0.1)
    assert generator.streams[1].answer in ("a", "b")


@pytest.mark.row("S083")
async def test_a_group_of_eight_has_more_distinct_answers_than_independent_sampling() -> None:
    """The tree forks at the three letters whose second token has probability 0.4, and not at the one with 0.3."""
    table = chances(0.0, 0.4, 0.4, 0.0, 0.3, 0.4)
    tree, independent = [], []
    for seed in range(12):
        mesh, _ = await grown(table, seed=seed, suffix_max=1.0, rouge_max=1.0)
        found = answers(mesh)
        assert len(found) == 8
        tree.append(len(set(found)))
        mesh, _ = await grown(table, seed=seed, mix=[[0, 0.0]])
        independent.append(len(set(answers(mesh))))
    assert min(tree) >= max(independent) - 1
    assert np.mean(tree) > np.mean(independent) + 1.0, (tree, independent)


@pytest.mark.row("S083")
async def test_branches_continue_the_tokens_of_their_parent_and_those_are_trained_once() -> None:
    mesh, generator = await grown(chances(0.0, 0.45, 0.0, 0.0), samples=2)
    (episode,) = mesh.samples.episodes
    root, branch = episode.samples
    _, given, sampled = episode.path_segments(branch)
    assert (given.num_tokens, given.num_trainable, given.logprobs) == (2, 0, None)
    assert sampled.num_trainable == sampled.num_tokens == 3
    (_, whole) = episode.path_segments(root)
    assert whole.num_trainable == whole.num_tokens == 5
    assert generator.streams[1].answer[0] == answers(mesh)[0][0], "the engine gets the tokens that it has in its cache"


@pytest.mark.row("S083")
async def test_a_branch_that_continues_as_its_parent_is_cancelled_after_the_lookahead() -> None:
    """After the second letter both branches say the same."""
    letters = (0.0, 0.45, *[0.0] * 10)
    mesh, generator = await grown(chances(*letters), samples=3, lookahead=[4], rouge_max=1.0, suffix_max=0.7)
    pruned = [stream for stream in generator.streams if stream.answer]
    assert pruned
    for stream in pruned:
        assert 3 <= stream.num_read <= 5 < len(stream.pieces), "of the four tokens one was given"
    assert len(answers(mesh)) == 3, "ordinary answers take their places"
    assert len(mesh.samples.episodes[0].samples) == 3
    kept, _ = await grown(chances(*letters), samples=2, lookahead=[4], rouge_max=1.0, suffix_max=0.8)
    assert len(set(answers(kept))) == 2, "the limit is above the match of 0.75"


async def test_descendants_of_a_pruned_branch_are_pruned() -> None:
    """A capital letter at position 2 changes all that follows; one at position 1 changes nothing."""

    def table(answer: str) -> Mapping[str, float]:
        if len(answer) == 12:
            return {END: 1.0}
        if len(answer) in (1, 2):
            return {"bc"[len(answer) - 1]: 0.55, "BC"[len(answer) - 1]: 0.45}
        return {"123456789012"[len(answer)] if "C" in answer else "abcdefghijkl"[len(answer)]: 1.0}

    cases = 0
    for seed in range(12):
        mesh, generator = await grown(table, seed=seed, samples=8, lookahead=[6], suffix_max=1.0)
        given = {stream.answer: stream for stream in generator.streams if stream.answer}
        root = answers(mesh)[0]
        if root.startswith("abcd") and "aBC" in given and given["aB"].pieces[0].token_ids.tolist() == [ord("c")]:
            cases += 1
            (episode,) = mesh.samples.episodes
            begins = [mesh.tokenizer.decode(episode.path_segments(s)[1].token_ids) for s in episode.samples]
            assert not {"aB", "aBC"} & set(begins), "neither is a sample"
            assert given["aBC"].num_read < len(given["aBC"].pieces)
    assert cases


async def test_sequences_that_end_within_the_lookahead_are_not_compared() -> None:
    mesh, _ = await grown(chances(0.0, 0.45, 0.0), samples=2, lookahead=[3])
    assert len(set(answers(mesh))) == 2


@pytest.mark.row("S083")
@pytest.mark.parametrize(("step", "tree"), [(0, 8), (99, 8), (100, 6), (200, 4), (350, 2)])
async def test_the_share_of_the_tree_falls_with_the_updates_of_the_weights(step: int, tree: int) -> None:
    mesh, generator = await grown(chances(*[0.45] * 6), step=step, suffix_max=1.0, rouge_max=1.0)
    assert len(mesh.samples.episodes[0].samples) == 8
    assert len([stream for stream in generator.streams if not stream.answer]) == 1 + 8 - tree


def test_a_tree_is_a_group_of_grpo() -> None:
    """The settings of the recipe: the advantages of the samples of one episode."""
    values = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    members = [
        MemberOutcome(
            sample_id=str(n),
            end="ready",
            episode="e",
            rewards=(Reward(name="r", value=value),),
            summary=SampleSummary(turns=(TurnSummary(segment=n + 1, num_tokens=5, mean_logprob=-0.5),)),
        )
        for n, value in enumerate(values)
    ]
    _, recipe = read_recipe(find_recipe("latr"))
    chosen = recipe["learner"]["estimator"]
    estimator = make_estimator(Extension(chosen["name"], chosen["options"]))
    assert estimator.group_size.allows(recipe["run"]["group_size"])
    found = estimator.of_turns(GroupContext(group="g", task="t", members=tuple(members)))  # type: ignore[attr-defined]
    expected = (values - 0.25) / (np.sqrt(0.25 * 0.75) + 1e-6)
    assert [found[str(n)].tolist() for n in range(8)] == [pytest.approx([one]) for one in expected]


async def test_the_tree_does_not_fork_late_and_turns_are_left_for_all_samples() -> None:
    _, generator = await grown(chances(0.0, 0.45, 0.45), fork_tokens_max=2, samples=4, rouge_max=1.0, suffix_max=1.0)
    assert {len(stream.answer) for stream in generator.streams} == {0, 2}


@pytest.mark.parametrize("limits", [{"tokens_max": 34}, {"segments_max": 6}, {"context_tokens_max": 30}], ids=str)
async def test_a_limit_ends_the_tree_and_not_the_attempt(limits: dict[str, int]) -> None:
    config = replace(CONFIG, limits=LimitsConfig(turns_max=40, **limits))
    for seed in range(4):
        mesh, generator = await grown(chances(*[0.45] * 16), seed=seed, config=config, suffix_max=1.0, rouge_max=1.0)
        (episode,) = mesh.samples.episodes
        assert episode.samples
        assert all(stream.pieces for stream in generator.streams), "no branch begins without room"


async def test_evaluations_and_missing_outputs() -> None:
    mesh, _ = table_mesh(chances(0.45, 0.45), config=CONFIG)
    await mesh.runner(load_agent(Extension("latr"))).run(lease(purpose=types_pb2.PURPOSE_EVAL))
    assert len(mesh.samples.episodes[0].samples) == 1
    report = await LocalMesh(script=lambda text: "abc").runner(load_agent(Extension("latr"))).run(lease())
    assert "add it to rollout.outputs" in report.failure.message
    with pytest.raises(ConfigError, match="`mix` must have increasing numbers of updates"):
        load_agent(Extension("latr", {"mix": [[5, 1.0]]}))
