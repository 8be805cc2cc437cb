"""Delete the directory tree that a session left on the host. The tree is hostile and may have any depth. No process
uses it any more.

Directories are moved to the top before they are emptied, so that neither the stack, nor the number of descriptors, nor
path lengths grow with the depth. Symbolic links are deleted, never followed.
"""

from __future__ import annotations

import itertools
import os
import secrets

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: str) -> None:
    """Delete a tree. Blocking: call from a thread. Raises OSError."""
    top = os.open(path, _FOLDER)
    try:
        _empty(top)
    finally:
        os.close(top)
    os.rmdir(path)


def _empty(top: int) -> None:
    prefix, numbers = secrets.token_hex(8), itertools.count()
    waiting = _strip(top)
    while waiting:
        name = waiting.pop()
        folder = os.open(name, _FOLDER, dir_fd=top)
        try:
            for inner in _strip(folder):
                lifted = f"{prefix}-{next(numbers)}"
                os.rename(inner, lifted, src_dir_fd=folder, dst_dir_fd=top)
                waiting.append(lifted)
        finally:
            os.close(folder)
        os.rmdir(name, dir_fd=top)


def _strip(folder: int) -> list[str]:
    """Delete all files and return the names of the remaining directories. They are made accessible to their owner,
    because the session may have removed permissions."""
    folders = []
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.name, 0o700, dir_fd=folder)
            folders.append(entry.name)
        else:
            os.unlink(entry.name, dir_fd=folder)
    return folders
