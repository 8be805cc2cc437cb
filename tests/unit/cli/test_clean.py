"""`rollmesh clean` removes only what it may, and the disk estimate of a run."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from rollmesh.app.checks.disk_need import disk_need, disk_text
from rollmesh.app.config import TrainConfig
from rollmesh.app.open_run import open_resumed
from rollmesh.app.run_folder import RunFolder, new_folder, origin_now
from rollmesh.app.samples.stored_samples import list_samples
from rollmesh.app.views.series import Point, encode_line
from rollmesh.cli.commands.clean import CleanOptions, clean_folder
from rollmesh.cli.commands.train import run_training
from rollmesh.mesh.config import RunConfig
from rollmesh.mesh.run_lock import RunFolderBusy, owned
from rollmesh.services.coordinator.core.records import ReplaySpec
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.weights.config import DepotConfig
from rollmesh.shared.errors import ConfigError

KEPT = {"config.yaml", "run.json", "series.jsonl", "token", "model", "owner.lock"}


def run_folder(root: Path, *, ended: str = "") -> RunFolder:
    """A run with checkpoints 2 and 4 that was rolled back to 3 in a second incarnation."""
    folder = new_folder(TrainConfig(run=RunConfig(name="r")), origin_now(["rollmesh"], root), root / "run")
    for name in ("update-00000002.0", "update-00000004.0", "update-00000003.1", ".tmp-update-00000005.1"):
        (folder.root / "checkpoints" / name).mkdir(parents=True)
        (folder.root / "checkpoints" / name / "weights").write_bytes(bytes(10_000))
    for name in ("nats", "coordinator", "depot", "inference-0", "inference-1", "sandbox-0", "model"):
        (folder.root / name).mkdir()
        (folder.root / name / "data").write_bytes(bytes(10_000))
    (folder.root / "token").write_text("t")
    folder.series.write_bytes(encode_line(Point(time_s=1.0, ended=ended)))
    return folder


def left(folder: RunFolder) -> set[str]:
    return {path.name for path in folder.root.iterdir()}


def checkpoints(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in (folder.root / "checkpoints").iterdir())


def test_a_run_that_can_go_on_keeps_its_ledger_and_its_newest_checkpoint(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    removals, remark = clean_folder(folder.root, CleanOptions())
    assert left(folder) == KEPT | {"nats", "coordinator", "checkpoints"}
    assert checkpoints(folder) == ["update-00000003.1"], "the newest life counts, not the highest update"
    assert remark == ""
    assert sum(r.num_bytes for r in removals) >= 7 * 10_000


def test_more_checkpoints_stay_where_more_are_asked_for(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    clean_folder(folder.root, CleanOptions(keep_last=2))
    assert checkpoints(folder) == ["update-00000003.1", "update-00000004.0"]


def test_a_dry_run_names_the_same_and_removes_nothing(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    before = left(folder), checkpoints(folder)
    named, _ = clean_folder(folder.root, CleanOptions(dry_run=True))
    assert (left(folder), checkpoints(folder)) == (before[0] | {"owner.lock"}, before[1])
    removed, _ = clean_folder(folder.root, CleanOptions())
    assert [r.path for r in named] == [r.path for r in removed]


@pytest.mark.parametrize("ended", ["", "updates_max"])
def test_what_a_resume_needs_goes_only_when_asked_for(tmp_path: Path, ended: str) -> None:
    folder = run_folder(tmp_path, ended=ended)
    clean_folder(folder.root, CleanOptions())
    assert left(folder) == KEPT | {"nats", "coordinator", "checkpoints"}
    clean_folder(folder.root, CleanOptions(for_good=True))
    assert left(folder) == KEPT | {"checkpoints"}


def test_a_run_without_its_ledger_says_so_when_it_is_resumed_or_read(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    clean_folder(folder.root, CleanOptions(for_good=True))
    (folder.root / "addresses.json").write_text("{}")
    folder.audit.write_text("{}")
    with pytest.raises(ConfigError, match="was removed by `rollmesh clean --for-good`, so it cannot be resumed"):
        open_resumed(folder.root, [])
    with pytest.raises(ConfigError, match=r"were removed by `rollmesh clean --for-good`; what remains is its audit"):
        list_samples(folder.root, 10)


def test_a_second_owner_changes_nothing_in_a_run_that_is_running(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    before = folder.config.read_text(), left(folder)
    with owned(folder.root), pytest.raises(RunFolderBusy, match="process .* executes this run"):
        run_training(folder.root, ["run.updates_max=7"], console=Console())
    assert (folder.config.read_text(), left(folder)) == (before[0], before[1] | {"owner.lock"})


def test_a_running_run_and_a_folder_that_is_none_are_left_alone(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    with owned(folder.root), pytest.raises(RunFolderBusy, match="process .* executes this run"):
        clean_folder(folder.root, CleanOptions())
    with pytest.raises(ConfigError, match="not the folder of a run"):
        clean_folder(tmp_path, CleanOptions())
    assert len(checkpoints(folder)) == 4


def model_of(folder: Path, num_parameters: int) -> Path:
    folder.mkdir()
    save_file({"w": np.zeros(num_parameters, np.float32)}, folder / "model.safetensors")
    return folder


def test_disk_is_estimated_from_the_model_and_what_bounds_each_part(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", 1000)
    weights = (model / "model.safetensors").stat().st_size
    config = TrainConfig(learner=LearnerConfig(keep_last=2), depot=DepotConfig(directory="depot", versions_max=3))
    parts = {part.name: part.num_bytes for part in disk_need(config, model)}
    assert parts["checkpoints"] == 3 * (weights + 8 * 1000)
    assert parts["depot"] == 4 * weights
    assert parts["nodes"] == 2 * weights
    streams = config.coordinator.streams
    assert parts["streams"] > streams.samples_bytes_max + streams.ledger_bytes_max
    run = config.run
    assert parts["ledger archive"] == 200 * run.updates_max * run.batch_groups * run.group_size
    remote = msgspec.structs.replace(config, bus=msgspec.structs.replace(config.bus, url="tls://elsewhere:4222"))
    assert not {"streams", "ledger archive"} & {part.name for part in disk_need(remote, model)}


def test_too_little_disk_is_a_warning_that_names_the_settings(tmp_path: Path) -> None:
    config = TrainConfig()
    parts = disk_need(config, tmp_path)
    assert disk_text(parts, tmp_path / "not" / "made").startswith("disk: up to")
    huge = [part.__class__(part.name, 1 << 60, part.bound) for part in parts]
    words = disk_text(huge, tmp_path)
    assert words.startswith("warning: disk: up to")
    assert "learner.keep_last 3" in words


def test_a_damaged_header_costs_the_estimate_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 400)
    (tmp_path / "other.safetensors").write_bytes((2).to_bytes(8, "little") + json.dumps([]).encode())
    assert disk_need(TrainConfig(), tmp_path)[0].num_bytes > 0


def test_the_copies_of_a_replay_log_are_in_the_estimate(tmp_path: Path) -> None:
    replay = ReplaySpec(max_staleness=4, capacity_bytes=1 << 20)
    config = TrainConfig(run=RunConfig(replay=replay))
    assert config.payloads_in_files
    assert {part.name: part.num_bytes for part in disk_need(config, tmp_path)}["replay log"] == 1 << 20
