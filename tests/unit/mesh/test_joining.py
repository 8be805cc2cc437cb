"""A node that joins a mesh on another address needs an address that other hosts reach."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.joining import refuse_loopback
from rollmesh.mesh.security import NetworkConfig, SecurityConfig
from rollmesh.shared.errors import ConfigError

ELSEWHERE = "10.0.0.5:7000"
FILES = {"ca": "ca.pem", "certificate": "c.pem", "key": "k.pem", "token_file": "token"}


@pytest.mark.parametrize("kind", ["inference", "reward", "gateway", "depot"])
def test_a_serving_node_on_loopback_is_rejected_by_a_mesh_on_another_address(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"on 10\.0\.0\.5.*advertise 127\.0\.0\.1.*set network\.host=ADDRESS"):
        refuse_loopback(MeshConfig(), kind, ELSEWHERE)


@pytest.mark.parametrize(
    ("kind", "network", "coordinator"),
    [
        ("rollout", {}, ELSEWHERE),  # serves no other process
        ("inference", {}, "127.0.0.1:7000"),
        ("inference", {"host": "10.0.0.6"}, ELSEWHERE),
        ("sandbox", {"host": "0.0.0.0", "advertise": "gpu7"}, ELSEWHERE),
    ],
)
def test_other_nodes_join(kind: str, network: dict[str, Any], coordinator: str) -> None:
    config = MeshConfig(network=NetworkConfig(**network), security=SecurityConfig(**FILES))
    refuse_loopback(config, kind, coordinator)
