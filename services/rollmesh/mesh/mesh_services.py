"""The services of a mesh by name, each as an async context. One process and many processes run the same code.

A service gets the layout and the bus. It finds the other services through the coordinator's address. Its modules are imported when it is
built, so that a process imports only the services that it hosts.
"""

from __future__ import annotations

import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.data_snapshots import DataSnapshots
from rollmesh.mesh.run_layout import RunLayout
from rollmesh.mesh.tool_descriptions import rollout_config
from rollmesh.services.data.source import SOURCES
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.reward.config import RewardConfig
from rollmesh.services.reward.oracles import AnswerFileConfig
from rollmesh.services.reward.policy import PromptEncoder
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.model_folder import find_model
from rollmesh.shared.outputs import array_names
from rollmesh.trainer.checkpoint_files import SNAPSHOT_NAME, list_checkpoints

MeshService = AbstractAsyncContextManager[Any]
NATS = "nats"
"""Name of the embedded server. `build_service` does not build it."""


def service_names(config: MeshConfig) -> list[str]:
    """Return every service except the bus, in the order of their start."""
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


def is_inference(name: str) -> bool:
    """Return whether a service is an inference node."""
    return name.partition("-")[0] == "inference"


def build_service(name: str, layout: RunLayout, bus: Bus, **options: Any) -> MeshService:
    """Return the service called `name`. Its node gets `options`. Raises ConfigError for an unusable configuration."""
    kind = name.partition("-")[0]
    try:
        service: MeshService = _BUILDERS[kind](name, layout, bus, **options)
    except ValueError as err:  # an engine or a trainer would raise it again at every restart
        raise ConfigError(f"{name}: {err}") from err
    return service


def _coordinator(name: str, layout: RunLayout, bus: Bus, **options: Any) -> MeshService:
    from rollmesh.mesh.mesh_description import describe_mesh
    from rollmesh.services.coordinator.node import CoordinatorNode

    config = layout.config.coordinator
    config = msgspec.structs.replace(config, server=layout.served_at(layout.coordinator, config.server))
    return CoordinatorNode(
        config, folder=layout.folder(name), access=layout.access, bus=bus, offer=describe_mesh(layout, bus), **options
    )


def _gateway(name: str, layout: RunLayout, bus: Bus, **options: Any) -> MeshService:
    from rollmesh.services.gateway.node import GatewayNode

    config = layout.config.gateway
    config = msgspec.structs.replace(config, server=layout.served_at(layout.gateway, config.server))
    return GatewayNode(
        config,
        node_id=name,
        coordinator=layout.coordinator,
        access=layout.access,
        folder=layout.folder(name),
        bus=bus,
        **options,
    )


def _depot(name: str, layout: RunLayout, bus: Bus, **options: Any) -> MeshService:
    from rollmesh.services.weights.node import DepotNode

    config = layout.config.depot
    config = msgspec.structs.replace(
        config,
        directory=str(layout.folder(config.directory)),
        server=layout.served_at(layout.depot, config.server),
    )
    return DepotNode(config, node_id=name, coordinator=layout.coordinator, access=layout.access, **options)


def _inference(name: str, layout: RunLayout, bus: Bus, **options: Any) -> MeshService:
    from rollmesh.services.inference.engine import with_model
    from rollmesh.services.inference.interpreter import interpreter_of, is_this
    from rollmesh.services.inference.node import InferenceNode

    config = layout.config.inference
    python = interpreter_of(config, layout.base_dir)
    if not is_this(python):
        raise ConfigError(
            f"`inference.python`: the engine {config.engine.name} runs with {python}, and this process with {sys.executable}; run the "
            "node in a separate process: without --in-process, or with `rollmesh serve inference --join` of that environment",
            key="inference.python",
        )
    engine = with_model(config.engine, layout.base_dir, layout.model_dir)
    config = msgspec.structs.replace(
        config, directory=str(layout.folder(name)), engine=engine, server=layout.served(config.server)
    )
    return InferenceNode(
        config, node_id=name, coordinator=layout.coordinator, access=layout.access, base_dir=layout.base_dir, **options
    )


def _sandbox(name: str, layout: RunLayout, bus: Bus, **options: Any) -> MeshService:
    from rollmesh.services.sandbox.node import SandboxNode

    return SandboxNode(
        layout.config.sandbox.located(layout.base_dir),
        node_id=name,
        coordinator=layout.coordinator,
        access=layout.access,
        state_dir=layout.folder(name),
        **({"server": layout.served()} | options),
    )


def _reward(name: str, layout: RunLayout, bus: Bus, **options: Any) -> MeshService:
    from rollmesh.services.reward.node import RewardNode

    return RewardNode(
        reward_config(layout.config),
        node_id=name,
        coordinator=layout.coordinator,
        access=layout.access,
        base_dir=layout.base_dir,
        estimator=layout.config.learner.estimator,
        policy=layout.config.inference.policy,
        num_top=layout.config.rollout.num_top,
        tokenizer=lambda: _policy_tokenizer(layout),
        **({"server": layout.served()} | options),
    )


def _policy_tokenizer(layout: RunLayout) -> PromptEncoder | None:
    """Return the tokenizer of the workers; None if the engines need no model. Raises ConfigError."""
    from rollmesh.services.rollout.tokenizer import load_tokenizer

    rollout = layout.config.rollout
    if not rollout.model_dir and not layout.config.model:
        return None
    folder = layout.base_dir / rollout.model_dir if rollout.model_dir else layout.model_dir()
    return load_tokenizer(folder, rollout.format)


def reward_config(config: MeshConfig) -> RewardConfig:
    """Return the reward service's config with the answer key of a JSONL task file, which only this service reads."""
    if config.data.source.name != "jsonl":
        return config.reward
    source: Any = SOURCES.options(config.data.source)
    if source.name in config.reward.answer_files or not (source.answer or source.tests):
        return config.reward
    key = AnswerFileConfig(
        path=source.path,
        answer=source.answer,
        tests=source.tests,
        answer_pattern=source.answer_pattern,
        num_lines_max=source.num_lines_max,
    )
    return msgspec.structs.replace(config.reward, answer_files={**config.reward.answer_files, source.name: key})


def _data(name: str, layout: RunLayout, bus: Bus, **options: Any) -> MeshService:
    from rollmesh.services.data.node import DataNode
    from rollmesh.services.data.snapshots import SnapshotFolder

    config = layout.config.data
    if not config.seed:
        config = msgspec.structs.replace(config, seed=layout.config.run.seed)
    return DataNode(
        config,
        node_id=name,
        coordinator=layout.coordinator,
        access=layout.access,
        bus=bus,
        base_dir=layout.base_dir,
        snapshots=SnapshotFolder(layout.folder(name), more=lambda: _states_in_checkpoints(layout)),
        **({"server": layout.served()} | options),
    )


def _states_in_checkpoints(layout: RunLayout) -> list[Path]:
    """Return the snapshots of the data service in the learner's checkpoints, newest first. Empty if the checkpoints are on another host."""
    return [path / SNAPSHOT_NAME for path in reversed(list_checkpoints(layout.run_dir / "checkpoints"))]


def _rollout(name: str, layout: RunLayout, bus: Bus, **options: Any) -> MeshService:
    from rollmesh.services.rollout.node import RolloutNode

    config = rollout_config(layout.config)
    if not config.model_dir:
        config = msgspec.structs.replace(config, model_dir=str(layout.model_dir()))
    return RolloutNode(
        config,
        node_id=name,
        coordinator=layout.coordinator,
        access=layout.access,
        bus=bus,
        base_dir=layout.base_dir,
        **options,
    )


def _learner(name: str, layout: RunLayout, bus: Bus, **options: Any) -> MeshService:
    from rollmesh.client import RunAddress
    from rollmesh.services.learner.node import LearnerNode

    run = layout.config.run
    where = RunAddress(
        address=layout.gateway,
        access=layout.access,
        run=layout.run,
        policy=run.policy,
        learner=run.learner,
        payloads=layout.payloads if layout.config.payloads_in_files else None,
    )
    return LearnerNode(
        learner_config(layout),
        where,
        coordinator=layout.coordinator,
        node_id=name,
        base_dir=layout.base_dir,
        **{"data_snapshot": DataSnapshots(layout), **options},
    )


def learner_config(layout: RunLayout) -> LearnerConfig:
    """Return the learner's config with the run's folder, model and seed."""
    config = located_learner(layout.config, layout.base_dir)
    return msgspec.structs.replace(
        config,
        directory=str(layout.run_dir),
        model=config.model or (str(layout.model_dir()) if layout.config.model else ""),
        seed=config.seed or layout.config.run.seed,
    )


def located_learner(config: MeshConfig, base_dir: Path) -> LearnerConfig:
    """Return the learner's config with absolute files of a user, and with the rewards and outputs of the run. Raises ConfigError if the
    reference model does not exist."""
    learner, reference = config.learner, config.learner.reference
    if reference.kind == "path":
        folder = find_model(reference.path, base_dir, "learner.reference.path")
        reference = msgspec.structs.replace(reference, path=str(folder))
    return msgspec.structs.replace(
        learner,
        estimator=learner.estimator.located(base_dir),
        loss=tuple(term.located(base_dir) for term in learner.loss),
        update_rule=learner.update_rule.located(base_dir),
        features={name: choice.located(base_dir) for name, choice in learner.features.items()},
        reference=reference,
        reward_weights=config.reward.weights,
        outputs=array_names(config.rollout.outputs),
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
