"""A value that a service's constructor rejects is a configuration error: the process exits with code 2 and is not
restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.mesh_services import build_service
from rollmesh.mesh.run_layout import open_layout
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.errors import ConfigError
from rollmesh.testing.memory_bus import MemoryBus

ENGINE = """
class Engine:
    def __init__(self):
        raise ValueError("model_type 'odd' is not supported")
"""


def config(folder: Path) -> MeshConfig:
    (folder / "engine.py").write_text(ENGINE)
    inference = {"engine": "engine.py:Engine"}
    return config_from_dict(MeshConfig, {"inference": inference, "bus": {"url": "nats://127.0.0.1:1"}})


def test_a_model_that_the_engine_rejects_is_a_configuration_error(tmp_path: Path) -> None:
    layout = open_layout(config(tmp_path), run_dir=tmp_path / "run", base_dir=tmp_path)
    with pytest.raises(ConfigError, match="inference engine `engine.py:Engine`: .*model_type 'odd' is not supported"):
        build_service("inference-0", layout, MemoryBus())


@pytest.mark.parametrize("address", ["b.example.org:7400", "10.0.0.2", "10.0.0.2:0", "10.0.0.2:99999"])
def test_a_standby_address_that_no_node_could_try_is_rejected(address: str) -> None:
    good = config_from_dict(MeshConfig, {"coordinator": {"standby": ["10.0.0.2:7400", "[fd00::2]:7400"]}})
    assert len(good.coordinator.standby) == 2
    with pytest.raises(ConfigError, match="`coordinator.standby` must list IP:PORT, got"):
        config_from_dict(MeshConfig, {"coordinator": {"standby": [address]}})
