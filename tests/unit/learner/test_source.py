"""From a lease and its payloads to training samples."""

from __future__ import annotations

import numpy as np
import pytest

from rollmesh.client.batch import Batch, BatchAssembler, BatchLease, BatchSample
from rollmesh.services.learner.source import decode_batch
from rollmesh.shared.codec.metadata import sample_meta
from rollmesh.shared.codec.trajectory import encode_episode, encode_rewards, encode_sample
from rollmesh.shared.domain.trajectory import (
    Episode,
    EpisodeKey,
    Reward,
    Role,
    Sample,
    SamplingParams,
    Segment,
    Source,
)
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import PayloadLost
from rollmesh.v1 import run_pb2


def given(parent: int, source: Source = Source.PROMPT) -> Segment:
    return Segment(parent=parent, role=Role.CONTEXT, source=source, token_ids=np.array([1, 2], np.int32))


def sampled(parent: int, step: int, *, source: Source = Source.POLICY) -> Segment:
    return Segment(
        parent=parent,
        role=Role.ACTION,
        source=source,
        token_ids=np.array([5, 6, 7], np.int32),
        logprobs=np.array([-1.0, -2.0, -3.0], np.float32),
        loss_mask=np.array([0, 1, 1], np.uint8),
        version=PolicyVersion(policy="main", step=step),
        kv_step_oldest=step,
        sampling=1,
    )


def episode(name: str, *segments: Segment, samples: tuple[Sample, ...] = ()) -> Episode:
    return Episode(
        key=EpisodeKey(run="r", task="t", group="g", episode=name),
        segments=segments,
        sampling_params=(SamplingParams(temperature=1.0), SamplingParams(temperature=0.5, top_k=4)),
        samples=samples or (Sample(sample_id=name, leaf=len(segments) - 1),),
    )


def leased(made: Episode, sample: Sample | None = None, *, below: int = 0, staleness: int = 1) -> run_pb2.LeasedSample:
    meta = sample_meta(encode_episode(made), encode_sample(sample or made.samples[0]))
    return run_pb2.LeasedSample(meta=meta, group="g", task="t", staleness=staleness, mask_below_step=below)


def payload(made: Episode) -> run_pb2.FetchSamplesResponse:
    return run_pb2.FetchSamplesResponse(episode=encode_episode(made), sample_ids=[s.sample_id for s in made.samples])


def assembler(samples: list[run_pb2.LeasedSample]) -> BatchAssembler:
    return BatchAssembler(BatchLease(update=1, lease_id="b", samples=samples, groups=[]))


def test_samples_come_in_the_order_of_the_lease_however_they_arrive() -> None:
    made = [episode(name, given(-1), sampled(0, 3)) for name in "abc"]
    batch = assembler([leased(e) for e in made])
    for one in reversed(made):
        batch.add(payload(one))
    assert [s.sample.sample_id for s in decode_batch(batch.finish()).samples] == ["a", "b", "c"]


def test_a_sample_has_its_path_the_sampling_parameters_and_the_lease_s_rewards() -> None:
    branches = (Sample(sample_id="left", leaf=1), Sample(sample_id="right", leaf=2, trainable=False))
    made = episode("e", given(-1), sampled(0, 3), sampled(0, 4), samples=branches)
    one = leased(made, branches[1], staleness=-1)
    one.meta.rewards.extend(encode_rewards([Reward(name="correct", value=1.0)]))
    one.meta.trainable = True
    given_batch = Batch(
        update=1, lease_id="b", samples=[BatchSample(one, encode_episode(made))], unreadable={}, groups=[]
    )
    (sample,) = decode_batch(given_batch).samples
    assert [s.version.step if s.version else None for s in sample.segments] == [None, 4]
    assert sample.sampling_params[sample.segments[1].sampling].temperature == 0.5
    assert (sample.sample.rewards[0].value, sample.sample.trainable, sample.staleness) == (1.0, True, None)
    assert (sample.group, sample.task) == ("g", "t")


def test_a_replayed_sample_has_its_new_id_and_the_payload_of_its_original() -> None:
    made = episode("e", given(-1), sampled(0, 3))
    again = leased(made, staleness=7)
    again.meta.sample_id, again.replay_of, again.group = "r0.0", "e", "r0"
    joined = assembler([again])
    joined.add(run_pb2.FetchSamplesResponse(episode=encode_episode(made), sample_ids=["r0.0"]))
    batch = joined.finish()
    assert not batch.unreadable
    (sample,) = decode_batch(batch).samples
    assert (sample.sample.sample_id, sample.group, sample.staleness) == ("r0.0", "r0", 7)
    assert [segment.token_ids.tolist() for segment in sample.segments] == [[1, 2], [5, 6, 7]]
    again.meta.steps[0].step = 4
    other = assembler([again])
    other.add(run_pb2.FetchSamplesResponse(episode=encode_episode(made), sample_ids=["r0.0"]))
    assert other.finish().unreadable == {"r0.0": "METADATA_MISMATCH"}


def test_the_mask_takes_the_loss_of_older_tokens_of_the_policy_and_of_nothing_else() -> None:
    made = episode(
        "e",
        given(-1),
        sampled(0, 2),
        sampled(1, 3),
        sampled(2, 1, source=Source.PEER),
        given(3, Source.TOOL),
        sampled(4, 4),
    )
    batch = assembler([leased(made, below=3)])
    batch.add(payload(made))
    segments = decode_batch(batch.finish()).samples[0].segments
    assert [s.num_trainable for s in segments] == [0, 0, 2, 2, 0, 2]
    np.testing.assert_array_equal(segments[1].token_ids, [5, 6, 7])


def test_a_payload_of_another_attempt_is_unreadable_and_one_that_came_before_the_lease_is_missing() -> None:
    made = episode("e", given(-1), sampled(0, 3))
    one = leased(made)
    one.key.CopyFrom(encode_episode(made).key)
    one.key.attempt += 1
    batch = assembler([one])
    batch.add_ahead(run_pb2.PrefetchSamplesResponse(episode=encode_episode(made), sample_ids=["e"]))
    assert batch.missing() == ["e"]
    batch.add(payload(made))
    assert batch.finish().unreadable == {"e": "METADATA_MISMATCH"}


def test_no_mask_leaves_step_0_alone() -> None:
    made = episode("e", given(-1), sampled(0, 0))
    batch = assembler([leased(made, below=0)])
    batch.add(payload(made))
    assert decode_batch(batch.finish()).samples[0].segments[1].num_trainable == 2


def test_a_leased_sample_that_does_not_arrive_is_a_lost_payload() -> None:
    made = [episode(name, given(-1), sampled(0, 3)) for name in "ab"]
    batch = assembler([leased(e) for e in made])
    batch.add(payload(made[0]))
    with pytest.raises(PayloadLost, match="first b"):
        batch.finish()


def test_payloads_that_do_not_hold_what_was_leased_are_unreadable(caplog: pytest.LogCaptureFixture) -> None:
    good, malformed, other_leaf, absent = (episode(name, given(-1), sampled(0, 3)) for name in "abcd")
    batch = assembler([leased(e) for e in (good, malformed, other_leaf, absent)])
    broken = payload(malformed)
    broken.episode.segments[1].sampling = 7
    moved = payload(other_leaf)
    moved.episode.samples[0].leaf = 0
    empty = payload(absent)
    empty.episode.samples.clear()
    for message in (payload(good), broken, moved, empty):
        batch.add(message)
    fetched = decode_batch(batch.finish())
    assert [s.sample.sample_id for s in fetched.samples] == ["a"]
    assert fetched.unreadable == {"b": "UNREADABLE", "c": "METADATA_MISMATCH", "d": "METADATA_MISMATCH"}
    assert "sampling" in next(text for text in caplog.messages if "id=b " in text)


def test_samples_that_are_not_leased_are_passed_over() -> None:
    both = (Sample(sample_id="mine", leaf=1), Sample(sample_id="other", leaf=1))
    made = episode("e", given(-1), sampled(0, 3), samples=both)
    batch = assembler([leased(made, both[0])])
    batch.add(payload(made))
    assert [s.sample.sample_id for s in decode_batch(batch.finish()).samples] == ["mine"]
