"""Facts that a session's process stores about its environment: its private directory, and whether `kill(-1)` is
confined to the session.

`contain` sets both once before any foreign code runs. Code in the session can change them without effect on other
sessions: the isolation mechanisms determine its access.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

from rollmesh.sandbox_runtime.mounts import PRIVATE_DIR


@dataclass(slots=True)
class _ProcessEnv:
    private_dir: str = PRIVATE_DIR
    kill_confined: bool = False


_here = _ProcessEnv()


def private_dir() -> str:
    """Return the session's working, home and temporary directory."""
    return _here.private_dir


def kill_is_confined() -> bool:
    """Return whether `kill(-1)` reaches only processes of the session."""
    return _here.kill_confined


def reset() -> None:
    """Set the environment variables of the private directory again, because code of the operator may have changed
    them."""
    os.environ["HOME"] = os.environ["TMPDIR"] = _here.private_dir


def enter(path: str, *, kill_confined: bool) -> None:
    """Enter the private directory and make it the home directory. Raises OSError."""
    os.chdir(path)
    _here.kill_confined = kill_confined
    if path != _here.private_dir:  # otherwise the zygote's environment contains it already
        _here.private_dir = path
        reset()
    tempfile.tempdir = None
