"""Engines behind the port of `rollmesh.services.sandbox.engine`."""
