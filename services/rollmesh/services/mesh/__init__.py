"""A whole run: every service on real gRPC and a real nats-server, engines by name; in one process or in one for each part."""

from rollmesh.services.mesh.config import MeshConfig
from rollmesh.services.mesh.mesh import Mesh
from rollmesh.services.mesh.supervisor import Supervisor

__all__ = ["Mesh", "MeshConfig", "Supervisor"]
