"""What may leave the node: tokens of a version only after its probes were scored right.

Activation and probes are two steps, and sequences go on between them. Tokens of the new version are held back until the verdict,
so that a node that serves wrong weights is found out before anyone has trained on a token of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollmesh.shared.errors import MeshError
from rollmesh.shared.versions import PolicyVersion


class VersionGate:
    """Open, or holding one version. Used on one event loop."""

    def __init__(self) -> None:
        self._held: PolicyVersion | None = None
        self._changed = asyncio.Event()
        self._listeners: set[Callable[[], None]] = set()
        self.failure: MeshError | None = None
        """Set once a verdict was bad; for good."""

    def listen(self, listener: Callable[[], None]) -> None:
        """`listener` is called after every verdict."""
        self._listeners.add(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        self._listeners.discard(listener)

    def hold(self, version: PolicyVersion) -> None:
        """From now on, nothing of `version` leaves."""
        self._held = version

    def admits(self, version: PolicyVersion) -> bool:
        """Whether tokens of `version` may leave now."""
        return self._held is None or version != self._held

    def release(self) -> None:
        """The verdict is good, or there was nothing to judge."""
        self._held = None
        self._tell()

    def fail(self, failure: MeshError) -> None:
        """The verdict is bad: what is held is never released."""
        self.failure = failure
        self._tell()

    async def verdict(self, version: PolicyVersion) -> None:
        """Returns once `version` may leave; raises the failure if it never will. Bounded by the probes' own limit."""
        while not self.admits(version):
            if self.failure is not None:
                raise self.failure
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in list(self._listeners):
            listener()
