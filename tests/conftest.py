"""Collections of the garbage collector are rare, as in the processes of a mesh.

While pytest imports the tests, they took a quarter of its time. Afterwards each one would visit the 800,000 objects of
the modules.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

from rollmesh.shared.process.interpreter_tuning import collect_rarely, without_collections


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without collections."""
    with without_collections():
        result = yield
    gc.freeze()
    collect_rarely()
    return result
