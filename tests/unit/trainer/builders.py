"""Builders of samples and groups for the trainer's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from rollmesh.shared.codec.trajectory import summary_of
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    NO_SUMMARY,
    Episode,
    EpisodeKey,
    FinishReason,
    GroupContext,
    MemberOutcome,
    Outcome,
    Reward,
    Role,
    Sample,
    SamplingParams,
    Segment,
    Source,
    TrainingSample,
)
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.trainer.batch import UpdateBatch, check_membership
from rollmesh.trainer.samples import build_table


def member(
    sample_id: str,
    rewards: Mapping[str, float],
    *,
    outcome: Outcome = Outcome.OK,
    end: str = "ready",
    episode: str = "",
    of: TrainingSample | None = None,
) -> MemberOutcome:
    """Return a member with these rewards, and the summary of the sample `of`."""
    made = tuple(Reward(name=n, value=v, outcome=outcome) for n, v in rewards.items())
    summary = NO_SUMMARY if of is None else summary_of(_episode(of), of.sample)
    return MemberOutcome(sample_id=sample_id, rewards=made, end=end, episode=episode, summary=summary)


def _episode(of: TrainingSample) -> Episode:
    """Return the episode whose only path the sample is."""
    segments = tuple(replace(segment, parent=n - 1) for n, segment in enumerate(of.segments))
    key = EpisodeKey(run="r", task=of.task, group=of.group, episode=of.episode or of.sample.sample_id)
    return Episode(key=key, segments=segments, sampling_params=of.sampling_params, samples=(of.sample,))


def group(name: str, *members: MemberOutcome) -> GroupContext:
    return GroupContext(group=name, task=f"task-of-{name}", members=members)


def prompt(token_ids: Sequence[int]) -> Segment:
    return Segment(parent=-1, role=Role.CONTEXT, source=Source.PROMPT, token_ids=np.asarray(token_ids, np.int32))


def action(token_ids: Sequence[int], logprobs: Sequence[float], *, step: int = 0, parent: int = 0) -> Segment:
    return Segment(
        parent=parent,
        role=Role.ACTION,
        source=Source.POLICY,
        token_ids=np.asarray(token_ids, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        loss_mask=np.ones(len(token_ids), np.uint8),
        finish=FinishReason.STOP,
        version=PolicyVersion(policy="main", step=step),
        kv_step_oldest=step,
        sampling=0,
        arrays={"entropy": np.asarray([0.1 + (t * 7 % 5) for t in token_ids], np.float32)},
    )


def training_sample(
    sample_id: str,
    segments: Sequence[Segment],
    *,
    of: str = "g0",
    params: SamplingParams | None = None,
    trainable: bool = True,
    weight: float = 1.0,
) -> TrainingSample:
    return TrainingSample(
        sample=Sample(sample_id=sample_id, leaf=len(segments) - 1, trainable=trainable, weight=weight),
        segments=tuple(segments),
        group=of,
        task=f"task-of-{of}",
        staleness=0,
        sampling_params=(params or SamplingParams(),),
    )


def random_batch(
    num_groups: int = 4,
    group_size: int = 4,
    *,
    seed: int = 0,
    logprob: float = -4.7,
    step: int = 0,
    same_prompt: bool = False,
) -> tuple[list[TrainingSample], list[GroupContext]]:
    """Return two-turn samples over random tokens with 0/1 rewards, and their groups; behavior log-probs near those of
    an untrained model. `same_prompt` gives the samples of a group one prompt, which is longer."""
    rng = np.random.default_rng(seed)
    samples, groups = [], []
    for g in range(num_groups):
        members, prompts = [], []
        for i in range(group_size):
            sample_id = f"s{seed}-{g}-{i}"
            first, second = (rng.integers(13, 109, rng.integers(3, 20)).tolist() for _ in range(2))
            tool = prompt(rng.integers(13, 109, 5).tolist())
            prompts.append(prompt(rng.integers(13, 109, 36 if same_prompt else 12).tolist()))
            segments = [
                prompts[0 if same_prompt else i],
                action(first, rng.normal(logprob, 0.1, len(first)).tolist(), step=step),
                tool,
                action(second, rng.normal(logprob, 0.1, len(second)).tolist(), step=step),
            ]
            samples.append(training_sample(sample_id, segments, of=f"g{g}"))
            members.append(member(sample_id, {"correct": float(i % 2)}, of=samples[-1]))
        groups.append(group(f"g{g}", *members))
    return samples, groups


def batch_of(samples: Sequence[TrainingSample], groups: Sequence[GroupContext], *, update: int = 1) -> UpdateBatch:
    """Return the batch of an update. Raises ValueError for a sample that its group does not list."""
    check_membership(groups, samples)
    return UpdateBatch(
        update=update, samples=tuple(samples), groups=tuple(groups), table=build_table(samples, update=update)
    )


def minibatches(num: int, epochs: int = 1, *, whole_groups: bool = False) -> Extension:
    options = {"num_minibatches": num, "epochs": epochs, "whole_groups": whole_groups}
    return Extension("minibatches", options)
