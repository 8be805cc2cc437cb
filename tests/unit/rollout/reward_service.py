"""The real reward service behind a local mesh, without gRPC."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rollmesh.services.reward.config import RewardConfig, build_engine
from rollmesh.services.reward.servicer import RewardServicer
from rollmesh.services.rollout.agent import Agent
from rollmesh.services.rollout.config import RolloutConfig
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.codec.trajectory import decode_rewards
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import EndpointUse, Episode, Reward
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2, reward_pb2


class ServicePort:
    """A port of the worker that calls the reward service with the bytes of a request."""

    def __init__(self, scorers: Sequence[Mapping[str, Any]]) -> None:
        engine = build_engine(config_from_dict(RewardConfig, {"scorers": scorers}))
        self._servicer = RewardServicer(engine)
        self.items: list[reward_pb2.ScoreItem] = []

    async def columns(self) -> Collection[str]:
        return ()

    async def score(
        self, run: str, item: reward_pb2.ScoreItem, uses: list[EndpointUse] | None = None
    ) -> list[tuple[Reward, ...]]:
        self.items.append(item)
        sent = reward_pb2.RewardServiceScoreRequest(run=run, items=[item]).SerializeToString()
        response = await self._servicer.Score(reward_pb2.RewardServiceScoreRequest.FromString(sent), None)
        return [decode_rewards(sample.rewards) for sample in response.samples]


def environment(reward: str = "score", **options: Any) -> dict[str, Any]:
    """Return the entry of a scorer `environment` whose values are in [0, 1]."""
    return {"name": "environment", "reward": reward, "options": {"min": 0, "max": 1, **options}}


def scored_mesh(
    *scorers: Mapping[str, Any],
    said: str = "<answer>4</answer><|end|>",
    config: RolloutConfig | None = None,
    clock: Clock | None = None,
) -> LocalMesh:
    """Return a mesh whose model always says `said`, and whose samples these scorers judge."""
    mesh = LocalMesh(script=lambda text: said, config=config or RolloutConfig(), clock=clock or SystemClock())
    mesh.scorer = ServicePort(scorers)  # type: ignore[assignment]
    return mesh


async def played(mesh: LocalMesh, agent: Agent) -> Episode:
    """Run one episode, and return it. It must be complete."""
    report = await mesh.runner(agent).run(lease())
    assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_COMPLETED, report.failure
    return mesh.samples.episodes[-1]


async def failed(mesh: LocalMesh, agent: Agent) -> str:
    """Run one episode that is an infra failure and stores nothing, and return the message."""
    report = await mesh.runner(agent).run(lease())
    assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE
    assert not mesh.samples.episodes
    return report.failure.message
