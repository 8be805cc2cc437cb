"""The agent that summarizes its work when the context is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from rollmesh.services.reward.config import RewardConfig, ScorerConfig, build_engine
from rollmesh.services.reward.item import AnswerKey, ScoreItem, TaskView, judged_path
from rollmesh.services.rollout.agents.summarizing import SummarizingAgent, SummarizingOptions
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.shared.codec.trajectory import decode_segment
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    Episode,
    EpisodeKey,
    FinishReason,
    GroupContext,
    MemberOutcome,
    Role,
    text_view,
)
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.trainer.estimators import make_estimator
from rollmesh.v1 import coordinator_pb2, reward_pb2, types_pb2

COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
INFRA_FAILURE = coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE
CONTEXT, TURN = 200, 40
OPTIONS = SummarizingOptions(
    context_tokens=CONTEXT, turn_tokens=TURN, summaries_max=2, request="Sum up.", heading="So:"
)


def works(text: str) -> str:
    """A model that calls a tool until it has seen four results; it counts them in its summaries."""
    num_seen = text.count("result") + sum(int(part[0]) for part in text.split("seen ")[1:])
    if text.endswith("Sum up.<|end|><|assistant|>"):
        return f"seen {num_seen}<|end|>"
    return "done<|end|>" if num_seen >= 4 else "<tool_call>next</tool_call><|end|>"


def mesh(script: Callable[[str], str] = works, result: str = "result " + "x" * 40, **limits: int) -> LocalMesh:
    config = RolloutConfig(limits=LimitsConfig(context_tokens_max=400, **limits))
    return LocalMesh(script=script, functions={"call": lambda text: result}, config=config)


async def finished(local: LocalMesh, options: SummarizingOptions = OPTIONS, **of_lease: Any) -> Episode:
    report = await local.runner(SummarizingAgent(options=options)).run(lease(["go"], tools=["calculator"], **of_lease))
    assert report.outcome == COMPLETED, report.failure
    (episode,) = local.samples.episodes
    return episode


async def test_a_long_result_takes_the_room_of_what_is_observed_of_it() -> None:
    long = mesh(result="result " + "x" * 5000, observation_chars_max=47)
    assert len((await finished(long)).samples) == len((await finished(mesh())).samples) > 1
    assert all(len(m.content) <= 200 for s in long.samples.episodes[0].segments for m in s.messages)


def items_of(request: reward_pb2.ScoreItem) -> list[ScoreItem]:
    """Return the samples of an episode as the reward service reads them."""
    segments = [decode_segment(segment) for segment in request.segments]
    made = []
    for sample in request.samples:
        path, messages = judged_path(segments, sample.leaf)
        made.append(
            ScoreItem(
                key=EpisodeKey(run="r", task="t", group="g", episode="e"),
                task=TaskView(task_id="t"),
                answer_key=AnswerKey(answers=("done",)),
                messages=messages,
                sample_id=sample.sample_id,
                leaf=sample.leaf,
                path=path,
            )
        )
    return made


@pytest.mark.row("S069")
async def test_an_episode_of_three_contexts_gives_three_samples_that_share_an_advantage() -> None:
    local = mesh()
    episode = await finished(local)
    views = [[message.content for message in text_view(episode.path_segments(sample))] for sample in episode.samples]
    assert len(views) == 3
    assert [view[-1] for view in views] == ["seen 2", "seen 3", "done"], "each context but the last ends with a summary"
    assert views[1][0] == "go\n\nSo:\nseen 2\n\nResult of your last call:\nresult " + "x" * 40
    # One reward for all three samples, from the answer in the last one.
    config = RewardConfig(
        scorers=(
            ScorerConfig(name="exact", reward="correct", options={"pattern": ""}),
            ScorerConfig(name="outcome", reward="episode"),
        ),
        weights={"episode": 1.0},
    )
    (request,) = local.scorer.items
    scored = await build_engine(config).score(items_of(request))
    values = [{reward.name: reward.value for reward in rewards} for rewards in scored]
    assert values == [{"correct": float(n == 2), "episode": 1.0} for n in range(3)]
    # One advantage: +1 against an episode that failed, whatever the number of contexts.
    members = [
        *(
            MemberOutcome(sample_id=f"a{n}", episode="a", rewards=rewards, end="ready")
            for n, rewards in enumerate(scored)
        ),
        MemberOutcome(
            sample_id="b0",
            episode="b",
            rewards=tuple(type(reward)(name=reward.name, value=0.0) for reward in scored[0]),
            end="ready",
        ),
    ]
    estimator = make_estimator(Extension("grpo", {}), config.weights)
    advantages = estimator.of_group(GroupContext(group="g", task="t", members=tuple(members)))
    assert advantages == pytest.approx({"a0": 1.0, "a1": 1.0, "a2": 1.0, "b0": -1.0}, rel=1e-3)


@pytest.mark.row("S069")
async def test_no_sample_is_longer_than_a_context_and_a_turn_and_summaries_are_trained() -> None:
    episode = await finished(mesh())
    for sample in episode.samples:
        path = episode.path_segments(sample)
        assert sum(segment.num_tokens for segment in path) <= CONTEXT + TURN
        assert path[-1].role is Role.ACTION
        assert path[-1].num_trainable == path[-1].num_tokens, "a summary is trained like an answer"


@pytest.mark.row("S069")
async def test_an_episode_ends_at_its_number_of_summaries() -> None:
    def never_done(text: str) -> str:
        return "seen 0<|end|>" if text.endswith("Sum up.<|end|><|assistant|>") else "<tool_call>next</tool_call><|end|>"

    episode = await finished(mesh(never_done))
    assert len(episode.samples) == 3, "two summaries, and the context after them"
    assert {sample.finish for sample in episode.samples} == {FinishReason.LENGTH}, "the recipe does not train them"


@pytest.mark.row("S069")
async def test_an_evaluation_may_have_more_summaries_than_training() -> None:
    """The episode needs two summaries."""
    options = replace(OPTIONS, summaries_max=1, eval_summaries_max=2)
    trained, evaluated = [
        await finished(mesh(), options, purpose=purpose)
        for purpose in (types_pb2.PURPOSE_TRAIN, types_pb2.PURPOSE_EVAL)
    ]
    assert [sample.finish for sample in trained.samples] == [FinishReason.LENGTH] * 2
    assert [sample.finish for sample in evaluated.samples] == [FinishReason.STOP] * 3
    as_trained = await finished(mesh(), replace(OPTIONS, summaries_max=1), purpose=types_pb2.PURPOSE_EVAL)
    assert len(as_trained.samples) == 2


async def test_a_prompt_without_room_is_an_error_that_names_the_option() -> None:
    small = SummarizingOptions(context_tokens=50, turn_tokens=TURN)
    report = await mesh().runner(SummarizingAgent(options=small)).run(lease(["go"], tools=["calculator"]))
    assert report.outcome == INFRA_FAILURE
    assert "`context_tokens` = 50 has no room for the prompt of task t" in report.failure.message
