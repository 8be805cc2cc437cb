"""The owner of a run folder."""

from __future__ import annotations

import os
from pathlib import Path

from rollmesh.mesh.run_lock import owned, still_starting


def test_a_run_that_a_process_executes_is_reported_as_starting_or_stopping_with_the_id_of_the_process(
    tmp_path: Path,
) -> None:
    with owned(tmp_path):
        error = still_starting(tmp_path)
        assert error is not None
        assert f"starting or stopping (process {os.getpid()}); try again in some seconds" in str(error)
    assert still_starting(tmp_path) is None
