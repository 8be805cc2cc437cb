"""A folder of its own for one program: its source, what the compiler makes of it, and nothing after it has run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from rollmesh.sandbox_runtime.process_env import private_dir


@contextmanager
def build_folder(name: str, code: str) -> Iterator[str]:
    """A fresh folder with the source in the file `name`. Raises OSError where the disk is full."""
    folder = tempfile.mkdtemp(prefix=".program-", dir=private_dir())
    try:
        with open(os.path.join(folder, name), "w", encoding="utf-8", errors="replace") as file:
            file.write(code)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
