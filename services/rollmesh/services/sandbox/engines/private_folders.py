"""Private directories of sessions that have no mount namespace: one each, made before the session, deleted after it.

They lie in a directory of the node's own, below one that every user can enter; its path is recorded, so that the next start finds what a
killed service left. Deleting is done by a thread: a session may leave a million files.
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
    """Made when the service starts; blocking, but for `make` and `remove`."""

    def __init__(self, parent: str, state: StateDir, name: str) -> None:
        self._root = tempfile.mkdtemp(prefix=PREFIX, dir=parent or None)
        self._state = state
        self._name = name
        state.record_folders(name, self._root)
        os.chmod(self._root, 0o711)  # entered by sessions of any uid, listed by none
        self._remover = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox folders")

    def make(self, uid: int) -> str:
        """A new one, `uid`'s own if we are root. Raises OSError."""
        path = tempfile.mkdtemp(dir=self._root)
        if os.geteuid() == 0:
            os.chown(path, uid, uid)
        return path

    def remove(self, path: str) -> None:
        """Soon: nobody may use it any more."""
        self._remover.submit(_removed, path)

    def close(self) -> None:
        """When all are deleted."""
        self._remover.shutdown()
        try:
            os.rmdir(self._root)
        except OSError as error:
            _log.warning("%s can't be deleted now, the next start will: %s", self._root, error)
            return
        self._state.forget_folders(self._name)


def _removed(path: str) -> None:
    try:
        remove_tree(path)
    except OSError as error:
        _log.warning("a session's directory can't be deleted now, the next start will: %s", error)
