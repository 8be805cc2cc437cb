"""Clients of the mesh's services, with routing, batching and retries in the caller's process."""
