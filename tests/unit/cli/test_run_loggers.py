"""Loggers of a run: what they get, in which order, after a resume, and when one of them fails."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from rollmesh.app.loggers.run_loggers import LoggedRun, RunLogger, RunLoggers, flat, without_logins
from rollmesh.app.views.series import Eval
from rollmesh.services.learner.metrics_log import MetricsLog, read_metrics
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.errors import ConfigError


class RecorderOptions(Settings):
    """Options of `Recorder`."""

    fails_at: int = -1
    """Update whose entry raises."""


class Recorder(RunLogger):
    """A logger that keeps what it gets."""

    Options: ClassVar[type[Settings]] = RecorderOptions
    made: ClassVar[list[Recorder]] = []

    def __init__(self, *, run: LoggedRun, options: RecorderOptions) -> None:
        self.run, self.options = run, options
        self.tracker_id = run.tracker_id or "t1"
        self.entries: list[tuple[int, dict[str, float]]] = []
        self.ended: bool | None = None
        self.made.append(self)

    def add(self, update: int, time_unix_s: float, values: Mapping[str, float]) -> None:
        if update == self.options.fails_at:
            raise OSError("the tracker is gone")
        self.entries.append((update, dict(values)))

    def close(self, *, finished: bool) -> None:
        self.ended = finished


@pytest.fixture(autouse=True)
def none_made() -> None:
    Recorder.made.clear()


def opened(folder: Path, *chosen: Extension) -> RunLoggers:
    run = LoggedRun(name="r", folder=folder, config={"run": {"seed": 1}})
    return RunLoggers(chosen, run, metrics=folder / "metrics.jsonl", state=folder / "loggers.json", base_dir=folder)


def trained(folder: Path, *updates: int, loss: float = 0.5) -> None:
    log = MetricsLog(folder, tensorboard=False)
    for update in updates:
        log.append(
            update=update,
            incarnation=0,
            outcome="APPLIED",
            time_unix_s=9.0,
            metrics={"loss": loss},
            seconds={"train": 2.0},
        )
    log.close()


RECORDER = Extension(f"{__name__}:Recorder")


def test_a_logger_gets_updates_and_evaluations(tmp_path: Path) -> None:
    loggers = opened(tmp_path, RECORDER)
    loggers.read()  # there is no file yet
    loggers.add_eval(Eval(time_s=0.0, step=0, success=0.25, success_by_label={"easy": 0.5}), 1.0)
    trained(tmp_path, 1, 2)
    loggers.read()
    loggers.read()
    trained(tmp_path, 3, loss=float("nan"))
    loggers.close(finished=True)
    (made,) = Recorder.made
    assert made.entries == [
        (0, {"heldout_success": 0.25, "heldout_success/easy": 0.5}),
        (1, {"loss": 0.5, "seconds/train": 2.0}),
        (2, {"loss": 0.5, "seconds/train": 0.0}),
        (3, {"seconds/train": 2.0}),
    ]
    assert made.ended is True
    assert made.run.config == {"run": {"seed": 1}}


def test_a_resumed_run_continues_with_its_id(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    opened(tmp_path, RECORDER).close(finished=False)
    trained(tmp_path, 2)
    opened(tmp_path, RECORDER).close(finished=True)
    first, second = Recorder.made
    assert (first.run.tracker_id, second.run.tracker_id) == ("", "t1")
    assert [[update for update, _ in made.entries] for made in (first, second)] == [[1], [2]]
    assert (first.ended, second.ended) == (False, True)


def test_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    trained(tmp_path, 1, 2)
    content = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(content[:-10])
    loggers = opened(tmp_path, RECORDER)
    loggers.read()
    (tmp_path / "metrics.jsonl").write_bytes(content)
    loggers.close(finished=True)
    assert [update for update, _ in Recorder.made[0].entries] == [1, 2]


def test_a_malformed_line_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"update": 1, "inc\n')
    trained(tmp_path, 2)
    opened(tmp_path, RECORDER).close(finished=True)
    assert [update for update, _ in Recorder.made[0].entries] == [2]
    assert "a line of metrics.jsonl is malformed" in caplog.text


def test_a_line_that_a_full_disk_has_cut_is_removed_at_a_resume(tmp_path: Path) -> None:
    trained(tmp_path, 1, 2)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-10])
    trained(tmp_path, 2, 3)
    assert list(read_metrics(file)) == [1, 2, 3]


def test_a_logger_that_was_removed_for_a_time_continues_its_run(tmp_path: Path) -> None:
    other = Extension(f"{__name__}:Other")
    opened(tmp_path, RECORDER, other).close(finished=False)
    opened(tmp_path, other).close(finished=False)
    opened(tmp_path, RECORDER, other).close(finished=True)
    assert [made.run.tracker_id for made in Recorder.made] == ["", "", "t1", "t1", "t1"]


def test_a_failing_logger_is_reported_once_and_others_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Extension(f"{__name__}:Recorder", {"fails_at": 2})
    other = Extension(f"{__name__}:Other")
    trained(tmp_path, 1, 2, 3, 4)
    opened(tmp_path, failing, other).close(finished=True)
    one, two = Recorder.made
    assert [update for update, _ in one.entries] == [1]
    assert one.ended is False
    assert [update for update, _ in two.entries] == [1, 2, 3, 4]
    assert [r.message for r in caplog.records if "the tracker is gone" in r.message] == [
        "a logger failed and gets no further entries: logger=Recorder cause=OSError: the tracker is gone"
    ]


class Other(Recorder):
    """A second one with its own name."""


def test_a_missing_package_and_an_unknown_logger_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean `wandb`"):
        opened(tmp_path, Extension("wandbb"))
    with pytest.raises(ConfigError, match=r"options of logger `mlflow`.*uri"):
        opened(tmp_path, Extension("mlflow"))


def test_a_tracker_does_not_get_the_logins_of_urls() -> None:
    given = {
        "loggers": [{"name": "mlflow", "options": {"uri": "postgresql://me:p@ss@db:5432/runs"}}],
        "url": "http://127.0.0.1:5000/a@b",
        "number": 3,
    }
    assert without_logins(given) == {
        "loggers": [{"name": "mlflow", "options": {"uri": "postgresql://db:5432/runs"}}],
        "url": "http://127.0.0.1:5000/a@b",
        "number": 3,
    }


def test_flat_names_the_keys_of_a_configuration() -> None:
    config = {"run": {"seed": 1, "empty": {}}, "recipe": "grpo", "loggers": ["wandb"]}
    assert flat(config) == {"run.seed": "1", "run.empty": "{}", "recipe": "grpo", "loggers": "['wandb']"}


@pytest.mark.slow
def test_weights_and_biases_has_the_curves_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    trained(tmp_path, 1, 2)
    loggers = opened(tmp_path, Extension("wandb", {"mode": "offline"}))
    loggers.add_eval(Eval(time_s=0.0, step=2, success=0.25), 1.0)
    loggers.close(finished=True)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    for text in (b"heldout_success", b"loss", b"seconds/train", b'"seed"'):
        assert text in content
    state = msgspec.json.decode((tmp_path / "loggers.json").read_bytes())
    assert state["tracker_ids"]["wandb"] in file.name


@pytest.mark.slow
def test_mlflow_has_the_curves_of_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    chosen = Extension("mlflow", {"uri": f"sqlite:///{tmp_path}/mlflow.db"})
    trained(tmp_path, 1)
    opened(tmp_path, chosen).close(finished=False)
    trained(tmp_path, 2)
    loggers = opened(tmp_path, chosen)
    loggers.add_eval(Eval(time_s=0.0, step=2, success=0.25, success_by_label={"level=1": 0.5}), 1.0)
    loggers.close(finished=True)
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        assert base.execute(
            "select key, value, step from metrics where key not like 'seconds%' order by step, key"
        ).fetchall() == [
            ("loss", 0.5, 1),
            ("heldout_success", 0.25, 2),
            ("heldout_success/level_1", 0.5, 2),
            ("loss", 0.5, 2),
        ]
        assert base.execute("select name, status from runs").fetchall() == [(tmp_path.name, "FINISHED")]
        assert base.execute("select value from params where key = 'run.seed'").fetchall() == [("1",)]
