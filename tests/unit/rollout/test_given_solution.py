"""The agent that gives a solution in the first episode of a group, and how the given episode is trained."""

from __future__ import annotations

import pytest

from rollmesh.services.rollout.agent import load_agent
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Role, Source
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2, types_pb2

COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
SOLUTION = "<answer>3</answer>"


def mesh_with(solution: object = SOLUTION, **settings: object) -> LocalMesh:
    return LocalMesh(
        script=lambda text: "<answer>7</answer><|end|>",
        private_extras={"solution": solution},
        config=RolloutConfig(**settings),  # type: ignore[arg-type]
    )


async def sources(mesh: LocalMesh, **given: object) -> list[tuple[str, Source, bool]]:
    """Play one episode, and return its answers: text, source, and whether all of its tokens are trained."""
    report = await mesh.runner(load_agent(Extension("given_solution"))).run(lease(**given))  # type: ignore[arg-type]
    assert report.outcome == COMPLETED, report.failure
    return [
        (mesh.tokenizer.decode(s.token_ids), s.source, s.num_trainable == s.num_tokens)
        for s in mesh.samples.episodes[-1].segments
        if s.role is Role.ACTION
    ]


@pytest.mark.row("S033")
async def test_one_episode_of_a_group_is_the_solution_with_its_source_and_the_model_plays_the_others() -> None:
    mesh = mesh_with()
    group = [await sources(mesh, index=index, lease_id=str(index)) for index in range(3)]
    assert group == [
        [(f"{SOLUTION}<|end|>", Source.DATASET, True)],
        *[[("<answer>7</answer><|end|>", Source.POLICY, True)]] * 2,
    ]
    given, sampled, _ = mesh.samples.episodes
    assert (given.segments[-1].logprobs, sampled.segments[-1].logprobs is None) == (None, False)
    assert len(mesh.generator.asked) == 2, "the model generates nothing in the given episode"
    assert [item.samples[0].leaf for item in mesh.scorer.items] == [1, 1, 1], "scorers judge the given episode too"


async def test_nothing_is_given_in_evaluations_and_exports_and_without_a_solution() -> None:
    for purpose in (types_pb2.PURPOSE_EVAL, types_pb2.PURPOSE_EXPORT):
        ((_, source, _),) = await sources(mesh_with(), purpose=purpose)
        assert source is Source.POLICY
    for empty in ("", None):
        ((_, source, _),) = await sources(mesh_with(empty))
        assert source is Source.POLICY


async def test_a_solution_without_room_fails_the_attempt_and_names_the_limits() -> None:
    mesh = mesh_with("9" * 30, limits=LimitsConfig(context_tokens_max=24))
    report = await mesh.runner(load_agent(Extension("given_solution"))).run(lease())
    assert report.outcome != COMPLETED
    assert "the private extra `solution` of the task t must have at most" in report.failure.message
    assert "tokens, got 31; raise rollout.limits.tokens_max and context_tokens_max" in report.failure.message
    assert "999" not in str(report)
