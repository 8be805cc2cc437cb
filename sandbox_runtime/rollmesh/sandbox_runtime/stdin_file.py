"""Standard input of a program that a session runs: a file to which `/dev/stdin` points while the program runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

from rollmesh.sandbox_runtime.mounts import STDIN_NAME
from rollmesh.sandbox_runtime.process_env import private_dir


@contextmanager
def stdin_file(content: bytes) -> Iterator[int]:
    """Yield a descriptor that reads `content`. Raises OSError if the disk is full or the previous program left a
    directory at the path."""
    path = os.path.join(private_dir(), STDIN_NAME)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    try:
        with open(path, "xb") as file:
            file.write(content)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
