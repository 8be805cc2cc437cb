"""The benchmark of a swarm notices at once that a node cannot start."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import swarm


def test_a_node_that_exits_ends_the_wait_for_it_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "START_S", 120.0)
    with closing(swarm.Command(tmp_path / "weak.log", "train", str(tmp_path / "missing.yaml"))) as node:
        with pytest.raises(RuntimeError, match=r"missing\.yaml"):
            node.until_it_responds()
        with pytest.raises(RuntimeError, match="weak exited with"):
            node.finish()
