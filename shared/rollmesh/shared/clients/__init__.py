"""Clients of the mesh's services: routing, batching and retries on this side of the wire."""
