"""Implementations of the port in `rollmesh.services.sandbox.engine`."""
