"""A whole run: every service on real gRPC and a real nats-server, in one process or in one process for each service."""

from rollmesh.shared.process.interpreter_tuning import without_collections

with without_collections():
    from rollmesh.mesh.config import MeshConfig
    from rollmesh.mesh.mesh import Mesh
    from rollmesh.mesh.supervisor import Supervisor

__all__ = ["Mesh", "MeshConfig", "Supervisor"]
