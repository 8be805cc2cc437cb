"""Private directories of sessions without a mount namespace: one per session, created before it and deleted after it.

They are in a directory of the node, below a directory that every user can enter. Its path is recorded, so that the next
start finds what a killed service left. A thread deletes them, because a session may leave a million files.
"""

from __future__ import annotations

import logging
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor

from rollmesh.services.sandbox.engines.cleanup import StateDir
from rollmesh.services.sandbox.engines.file_trees import remove_tree

_log = logging.getLogger(__name__)

PREFIX = "rollmesh-sessions-"


class PrivateFolders:
    """Create at the start of the service. All methods except `make` and `remove` block."""

    def __init__(self, parent: str, state: StateDir, name: str) -> None:
        self._root = tempfile.mkdtemp(prefix=PREFIX, dir=parent or None)
        self._state = state
        self._name = name
        state.record_folders(name, self._root)
        os.chmod(self._root, 0o711)  # sessions of any uid can enter it, and none can list it
        self._remover = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox folders")

    def make(self, uid: int) -> str:
        """Create a directory, owned by `uid` if the service runs as root. Raises OSError."""
        path = tempfile.mkdtemp(dir=self._root)
        if os.geteuid() == 0:
            os.chown(path, uid, uid)
        return path

    def remove(self, path: str) -> None:
        """Delete a directory in the background. No process may use it any more."""
        self._remover.submit(_removed, path)

    def close(self) -> None:
        """Wait until all directories are deleted."""
        self._remover.shutdown()
        try:
            os.rmdir(self._root)
        except OSError as error:
            _log.warning("cannot delete %s now; the next start retries: %s", self._root, error)
            return
        self._state.forget_folders(self._name)


def _removed(path: str) -> None:
    try:
        remove_tree(path)
    except OSError as error:
        _log.warning("cannot delete a session's directory now; the next start retries: %s", error)
