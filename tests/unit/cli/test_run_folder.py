"""Run folders: a new run never overwrites one, and an existing one can be resumed."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollmesh.app.config import TrainConfig
from rollmesh.app.run_folder import RunExistsHere, new_folder, open_folder, origin_now
from rollmesh.cli.__main__ import app
from rollmesh.mesh.config import RunConfig
from rollmesh.shared.errors import ConfigError

CONFIG = TrainConfig(run=RunConfig(name="mine", seed=4))


def test_new_folders_of_one_second_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *_: "20250101-101500")
    roots = [new_folder(CONFIG, origin_now(["rollmesh"], tmp_path)).root for _ in range(3)]
    assert [root.name for root in roots] == [f"mine-20250101-101500{suffix}" for suffix in ("", "-2", "-3")]


def test_folder_of_a_run_is_not_overwritten_and_the_error_names_the_command_that_resumes_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    new_folder(CONFIG, origin_now([], tmp_path), out)
    with pytest.raises(RunExistsHere, match=rf"holds a run; resume it with `rollmesh train {out}`"):
        new_folder(CONFIG, origin_now([], tmp_path), out)


def test_folder_of_something_else_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(RunExistsHere, match="is not empty; choose another --out"):
        new_folder(CONFIG, origin_now([], tmp_path), tmp_path)


def test_file_in_the_place_of_a_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose another --out"):
        new_folder(CONFIG, origin_now([], tmp_path), tmp_path / "file")


def test_folder_is_opened_with_its_configuration_and_base(tmp_path: Path) -> None:
    made = new_folder(CONFIG, origin_now(["rollmesh", "train"], tmp_path), tmp_path / "run")
    folder, config, base = open_folder(made.root, ["learner.keep_last=7"])
    assert (config.run, config.learner.keep_last, base) == (CONFIG.run, 7, tmp_path)
    assert open_folder(folder.root, [])[1].learner.keep_last == CONFIG.learner.keep_last, "opening changes nothing"


def test_other_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not the folder of a run: run.json cannot be read"):
        open_folder(tmp_path, [])


def test_newest_checkpoint_is_the_last_by_incarnation_then_update(tmp_path: Path) -> None:
    folder = new_folder(CONFIG, origin_now([], tmp_path), tmp_path / "run")
    assert folder.newest_checkpoint() is None
    for name in ("update-00000009.0", "update-00000012.0", "update-00000010.1", ".tmp-checkpoint-x"):
        (folder.root / "checkpoints" / name).mkdir(parents=True)
    newest = folder.newest_checkpoint()
    assert newest is not None
    assert newest.name == "update-00000010.1"


def test_a_fine_tuning_that_failed_at_its_start_leaves_its_folder_usable(tmp_path: Path) -> None:
    config, out = tmp_path / "sft.yaml", tmp_path / "out"
    config.write_text("model: model\ndata: talks.jsonl\n")
    (tmp_path / "talks.jsonl").write_text("not JSON\n")
    (tmp_path / "model").mkdir()
    first = CliRunner().invoke(app, ["sft", str(config), "--out", str(out)])
    assert first.exit_code == 2
    assert [path.name for path in out.iterdir()] == ["owner.lock"]
    again = CliRunner().invoke(app, ["sft", str(config), "--out", str(out)])
    assert (again.exit_code, again.output) == (2, first.output)
