"""`rollmesh mixture`: records of runs, the predictor, the proposal, and its errors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from rollmesh.app.mixture_trials import Quadratic, Trial, propose, read_trial, search
from rollmesh.app.views.summary import summarize
from rollmesh.cli.__main__ import app
from rollmesh.services.data.mixture_pool import MixturePart, MixturePool
from rollmesh.services.data.selector import SELECTORS, Selector
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import InvalidInput
from tests.unit.cli.recorded import recorded_folder, recorded_series
from tests.unit.data.builders import pool

GRID = [
    (0.8, 0.1, 0.1),
    (0.1, 0.8, 0.1),
    (0.1, 0.1, 0.8),
    (1 / 3, 1 / 3, 1 / 3),
    (0.5, 0.4, 0.1),
    (0.4, 0.1, 0.5),
    (0.1, 0.4, 0.5),
]
BEST = np.array([0.5, 0.3, 0.2])


def score_of(shares: Any) -> float:
    """A quadratic function with its maximum at `BEST`."""
    return float(0.9 - np.square(np.array(shares) - BEST).sum())


def trials(grid: Any = tuple(GRID)) -> list[Trial]:
    return [
        Trial(
            run="r",
            folder=f"runs/{n}",
            seed=n,
            updates=10,
            shares=dict(zip("abc", shares, strict=True)),
            trained={},
            scores={"success": score_of(shares), "source=a": shares[0]},
        )
        for n, shares in enumerate(grid)
    ]


@pytest.mark.row("S047")
def test_the_proposal_is_the_maximum_of_a_quadratic_function_of_the_shares() -> None:
    found = propose(trials())
    assert sum(found.weights.values()) == pytest.approx(1.0)
    assert list(found.weights.values()) == pytest.approx(BEST, abs=0.01)
    assert found.predicted == pytest.approx(0.9, abs=0.01)
    assert found.best_measured < found.predicted
    assert found.error < 0.3 * found.error_of_mean


def test_a_line_of_two_sources_by_hand() -> None:
    """Scores 0, 1 and 0 at the shares 0, 1/2 and 1 of a: the maximum is at 1/2, where the parabola is about 1."""
    points = np.array([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]])
    predictor = Quadratic.fitted(points, np.array([0.0, 1.0, 0.0]), 1e-3)
    assert predictor(points).tolist() == pytest.approx([0, 1, 0], abs=0.05)
    assert predictor.offset == pytest.approx(1 / 3)
    assert search(predictor, points, 0.0).tolist() == pytest.approx([0.5, 0.5], abs=0.01)


def test_the_search_moves_shares_where_no_random_point_is_near() -> None:
    target = np.array([0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.3])

    def predictor(points: Any) -> Any:
        return -np.square(points - target).sum(axis=1)

    found = search(cast(Quadratic, predictor), np.full((1, 8), 1 / 8), 0.01)
    assert found.sum() == pytest.approx(1.0)
    assert found.tolist() == pytest.approx(target.tolist(), abs=0.005)


def test_a_least_share_and_another_score_bound_the_proposal() -> None:
    found = propose(trials(), ["source=a"], least=0.1)
    assert found.weights == {"a": 0.8, "b": 0.1, "c": 0.1}, "the score is the share of a"
    assert found.score == ["source=a"]


@pytest.mark.row("S047")
def test_sampled_groups_match_the_proposed_weights_within_the_multinomial_error() -> None:
    """The draws of the selector of the proposal: each source within one standard deviation of a multinomial draw."""
    weights = propose(trials()).weights
    tasks = MixturePool([MixturePart(source=name, pool=pool(30)) for name in weights])
    chosen: Selector = SELECTORS.make(Extension("mixture", {"weights": weights}), pool=tasks, seed=3)
    num = 1000
    counts = Counter(tasks.label(chosen.draw(index, frozenset()), "source") for index in range(num))
    for name, weight in weights.items():
        assert abs(counts[name] - num * weight) <= np.sqrt(num * weight * (1 - weight)), name


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (trials(GRID[:3]), {}, "needs trials with more than 3 different mixtures, got 3 trials"),
        (trials([GRID[0]] * 6), {}, "needs trials with more than 3 different mixtures, got 6 trials"),
        (trials(), {"score": ["source=x"]}, "--score source=x: runs/0 has no such score; known: success, source=a"),
        (trials(), {"least": 0.5}, "--least must be in .0, 1 / 3. for 3 sources, got 0.5"),
    ],
)
def test_wrong_trials_are_named(made: list[Trial], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        propose(made, **options)


def recorded_run(root: Path, weights: Mapping[str, float], **changes: Any) -> Path:
    """Write the folder of a run that drew from a mixture, and return it. `changes` are fields of its summary."""
    options = json.dumps({"name": "mixture", "options": {"weights": weights}})
    folder, config = recorded_folder(root, f"data.selector={options}")
    made = summarize(folder, config, recorded_series(), outcome="finished", warm_start_s=0.0)
    summary = msgspec.to_builtins(made)
    folder.summary.write_text(json.dumps({**summary, **changes}))
    return root


@pytest.mark.row("S047")
def test_the_command_reads_the_records_of_runs_and_prints_the_setting_of_the_next(tmp_path: Path) -> None:
    folders = []
    for n, share in enumerate((0.2, 0.4, 0.6, 0.8)):
        success = 0.8 - (share - 0.5) ** 2
        run = recorded_run(tmp_path / f"w{n}", {"a": share, "b": 1 - share}, heldout_success_after=success)
        folders.append(str(run))
    first = read_trial(tmp_path / "w0")
    assert first.shares == pytest.approx({"a": 0.2, "b": 0.8})
    assert first.scores == pytest.approx({"success": 0.71, "level=1": 1.0, "level=2": 0.8})
    done = CliRunner().invoke(app, ["mixture", *folders])
    assert done.exit_code == 0, done.output
    assert "data: {selector: {name: mixture, options: {weights: {a: 0.5, b: 0.5}}}}" in done.stdout
    whole = json.loads(CliRunner().invoke(app, ["mixture", *folders, "--json"]).stdout)
    assert [trial["run"] for trial in whole["trials"]] == ["recorded"] * 4
    assert whole["weights"] == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heldout_success_after": None}, "the run has no evaluation after an update; set `run.eval_every`"),
        ({"source_shares": []}, "must draw from at least two sources by `data.selector: mixture`"),
        ({"updates": "many"}, "not the summary of a run"),
    ],
)
def test_a_run_that_is_no_trial_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    run = recorded_run(tmp_path / "w", {"a": 1, "b": 1}, **changes)
    for name, expected in ((str(run), message), (str(tmp_path / "none"), "has no readable summary.json")):
        failed = CliRunner().invoke(app, ["mixture", name])
        assert failed.exit_code == 2
        assert expected in failed.output.replace("\n", " ")
