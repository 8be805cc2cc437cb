"""summary.json and report from a recorded run."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from rollmesh.app.views.display import eval_text
from rollmesh.app.views.report import render_page
from rollmesh.app.views.results import write_results
from rollmesh.app.views.series import Point, Series, encode_line, read_series
from rollmesh.app.views.summary import learner_seconds, milestones, summarize, summary_text
from rollmesh.services.learner.metrics_log import read_metrics
from rollmesh.shared.config.registry import Extension
from rollmesh.trainer.checkpoint_files import list_checkpoints
from tests.unit.cli.recorded import encoded, recorded_eval, recorded_folder, recorded_point, recorded_series

# The fields that scripts rely on.
FIELDS = {
    "run": "recorded", "recipe": "grpo", "seed": 3, "eta": 2, "lag_max": 1, "updates": 12, "wall_s": 29.0,
    "heldout_success_before": 0.45, "heldout_success_after": 0.9, "tokens_generated": 12000, "tokens_trained": 7200,
}  # fmt: skip


def test_summary_has_what_scripts_rely_on(tmp_path: Path) -> None:
    folder, config = recorded_folder(tmp_path / "run")
    write_results(folder, config, outcome="finished")
    written = json.loads(folder.summary.read_text())
    assert {name: written[name] for name in FIELDS} == FIELDS
    samples = written["samples"]
    assert set(samples) == {"reserved", "trained", "stale", "filtered", "failed", "cancelled", "exported", "live"}
    assert samples["reserved"] == sum(n for name, n in samples.items() if name != "reserved")
    assert written["learner_seconds"]["train"] == 12.0
    assert written["learner_seconds"]["wait"] == 6.0


def test_summary_counts_the_warm_start_into_the_whole(tmp_path: Path) -> None:
    folder, config = recorded_folder(tmp_path / "run")
    (folder.root / "warm_start.json").write_text(
        '{"seconds": 12.5, "steps": 140, "num_tokens": 9, "success_validation": 0.46}'
    )
    summary = write_results(folder, config, outcome="finished")
    assert (summary.warm_start_s, summary.train_s, summary.wall_s) == (12.5, 29.0, 41.5)


def test_milestones_name_the_first_evaluation_at_or_above_each(tmp_path: Path) -> None:
    evals = [recorded_eval(0, 0.5, time_s=1.0), recorded_eval(5, 0.8, time_s=9.0), recorded_eval(10, 0.75, time_s=20.0)]
    assert [(m.success, m.update, m.time_s) for m in milestones(evals)] == [(0.6, 5, 9.0), (0.7, 5, 9.0), (0.8, 5, 9.0)]


def test_summary_of_a_run_that_never_began_says_so(tmp_path: Path) -> None:
    folder, config = recorded_folder(tmp_path / "run")
    shutil.rmtree(folder.checkpoints)
    summary = summarize(folder, config, Series(), outcome="failed", warm_start_s=0.0)
    assert (summary.updates, summary.lag_max, summary.heldout_success_before) == (0, None, None)


def test_a_run_that_trained_no_tokens_of_the_policy_has_no_largest_staleness(tmp_path: Path) -> None:
    folder, config = recorded_folder(tmp_path / "run")
    series = Series(points=[Point(time_s=5.0, update=1, trained_by_staleness={-1: 12})])
    assert summarize(folder, config, series, outcome="finished", warm_start_s=0.0).lag_max is None


def test_the_report_draws_the_metrics_of_the_learner(tmp_path: Path) -> None:
    folder, config = recorded_folder(tmp_path / "run")
    write_results(folder, config, outcome="finished")
    page = folder.report.read_text()
    for label in ("kl", "entropy", "gradient norm", "ess", "length", "lr"):
        assert f"Learner: {label}" in page
    assert page.count("not measured") == 3


def test_the_mean_of_graded_rewards_is_not_called_success(tmp_path: Path) -> None:
    folder, config = recorded_folder(tmp_path / "run")
    series = recorded_series()
    assert "held-out success 0.450 -> 0.900" in summary_text(
        summarize(folder, config, series, outcome="finished", warm_start_s=0.0)
    )
    series.evals = [msgspec.structs.replace(e, graded=True) for e in series.evals]
    summary = summarize(folder, config, series, outcome="finished", warm_start_s=0.0)
    page = render_page(folder, series, summary, "")
    for text in (summary_text(summary), page, eval_text(series.evals[0])):
        assert "held-out reward" in text
        assert "held-out success" not in text


def test_summary_counts_the_updates_of_a_checkpoint_that_was_not_watched(tmp_path: Path) -> None:
    folder, config = recorded_folder(tmp_path / "run")
    assert [path.name for path in list_checkpoints(folder.checkpoints)] == ["update-00000012.0"]
    assert summarize(folder, config, Series(), outcome="interrupted", warm_start_s=0.0).updates == 12
    after_roll_back = Series(points=[Point(time_s=1.0, update=3, incarnation=1)])
    assert summarize(folder, config, after_roll_back, outcome="interrupted", warm_start_s=0.0).updates == 3


def test_learner_seconds_of_unreadable_metrics_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("not json\n")
    assert learner_seconds(tmp_path / "metrics.jsonl") == {}
    assert learner_seconds(tmp_path / "absent.jsonl") == {}


def test_report_is_one_file_with_pictures_and_tables(tmp_path: Path) -> None:
    folder, config = recorded_folder(tmp_path / "run")
    write_results(folder, config, outcome="finished")
    page = folder.report.read_text()
    assert folder.picture.read_bytes().startswith(b"\x89PNG")
    for text in ("<svg", "0.450 → 0.900", "BEYOND_BOUND", "level 2", "update-00000012.0", "max_staleness: 2"):
        assert text in page
    for outside in ("<script src", "<link", "<img", "url(http"):
        assert outside not in page


def test_summary_and_report_have_the_shares_of_the_sources_of_a_mixture(tmp_path: Path) -> None:
    """Updates 4 to 12 have groups of both sources. The run reserved 200 samples, which are 25 draws."""
    folder, config = recorded_folder(tmp_path / "run", "run.group_size=8")
    selector = Extension(
        "mixture", {"weights": {"sums": [{"draw": 0, "weight": 1}, {"draw": 1, "weight": 3}], "b<": 1}}
    )
    config = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, selector=selector))
    series = recorded_series()
    of_config = summarize(folder, config, series, outcome="finished", warm_start_s=0.0).source_shares
    requested = pytest.approx((0.5 + 24 * 0.75) / 25)
    assert [(one.source, one.trained) for one in of_config] == [("sums", None), ("b<", None)]
    assert of_config[0].requested == requested
    lines = read_metrics(folder.metrics)
    for update, line in lines.items():
        line.metrics["source/sums/groups_share"] = 0.6 if update > 3 else 1.0
        if update > 3:
            line.metrics["source/b</groups_share"] = 0.4
    folder.metrics.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines.values()))
    series.evals = [msgspec.structs.replace(e, success_by_label={"source=sums": e.success}) for e in series.evals]
    summary = summarize(folder, config, series, outcome="finished", warm_start_s=0.0)
    assert [one.trained for one in summary.source_shares] == pytest.approx([0.7, 0.3])
    page = render_page(folder, series, summary, "")
    assert "<td>sums</td><td>0.740</td><td>0.700</td><td>0.450 → 0.900</td>" in page
    assert "<td>b&lt;</td><td>0.260</td><td>0.300</td><td>– → –</td>" in page


def test_every_row_of_the_report_has_a_name(tmp_path: Path) -> None:
    folder, config = recorded_folder(tmp_path / "run")
    point = recorded_point(12, time_s=29.0)
    point = msgspec.structs.replace(point, reasons={**point.reasons, "trained": point.samples["trained"]})
    folder.series.write_bytes(encoded([point], []))
    write_results(folder, config, outcome="finished")
    page = folder.report.read_text()
    assert "<td>\u2003</td>" not in page
    assert "<td>other</td>" in page


def test_report_escapes_what_comes_from_outside(tmp_path: Path) -> None:
    folder, config = recorded_folder(tmp_path / "run")
    write_results(folder, config, outcome="finished")
    page = folder.report.read_text()
    assert "&lt;b&gt;mine&lt;/b&gt;.yaml" in page
    assert "<b>mine" not in page


def test_report_of_an_empty_run_is_written(tmp_path: Path) -> None:
    folder, config = recorded_folder(tmp_path / "run")
    folder.series.unlink()
    folder.metrics.unlink()
    write_results(folder, config, outcome="interrupted")
    assert "can be resumed" in folder.report.read_text()


def test_a_run_that_was_evaluated_only_before_its_first_update_has_no_success_after_it(tmp_path: Path) -> None:
    folder, config = recorded_folder(tmp_path / "run")
    series = Series(points=recorded_series().points, evals=[recorded_eval(0, 0.558, time_s=1.0)])
    summary = summarize(folder, config, series, outcome="finished", warm_start_s=0.0)
    assert (summary.heldout_success_before, summary.heldout_success_after) == (0.558, None)
    assert "held-out success 0.558 at update 0 (not evaluated since)" in summary_text(summary)


@pytest.mark.parametrize(("outcome", "resumable"), [("finished", False), ("interrupted", True)])
def test_the_summary_text_names_the_checkpoint_and_how_to_resume(tmp_path: Path, outcome: str, resumable: bool) -> None:
    folder, config = recorded_folder(tmp_path / "run")
    text = summary_text(write_results(folder, config, outcome=outcome))  # type: ignore[arg-type]
    assert "0.450 -> 0.900" in text
    assert f"checkpoint  {folder.root}/checkpoints/update-00000012.0" in text
    assert (f"rollmesh train {folder.root}" in text) is resumable


def test_the_end_of_an_earlier_session_is_not_that_of_this_one(tmp_path: Path) -> None:
    folder, config = recorded_folder(tmp_path / "run")
    series = read_series(folder.series)
    ended = msgspec.structs.replace(series.last, ended="MAX_UPDATES")
    with folder.series.open("ab") as file:
        file.write(encode_line(ended))
    num = len(series.points) + 1
    assert write_results(folder, config, outcome="interrupted", points_before=num - 1).ended == "MAX_UPDATES"
    assert write_results(folder, config, outcome="interrupted", points_before=num).ended == ""
