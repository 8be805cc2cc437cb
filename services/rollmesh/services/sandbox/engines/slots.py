"""The slots of a jail engine: the resources of one live session, reused by the next.

A slot is a number, its uid, and its cgroups if they are writable. A slot becomes free only when all processes of its
last session are gone, so that two sessions never share a uid or a memory limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.sandbox_runtime.cgroups import Cgroup, Hierarchy
from rollmesh.sandbox_runtime.mounts import PRIVATE_DIR
from rollmesh.services.sandbox.engines.private_folders import PrivateFolders
from rollmesh.shared.errors import Overloaded, SandboxFailed


@dataclass(slots=True)
class SessionSlot:
    """Resources for one session at a time."""

    index: int
    uid: int
    group: Cgroup | None
    private_dir: str = PRIVATE_DIR
    """Private directory of the current session."""


class SessionSlots:
    """At most `num_max` slots, created on first use."""

    def __init__(
        self,
        num_max: int,
        uid_base: int,
        hierarchy: Hierarchy | None,
        name: str,
        retry_after_s: float,
        folders: PrivateFolders | None = None,
    ) -> None:
        """If `folders` is set, each session gets a directory and each slot two uids: the second is used to kill
        processes of the first."""
        self._folders = folders
        self._num_max = num_max
        self._uid_base = uid_base
        self._hierarchy = hierarchy
        self._name = name
        self._retry_after_s = retry_after_s
        self._made: list[SessionSlot] = []
        self._free: list[SessionSlot] = []

    @property
    def num_used(self) -> int:
        """Number of slots with a session or its remaining processes."""
        return len(self._made) - len(self._free)

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return self._num_max - self.num_used

    def acquire(self) -> SessionSlot:
        """Acquire a free slot. Raises Overloaded, SandboxFailed."""
        if self._free:
            return self._with_folder(self._free.pop())
        if len(self._made) == self._num_max:
            raise Overloaded(
                f"all {self._num_max} slots of this sandbox node are in use; wait, use another node, or raise "
                "sessions_max",
                retry_after_s=self._retry_after_s,
            )
        slot = self._make(len(self._made))
        self._made.append(slot)
        return self._with_folder(slot)

    def release(self, slot: SessionSlot) -> None:
        """Release a slot. The caller guarantees that its session is gone."""
        assert slot not in self._free
        self._free.append(slot)
        if self._folders is not None:
            self._folders.remove(slot.private_dir)

    def _with_folder(self, slot: SessionSlot) -> SessionSlot:
        if self._folders is None:
            return slot
        try:
            slot.private_dir = self._folders.make(slot.uid)
        except OSError as error:
            self._free.append(slot)
            raise SandboxFailed(f"cannot create a session's directory: {error}") from error
        return slot

    def remove_groups(self) -> None:
        """Delete all cgroups. Call when every session is gone."""
        for slot in self._made:
            if slot.group is not None:
                slot.group.remove()

    def _make(self, index: int) -> SessionSlot:
        group = None
        if self._hierarchy is not None:
            try:
                group = self._hierarchy.make(f"{self._name}-{index}")
            except OSError as error:
                raise SandboxFailed(f"cannot create a cgroup: {error}") from error
        return SessionSlot(index, self._uid_base + index * (2 if self._folders else 1), group)
