"""The witness detects wrong stamps."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from rollmesh.shared.domain.trajectory import ROOT, Role, Sample, SamplingParams, Segment, Source, TrainingSample
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.testing.fake_policy import FakePolicy

from .trainer import VOCAB_SIZE, num_forged, oldest

PARAMS = SamplingParams(seed=7)


def sampled(parent: int, version: PolicyVersion, start: int, num: int = 6) -> Segment:
    """Return the tokens that the fake engine would generate there."""
    token_ids, columns = FakePolicy(version, VOCAB_SIZE).draw(PARAMS, np.arange(start, start + num))
    return Segment(
        parent=parent, role=Role.ACTION, source=Source.POLICY, token_ids=token_ids, logprobs=columns["logprobs"], sampling=0,
        loss_mask=np.ones(num, np.uint8), version=version,
    )  # fmt: skip


def trained(*segments: Segment) -> TrainingSample:
    prompt = Segment(parent=ROOT, role=Role.CONTEXT, source=Source.PROMPT, token_ids=np.arange(5, dtype=np.int32))
    sample = Sample(sample_id="s", leaf=len(segments))
    return TrainingSample(
        sample=sample, segments=(prompt, *segments), group="g", task="t", staleness=0, sampling_params=(PARAMS,)
    )


def test_tokens_of_two_versions_are_known_by_their_stamps() -> None:
    first, second = PolicyVersion(policy="main", step=3), PolicyVersion(policy="main", step=4)
    sample = trained(sampled(0, first, 5), sampled(1, second, 11))
    assert num_forged(sample) == 0
    assert oldest(sample) == first


def test_a_wrong_stamp_shows() -> None:
    true = PolicyVersion(policy="main", step=3)
    segment = sampled(0, true, 5)
    for wrong in (replace(true, step=4), replace(true, incarnation=1)):
        assert num_forged(trained(replace(segment, version=wrong))) == 1
