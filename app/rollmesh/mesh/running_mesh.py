"""The port of a running mesh, with the methods that a session needs, for one process or many.

Implementations: `mesh.Mesh` (one process), `supervisor.Supervisor` (processes). Both start on entry and stop on exit.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from rollmesh.mesh.run_layout import RunLayout


class RunningMesh(Protocol):
    """A run in progress."""

    @property
    def layout(self) -> RunLayout:
        """Folder, addresses and secret of the run."""
        ...

    async def finished(self) -> None:
        """Wait until the learner is done. Raises the error that stopped the mesh."""
        ...

    async def stop_learner(self) -> None:
        """Let the learner finish its update, write a checkpoint, publish and exit. The other services continue."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
