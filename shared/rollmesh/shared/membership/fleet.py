"""The mesh's nodes as seen from one process: an observable snapshot, filled by `membership` or by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollmesh.v1 import coordinator_pb2


class KnownFleet:
    """Every usable node, as the coordinator last reported. Used on one event loop."""

    def __init__(self, nodes: Sequence[coordinator_pb2.FleetNode] = ()) -> None:
        self._nodes = tuple(nodes)
        self._revision = 0
        self._changed = asyncio.Event()

    @property
    def revision(self) -> int:
        """Increases with every new snapshot."""
        return self._revision

    def nodes(
        self, kind: coordinator_pb2.NodeKind.ValueType = coordinator_pb2.NODE_KIND_UNSPECIFIED
    ) -> tuple[coordinator_pb2.FleetNode, ...]:
        """Return all nodes, or those of a kind. The messages are shared; do not change them."""
        if kind == coordinator_pb2.NODE_KIND_UNSPECIFIED:
            return self._nodes
        return tuple(node for node in self._nodes if node.kind == kind)

    def address_of(self, kind: coordinator_pb2.NodeKind.ValueType) -> str | None:
        """Return the address of a READY node of a kind; None if no such node exists now."""
        ready = (n.address for n in self.nodes(kind) if n.state == coordinator_pb2.NODE_STATE_READY)
        return next(ready, None)

    def replace(self, nodes: Sequence[coordinator_pb2.FleetNode]) -> None:
        """Replace the snapshot and wake the tasks that wait in `changed`."""
        self._nodes = tuple(nodes)
        self._revision += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, *, since: int) -> int:
        """Return the revision as soon as it is above `since`. The wait has no limit, so the caller must bound it."""
        while self._revision <= since:
            await self._changed.wait()
        return self._revision
