"""The port to a running mesh: what a session needs of it, whether its parts share a process or have one each.

Implementations: `mesh.Mesh` (one process), `supervisor.Supervisor` (processes). Both are entered to start and left to stop.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from rollmesh.mesh.run_layout import RunLayout


class RunningMesh(Protocol):
    """A run that is going on."""

    @property
    def layout(self) -> RunLayout:
        """Folder, addresses and secret of the run."""
        ...

    async def finished(self) -> None:
        """Until the learner is done. Raises what broke the mesh."""
        ...

    async def stop_learner(self) -> None:
        """Ends the learner in good order: it finishes its update, writes a checkpoint and publishes. The rest goes on."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
