"""The command with a whole mesh: real services, gRPC and nats-server, with an engine and a trainer that need no
model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rollmesh.app.config import load_train_config
from rollmesh.app.run_bus import run_bus
from rollmesh.app.run_folder import RunFolder
from rollmesh.app.views.series import read_series
from rollmesh.cli.__main__ import app
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.services.coordinator.core.facts import Fact, GroupReserved
from rollmesh.services.coordinator.ledger import read_ledger
from rollmesh.services.learner.metrics_log import read_metrics
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.trainer.model_files import save_tokenizer

AGENT = """
class Agent:
    async def run(self, task, env):
        await env.generate(max_tokens=4)
"""
SCORER = """
class Scorer:
    async def score(self, item):
        return float(sum(map(ord, item.response())) % 2)
"""
CONFIG = """
model: model
run: {name: cli, max_staleness: 2, batch_groups: 2, group_size: 4, updates_max: 4, eval_every: 2, eval_tasks: 4}
counts: {sandbox: 0}
processes: {enabled: false}
data: {source: {name: jsonl, options: {path: tasks.jsonl, labels: {parity: parity}, validation_share: 0.1, test_share: 0.3}}}
rollout: {agent: "agent.py:Agent"}
reward: {scorers: [{name: "scorer.py:Scorer", reward: correct}]}
inference:
  engine: fake
learner:
  engine: fake
  checkpoint_every: 2
  publish: {num_probes: 0}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return save_user_folder(tmp_path)


def save_user_folder(folder: Path) -> Path:
    """A custom configuration, tasks, agent and scorer."""
    (folder / "model").mkdir()
    save_tokenizer(build_tokenizer(), folder / "model")
    (folder / "model" / "config.json").write_text("{}")
    (folder / "agent.py").write_text(AGENT)
    (folder / "scorer.py").write_text(SCORER)
    tasks = [{"question": f"{n}+{n}", "answer": str(2 * n), "parity": str(n % 2)} for n in range(60)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (folder / "mine.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended. Its output is in the file `output` of the parent."""
    folder, before = save_user_folder(tmp_path_factory.mktemp("ended")), os.umask(0o022)
    out = folder / "run"
    try:
        done = CliRunner().invoke(
            app, ["train", str(folder / "mine.yaml"), "telemetry.traces=file", "--out", str(out), "--json"]
        )
    finally:
        os.umask(before)
    assert done.exit_code == 0, done.output
    (folder / "output").write_text(done.stdout)
    return out


def test_train_runs_to_its_end_and_leaves_summary_report_checkpoint_and_a_ledger_that_holds(
    ended: Path, tmp_path: Path
) -> None:
    summary = json.loads((ended.parent / "output").read_text())
    assert summary == json.loads((ended / "summary.json").read_text())
    assert (summary["updates"], summary["outcome"], summary["samples"]["live"]) == (4, "finished", 0)
    assert summary["lag_max"] <= summary["eta"] == 2
    assert Path(summary["checkpoint"]).name == "update-00000004.0"
    series = read_series(RunFolder(ended).series)
    assert [e.step for e in series.evals_by_step] == [0, 2, 4]
    assert set(series.evals_by_step[0].success_by_label) == {"parity=0", "parity=1"}
    assert series.last.ended == "UPDATES_MAX"
    assert "<svg" in (ended / "report.html").read_text()
    assert [step for step, _ in heldout_events(ended / "tensorboard")] == [0, 2, 4]

    audit = CliRunner().invoke(app, ["audit", str(ended), "--payloads", "--json"])
    assert audit.exit_code == 0, audit.output
    found = json.loads(audit.stdout)
    assert found["holds"]
    where = {head["where"].split(" ")[0] for head in found["heads"] if head["holds"]}
    assert where == {"checkpoint", "gateway", "summary.json"}
    assert sum(found["payloads"].values()) >= summary["samples"]["trained"]
    assert found["samples"]["trained"] == summary["samples"]["trained"]
    assert found["checkpoint"] is not None

    copied = tmp_path / "run"
    shutil.copytree(ended, copied)
    exported = CliRunner().invoke(app, ["export", str(copied), "--json"])
    assert exported.exit_code == 0, exported.output
    rows = json.loads(exported.stdout)
    assert rows["num_rows"] == found["samples"]["reserved"] + found["eval_samples"]["reserved"]
    assert (rows["num_updates"], rows["num_live"]) == (4, 0)

    cleaned = CliRunner().invoke(app, ["clean", str(copied), "--for-good", "--json"])
    assert cleaned.exit_code == 0, cleaned.output
    removed = {Path(r["path"]).name for r in json.loads(cleaned.stdout)["removed"]}
    assert {"nats", "coordinator", "depot"} <= removed
    assert json.loads((copied / "audit.json").read_text())["holds"], "the proof outlives the ledger"
    assert (copied / "checkpoints" / "update-00000004.0").is_dir()


def readable(folder: Path) -> set[str]:
    """Return the first two parts of the path of each file that other users can read."""
    found = set()
    for path in folder.rglob("*"):
        way = [*path.relative_to(folder).parents][:-1]
        if path.is_file() and path.stat().st_mode & 0o044 and all((folder / at).stat().st_mode & 0o055 for at in way):
            found.add("/".join(path.relative_to(folder).parts[:2]))
    return found


def test_other_users_read_only_what_a_run_is_for_in_its_folder(ended: Path) -> None:
    expected = r"(config\.yaml|run\.json|results\.json|loggers\.json|model|recorded\.json|(series|metrics)\.jsonl|summary\.json|report\.(html|png))"
    others = [
        name
        for name in readable(ended)
        if not re.fullmatch(rf"{expected}|(checkpoints|model|metrics|tensorboard)/.*", name)
    ]
    assert not others
    private = [ended / "run.log", ended / "mesh.yaml", *ended.glob("coordinator/runs/**/*"), *ended.glob("data/*/*")]
    private += [*ended.glob("gateway/*"), *ended.glob("payloads/*/*"), *ended.glob("logs/*"), *ended.glob("traces/*")]
    assert {path.relative_to(ended).parts[0] for path in private} >= {"coordinator", "gateway", "payloads", "logs"}
    assert {path.name for path in private if path.is_file() and path.stat().st_mode & 0o077} == set()


def heldout_events(folder: Path) -> list[tuple[int, float]]:
    """Return the evaluations in the TensorBoard file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder))
    shown.Reload()
    return [(event.step, event.value) for event in shown.Scalars("heldout_success")]


def test_audit_of_a_checkpoint_that_says_otherwise_fails(ended: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(ended, out)
    trained = out / "checkpoints" / "update-00000004.0" / "trained.jsonl"
    lines = trained.read_text().splitlines()
    first = json.loads(lines[0])
    first["sample_ids"].append(first["sample_ids"][0] + "x")
    trained.write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    audit = CliRunner().invoke(app, ["audit", str(out)])
    assert audit.exit_code == 1, audit.output
    assert "CLAIMS ARE BROKEN" in audit.stdout
    audit = CliRunner().invoke(app, ["audit", str(out), "--head", f"5:{'0' * 64}"])
    assert "record 5 has the hash" in audit.stdout, "of another ledger"
    audit = CliRunner().invoke(app, ["audit", str(out), "--checkpoint", str(trained)])
    assert "it is not a checkpoint folder of the built-in learner" in " ".join(audit.output.split())
    audit = CliRunner().invoke(app, ["audit", str(out), "--head", "5"])
    assert audit.exit_code != 0
    assert "`head` must be POSITION:HASH" in audit.output


def test_run_goes_on_under_changed_settings_and_from_an_older_checkpoint(mine: Path) -> None:
    out = mine / "run"
    first = _train(str(mine / "mine.yaml"), "--out", str(out))
    assert first.exit_code == 0, first.output
    assert re.search(r"checkpoint +.*/checkpoints/update-00000004.0", first.stdout)

    refused = _train("--resume", str(out), "run.group_size=8", "run.updates_max=6")
    assert refused.exit_code == 2
    assert "`run.group_size` 4 -> 8: fixed after the run began" in refused.output
    assert "group_size: 4" in (out / "config.yaml").read_text()

    for path in (out / "checkpoints").glob("*/data_snapshot.bin"):
        assert path.stat().st_size, "a checkpoint holds where the draws stand"
    assert list((out / "data" / "cli").glob("*.snapshot"))
    shutil.rmtree(out / "checkpoints" / "update-00000004.0")
    second = _train("--resume", str(out), "run.updates_max=6")
    assert second.exit_code == 0, second.output
    assert "changed: run.updates_max 4 -> 6" in second.output
    assert (out / "checkpoints" / "update-00000006.1").is_dir()

    damaged = out / "checkpoints" / "update-00000006.1" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    third = _train("--resume", str(out), "run.updates_max=8", "run.max_staleness=1")
    assert third.exit_code == 0, third.output
    assert f"warning: checkpoint file {damaged} is corrupt" in third.output.replace("\n", "")
    assert (out / "checkpoints" / "corrupt-update-00000006.1").is_dir()
    assert (out / "checkpoints" / "update-00000008.2").is_dir()

    found = _audited(out)
    assert found["holds"]
    assert (found["updates"], found["updates_undone"], found["ended"]) == (8, 4, "UPDATES_MAX")
    changes = [(c["key"], c["old"], c["new"]) for c in found["changes"]]
    assert changes == [("run.updates_max", "4", "6"), ("run.max_staleness", "2", "1"), ("run.updates_max", "6", "8")]


def test_run_over_a_finite_source_ends_when_its_tasks_are_used_up(mine: Path) -> None:
    out = mine / "run"
    done = _train(
        str(mine / "mine.yaml"),
        "run.updates_max=0",
        "run.eval_every=0",
        "data.epochs_max=1",
        "--out",
        str(out),
        "--json",
    )
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert (summary["outcome"], summary["ended"], summary["samples"]["live"]) == ("finished", "TASKS_EXHAUSTED", 0)
    assert summary["updates"] >= 10
    assert _audited(out)["holds"]


def _train(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", "--in-process", *arguments])


def _audited(out: Path) -> dict[str, Any]:
    audit = CliRunner().invoke(app, ["audit", str(out), "--json"])
    assert audit.exit_code == 0, audit.output
    found: dict[str, Any] = json.loads(audit.stdout)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", ["--in-process", pytest.param("processes.enabled=true", marks=pytest.mark.slow)])
async def test_interrupted_run_writes_a_checkpoint_and_goes_on(mine: Path, start: str) -> None:
    """A run starts in one process, or with a process per service, and resumes in one process."""
    out = mine / "run"
    changes = ("run.updates_max=2000", "run.eval_every=0", start)
    output = await _interrupted("train", str(mine / "mine.yaml"), *changes, "--out", str(out))
    first = json.loads((out / "summary.json").read_text())
    assert first["outcome"] == "interrupted"
    assert f"rollmesh train {out}" in output
    assert Path(first["checkpoint"]).name == f"update-{first['updates']:08}.0"

    await _interrupted("train", "--in-process", str(out))
    second = json.loads((out / "summary.json").read_text())
    assert second["updates"] > first["updates"]
    assert {line.incarnation for line in read_metrics(out / "metrics.jsonl").values()} == {0}
    audit = await asyncio.to_thread(CliRunner().invoke, app, ["audit", str(out)])
    assert audit.exit_code == 0, audit.output


@pytest.mark.slow
def test_run_killed_in_mid_update_goes_on_without_skipping_or_repeating_a_prompt(mine: Path) -> None:
    out = mine / "run"
    started = ("train", "--in-process", str(mine / "mine.yaml"), "run.updates_max=2000", "run.eval_every=0")
    asyncio.run(_killed(*started, "--out", str(out)))
    done = _num_lines(out / "metrics.jsonl")
    last = _train("--resume", str(out), f"run.updates_max={done + 4}", "--json")
    assert last.exit_code == 0, last.output
    assert json.loads(last.stdout)["ended"] == "UPDATES_MAX"

    found = _audited(out)
    assert found["holds"]
    assert (found["updates"], found["samples"]["live"]) == (done + 4, 0)
    draws = [fact.draw for fact in asyncio.run(_facts(out)) if isinstance(fact, GroupReserved)]
    assert draws == list(range(len(draws)))


async def _facts(out: Path) -> list[Fact]:
    """Return every fact of the run, in order."""
    folder = RunFolder(out)
    async with run_bus(folder, load_train_config(folder.config)) as bus:
        log = await bus.open(run_streams("cli").ledger.name)
        return [fact async for record in read_ledger(log) for fact in record.facts]


async def _killed(*arguments: str) -> None:
    """Run the command until three updates are made, then kill it, as a power failure would."""
    await _until_updates(3, signal.SIGKILL, *arguments)


async def _interrupted(*arguments: str) -> str:
    """Run the command until three more updates are made, send Ctrl-C, and return the output."""
    code, output = await _until_updates(3, signal.SIGINT, *arguments)
    assert code == 130, output
    return output


async def _until_updates(num: int, then: signal.Signals, *arguments: str) -> tuple[int | None, str]:
    """Run the command until `num` more updates are made, send a signal, and return exit code and output."""
    metrics = Path(arguments[-1]) / "metrics.jsonl"
    wanted = _num_lines(metrics) + num
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollmesh.cli", *arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(90):
            while _num_lines(metrics) < wanted:
                assert process.returncode is None, (await process.communicate())[0].decode()
                await asyncio.sleep(0.05)
            process.send_signal(then)
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode()


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
