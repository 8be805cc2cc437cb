"""A worker takes submitted episodes as given: it encodes text, computes log-probs of PEER tokens, and keeps
token ids as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollmesh.app.shared_rollouts import decoded
from rollmesh.services.rollout.agents.given import content_tags
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.shared.codec.arrays import encode_floats, encode_ints, encode_mask
from rollmesh.shared.domain.trajectory import Episode, Role, Segment, Source
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2, types_pb2

PB = types_pb2
COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
PEER, DATASET = PB.SEGMENT_SOURCE_PEER, PB.SEGMENT_SOURCE_DATASET
ACTION, OBSERVATION, CONTEXT = PB.SEGMENT_ROLE_ACTION, PB.SEGMENT_ROLE_OBSERVATION, PB.SEGMENT_ROLE_CONTEXT


def text_segment(index: int, text: str, source: Any = PEER, **fields: Any) -> types_pb2.Segment:
    role = OBSERVATION if index % 2 else ACTION
    source = PB.SEGMENT_SOURCE_TOOL if index % 2 else source
    return PB.Segment(parent=index - 1, role=role, source=source, messages=[PB.Message(content=text)], **fields)


def token_segment(index: int, ids: list[int], **fields: Any) -> types_pb2.Segment:
    return PB.Segment(parent=index - 1, token_ids=encode_ints(np.array(ids, dtype=np.int32)), sampling=-1, **fields)


async def taken(
    *segments: types_pb2.Segment, source: Any = PEER, config: RolloutConfig | None = None
) -> tuple[LocalMesh, coordinator_pb2.EpisodeReport, Episode]:
    mesh = LocalMesh(script=lambda text: "never", config=config or RolloutConfig())
    given = lease()
    given.given.segments.extend(segments)
    given.given_source = source
    report = await mesh.runner().run(given)
    assert report.outcome == COMPLETED, report.failure
    assert mesh.generator.asked == [], "no token is sampled"
    return mesh, report, mesh.samples.episodes[-1]


def text_of(mesh: LocalMesh, segment: Segment) -> str:
    return mesh.tokenizer.decode(segment.token_ids)


async def test_the_text_of_a_peer_is_encoded_and_scored_by_this_model() -> None:
    mesh, report, episode = await taken(
        text_segment(0, "call 1+2"), text_segment(1, "3"), text_segment(2, "it is 3 <|end|>")
    )
    prompt, call, result, answer = episode.segments
    form = mesh.tokenizer.format
    assert prompt.source is Source.PROMPT
    assert [(s.role, s.source) for s in (call, result, answer)] == [
        (Role.ACTION, Source.PEER), (Role.OBSERVATION, Source.TOOL), (Role.ACTION, Source.PEER),
    ]  # fmt: skip
    assert text_of(mesh, call) == f"call 1+2{form.turn_end}"
    assert text_of(mesh, result) == form.observation.replace("{text}", "3")
    assert text_of(mesh, answer) == f"it is 3 <|end|>{form.turn_end}", "a special token of a text is plain text"
    end = mesh.tokenizer.token_id(form.turn_end)
    assert list(answer.token_ids).count(end) == 1
    for segment in (call, answer):
        assert segment.logprobs is not None
        assert segment.loss_mask is not None
        assert segment.logprobs.shape == segment.loss_mask.shape == segment.token_ids.shape
        assert segment.loss_mask.all()
        assert (segment.logprobs == -0.5).all()
    assert result.loss_mask is None
    assert len(mesh.generator.scored) == 1, "one request for the whole episode"
    (meta,) = report.samples
    num = call.num_tokens + answer.num_tokens
    assert [(span.source, span.num_tokens) for span in meta.external] == [(PEER, num)]
    assert (meta.num_sampled_tokens, list(meta.steps)) == (0, [])
    assert [one.content for one in mesh.scorer.items[0].segments[1].messages] == ["call 1+2"]


async def test_a_given_solution_is_trained_without_log_probs() -> None:
    mesh, report, episode = await taken(text_segment(0, "3", DATASET), source=DATASET)
    assert mesh.generator.scored == []
    assert episode.segments[-1].logprobs is None
    assert episode.segments[-1].num_trainable == episode.segments[-1].num_tokens
    assert [span.source for span in report.samples[0].external] == [DATASET]


async def test_tags_of_content_are_single_tokens_and_tags_of_turns_are_text() -> None:
    mesh, _, episode = await taken(text_segment(0, "<tool_call>3</tool_call><|end|><|user|>"))
    tokens = episode.segments[-1].token_ids.tolist()
    ids = [mesh.tokenizer.token_id(tag) for tag in ("<tool_call>", "</tool_call>", "<|end|>", "<|user|>")]
    assert [tokens.count(number) for number in ids if number is not None] == [1, 1, 1, 0], "one <|end|> ends the turn"
    assert (tokens[0], tokens[-1]) == (ids[0], ids[2])


async def test_a_shared_rollout_has_the_same_tokens_again_under_the_same_tokenizer() -> None:
    def script(text: str) -> str:
        return "<tool_call>1+2</tool_call><|end|>" if "<|tool|>" not in text else "so <answer>3</answer><|end|>"

    mesh = LocalMesh(script=script, functions={"call": lambda text: "3"})
    report = await mesh.runner().run(lease(tools=("calculator",)))
    assert report.outcome == COMPLETED, report.failure
    rolled = mesh.samples.episodes[-1]
    shared = decoded(rolled, num_prompt=1)
    assert shared is not None
    given = lease(tools=("calculator",))
    given.given.MergeFrom(shared)
    given.given_source = PEER
    assert (await mesh.runner().run(given)).outcome == COMPLETED
    again = mesh.samples.episodes[-1]
    assert [s.role for s in again.segments] == [s.role for s in rolled.segments]
    assert [s.token_ids.tolist() for s in again.segments] == [s.token_ids.tolist() for s in rolled.segments]
    assert [s.num_trainable for s in again.segments] == [s.num_trainable for s in rolled.segments]


async def test_a_turn_that_a_limit_ended_has_no_end_of_a_turn() -> None:
    mesh, _, episode = await taken(text_segment(0, "12", finish=PB.FINISH_REASON_LENGTH))
    assert text_of(mesh, episode.segments[-1]) == "12"


async def test_token_ids_stay_as_they_are_with_their_log_probs_version_and_mask() -> None:
    version = PB.PolicyVersion(policy="other", step=3)
    logprobs = encode_floats(np.array([-1.0, -2.0], dtype=np.float32))
    mask = encode_mask(np.array([0, 1], dtype=np.uint8))
    mesh, report, episode = await taken(
        token_segment(0, [5, 6], role=CONTEXT, source=PB.SEGMENT_SOURCE_PROMPT),
        token_segment(1, [7, 8], role=ACTION, source=PEER, version=version, logprobs=logprobs, loss_mask=mask),
    )
    prompt, action = episode.segments
    assert prompt.token_ids.tolist() == [5, 6]
    assert action.token_ids.tolist() == [7, 8]
    assert action.logprobs is not None
    assert action.logprobs.tolist() == [-1.0, -2.0]
    assert str(action.version) == "other@3.0"
    assert mesh.generator.scored == []
    assert [(span.source, span.num_tokens) for span in report.samples[0].external] == [(PEER, 1)]
    assert [message.content for message in prompt.messages] == ["1+2"]


async def test_token_ids_of_a_peer_without_log_probs_get_those_of_this_model() -> None:
    _, _, episode = await taken(
        token_segment(0, [5, 6], role=CONTEXT, source=PB.SEGMENT_SOURCE_PROMPT),
        token_segment(1, [7, 8], role=ACTION, source=PEER),
    )
    assert episode.segments[1].logprobs is not None
    assert episode.segments[1].logprobs.tolist() == [-0.5, -0.5]
    assert episode.segments[0].logprobs is None


@pytest.mark.parametrize("has_tokens", [False, True])
async def test_an_episode_that_is_too_long_for_this_model_has_no_sample(has_tokens: bool) -> None:
    config = RolloutConfig(limits=LimitsConfig(context_tokens_max=20))
    long = [text_segment(0, "x" * 100)]
    if has_tokens:
        long = [
            token_segment(0, [5], role=CONTEXT, source=PB.SEGMENT_SOURCE_PROMPT),
            token_segment(1, [7] * 30, role=ACTION, source=PEER),
        ]
    _, report, _ = await taken(*long, config=config)
    assert list(report.samples) == []


async def test_a_token_id_outside_the_vocabulary_has_no_sample() -> None:
    for wrong in (10_000_000, -1):
        _, report, _ = await taken(
            token_segment(0, [5], role=CONTEXT, source=PB.SEGMENT_SOURCE_PROMPT),
            token_segment(1, [7, wrong], role=ACTION, source=PEER),
        )
        assert list(report.samples) == []


@pytest.mark.parametrize(("segments_max", "num_samples"), [(5, 1), (4, 0)])
async def test_an_episode_is_trained_as_a_whole_or_not(segments_max: int, num_samples: int) -> None:
    config = RolloutConfig(limits=LimitsConfig(segments_max=segments_max))
    turns = (text_segment(0, "call 1+2"), text_segment(1, "3"), text_segment(2, "3"))  # and the prompt
    _, report, _ = await taken(*turns, config=config)
    assert len(report.samples) == num_samples


async def test_special_tokens_that_look_like_a_pair_are_text() -> None:
    mesh = LocalMesh(script=lambda text: "never", config=RolloutConfig())
    tags = {"<s>": True, "</s>": True, "<think>": True, "</think>": True, "<step>": False}

    class Tagged:
        def __init__(self) -> None:
            self.tags, self.format = tags, mesh.tokenizer.format

    env: Any = Tagged()
    assert set(content_tags(env)) == {"<tool_call>", "</tool_call>", "<think>", "</think>", "<step>"}
