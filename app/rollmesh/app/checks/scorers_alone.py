"""Check that scorers can score without a mesh, as `rollmesh score` and the probe let them."""

from __future__ import annotations

from rollmesh.services.reward.engine import RewardEngine
from rollmesh.services.reward.scorer import Scorer
from rollmesh.shared.config.plugin import overrides
from rollmesh.shared.errors import ConfigError


def check_scorers(engine: RewardEngine) -> None:
    """Raise ConfigError if a scorer needs what only an episode of a mesh has."""
    for configured in engine.scorers:
        if overrides(configured.scorer, Scorer.use_policy):
            raise ConfigError(
                f"the scorer of the reward `{configured.name}` ({configured.label}) asks the policy, which only a mesh "
                "serves; score it with `rollmesh rollout`, or remove it from reward.scorers"
            )
        if configured.scorer.environment_rewards:
            raise ConfigError(
                f"the scorer of the reward `{configured.name}` ({configured.label}) reads rewards of the environment, "
                "which only an episode has; score it with `rollmesh rollout`, or remove it from reward.scorers"
            )
