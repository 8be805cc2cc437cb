"""Files in and out of a session, handled inside its jail: path tricks reach no further than the session's own directory."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence

from rollmesh.sandbox_runtime.mounts import PRIVATE_DIR


def put(files: Mapping[str, str]) -> dict[str, str]:
    """Write base64 contents by relative path; nothing to send back. Raises OSError, ValueError."""
    for path, content in files.items():
        target = os.path.join(PRIVATE_DIR, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb") as file:
            file.write(base64.b64decode(content))
    return {}


def get(paths: Sequence[str], bytes_max: int) -> dict[str, str]:
    """Read regular files as base64; nothing is followed into a pipe or device that would never end. Raises OSError, ValueError."""
    files: dict[str, str] = {}
    room = bytes_max
    for path in paths:
        target = os.path.join(PRIVATE_DIR, path)
        if not os.path.isfile(target):
            raise ValueError(f"{path}: no such file")
        with open(target, "rb") as file:
            content = file.read(room + 1)
        room -= len(content)
        if room < 0:
            raise ValueError(f"{path}: the files asked for exceed {bytes_max} bytes together")
        files[path] = base64.b64encode(content).decode()
    return files
