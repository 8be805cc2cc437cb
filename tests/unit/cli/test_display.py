"""The display of a running run."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rollmesh.app.config import TrainConfig
from rollmesh.app.views.display import LiveView, PlainView, eval_text, open_view, sample_parts, spark
from rollmesh.app.views.series import Eval
from rollmesh.app.views.watch import RunRecorder
from rollmesh.demo.model_process import WarmStep
from rollmesh.mesh.config import RunConfig
from rollmesh.shared.clock import ManualClock
from rollmesh.v1 import run_pb2
from tests.unit.cli.recorded import encoded, recorded_point, recorded_series

CONFIG = TrainConfig(run=RunConfig(name="shown", updates_max=12))


def watched(tmp_path: Path) -> RunRecorder:
    series = recorded_series()
    path = tmp_path / "series.jsonl"
    path.write_bytes(encoded(series.points[:7], series.evals[:2]))
    return RunRecorder(path, success_reward="correct", clock=ManualClock())


def console(*, terminal: bool) -> tuple[Console, StringIO]:
    out = StringIO()
    return Console(file=out, force_terminal=terminal, width=110, color_system=None), out


def test_view_is_live_on_a_terminal_and_plain_elsewhere() -> None:
    for terminal, kind in ((True, LiveView), (False, PlainView)):
        view = open_view(CONFIG, console(terminal=terminal)[0], "runs/x")
        assert type(view) is kind
        view.close()


def test_live_view_shows_progress_success_staleness_accounts_and_waiters(tmp_path: Path) -> None:
    shown, out = console(terminal=False)
    view = LiveView(CONFIG, shown, "runs/x")
    view.follow(watched(tmp_path))
    view.close()
    out.truncate(0)
    shown.print(view.render())
    text = out.getvalue()
    for part in ("update 6 / 12", "0.450 → 0.720", "at update 6", "level 1: 0.82", "correct 0.600", "(bound 2)", "33%",
                 "104 reserved = 48 trained + 24 applied", "main waits", "READY groups: 1 of 2"):  # fmt: skip
        assert part in text


def test_live_view_shows_the_warm_start() -> None:
    shown, out = console(terminal=False)
    view = LiveView(CONFIG, shown, "runs/x")
    view.phase("making the model")
    view.warm_start(WarmStep(step=90, level=4, loss_smoothed=0.21, success=0.31))
    view.close()
    shown.print(view.render())
    for part in ("making the model", "step 90  levels 1-4  loss 0.210", "0.310"):
        assert part in out.getvalue()


def test_plain_view_has_lines_for_evaluations_and_updates(tmp_path: Path) -> None:
    shown, out = console(terminal=False)
    view = PlainView(CONFIG, shown, "runs/x")
    recorder = watched(tmp_path)
    evals = recorder.series.evals
    recorder.series.evals = evals[:1]
    view.follow(recorder)
    recorder.series.evals = evals
    view.moved()
    view.moved()
    lines = out.getvalue().splitlines()
    assert lines[0] == "shown: seed 0, runs/x"
    assert lines[1].endswith("evaluated update 6: held-out success 0.720  (level 1: 0.82, level 2: 0.62)")
    assert lines[2].startswith("0:17  update 6/12  reward correct 0.60  lag 0:33% 1:67% 2:0%")
    assert len(lines) == 3


def test_sample_parts_add_up_and_tell_applied_from_in_flight() -> None:
    point = recorded_point(6, time_s=1.0)
    parts = sample_parts(point)
    assert sum(count for _, count in parts) == point.samples["reserved"]
    assert dict(parts) == {"trained": 48, "applied": 24, "stale": 6, "filtered": 18, "in flight": 8}


@pytest.mark.parametrize(
    ("values", "drawn"), [([0.0, 0.5, 1.0], "▁▅█"), ([], ""), ([-3.0, 9.0], "▁█"), ([0.5] * 100, "▅" * 32)]
)
def test_spark_draws_values_between_its_ends(values: list[float], drawn: str) -> None:
    assert spark(values, low=0.0, high=1.0) == drawn


def test_both_views_show_why_a_run_stands_still(tmp_path: Path) -> None:
    recorder = watched(tmp_path)
    recorder.miss("sandbox-0 silent for 42 s")
    shown, out = console(terminal=False)
    plain = PlainView(CONFIG, shown, "runs/x")
    plain.follow(recorder)
    plain.moved()
    plain.moved()
    assert out.getvalue().count("stalled: sandbox-0 silent for 42 s") == 1
    live = LiveView(CONFIG, shown, "runs/x")
    live.follow(recorder)
    live.close()
    out.truncate(0)
    shown.print(live.render())
    assert "stalled" in out.getvalue()
    assert "sandbox-0 silent for 42 s" in out.getvalue()


def test_both_views_show_a_silent_coordinator_and_that_it_answers_again(tmp_path: Path) -> None:
    recorder = watched(tmp_path)
    shown, out = console(terminal=False)
    plain = PlainView(CONFIG, shown, "runs/x")
    plain.follow(recorder)
    for silent_s in (6.0, 11.0, 17.0):
        recorder.miss_answer(silent_s)
        plain.moved()
    live = LiveView(CONFIG, shown, "runs/x")
    live.follow(recorder)
    live.close()
    said = out.getvalue()
    assert [f"no response from the coordinator for {s} s" in said for s in (6, 11, 17)] == [True, False, True]
    shown.print(live.render())
    assert "no response from the coordinator for 17 s" in out.getvalue()[len(said) :]
    recorder.silent_s = 0.0
    plain.moved()
    assert out.getvalue().count("coordinator responds again") == 1


def test_both_views_show_the_newest_failure_and_why_there_is_no_update(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path / "series.jsonl", success_reward="correct", clock=ManualClock())
    state = run_pb2.RunState(run="r", policies=[run_pb2.PolicyState(policy="main")])
    state.samples.reasons["filtered/ZERO_VARIANCE"] = 20_896
    state.failed_attempts.num, state.failed_attempts.cause = 3, "agent: ValueError: my\nbug"
    state.recent.num_samples, state.recent.mean_sampled_tokens, state.recent.newest_sample_id = 256, 31.4, "g9.1.0"
    state.recent.num_tool_calls, state.recent.num_tool_calls_failed = 512, 512
    state.recent.mean_rewards["correct"] = 0.125
    recorder.see(state)
    shown, out = console(terminal=False)
    plain = PlainView(CONFIG, shown, "runs/x")
    plain.follow(recorder)
    plain.moved()
    plain.moved()
    live = LiveView(CONFIG, shown, "runs/x")
    live.follow(recorder)
    live.close()
    shown.print(live.render())
    text = " ".join(out.getvalue().replace("│", " ").split())
    for words in (
        "3 attempts failed, the newest: agent: ValueError: my bug",
        "no update yet: 20,896 samples ended, all ZERO_VARIANCE (all answers to a task got the same reward); the newest 256 samples: ",
        f"mean correct 0.125, 31 sampled tokens, 512 of 512 tool calls failed; see `rollmesh show {tmp_path} g9.1.0`",
    ):
        assert text.count(words) >= 2, text
    recorder.close()


def test_views_without_evaluations_or_labels_say_so(tmp_path: Path) -> None:
    config = TrainConfig(run=RunConfig(name="shown", eval_every=0))
    recorder = RunRecorder(tmp_path / "series.jsonl", success_reward="correct", clock=ManualClock())
    shown, out = console(terminal=False)
    live = LiveView(config, shown, "runs/x")
    live.follow(recorder)
    live.close()
    shown.print(live.render())
    assert "no evaluations (run.eval_every=0)" in out.getvalue()
    assert eval_text(Eval(time_s=1.0, step=0, success=0.5)) == "held-out success 0.500"
    recorder.close()


def test_the_learners_health_is_in_view(tmp_path: Path) -> None:
    recorder = watched(tmp_path)
    line = {"update": 6, "incarnation": 0, "outcome": "APPLIED", "time_unix_s": 0.0, "seconds": {}}
    line["metrics"] = {"kl": 0.00123, "entropy": 1.5, "grad_norm": None, "length/used_mean": 3.4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n" + '{"update": 7, "cut')
    shown, out = console(terminal=False)
    live = LiveView(CONFIG, shown, "runs/x")
    live.follow(recorder)
    live.close()
    shown.print(live.render())
    assert "kl 0.00123  entropy 1.5  length 3.4" in out.getvalue()
