"""`rollout`, `show` and `score` with a whole mesh with an engine and weights that need no model."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollmesh.app.config import load_train_config
from rollmesh.app.lake.files import owned
from rollmesh.app.run_folder import RunFolder
from rollmesh.cli.__main__ import app
from rollmesh.mesh.run_layout import open_layout

from .test_cli import save_user_folder

NUM = 6


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_user_folder(tmp_path_factory.mktemp("mine"))


@pytest.fixture(scope="module")
def done(mine: Path) -> Result:
    """One rollout that all tests read."""
    return run(
        "rollout", mine / "mine.yaml", "-n", NUM // 2, "--per-task", 2, "--out", mine / "samples.jsonl", "--run-dir", mine / "run"
    )  # fmt: skip


@pytest.fixture
def lines(mine: Path, done: Result) -> list[dict[str, object]]:
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in (mine / "samples.jsonl").read_text().splitlines()]


def test_rollout_prints_transcripts_and_ends_by_itself(done: Result, lines: list[dict[str, object]]) -> None:
    assert f"reserved {NUM}, exported {NUM}" in done.stdout
    for line in lines:
        assert str(line["sample_id"]) in done.stdout
    assert done.stdout.count("main@0.0") == NUM
    assert "correct" in done.stdout


def test_lines_hold_tokens_logprobs_versions_rewards_and_messages(lines: list[dict[str, object]]) -> None:
    assert len({line["sample_id"] for line in lines}) == NUM
    for line in lines:
        segments = line["segments"]
        assert isinstance(segments, list)
        actions = [s for s in segments if s["role"] == "action"]
        assert sum(len(s["token_ids"]) for s in segments) == line["num_tokens"]
        assert actions
        for action in actions:
            assert len(action["logprobs"]) == len(action["token_ids"]) == len(action["loss_mask"])
            assert action["version"]["step"] == 0
            assert len(action["version"]["weights_digest"]) == 64
        assert line["split"] == "test"
        assert [r["name"] for r in line["rewards"]] == ["correct"]  # type: ignore[attr-defined]
        assert {m["role"] for m in line["messages"]} == {"user", "assistant"}  # type: ignore[attr-defined]


def test_score_of_what_was_written_gives_the_rewards_of_the_run(mine: Path, lines: list[dict[str, object]]) -> None:
    scored = run("score", mine / "samples.jsonl", "--config", mine / "mine.yaml", "--json")
    assert scored.exit_code == 0, scored.output
    report = json.loads(scored.stdout)
    ours = [line["rewards"][0]["value"] for line in lines]  # type: ignore[index]
    assert [line["rewards"][0]["value"] for line in report["lines"]] == ours
    assert report["mean_rewards"] == {"correct": pytest.approx(sum(ours) / NUM)}


def test_show_tells_a_samples_words_and_life_and_the_audit_holds(mine: Path, lines: list[dict[str, object]]) -> None:
    first = str(lines[0]["sample_id"])
    listed = run("show", mine / "run")
    assert listed.exit_code == 0, listed.output
    assert len(listed.stdout.splitlines()) == NUM
    shown = run("show", mine / "run", first, "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["sample"] == lines[0]
    assert found["history"][-1]["what"] == "ended: exported"
    plain = run("show", mine / "run", first)
    assert "was leased to rollout-0" in plain.stdout
    audit = run("audit", mine / "run", "--json")
    assert json.loads(audit.stdout)["holds"], audit.output
    assert json.loads(audit.stdout)["samples"]["exported"] == NUM
    assert [(head["where"], head["holds"]) for head in json.loads(audit.stdout)["heads"]] == [("summary.json", True)]


def test_export_and_query_have_every_sample_of_the_run(mine: Path, lines: list[dict[str, object]]) -> None:
    exported = run("export", mine / "run", "--json")
    assert exported.exit_code == 0, exported.output
    found = json.loads(exported.stdout)
    assert (found["num_rows"], found["num_stored"], found["num_live"]) == (NUM, NUM, 0)
    names = "sample_id, messages, token_ids, reward.correct AS correct, ended_as, oracle_ref"
    queried = run("query", mine / "run", f"SELECT {names} FROM samples", "--json")
    assert queried.exit_code == 0, queried.output
    rows = {row["sample_id"]: row for row in map(json.loads, queried.stdout.splitlines())}
    assert len(rows) == NUM
    for line in lines:
        row = rows[line["sample_id"]]
        assert row["messages"] == line["messages"]
        assert row["token_ids"] == [token for segment in line["segments"] for token in segment["token_ids"]]  # type: ignore[attr-defined]
        assert row["correct"] == line["rewards"][0]["value"]  # type: ignore[index]
        assert (row["ended_as"], row["oracle_ref"]) == ("exported", line["oracle_ref"])
    table = run("query", mine / "run", "SELECT ended_as, count(*) AS num FROM samples GROUP BY ALL")
    assert "exported" in table.stdout
    assert str(NUM) in table.stdout
    as_csv = run("query", mine / "run", "SELECT ended_as, count(*) AS num FROM samples GROUP BY ALL", "--csv")
    assert as_csv.stdout.splitlines() == ["ended_as,num", f"exported,{NUM}"]
    sft = run("export", mine / "run", "--format", "sft", "--where", "reward.correct >= 1", "--out", mine / "sft.jsonl")
    assert sft.exit_code == 0, sft.output
    right = [line["messages"] for line in lines if line["rewards"][0]["value"] == 1]  # type: ignore[index]
    written = [json.loads(line)["messages"] for line in (mine / "sft.jsonl").read_text().splitlines()]
    assert sorted(written, key=str) == sorted(right, key=str)


def test_scores_of_exported_samples_are_added_beside_them(
    mine: Path, lines: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("export", mine / "run").exit_code == 0
    added = ("score", mine / "run", "--config", mine / "mine.yaml", "--name", "again", "--json")
    scored = run(*added)
    assert scored.exit_code == 0, scored.output
    report = json.loads(scored.stdout)
    mean = sum(line["rewards"][0]["value"] for line in lines) / NUM  # type: ignore[index]
    assert (report["num_files"], report["num_samples"]) == (1, NUM)
    assert report["mean_rewards"] == {"correct": pytest.approx(mean)}
    sql = "SELECT count(*) AS num FROM samples JOIN scores USING (run, sample_id) WHERE reward.correct = value AND scores = 'again'"
    assert json.loads(run("query", mine / "run", sql, "--json").stdout) == {"num": NUM}
    assert json.loads(run(*added).stdout)["num_files"] == 0
    with monkeypatch.context() as failing:
        failing.setattr("rollmesh.app.lake.rescore.has_failed", lambda _: True)
        failed = (*added[:4], "--name", "failed", "--json")
        assert json.loads(run(*failed).stdout)["num_failed"] == NUM
    assert [json.loads(run(*failed).stdout)["num_files"] for _ in range(2)] == [1, 0]
    shutil.rmtree(mine / "run/samples/scores=failed")
    assert "--name must have 1 to 64 letters" in run("score", mine / "run", "--config", mine / "mine.yaml").output
    stored = mine / "run/samples/scores=again/run=cli-rollout/update=none/part-0.parquet"
    with owned(stored.parents[2]):
        assert "another call writes to it; wait until it ends" in run(*added).output
    gone = stored.parent.parent / "update=9/part-0.parquet"
    gone.parent.mkdir()
    gone.write_bytes(stored.read_bytes())
    (mine / "other.yaml").write_text((mine / "mine.yaml").read_text().replace("reward: correct", "reward: other"))
    changed = ("--config", mine / "mine.yaml", "reward.scorers.0.timeout_s=7", *added[4:])
    for other in (("--config", mine / "other.yaml", *added[4:]), changed):
        assert "choose another --name" in run(*added[:2], *other).output
    assert not gone.exists(), "the rewards of samples that are no longer there are removed"
    stored.write_bytes(b"PAR1")
    assert "part-0.parquet: not a file that rollmesh wrote" in run(*added).output
    shutil.rmtree(stored.parents[2])


def test_wrong_input_of_export_and_query_is_answered_with_what_is_right(
    mine: Path, lines: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, expected in {
        ("export", mine): "not the folder of a run",
        ("export", mine / "run", "--run-name", "other"): "--run-name takes one of: cli-rollout",
        ("export", mine / "run", "--where", "true"): "--where and --out need --format sft or atif",
        ("query", mine, "SELECT 1"): "has no exported samples; run `rollmesh export",
        (
            "query",
            mine / "run",
            "SELECT 1 AS a, 2 AS a",
            "--json",
        ): "--json needs columns with different names, got a, a",
        ("query", mine, "SELECT 1", "--csv", "--json"): "--json and --csv exclude each other",
        ("score", mine / "samples.jsonl", "--name", "x"): "--name and --processes need a folder with exported samples",
    }.items():
        refused = run(*arguments)
        assert refused.exit_code in (1, 2)
        assert expected in refused.output
    monkeypatch.setitem(sys.modules, "duckdb", None)
    monkeypatch.delitem(sys.modules, "rollmesh.app.lake.query", raising=False)
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ['duckdb>=1.3; extra == "lake"'])
    missing = run("query", mine / "run", "SELECT 1")
    assert missing.exit_code == 2
    assert "needs the library `duckdb`, which is not installed: pip install 'rollmesh[lake]'" in missing.output


def test_show_of_a_sample_that_never_was_says_how_to_list_them(mine: Path, lines: list[dict[str, object]]) -> None:
    shown = run("show", mine / "run", "g99.0-0")
    assert shown.exit_code == 1
    assert "has no sample or episode 'g99.0-0'" in shown.output


async def test_show_reads_a_run_that_is_running(mine: Path, lines: list[dict[str, object]]) -> None:
    folder = RunFolder(mine / "run")
    layout = open_layout(load_train_config(folder.config), run_dir=folder.root, base_dir=mine)
    async with layout.bus_server() as server:
        pid = server.pid
        shown = await asyncio.to_thread(run, "show", mine / "run", lines[0]["episode"], "--json")
        assert shown.exit_code == 0, shown.output
        assert json.loads(shown.stdout)["sample"] == lines[0]
        assert server.pid == pid is not None


def test_rollout_of_more_tasks_than_there_are_says_how_many_and_makes_nothing(mine: Path) -> None:
    refused = run("rollout", mine / "mine.yaml", "-n", 1000, "--run-dir", mine / "never")
    assert refused.exit_code == 2
    assert "-n 1000: the test split has" in refused.output
    assert not (mine / "never").exists()


def test_an_episode_that_fails_for_good_is_listed_with_its_cause_and_nothing_exported_is_a_failure(
    tmp_path: Path,
) -> None:
    folder = save_user_folder(tmp_path)
    (folder / "agent.py").write_text(
        "class Agent:\n    async def run(self, task, env):\n        raise RuntimeError('no idea')\n"
    )
    failed = run("rollout", folder / "mine.yaml", "run.tries_max=1", "-n", 1, "--run-dir", folder / "run")
    assert failed.exit_code == 1, failed.output
    assert "reserved 1, failed 1" in failed.stdout
    assert "newest failure\nagent: RuntimeError: no idea" in failed.stdout
    assert "raise RuntimeError('no idea')" in failed.stdout, "the line of the user's code"
    listed = run("show", folder / "run")
    assert "g0.0  tasks-" in listed.stdout
    assert "failed TRIES_EXHAUSTED: " in listed.stdout
    assert "no idea" in listed.stdout
    shown = run("show", folder / "run", "g0.0")
    assert shown.exit_code == 0, shown.output
    assert "the episode ended without samples: failed TRIES_EXHAUSTED" in shown.stdout


def test_a_runs_folder_is_rolled_out_by_its_own_configuration(mine: Path, done: Result) -> None:
    again = run("rollout", mine / "run", "-n", 1, "--run-dir", mine / "again", "--json")
    assert again.exit_code == 0, again.output
    summary = json.loads(again.stdout)
    assert (summary["run"], summary["ended"], summary["samples"]) == (
        "cli-rollout",
        "EXPORTED",
        {"reserved": 1, "exported": 1},
    )


# check --dry-run ------------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_one_episode_with_its_rewards_and_leaves_nothing(mine: Path) -> None:
    before = sorted(path.name for path in mine.iterdir())
    done = run("check", mine / "mine.yaml", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "main@0.0" in done.stderr
    assert "correct" in done.stderr
    assert sorted(path.name for path in mine.iterdir()) == before


def test_a_dry_run_prints_the_traceback_of_a_users_scorer(tmp_path: Path) -> None:
    folder = save_user_folder(tmp_path)
    (folder / "scorer.py").write_text(
        "class Scorer:\n    async def score(self, item):\n        return float(item.response.strip() == '1')\n"
    )
    done = run("check", folder / "mine.yaml", "--dry-run")
    assert done.exit_code == 2, done.output
    assert "the dry run's episode failed: scorer" in done.stderr
    assert "(`response` is a method; call it: `response()`)" in done.stderr
    assert "return float(item.response.strip() == '1')" in done.stderr


def test_training_whose_first_samples_all_fail_ends_with_the_users_traceback(tmp_path: Path) -> None:
    folder = save_user_folder(tmp_path)
    (folder / "agent.py").write_text(
        "class Agent:\n    async def run(self, task, env):\n        raise RuntimeError('no idea')\n"
    )
    done = run("train", "--in-process", folder / "mine.yaml", "run.first_failures_max=8", "--out", folder / "run")
    assert done.exit_code == 1, done.output
    assert "samples all failed with the same kind of error: agent: RuntimeError: no idea" in done.stderr
    assert "raise RuntimeError('no idea')" in done.stderr
    assert json.loads((folder / "run" / "summary.json").read_text())["outcome"] == "failed"
