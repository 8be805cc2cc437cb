"""The recorded states of a run."""

from pathlib import Path

import pytest

from rollmesh.app.views.series import Point, Series, encode_line, read_series, staleness_shares
from rollmesh.shared.errors import ConfigError
from tests.unit.cli.recorded import encoded, recorded_eval, recorded_point, recorded_series


def test_series_is_read_back_as_written(tmp_path: Path) -> None:
    series, path = recorded_series(), tmp_path / "series.jsonl"
    path.write_bytes(encoded(series.points, series.evals))
    assert read_series(path) == series


def test_series_without_a_file_is_empty(tmp_path: Path) -> None:
    assert read_series(tmp_path / "series.jsonl") == Series()


def test_series_leaves_out_a_last_line_that_a_crash_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "series.jsonl"
    path.write_bytes(encode_line(Point(time_s=1.0)) + encode_line(Point(time_s=2.0))[:-9])
    assert [p.time_s for p in read_series(path).points] == [1.0]


def test_series_names_the_line_of_other_damage(tmp_path: Path) -> None:
    path = tmp_path / "series.jsonl"
    path.write_bytes(encode_line(Point(time_s=1.0)) + b'{"kind": "point"}\n')
    with pytest.raises(ConfigError, match=r"series.jsonl:2: .*time_s"):
        read_series(path)


def test_updates_made_again_after_a_roll_back_replace_the_void_ones() -> None:
    points = [recorded_point(u, time_s=float(u)) for u in (1, 2, 3)]
    points += [recorded_point(u, time_s=10.0 + u, incarnation=1) for u in (2, 3)]
    assert [(p.update, p.incarnation) for p in Series(points=points).updates] == [(1, 0), (2, 1), (3, 1)]


def test_evaluation_made_again_replaces_the_older_one() -> None:
    series = Series(evals=[recorded_eval(0, 0.4, time_s=1.0), recorded_eval(10, 0.5, time_s=2.0)])
    series.add(recorded_eval(10, 0.6, time_s=3.0))
    assert [(e.step, e.success) for e in series.evals_by_step] == [(0, 0.4), (10, 0.6)]


def test_rates_are_of_the_last_window() -> None:
    series = Series(points=[Point(time_s=0.0)])
    series.add(Point(time_s=100.0, tokens_generated=1_000_000))
    series.add(Point(time_s=140.0, tokens_generated=1_000_400, tokens_trained=200))
    assert series.rates() == (10.0, 5.0)


def test_rates_before_anything_was_seen_are_zero() -> None:
    assert Series().rates() == (0.0, 0.0)


def test_staleness_shares_go_to_the_bound_and_beyond_it_where_it_was_broken() -> None:
    assert staleness_shares(Point(time_s=0.0, trained_by_staleness={0: 1, 1: 3}), 2) == [(0, 0.25), (1, 0.75), (2, 0.0)]
    assert staleness_shares(Point(time_s=0.0, trained_by_staleness={2: 5}), 1)[-1] == (2, 1.0)


def test_samples_without_tokens_of_the_policy_have_no_share_of_a_staleness() -> None:
    assert staleness_shares(Point(time_s=0.0, trained_by_staleness={-1: 4, 0: 1, 1: 3}), 1) == [(0, 0.25), (1, 0.75)]
    assert staleness_shares(Point(time_s=0.0, trained_by_staleness={-1: 4}), 1) == [(0, 0.0), (1, 0.0)]
