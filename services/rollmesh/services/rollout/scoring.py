"""Convert samples to score requests and add the rewards. A scorer failure fails the episode; it never becomes a reward
of 0."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from rollmesh.services.rollout.failures import EpisodeFailed
from rollmesh.services.rollout.lease import Lease
from rollmesh.shared.codec.environment_rewards import encode_environment_rewards
from rollmesh.shared.codec.trajectory import encode_key, encode_sample, encode_use
from rollmesh.shared.domain.environment_reward import EnvironmentReward
from rollmesh.shared.domain.trajectory import EndpointUse, FinishReason, Outcome, Reward, Sample, Segment
from rollmesh.shared.errors import ScorerFailed
from rollmesh.v1 import reward_pb2, types_pb2


def finish_of(segment: Segment, *, cut: bool) -> FinishReason:
    """Return the finish reason of a sample: that of its last action, but LENGTH if a limit cut the episode."""
    return FinishReason.LENGTH if cut else segment.finish


def score_item(
    lease: Lease,
    samples: Sequence[Sample],
    segments: Sequence[types_pb2.Segment],
    columns: Collection[str],
    *,
    rewards: Iterable[EnvironmentReward] = (),
    uses: Sequence[EndpointUse] = (),
    scorers: Sequence[str] = (),
) -> reward_pb2.ScoreItem:
    """Build the request from the segments of the episode. Every sample is scored on its path, with the arrays that
    `columns` names. `rewards` are those of the environment, and `uses` those of the agent. `scorers` names the rewards
    that are asked for; empty: all."""
    return reward_pb2.ScoreItem(
        key=encode_key(lease.key),
        task=lease.task_message,
        samples=[encode_sample(sample) for sample in samples],
        segments=[_judged(segment, columns) for segment in segments],
        endpoints=map(encode_use, uses),
        scorers=scorers,
        environment_rewards=encode_environment_rewards(rewards),
    )


def _judged(segment: types_pb2.Segment, columns: Collection[str]) -> types_pb2.Segment:
    message = types_pb2.Segment()
    message.CopyFrom(segment)
    for name in ("logprobs_model", "loss_mask", *(() if "logprobs" in columns else ("logprobs",))):
        message.ClearField(name)
    message.sampling = -1
    for name in [name for name in message.arrays if name not in columns]:
        del message.arrays[name]
    return message


def scored(samples: Sequence[Sample], rewards: Sequence[tuple[Reward, ...]]) -> tuple[Sample, ...]:
    """Return the samples with their rewards. Raise `EpisodeFailed` with the name of the failed scorer."""
    for sample_rewards in rewards:
        for reward in sample_rewards:
            if reward.outcome is Outcome.INFRA_FAILURE:
                said, _, traceback = reward.evidence.partition("\n")
                cause = ScorerFailed(said or f"no value for {reward.name}", reward=reward.name)
                raise EpisodeFailed(f"scorer {reward.scorer or reward.name}", cause, traceback=traceback)
    return tuple(replace(sample, rewards=given) for sample, given in zip(samples, rewards, strict=True))
