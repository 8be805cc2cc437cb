"""What a session's process knows of where it runs: its private directory, and whether all it may signal is its own.

Both are facts of the process, set once by `contain` before any foreign code runs. Code in the session can change them, and fools
itself alone: what it may reach is decided by the walls.
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
    """The session's working, home and temporary directory."""
    return _here.private_dir


def kill_is_confined() -> bool:
    """Whether `kill(-1)` reaches the session's own processes only."""
    return _here.kill_confined


def reset() -> None:
    """The environment names the private directory again, whatever an operator's code has made of it since the launcher began."""
    os.environ["HOME"] = os.environ["TMPDIR"] = _here.private_dir


def enter(path: str, *, kill_confined: bool) -> None:
    """Enter the private directory and make it home. Raises OSError."""
    os.chdir(path)
    _here.kill_confined = kill_confined
    if path != _here.private_dir:  # else the zygote's environment names it already
        _here.private_dir = path
        reset()
    tempfile.tempdir = None
