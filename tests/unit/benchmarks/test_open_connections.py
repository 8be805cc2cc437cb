"""The report of the bench of open connections."""

import pytest

from benchmarks import open_connections
from benchmarks.open_connections import Load


def test_the_ratio_is_the_rate_with_load_over_that_without_and_its_median_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = [(100.0, 95.0), (80.0, 40.0), (50.0, 50.0)]
    loads = [Load(opened=960, rejected=64, sent=1200, get_run_s=[0.1, 0.3, 0.2], threads=10) for _ in rates]

    async def measured(*_: object) -> tuple[list[tuple[float, float]], list[Load], int]:
        return rates, loads, 9

    monkeypatch.setattr(open_connections, "_measure", measured)
    report = open_connections.run(quick=True)
    assert [row["ratio"] for row in report.rows] == [0.95, 0.5, 1.0]
    assert report.targets[0].value == 0.95
    assert report.targets[0].met
    assert "GetRun 200 ms (max 300)" in report.notes[0]
    assert "960 open, 64 rejected" in report.notes[0]
