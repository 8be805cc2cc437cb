"""Collections of the garbage collector are rare, as in the processes of a mesh.

While pytest imports the tests, they took a quarter of its time. Afterwards each one would visit the 800,000 objects of
the modules.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator, Iterator

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


@pytest.fixture(scope="session", autouse=True)
def remembered() -> Iterator[None]:
    """Test the forward of equal models, and plan the memory of equal configurations, once per process. Without it, the
    self-test takes most of the time of a trainer that makes one update.

    The tests of both call the functions that they have imported, which are not replaced.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:
            from tests import remembered_checks

            remembered_checks.install(patch)
        yield
