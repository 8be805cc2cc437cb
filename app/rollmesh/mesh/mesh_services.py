"""The services of a mesh by name, each as an async context. One process and many processes run the same code.

A service gets the layout and the bus. It finds the other services through the coordinator's address. Its modules are
imported when it is built, so that a process imports only the services that it hosts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.data_snapshots import DataSnapshots
from rollmesh.mesh.run_layout import RunLayout
from rollmesh.mesh.tool_descriptions import rollout_config
from rollmesh.services.data.mixture_source import single_sources
from rollmesh.services.data.source import SOURCES
from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.reward.config import RewardConfig
from rollmesh.services.reward.oracles import AnswerFileConfig
from rollmesh.services.rollout.tokenizer import ChatTokenizer
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.domain.outputs import array_names
from rollmesh.shared.endpoints.blocking import BlockingEndpoints
from rollmesh.shared.endpoints.fleet_endpoints import EndpointsOfRun
from rollmesh.shared.endpoints.weights_backend import ChatEncoder
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.rpc.addresses import host_of, is_loopback
from rollmesh.shared.weights.model_folder import find_model
from rollmesh.trainer.checkpoint_files import SNAPSHOT_NAME, list_checkpoints

MeshService = AbstractAsyncContextManager[Any]
SPENT = "endpoints"
"""Folder in the run folder with the sums of the prices of endpoints."""
NATS = "nats"
"""Name of the embedded server. `build_service` does not build it."""


def service_names(config: MeshConfig) -> list[str]:
    """Return every service except the bus, in the order of their start."""
    counts = config.counts
    return [
        "coordinator",
        "depot",
        *("reward" if n == 0 else f"reward-{n}" for n in range(counts.reward)),
        "data",
        *(f"sandbox-{n}" for n in range(counts.sandbox)),
        *(f"inference-{n}" for n in range(counts.inference)),
        *(
            f"endpoint-{name}-{n}"
            for name, one in config.endpoints.items()
            if one.kind == "frozen"
            for n in range(one.nodes)
        ),
        "gateway",
        *(f"rollout-{n}" for n in range(counts.rollout)),
        "learner",
    ]


def refuse_shared_port(config: MeshConfig, services: Sequence[str]) -> None:
    """Raise ConfigError if a fixed port of the network would have to serve several services."""
    network = config.network
    if len(services) > 1 and (network.port or network.probes):
        key = "port" if network.port else "probes"
        raise ConfigError(
            f"`network.{key}` must be {'0' if network.port else 'empty'}, got {getattr(network, key)}: it is for a "
            f"process that runs one service, and this command runs {len(services)} ({', '.join(services[:3])}, ...)",
            key=f"network.{key}",
        )


def is_inference(name: str) -> bool:
    """Return whether a service is an inference node, of the run or of an endpoint."""
    return name.partition("-")[0] in ("inference", "endpoint")


def build_service(name: str, layout: RunLayout, bus: Bus | None, **options: Any) -> MeshService:
    """Return the service called `name`. Its node gets `options`. `bus` may be None for a service that does not use it.
    Raises ConfigError for an unusable configuration."""
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
    steps = {one.step for one in layout.config.endpoints.values() if one.kind == "policy_step"}
    fleet = msgspec.structs.replace(config.fleet, keep_steps=tuple(sorted({*config.fleet.keep_steps, *steps})))
    config = msgspec.structs.replace(config, fleet=fleet)
    config = msgspec.structs.replace(config, server=layout.served_at(layout.coordinator, config.server))
    return CoordinatorNode(
        config, folder=layout.folder(name), access=layout.access, bus=bus, offer=describe_mesh(layout, bus), **options
    )


def _gateway(name: str, layout: RunLayout, bus: Bus, **options: Any) -> MeshService:
    from rollmesh.mesh.live_page import page_parts
    from rollmesh.services.gateway.node import GatewayNode
    from rollmesh.services.gateway.page.server import is_served

    config = layout.config.gateway
    served = is_served(config.page, local=is_loopback(host_of(layout.gateway)))
    changed = {"address": layout.page} if served else {"serve": "never"}
    page = msgspec.structs.replace(config.page, **changed)
    config = msgspec.structs.replace(config, server=layout.served_at(layout.gateway, config.server), page=page)
    return GatewayNode(
        config,
        node_id=name,
        coordinator=layout.coordinators,
        access=layout.access,
        folder=layout.folder(name),
        bus=bus,
        **({"page": page_parts(layout, partial(policy_tokenizer, layout))} | options),
    )


def _depot(name: str, layout: RunLayout, bus: Bus | None, **options: Any) -> MeshService:
    from rollmesh.services.weights.node import DepotNode

    config = layout.config.depot
    config = msgspec.structs.replace(
        config,
        directory=str(layout.folder(config.directory)),
        server=layout.served_at(layout.depot, config.server),
    )
    return DepotNode(config, node_id=name, coordinator=layout.coordinators, access=layout.access, **options)


def _inference(name: str, layout: RunLayout, bus: Bus | None, **options: Any) -> MeshService:
    from rollmesh.services.inference.node import InferenceNode

    config = _inference_config(name, layout, layout.config.inference, layout.model_dir)
    return InferenceNode(
        config, node_id=name, coordinator=layout.coordinators, access=layout.access, base_dir=layout.base_dir, **options
    )


def _endpoint(name: str, layout: RunLayout, bus: Bus | None, **options: Any) -> MeshService:
    from rollmesh.services.inference.endpoint_node import EndpointNode

    endpoint = name.split("-")[1]
    chosen = layout.config.endpoints.get(endpoint)
    if chosen is None or chosen.kind != "frozen":
        frozen = [name for name, one in layout.config.endpoints.items() if one.kind == "frozen"]
        raise ConfigError(f"`endpoints` has no entry {endpoint!r} of kind frozen; known: {', '.join(frozen) or 'none'}")
    folder = find_model(chosen.model, layout.base_dir, f"endpoints.{endpoint}.model")
    config = layout.config.inference
    config = msgspec.structs.replace(config, engine=chosen.engine or config.engine)
    return EndpointNode(
        _inference_config(name, layout, config, lambda: folder),
        endpoint=endpoint,
        weights=folder,
        node_id=name,
        coordinator=layout.coordinators,
        access=layout.access,
        base_dir=layout.base_dir,
        **options,
    )


def _inference_config(
    name: str, layout: RunLayout, config: InferenceConfig, model_dir: Callable[[], Path]
) -> InferenceConfig:
    """Return the config of an inference node with its folder and its model. Raises ConfigError if it needs another
    interpreter."""
    from rollmesh.services.inference.engine import with_model
    from rollmesh.services.inference.interpreter import interpreter_of, is_this

    python = interpreter_of(config, layout.base_dir)
    if not is_this(python):
        raise ConfigError(
            f"`inference.python`: the engine {config.engine.name} runs with {python}, and this process with "
            f"{sys.executable}; run the node in a separate process: without --in-process, or with `rollmesh serve "
            "inference --join` of that environment",
            key="inference.python",
        )
    engine = with_model(config.engine, layout.base_dir, model_dir)
    return msgspec.structs.replace(
        config, directory=str(layout.folder(name)), engine=engine, server=layout.served(config.server)
    )


def blocking_endpoints(config: MeshConfig, base_dir: Path, spent_dir: Path | None = None) -> BlockingEndpoints:
    """Return the endpoints that the task source of a configuration may ask."""
    return BlockingEndpoints(config.endpoints, base_dir=base_dir, spent_dir=spent_dir)


def endpoints_of_run(layout: RunLayout) -> EndpointsOfRun:
    """Return the endpoints that the agents and scorers of a run may ask."""

    def encoder(name: str) -> ChatEncoder:
        from rollmesh.services.rollout.tokenizer import load_tokenizer

        endpoint = layout.config.endpoints[name]
        if endpoint.kind == "frozen":
            return load_tokenizer(find_model(endpoint.model, layout.base_dir, f"endpoints.{name}.model"))
        rollout = layout.config.rollout
        folder = layout.base_dir / rollout.model_dir if rollout.model_dir else layout.model_dir()
        return load_tokenizer(folder, rollout.format)

    return EndpointsOfRun(
        table=layout.config.endpoints,
        base_dir=layout.base_dir,
        spent_dir=layout.run_dir / SPENT,
        policy=layout.config.inference.policy,
        encoder=encoder,
    )


def _sandbox(name: str, layout: RunLayout, bus: Bus | None, **options: Any) -> MeshService:
    from rollmesh.services.sandbox.node import SandboxNode

    return SandboxNode(
        layout.config.sandbox.located(layout.base_dir),
        node_id=name,
        coordinator=layout.coordinators,
        access=layout.access,
        state_dir=layout.folder(name),
        **({"server": layout.served()} | options),
    )


def _reward(name: str, layout: RunLayout, bus: Bus | None, **options: Any) -> MeshService:
    from rollmesh.services.reward.node import RewardNode

    return RewardNode(
        reward_config(layout.config),
        node_id=name,
        coordinator=layout.coordinators,
        access=layout.access,
        base_dir=layout.base_dir,
        estimator=layout.config.learner.estimator,
        policy=layout.config.inference.policy,
        num_top=layout.config.rollout.num_top,
        tokenizer=lambda: policy_tokenizer(layout),
        endpoints=endpoints_of_run(layout),
        **({"server": layout.served()} | options),
    )


def policy_tokenizer(layout: RunLayout) -> ChatTokenizer | None:
    """Return the tokenizer of the workers; None if the engines need no model. Raises ConfigError."""
    from rollmesh.services.rollout.tokenizer import load_tokenizer

    rollout = layout.config.rollout
    if not rollout.model_dir and not layout.config.model:
        return None
    folder = layout.base_dir / rollout.model_dir if rollout.model_dir else layout.model_dir()
    return load_tokenizer(folder, rollout.format)


_ANSWER_FILES: Mapping[str, Any] = {"jsonl": "jsonl", "files": "files", "templated": "jsonl"}
"""Sources of which the reward service reads the files, by the options that `AnswerFileConfig` has as well, with the
scheme of their references."""


def reward_config(config: MeshConfig) -> RewardConfig:
    """Return the reward service's config with the answer keys of task files, which only this service reads. Raise
    ConfigError if two files have one name."""
    keys: dict[str, AnswerFileConfig] = {}
    for place, chosen in single_sources(config.data.source):
        if chosen.name not in _ANSWER_FILES:
            continue
        source: Any = SOURCES.options(chosen)
        given = {name: getattr(source, name) for name in AnswerFileConfig.__struct_fields__ if hasattr(source, name)}
        if not given["answer"] and not given.get("tests"):
            continue
        key = AnswerFileConfig(**given, source=_ANSWER_FILES[chosen.name])
        if keys.setdefault(source.name, key) != key:
            place += ".options.name"
            raise ConfigError(
                f"`{place}` must be another name, because references to the answers of a file contain it; got that of "
                f"an earlier file, {source.name}",
                key=place,
            )
    return msgspec.structs.replace(config.reward, answer_files={**keys, **config.reward.answer_files})


def _data(name: str, layout: RunLayout, bus: Bus, **options: Any) -> MeshService:
    from rollmesh.services.data.node import DataNode
    from rollmesh.services.data.snapshots import SnapshotFolder

    config = layout.config.data
    if not config.seed:
        config = msgspec.structs.replace(config, seed=layout.config.run.seed)
    return DataNode(
        config,
        node_id=name,
        coordinator=layout.coordinators,
        access=layout.access,
        bus=bus,
        base_dir=layout.base_dir,
        endpoints=blocking_endpoints(layout.config, layout.base_dir, layout.run_dir / SPENT),
        snapshots=SnapshotFolder(layout.folder(name), more=lambda: _states_in_checkpoints(layout)),
        **({"server": layout.served()} | options),
    )


def _states_in_checkpoints(layout: RunLayout) -> list[Path]:
    """Return the snapshots of the data service in the learner's checkpoints, newest first. Empty if the checkpoints are
    on another host."""
    return [path / SNAPSHOT_NAME for path in reversed(list_checkpoints(layout.run_dir / "checkpoints"))]


def _rollout(name: str, layout: RunLayout, bus: Bus, **options: Any) -> MeshService:
    from rollmesh.services.rollout.node import RolloutNode

    config = rollout_config(layout.config)
    if not config.model_dir:
        config = msgspec.structs.replace(config, model_dir=str(layout.model_dir()))
    return RolloutNode(
        config,
        node_id=name,
        coordinator=layout.coordinators,
        access=layout.access,
        bus=bus,
        base_dir=layout.base_dir,
        endpoints=endpoints_of_run(layout),
        **options,
    )


def _learner(name: str, layout: RunLayout, bus: Bus | None, **options: Any) -> MeshService:
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
        coordinator=layout.coordinators,
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
    """Return the learner's config with absolute files of a user, and with the rewards, outputs and external sources of
    the run. Raises ConfigError if the reference model does not exist."""
    return msgspec.structs.replace(
        config.learner.located(base_dir),
        reward_weights=config.reward.weights,
        outputs=array_names(config.rollout.outputs),
        external_sources=config.run.external_sources,
    )


_BUILDERS: dict[str, Any] = {
    "coordinator": _coordinator,
    "gateway": _gateway,
    "depot": _depot,
    "inference": _inference,
    "endpoint": _endpoint,
    "sandbox": _sandbox,
    "reward": _reward,
    "data": _data,
    "rollout": _rollout,
    "learner": _learner,
}
