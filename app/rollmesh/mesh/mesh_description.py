"""The description of a mesh for a joining node: the resolved configuration without secrets, and the model's small
files."""

from __future__ import annotations

import msgspec

from rollmesh.mesh.config import SERVING, BusConfig, MeshConfig
from rollmesh.mesh.run_layout import RunLayout
from rollmesh.mesh.security import NetworkConfig, SecurityConfig
from rollmesh.mesh.tool_descriptions import rollout_config
from rollmesh.services.coordinator.mesh_description import MeshDescription
from rollmesh.services.data.source import SUBMITTED
from rollmesh.services.reward.oracles import ORACLES
from rollmesh.services.reward.submitted_oracle import SCHEME as SUBMITTED_SCHEME
from rollmesh.services.rollout.config import APPLICATION
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.config.loader import to_yaml
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.weights.model_files import ModelFiles


def describe_mesh(layout: RunLayout, bus: Bus) -> MeshDescription:
    """Return the description of the mesh at `layout`, whose streams are on `bus`."""
    rollout = layout.config.rollout
    private = [name for name, extras in rollout.private_extras.items() if extras]
    return MeshDescription(
        config_yaml=to_yaml(public_config(layout.config)),
        coordinator=layout.coordinators,
        bus_url=layout.config.bus.url or layout.bus_server().known_url(),
        policy=layout.config.inference.policy,
        base_dir=str(layout.base_dir),
        model=_model_files(layout),
        agents=tuple(rollout.agents),
        private_agents=(*private, *([""] if rollout.agent.name in private else [])),
        application_agents=tuple(name for name, one in rollout.agents_by_name.items() if one.name == APPLICATION),
        tools=tuple(rollout.tools),
        oracles=tuple(sorted({*ORACLES.names, "jsonl", "files", *layout.config.reward.oracles} - {SUBMITTED_SCHEME})),
        needs_submissions=layout.config.data.source.name == SUBMITTED,
        payloads="files" if layout.config.payloads_in_files else "stream",
    )


def public_config(config: MeshConfig) -> MeshConfig:
    """Return `config` without the settings of this host: files with secrets, addresses, and settings that a command
    added."""
    fields = {name: getattr(config, name) for name in MeshConfig.__struct_fields__}
    fields["bus"] = BusConfig(embedded=config.bus.embedded)
    fields["rollout"] = rollout_config(config)  # a joining host may lack the profiles' modules
    fields["security"], fields["network"] = SecurityConfig(), NetworkConfig()
    for name in SERVING:
        server = msgspec.structs.replace(fields[name].server, address=ServerConfig().address, advertise="")
        fields[name] = msgspec.structs.replace(fields[name], server=server)
    return MeshConfig(**fields)


def _model_files(layout: RunLayout) -> ModelFiles | None:
    """Return the files of the initial model, or of the workers' tokenizer if the engines need no model."""
    if layout.config.model:
        return ModelFiles(layout.model_dir())
    folder = (layout.base_dir / layout.config.rollout.model_dir).resolve()
    return ModelFiles(folder) if layout.config.rollout.model_dir and folder.is_dir() else None
