"""A separate directory for one program with its source and the compiler's output, deleted after the run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from rollmesh.sandbox_runtime.process_env import private_dir


@contextmanager
def build_folder(name: str, code: str) -> Iterator[str]:
    """Create a directory with the source in the file `name`. Raises OSError if the disk is full."""
    folder = tempfile.mkdtemp(prefix=".program-", dir=private_dir())
    try:
        with open(os.path.join(folder, name), "w", encoding="utf-8", errors="replace") as file:
            file.write(code)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
