"""The root span of one episode, from the lease request to the acknowledged report.

Spans of the engine, sandbox, scorers and coordinator are its descendants. The trainer adds its lease and commit later,
with the context that is stored in the episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollmesh.shared.telemetry import tracing
from rollmesh.v1 import coordinator_pb2

SERVICE = "rollout"


@contextmanager
def episode_trace(lease: coordinator_pb2.EpisodeLease, asked_ns: int) -> Iterator[None]:
    """Trace an episode whose lease was requested at `asked_ns` and has just arrived."""
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
