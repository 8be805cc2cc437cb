"""Metadata of a sample is counted from the stamps of its payload, and every contradiction between the two is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollmesh.services.coordinator.core.facts import SampleMeta
from rollmesh.services.coordinator.fact_codec import decode, encode
from rollmesh.shared.codec.metadata import check_leased, check_metadata, sample_meta
from rollmesh.shared.codec.trajectory import decode_summary, encode_episode, summary_of
from rollmesh.shared.domain.trajectory import (
    ROOT,
    Episode,
    EpisodeKey,
    FinishReason,
    Message,
    Role,
    Sample,
    SamplingParams,
    Segment,
    Source,
    text_view,
)
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import MetadataMismatch
from rollmesh.v1 import run_pb2, types_pb2

from . import episodes

Change = Callable[[Any], object]


def test_metadata_counts_trainable_policy_tokens_by_the_weights_that_sampled_them() -> None:
    domain = episodes.rich_episode()
    episode = encode_episode(domain)
    meta = sample_meta(episode, episode.samples[0])
    assert [(s.step, s.incarnation, s.num_tokens) for s in meta.steps] == [(3, 0, 2), (4, 0, 3)]
    assert meta.num_tokens == 3 + 2 + 3 + 2 + 1
    assert meta.num_sampled_tokens == sum(
        segment.num_tokens for segment in domain.path_segments(domain.samples[0]) if segment.source is Source.POLICY
    )
    assert 0 < meta.num_sampled_tokens < meta.num_tokens
    assert meta.steps[0].step == domain.oldest_step(domain.samples[0])
    assert [r.name for r in meta.rewards] == ["correct", "format", "judge", "length"]


def test_tokens_that_samples_share_are_generated_once() -> None:
    episode = encode_episode(episodes.rich_episode())
    first = episode.samples[0]
    twin = types_pb2.Sample()
    twin.CopyFrom(first)
    twin.sample_id = "twin"
    episode.samples.append(twin)
    assert sample_meta(episode, twin).num_sampled_tokens == 0
    assert sample_meta(episode, twin).num_tokens == sample_meta(episode, first).num_tokens


def test_the_summary_has_the_turns_of_the_path_with_their_observations() -> None:
    domain = episodes.rich_episode()
    episode = encode_episode(domain)
    for sample, encoded in zip(domain.samples, episode.samples, strict=True):
        summary = sample_meta(episode, encoded, text_chars=40).summary
        path = domain.path(sample.leaf)
        actions = [domain.segments[i] for i in path if domain.segments[i].role is Role.ACTION]
        sampled = [s for s in actions if s.source is Source.POLICY]
        assert (summary.role, FinishReason(summary.finish)) == (sample.role, sample.finish)
        assert sum(turn.num_tokens for turn in summary.turns) == sum(s.num_tokens for s in sampled)
        assert [turn.segment for turn in summary.turns] == [
            i
            for i in path
            if domain.segments[i].role is Role.ACTION
            and (domain.segments[i].finish is not FinishReason.UNFINISHED or i == sample.leaf)
        ]
        logprobs = np.concatenate([np.zeros(0), *(s.logprobs for s in sampled if s.logprobs is not None)])
        mean = sum(turn.num_tokens * turn.mean_logprob for turn in summary.turns) / max(1, len(logprobs))
        assert mean == pytest.approx(float(logprobs.mean()) if len(logprobs) else 0.0, abs=1e-6)
        said = [m.content for m in text_view(domain.path_segments(sample)) if m.role == "assistant"]
        assert summary.text == "\n\n".join(said)[-40:]
        assert decode_summary(summary) == summary_of(domain, sample, text_chars=40)


def test_infinite_log_probs_of_both_signs_have_no_mean() -> None:
    domain = episodes.rich_episode()
    episode = encode_episode(domain)
    (action,) = {sample.leaf for sample in episode.samples[:1]}
    segment = episode.segments[action]
    num = len(segment.logprobs) // 4
    segment.logprobs = np.array([np.inf, -np.inf] + [0.0] * (num - 2), "<f4").tobytes()
    assert sample_meta(episode, episode.samples[0]).summary.turns[-1].mean_logprob == 0.0


def test_equal_observations_have_equal_digests() -> None:
    episode = encode_episode(episodes.rich_episode())
    first = sample_meta(episode, episode.samples[0]).summary.turns[0]
    assert len(first.observation) == 16
    again = encode_episode(episodes.rich_episode())
    assert sample_meta(again, again.samples[0]).summary.turns[0].observation == first.observation
    again.segments[0].token_ids = again.segments[0].token_ids[4:]
    assert sample_meta(again, again.samples[0]).summary.turns[0].observation != first.observation


def test_metadata_of_another_policy_counts_none_of_this_ones_tokens() -> None:
    episode = encode_episode(episodes.rich_episode())
    assert not sample_meta(episode, episode.samples[1]).steps


def test_metadata_made_from_a_payload_agrees_with_it_also_after_rewards_changed() -> None:
    episode = encode_episode(episodes.rich_episode())
    for sample in episode.samples:
        meta = sample_meta(episode, sample)
        del meta.rewards[:]
        check_metadata(episode, meta)
        meta.ClearField("num_sampled_tokens")  # a worker of older protos
        meta.ClearField("summary")
        check_metadata(episode, meta)
        check_metadata(episode, encode(decode(SampleMeta, meta), types_pb2.SampleMeta))  # from a ledger of that time


def test_a_forced_beginning_is_part_of_the_text_of_its_turn_and_its_tokens_are_not_the_policys() -> None:
    forced = types_pb2.Segment(
        role=types_pb2.SEGMENT_ROLE_ACTION, source=types_pb2.SEGMENT_SOURCE_HINT, token_ids=bytes(8)
    )
    forced.messages.add(role="assistant", content="Let me")
    episode = encode_episode(one_turn(temperature=1.0))
    sampled = episode.segments.pop()
    sampled.parent = 1
    episode.segments.extend([forced, sampled])
    episode.samples[0].leaf = 2
    summary = sample_meta(episode, episode.samples[0], text_chars=99).summary
    assert summary.text == "Let me think"
    assert [(turn.segment, turn.num_tokens) for turn in summary.turns] == [(2, 2)]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_sample_is_greedy_if_all_its_tokens_were_drawn_at_temperature_0(temperature: float) -> None:
    made = one_turn(temperature=temperature)
    summary = summary_of(made, made.samples[0])
    assert summary.greedy is (temperature == 0)
    assert (summary.num_tokens, summary.mean_logprob, summary.text) == (2, -0.75, "")


def one_turn(*, temperature: float) -> Episode:
    """Return an episode with a prompt of two tokens and an action of two."""
    action = Segment(
        parent=0,
        role=Role.ACTION,
        source=Source.POLICY,
        token_ids=np.array([3, 4], np.int32),
        logprobs=np.array([-0.5, -1.0], np.float32),
        finish=FinishReason.STOP,
        version=PolicyVersion(policy="main", step=0),
        kv_step_oldest=0,
        sampling=0,
        messages=(Message(role="assistant", content=" think"),),
    )
    prompt = Segment(parent=ROOT, role=Role.CONTEXT, source=Source.PROMPT, token_ids=np.array([1, 2], np.int32))
    return Episode(
        key=EpisodeKey(run="r", task="t", group="g", episode="g.0"),
        segments=(prompt, action),
        sampling_params=(SamplingParams(temperature=temperature),),
        samples=(Sample(sample_id="g.0-0", leaf=1, finish=FinishReason.STOP),),
    )


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda m: setattr(m.steps[0], "step", 5), "steps"),
        (lambda m: setattr(m.steps[0], "incarnation", 1), "steps"),
        (lambda m: setattr(m.steps[0], "num_tokens", 1), "steps"),
        (lambda m: m.steps.pop(), "steps"),
        (lambda m: setattr(m, "num_tokens", 1), "num_tokens"),
        (lambda m: setattr(m, "leaf", 2), "leaf"),
        (lambda m: setattr(m, "policy", "other"), "policy"),
        (lambda m: setattr(m.summary, "role", "other"), "summary"),
        (lambda m: setattr(m.summary.turns[0], "num_tokens", 99), "summary"),
        (lambda m: m.summary.turns.pop(), "summary"),
        (lambda m: setattr(m.summary.turns[0], "mean_logprob", -9.0), "summary"),
        (lambda m: setattr(m.summary.turns[0], "observation", "0" * 16), "summary"),
        (lambda m: setattr(m.summary, "text", "other"), "summary"),
        (lambda m: setattr(m.summary, "greedy", True), "summary"),
        (lambda m: setattr(m, "trainable", False), "trainable"),
        (lambda m: m.external.add(source=types_pb2.SEGMENT_SOURCE_DATASET, num_tokens=1), "external"),
        (lambda m: setattr(m, "sample_id", "e9.7"), "does not hold sample e9.7"),
    ],
)
def test_metadata_that_contradicts_its_payload_is_found(change: Change, names: str) -> None:
    episode = encode_episode(episodes.rich_episode())
    meta = sample_meta(episode, episode.samples[0])
    change(meta)
    with pytest.raises(MetadataMismatch, match=names) as caught:
        check_metadata(episode, meta)
    assert caught.value.metadata["sample_id"] == meta.sample_id


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda e: setattr(e.segments[1].version, "step", 4), "steps"),
        (lambda e: setattr(e.segments[1], "loss_mask", b"\1\0"), "steps"),
        (lambda e: setattr(e.segments[1], "loss_mask", b"\1"), "loss mask"),
        (lambda e: setattr(e.segments[1], "token_ids", b"\1"), "token ids"),
        (lambda e: e.segments[1].ClearField("version"), "no version"),
        (lambda e: setattr(e.segments[1].version, "policy", "other"), "segment 1 trains 2 tokens of policy 'other'"),
        (lambda e: setattr(e.segments[1], "kv_step_oldest", 4), "`kv_step_oldest` 4, expected a step in .0, 3."),
        (lambda e: setattr(e.segments[1], "kv_step_oldest", -1), "`kv_step_oldest` -1"),
        (lambda e: setattr(e.segments[1], "source", types_pb2.SEGMENT_SOURCE_REPLAY), "steps"),
        (lambda e: setattr(e.segments[3], "loss_mask", b"\1\0"), "external"),
        (lambda e: e.samples.append(e.samples[0]), "has 2 entries for sample e9.0"),
        (lambda e: setattr(e.segments[3], "parent", 3), "path"),
        (lambda e: setattr(e.samples[0], "leaf", 99), "path"),
        (lambda e: setattr(e.samples[0], "leaf", -2), "path"),
    ],
)
def test_a_payload_that_contradicts_its_metadata_is_found(change: Change, names: str) -> None:
    episode = encode_episode(episodes.rich_episode())
    meta = sample_meta(episode, episode.samples[0])
    change(episode)
    with pytest.raises(MetadataMismatch, match=names):
        check_metadata(types_pb2.Episode.FromString(episode.SerializeToString()), meta)


def test_tokens_of_other_sources_that_are_trained_are_counted_by_source() -> None:
    episode = encode_episode(episodes.rich_episode())
    assert not sample_meta(episode, episode.samples[0]).external
    episode.segments[0].loss_mask = b"\0\1\1"
    spans = sample_meta(episode, episode.samples[1]).external
    assert [(Source(span.source), span.num_tokens) for span in spans] == [(Source.PROMPT, 2), (Source.PEER, 2)]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda e: setattr(e.key, "run", "r2"), "`run` must be 'r1', got 'r2'"),
        (lambda e: setattr(e.key, "task", "calc-8"), "`task` must be 'calc-7'"),
        (lambda e: setattr(e.key, "group", "g4"), "`group` must be 'g3'"),
        (lambda e: setattr(e.key, "episode", "e8"), "`episode` must be 'e9'"),
        (lambda e: setattr(e.key, "attempt", 1), "`attempt` must be 2"),
        (lambda e: setattr(e.samples[0].rewards[0], "value", 0.0), "rewards"),
        (lambda e: setattr(e.samples[0].rewards[0], "name", "other"), "rewards"),
        (lambda e: setattr(e.samples[0].rewards[1], "segment", 0), "rewards"),
        (lambda e: setattr(e.samples[0].rewards[2], "outcome", types_pb2.REWARD_OUTCOME_OK), "rewards"),
        (lambda e: e.samples[0].rewards.pop(), "rewards"),
    ],
)
def test_a_payload_of_another_episode_or_with_other_rewards_contradicts_the_lease(change: Change, names: str) -> None:
    episode = encode_episode(episodes.rich_episode())
    meta = sample_meta(episode, episode.samples[0])
    leased = run_pb2.LeasedSample(meta=meta, key=episode.key, rewards_as_reported=True)
    leased.meta.rewards[0].evidence = "shortened"
    check_leased(episode, leased)
    change(episode)
    with pytest.raises(MetadataMismatch, match=names):
        check_leased(episode, leased)


def test_keys_of_an_undone_step_are_above_the_step_of_the_weights() -> None:
    episode = encode_episode(episodes.rich_episode())
    episode.segments[1].version.incarnation, episode.segments[1].kv_step_oldest = 1, 9
    assert sample_meta(episode, episode.samples[0]).steps


def test_rewards_of_the_finalizer_and_leases_of_earlier_releases_are_not_compared() -> None:
    episode = encode_episode(episodes.rich_episode())
    leased = run_pb2.LeasedSample(meta=sample_meta(episode, episode.samples[0]), key=episode.key)
    leased.meta.rewards[0].value = 7.0
    check_leased(episode, leased)
    leased.ClearField("key")
    episode.key.attempt += 1
    check_leased(episode, leased)
