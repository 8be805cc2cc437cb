"""The agent that grows a tree of branches: which steps fork, which branches are pruned, and what becomes a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollmesh.services.rollout.agents.tree_rollouts import TreeRolloutsAgent, TreeRolloutsOptions, compared
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig, ToolConfig
from rollmesh.services.rollout.rollout_tree import evenly, overlap
from rollmesh.shared.clients.sandbox import ExecOutcome, ExecResult
from rollmesh.shared.domain.trajectory import Episode, Purpose, Role, text_view
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2

FOUND = {"one": "id: a\nid: b", "two": "id: b\nid: a\na snippet", "three": "id: c", "four": "id: d"}
"""Query -> what the tool returns. The first two find the same documents."""


def mesh_of(turns: Sequence[str], **limits: Any) -> LocalMesh:
    """Return a mesh whose model says these turns, in the order in which they are generated."""
    said = iter(turns)
    tools = {"search": ToolConfig(profile="library", function="search")}
    config = RolloutConfig(tools=tools, limits=LimitsConfig(**limits))
    return LocalMesh(script=lambda _: f"{next(said)}<|end|>", functions={"search": FOUND.__getitem__}, config=config)


def call(query: str) -> str:
    return f"<tool_call>{query}</tool_call>"


async def run(mesh: LocalMesh, *, purpose: Any = Purpose.TRAIN, **options: Any) -> tuple[Any, Episode]:
    agent = TreeRolloutsAgent(options=TreeRolloutsOptions(**options))
    report = await mesh.runner(agent).run(lease(messages=["q"], tools=["search"], purpose=purpose))
    assert mesh.num_open == 0
    return report, mesh.samples.episodes[report.payload.sequence - 1]


def paths(episode: Episode) -> list[tuple[str, ...]]:
    """Return what the model said in each sample."""
    views = (text_view(episode.path_segments(sample)) for sample in episode.samples)
    return sorted(tuple(message.content for message in view if message.role == "assistant") for view in views)


@pytest.mark.row("S086")
async def test_a_tree_forks_at_calls_within_its_budget_and_prunes_branches_that_observe_the_same() -> None:
    """Four leaves, at most three branches of a step:

    level 1   the root has the share 4: `one`, `two`, which finds the same and is pruned, and the leaf x
    level 2   `one` has the share 3: `three`, the leaf y, `four`
    level 3   two leaves remain for two branches, which do not fork: the leaves z and w
    """
    mesh = mesh_of([call("one"), call("two"), "x", call("three"), "y", call("four"), "z", "w"])
    report, episode = await run(mesh, leaves=4, width=3)
    assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_COMPLETED
    one, three, four = call("one"), call("three"), call("four")
    assert paths(episode) == sorted([("x",), (one, "y"), (one, three, "z"), (one, four, "w")])
    actions = [segment for segment in episode.segments if segment.role is Role.ACTION]
    assert len(actions) == len(mesh.generator.asked) == 8, "a step that branches share is generated and stored once"


async def test_without_pruning_a_branch_that_observes_the_same_stays() -> None:
    mesh = mesh_of([call("one"), call("two"), "x", "y"])
    _, episode = await run(mesh, leaves=2, width=2, overlap_max=1.0)
    assert paths(episode) == [(call("one"), "x"), (call("two"), "y")]
    mesh = mesh_of([call("one"), call("two"), "x", "y"])
    _, episode = await run(mesh, leaves=2, width=2)
    assert paths(episode) == [(call("one"), "x"), (call("one"), "y")], (
        "the share of the pruned branch goes to the other"
    )


async def test_a_tree_that_ends_early_continues_at_its_root_until_it_has_its_leaves() -> None:
    mesh = mesh_of(["v", "w", "x", "y", "z"])
    _, episode = await run(mesh, leaves=5, width=2)
    assert paths(episode) == [("v",), ("w",), ("x",), ("y",), ("z",)]
    assert len({sample.leaf for sample in episode.samples}) == 5


async def test_the_call_of_the_last_step_is_not_executed() -> None:
    mesh = mesh_of([call("one"), call("three"), call("four"), call("one")])
    _, episode = await run(mesh, leaves=2, width=2, steps_max=2)
    assert paths(episode) == [(call("one"), call("four")), (call("three"), call("one"))]
    assert mesh.sandbox.calling.num_entered == 2


async def test_after_its_tokens_a_tree_only_continues() -> None:
    """The first two turns have more than 40 tokens, so that the second level does not fork, nor does the root again."""
    mesh = mesh_of([call("one"), call("three") + 40 * " ", "x", "y"])
    _, episode = await run(mesh, leaves=8, width=2, fork_tokens_max=40)
    assert paths(episode) == [(call("one"), "x"), (call("three") + 40 * " ", "y")]


async def test_a_limit_of_the_episode_ends_all_branches_and_they_are_samples_as_they_are() -> None:
    """The limit of four turns is reached at the second level, of whose four branches two get a turn."""
    mesh = mesh_of([call("one"), call("three"), call("four"), "x", "y"], turns_max=4)
    _, episode = await run(mesh, leaves=4, width=2)
    assert len(mesh.generator.asked) == 4
    assert paths(episode) == [(call("one"), call("four")), (call("one"), "x"), (call("three"),)]


async def test_an_evaluation_has_one_path() -> None:
    mesh = mesh_of([call("one"), "x"])
    _, episode = await run(mesh, purpose=Purpose.EVAL, leaves=4)
    assert paths(episode) == [(call("one"), "x")]


async def test_a_failed_sandbox_fails_the_episode_after_all_branches_have_stopped() -> None:
    mesh = mesh_of([call("one"), call("three")])
    mesh.sandbox.call = _fails  # type: ignore[method-assign]
    agent = TreeRolloutsAgent(options=TreeRolloutsOptions(leaves=2))
    report = await mesh.runner(agent).run(lease(messages=["q"], tools=["search"]))
    assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE
    assert mesh.num_open == 0


async def _fails(function: str, text: str) -> ExecResult:
    return ExecResult(outcome=ExecOutcome.INFRA_FAILURE, error="the jail was lost")


def test_observations_are_compared_by_their_items_or_else_by_words() -> None:
    options = TreeRolloutsOptions()
    assert compared(FOUND["one"], FOUND["two"], options.items) == ({"a", "b"}, {"a", "b"})
    assert overlap(*compared(FOUND["one"], "id: a\nid: c", options.items)) == pytest.approx(1 / 3)
    assert overlap(*compared(FOUND["one"], "no results", options.items)) == 0.0
    assert compared("12 apples", "12", options.items) == ({"12", "apples"}, {"12"})
    assert overlap(*compared("", "", options.items)) == 1.0
    assert compared("<d>1</d><d>2</d>", "3", r"<d>\d") == ({"<d>1", "<d>2"}, set())


def test_a_budget_is_divided_evenly() -> None:
    assert [evenly(7, 3), evenly(2, 2), evenly(5, 1)] == [[3, 2, 2], [1, 1], [5]]


@pytest.mark.parametrize(("items", "why"), [("(", "regular expression"), ("(a)(b)", "at most one group, got 2")])
def test_a_pattern_that_finds_no_items_is_rejected(items: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TreeRolloutsOptions(items=items)
