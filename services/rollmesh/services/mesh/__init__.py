"""The mesh in one process: every service on real gRPC and a real nats-server, engines by name."""

from rollmesh.services.mesh.config import MeshConfig
from rollmesh.services.mesh.mesh import Mesh

__all__ = ["Mesh", "MeshConfig"]
