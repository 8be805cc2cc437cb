"""`python -m benchmarks sandbox --quick` runs: every contender that is here, at every concurrency, with targets
judged."""

from __future__ import annotations

import pytest

from benchmarks.report import Spread
from benchmarks.sandbox import bench as sandbox


@pytest.mark.slow
def test_quick_bench_measures_every_contender_at_every_concurrency() -> None:
    report = sandbox.run(quick=True)
    names = {row["what"] for row in report.rows}
    assert {sandbox.FRESH, sandbox.FRESH_RPC, sandbox.LIVE, sandbox.LIVE_RPC, sandbox.FORK, sandbox.PYTHON} <= names
    assert [(row["at once"], row["what"]) for row in report.rows] == [
        (num, row["what"]) for num in sandbox.AT_ONCE for row in report.rows[: len(names)]
    ]
    for row in report.rows:
        assert isinstance(row["executions/s"], Spread)
        assert row["executions/s"].median > 0
        assert row["p99, ms"] >= row["p50, ms"] > 0
    assert sum("target" in note for note in report.notes) >= 3
