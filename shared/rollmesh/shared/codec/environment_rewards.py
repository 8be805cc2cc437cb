"""Rewards of an environment: domain (`rollmesh.shared.domain.environment_reward`) to protobuf
(`rollmesh/v1/reward.proto`) and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollmesh.shared.codec.checks import check_environment_reward, check_environment_segments
from rollmesh.shared.domain.environment_reward import ENVIRONMENT_REWARDS_MAX, EnvironmentReward
from rollmesh.shared.errors import field_error
from rollmesh.v1 import reward_pb2


def encode_environment_rewards(rewards: Iterable[EnvironmentReward]) -> list[reward_pb2.EnvironmentReward]:
    return [
        reward_pb2.EnvironmentReward(
            name=reward.name,
            value=reward.value,
            segment=reward.segment,
            branch=reward.branch,
            evidence=reward.evidence,
        )
        for reward in rewards
    ]


def decode_environment_rewards(
    messages: Sequence[reward_pb2.EnvironmentReward], field: str, *, num_segments: int
) -> tuple[EnvironmentReward, ...]:
    """`num_segments` is the number of segments of the episode. Raises `InvalidInput`."""
    if len(messages) > ENVIRONMENT_REWARDS_MAX:
        raise field_error(field, f"have at most {ENVIRONMENT_REWARDS_MAX} entries", len(messages))
    rewards = tuple(
        EnvironmentReward(name=m.name, value=m.value, segment=m.segment, branch=m.branch, evidence=m.evidence)
        for m in messages
    )
    for index, reward in enumerate(rewards):
        check_environment_reward(reward, f"{field}[{index}]")
        check_environment_segments(reward, f"{field}[{index}]", num_segments=num_segments)
    return rewards
