"""The parts of a mesh by name, each as an async context: the same code in one process and in many.

A part knows the place and the bus; it finds the other parts through the coordinator's address. A service is imported when its part is
built, so that a process pays for the parts that it hosts.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.data_snapshots import DataSnapshots
from rollmesh.mesh.place import Place
from rollmesh.mesh.tool_descriptions import rollout_config
from rollmesh.services.data.jsonl_source import JsonlConfig
from rollmesh.services.learner.config import TORCH_TRAINER, LearnerConfig
from rollmesh.services.learner.recipe_advantage import recipe_advantage
from rollmesh.services.reward.config import RewardConfig
from rollmesh.services.reward.oracles import AnswerFileConfig
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.advantages import AdvantageConfig
from rollmesh.trainer.checkpoint_files import SNAPSHOT_NAME, list_checkpoints

Part = AbstractAsyncContextManager[Any]
NATS = "nats"
"""The embedded server: started as a part, but not built as one."""


def part_names(config: MeshConfig) -> list[str]:
    """Every part but the bus, in the order in which they start."""
    counts = config.counts
    return [
        "coordinator",
        "depot",
        "reward",
        "data",
        *(f"sandbox-{n}" for n in range(counts.sandbox)),
        *(f"inference-{n}" for n in range(counts.inference)),
        "gateway",
        *(f"rollout-{n}" for n in range(counts.rollout)),
        "learner",
    ]


def build_part(name: str, place: Place, bus: Bus, **options: Any) -> Part:
    """The part called `name`; `options` go to its node. Raises ConfigError for a config that cannot work."""
    kind = name.partition("-")[0]
    try:
        part: Part = _BUILDERS[kind](name, place, bus, **options)
    except ValueError as err:  # of an engine or a trainer: it would be raised again at every restart
        raise ConfigError(f"{name}: {err}") from err
    return part


def _coordinator(name: str, place: Place, bus: Bus, **options: Any) -> Part:
    from rollmesh.mesh.offer import make_offer
    from rollmesh.services.coordinator.node import CoordinatorNode

    config = place.config.coordinator
    config = msgspec.structs.replace(config, server=place.served_at(place.coordinator, config.server))
    return CoordinatorNode(
        config, folder=place.folder(name), access=place.access, bus=bus, offer=make_offer(place, bus), **options
    )


def _gateway(name: str, place: Place, bus: Bus, **options: Any) -> Part:
    from rollmesh.services.gateway.node import GatewayNode

    config = place.config.gateway
    config = msgspec.structs.replace(config, server=place.served_at(place.gateway, config.server))
    return GatewayNode(
        config,
        node_id=name,
        coordinator=place.coordinator,
        access=place.access,
        folder=place.folder(name),
        bus=bus,
        **options,
    )


def _depot(name: str, place: Place, bus: Bus, **options: Any) -> Part:
    from rollmesh.services.weights.node import DepotNode

    config = place.config.depot
    config = msgspec.structs.replace(
        config,
        directory=str(place.folder(config.directory)),
        server=place.served_at(place.depot, config.server),
    )
    return DepotNode(config, node_id=name, coordinator=place.coordinator, access=place.access, **options)


def _inference(name: str, place: Place, bus: Bus, **options: Any) -> Part:
    from rollmesh.services.inference.node import InferenceNode

    config = place.config.inference
    engine = dict(config.engine_options)
    if config.engine.endswith(":TorchEngine") and "model" not in engine:
        engine["model"] = str(place.model_dir())
    config = msgspec.structs.replace(
        config, directory=str(place.folder(name)), engine_options=engine, server=place.served(config.server)
    )
    return InferenceNode(
        config, node_id=name, coordinator=place.coordinator, access=place.access, base_dir=place.base_dir, **options
    )


def _sandbox(name: str, place: Place, bus: Bus, **options: Any) -> Part:
    from rollmesh.services.sandbox.node import SandboxNode

    return SandboxNode(
        place.config.sandbox,
        node_id=name,
        coordinator=place.coordinator,
        access=place.access,
        state_dir=place.folder(name),
        **({"server": place.served()} | options),
    )


def _reward(name: str, place: Place, bus: Bus, **options: Any) -> Part:
    from rollmesh.services.reward.node import RewardNode

    return RewardNode(
        reward_config(place.config),
        node_id=name,
        coordinator=place.coordinator,
        access=place.access,
        base_dir=place.base_dir,
        advantage=run_advantage(place.config),
        **({"server": place.served()} | options),
    )


def run_advantage(config: MeshConfig) -> AdvantageConfig:
    """How the run's trainer compares the members of a group, without weights. Another trainer than the built-in one counts as GRPO."""
    learner = config.learner
    if learner.engine != TORCH_TRAINER:
        return AdvantageConfig()
    return recipe_advantage(learner.recipe, learner.recipe_options)


def reward_config(config: MeshConfig) -> RewardConfig:
    """The reward service's config with the answer key of a JSONL task file, which only it reads."""
    source = config.data.source
    if not isinstance(source, JsonlConfig) or source.name in config.reward.answer_files:
        return config.reward
    if not source.answer and not source.tests:
        return config.reward
    key = AnswerFileConfig(
        path=source.path,
        answer=source.answer,
        tests=source.tests,
        answer_pattern=source.answer_pattern,
        num_lines_max=source.num_lines_max,
    )
    return msgspec.structs.replace(config.reward, answer_files={**config.reward.answer_files, source.name: key})


def _data(name: str, place: Place, bus: Bus, **options: Any) -> Part:
    from rollmesh.services.data.node import DataNode
    from rollmesh.services.data.snapshots import SnapshotFolder

    config = place.config.data
    if not config.seed:
        config = msgspec.structs.replace(config, seed=place.config.run.seed)
    return DataNode(
        config,
        node_id=name,
        coordinator=place.coordinator,
        access=place.access,
        bus=bus,
        base_dir=place.base_dir,
        snapshots=SnapshotFolder(place.folder(name), more=lambda: _states_in_checkpoints(place)),
        **({"server": place.served()} | options),
    )


def _states_in_checkpoints(place: Place) -> list[Path]:
    """What the learner's checkpoints hold of the data service, newest first; empty if they lie on another host."""
    return [path / SNAPSHOT_NAME for path in reversed(list_checkpoints(place.run_dir / "checkpoints"))]


def _rollout(name: str, place: Place, bus: Bus, **options: Any) -> Part:
    from rollmesh.services.rollout.node import RolloutNode

    config = rollout_config(place.config)
    if not config.model_dir:
        config = msgspec.structs.replace(config, model_dir=str(place.model_dir()))
    return RolloutNode(
        config,
        node_id=name,
        coordinator=place.coordinator,
        access=place.access,
        bus=bus,
        base_dir=place.base_dir,
        **options,
    )


def _learner(name: str, place: Place, bus: Bus, **options: Any) -> Part:
    from rollmesh.services.learner.node import LearnerNode
    from rollmesh.shared.clients.trainer import RunAddress

    run = place.config.run
    where = RunAddress(
        address=place.gateway, access=place.access, run=place.run, policy=run.policy, learner=run.learner
    )
    return LearnerNode(
        learner_config(place),
        where,
        coordinator=place.coordinator,
        node_id=name,
        base_dir=place.base_dir,
        **{"data_snapshot": DataSnapshots(place), **options},
    )


def learner_config(place: Place) -> LearnerConfig:
    """The learner's config with the run's folder, model and seed filled in."""
    config = place.config.learner
    return msgspec.structs.replace(
        config,
        directory=str(place.run_dir),
        model=config.model or (str(place.model_dir()) if place.config.model else ""),
        seed=config.seed or place.config.run.seed,
        reward_weights=place.config.reward.weights,
    )


_BUILDERS: dict[str, Any] = {
    "coordinator": _coordinator,
    "gateway": _gateway,
    "depot": _depot,
    "inference": _inference,
    "sandbox": _sandbox,
    "reward": _reward,
    "data": _data,
    "rollout": _rollout,
    "learner": _learner,
}
