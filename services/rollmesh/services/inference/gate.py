"""Hold back the tokens of a version until the engine has scored its probes correctly.

Activation and probes are two steps, and sequences continue between them. The gate holds tokens of the new version until
the verdict, so that a node that serves wrong weights is detected before any of their tokens is trained on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import MeshError


class VersionGate:
    """Admits all versions, or holds one. Used on one event loop."""

    def __init__(self) -> None:
        self._held: PolicyVersion | None = None
        self._changed = asyncio.Event()
        self._listeners: set[Callable[[], None]] = set()
        self.failure: MeshError | None = None
        """Set by a failed verification, permanently."""

    def listen(self, listener: Callable[[], None]) -> None:
        """Register a function that is called after every verdict."""
        self._listeners.add(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        self._listeners.discard(listener)

    def hold(self, version: PolicyVersion) -> None:
        """Hold back the tokens of `version` from now on."""
        self._held = version

    def admits(self, version: PolicyVersion) -> bool:
        """Return whether tokens of `version` may leave now."""
        return self._held is None or version != self._held

    def release(self) -> None:
        """Release the held version after a passed verification, or if no swap happened."""
        self._held = None
        self._notify()

    def fail(self, failure: MeshError) -> None:
        """Record a failed verification. The held version is never released."""
        self.failure = failure
        self._notify()

    async def verdict(self, version: PolicyVersion) -> None:
        """Wait until `version` may leave. Raises the failure if it never may. Bounded by `activate_s`."""
        while not self.admits(version):
            if self.failure is not None:
                raise self.failure
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in list(self._listeners):
            listener()
