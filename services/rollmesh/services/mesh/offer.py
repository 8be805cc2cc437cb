"""What a mesh's coordinator tells whoever wants to add a node: the resolved configuration without its secrets, and the model's small files."""

from __future__ import annotations

from rollmesh.services.coordinator.offer import MeshOffer
from rollmesh.services.mesh.config import BusConfig, MeshConfig
from rollmesh.services.mesh.place import Place
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.config import to_yaml
from rollmesh.shared.model_files import ModelFiles


def make_offer(place: Place, bus: Bus) -> MeshOffer:
    """The offer of the mesh at `place`, whose streams are on `bus`."""
    return MeshOffer(
        config_yaml=to_yaml(public_config(place.config)),
        coordinator=place.coordinator,
        bus_url=bus.url if isinstance(bus, JetStreamBus) else place.config.bus.url,
        base_dir=str(place.base_dir),
        model=_model_files(place),
    )


def public_config(config: MeshConfig) -> MeshConfig:
    """`config` without secrets, and without what a command added to it for itself."""
    fields = {name: getattr(config, name) for name in MeshConfig.__struct_fields__}
    return MeshConfig(**{**fields, "bus": BusConfig(embedded=config.bus.embedded)})


def _model_files(place: Place) -> ModelFiles | None:
    """Of the initial model; of the workers' tokenizer where the engines need no model."""
    for name in (place.config.model, place.config.rollout.model_dir):
        folder = (place.base_dir / name).resolve()
        if name and folder.is_dir():
            return ModelFiles(folder)
    return None
