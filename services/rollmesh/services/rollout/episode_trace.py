"""The trace of one episode: its root span, from asking for the lease to the acknowledged report.

What follows elsewhere (engine, sandbox, scorers, coordinator) hangs below; the trainer adds its lease and commit later, by the context
that is stored with the episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollmesh.shared.telemetry import tracing
from rollmesh.v1 import coordinator_pb2

SERVICE = "rollout"


@contextmanager
def episode_trace(lease: coordinator_pb2.EpisodeLease, asked_ns: int) -> Iterator[None]:
    """Around an episode whose lease was asked for at `asked_ns` and came just now."""
    key = lease.key
    attributes: tracing.Attributes = {
        "rollmesh.run": key.run,
        "rollmesh.group": key.group,
        "rollmesh.attempt": key.attempt,
    }
    root = tracing.begin_root("episode", SERVICE, key.episode, asked_ns, attributes) if tracing.is_on() else None
    if root is None:
        yield
        return
    tracing.record(root, "lease", SERVICE, asked_ns, tracing.now_ns(), {"rollmesh.lease": lease.lease_id})
    try:
        with tracing.inside(root):
            yield
    finally:
        root.end()
