"""The example of docs/endpoints.md with real processes: a frozen opponent, a judge at a URL, and the same rewards
without the judge."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.trainer.model_files import write_model_folder

EXAMPLE = Path(__file__).parents[2] / "examples" / "judge_and_opponent"
NUM = 16
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
REPLAYED = ("endpoints.judge.replay=answers", "endpoints.opponent.replay=answers", "endpoints.opponent.nodes=0")
RECORDED = ("endpoints.judge.record=answers", "endpoints.opponent.record=answers")

Rewards = dict[str, list[tuple[str, float]]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def command(folder: Path, *arguments: object) -> str:
    """Run `rollmesh` in the folder of the example, and return what it printed."""
    words = [sys.executable, "-m", "rollmesh.cli", *map(str, arguments)]
    done = subprocess.run(words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@contextmanager
def judge(folder: Path) -> Iterator[str]:
    """Run the judge of the example as a process, and return its URL."""
    words = [sys.executable, "judge_server.py", "0"]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def rewards_of(lines: list[Any]) -> Rewards:
    return {line["sample_id"]: [(one["name"], one["value"]) for one in line["rewards"]] for line in lines}


def written(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its model, and with what it wrote while the judge ran."""
    folder = tmp_path_factory.mktemp("example") / "duel"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("model", "answers", "runs"))
    shape = TinyModelConfig(
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32
    )
    (folder / "model").mkdir()  # in place of make_model.py, which takes a minute
    write_model_folder(build_tiny_model(shape, seed=7), build_tokenizer(), folder / "model")
    with judge(folder) as url:
        online = (f"endpoints.judge.base_url={url}", *RECORDED)
        command(folder, "train", "config.yaml", "--out", "trained", "run.updates_max=3", "run.eval_every=0", *online)
        command(folder, "train", *IN_ORDER, "--out", "ordered", *online)
        command(folder, "rollout", "config.yaml", "-n", NUM, "--out", "first.jsonl", "--run-dir", "first", *online)
    return folder


IN_ORDER = (
    "config.yaml", "--in-process", "run.max_staleness=0", "run.updates_max=4", "run.eval_every=0", "learner.optimizer.decay_updates=4"
)  # fmt: skip


@pytest.mark.row("S068")
def test_show_has_calls_tokens_price_and_latency_of_both_endpoints(example: Path) -> None:
    shown = command(example, "show", "first", "g0.0-0")
    sample = json.loads(command(example, "show", "first", "g0.0-0", "--json"))
    uses = {(use["endpoint"], use["caller"]): use for use in sample["sample"]["endpoints"]}
    judged, played = uses["judge", "ComparedByJudge@1"], uses["opponent", "agent"]
    for name, use in (("judge", judged), ("opponent", played)):
        assert (use["calls"], use.get("replayed", 0)) == (1, 0)
        assert min(use["prompt_tokens"], use["completion_tokens"], use["latency_s"]) > 0
        assert (
            f"{name} 1 answer to {use['caller']}  {use['prompt_tokens']} + {use['completion_tokens']} tokens" in shown
        )
    assert judged["price"] == pytest.approx((judged["prompt_tokens"] * 0.5 + judged["completion_tokens"] * 1.5) / 1e6)
    assert played.get("price", 0) == 0
    spent = float((example / "first" / "endpoints" / "judge.spent").read_text())
    assert spent == pytest.approx(
        sum(use.get("price", 0) for line in written(example / "first.jsonl") for use in line["endpoints"])
    )
    roles = [(s["role"], sum(s.get("loss_mask") or [0])) for s in sample["sample"]["segments"]]
    assert [bool(mask) for role, mask in roles] == [role == "action" for role, _ in roles], (
        "the opponent is not trained"
    )


def test_real_processes_train_before_the_judge(example: Path) -> None:
    report = json.loads(command(example, "audit", "trained", "--json"))
    assert report["holds"], report
    assert report["samples"]["trained"] == 3 * 32
    assert float((example / "trained" / "endpoints" / "judge.spent").read_text()) > 3 * 32 * 1e-5
    assert not (example / "trained" / "endpoints" / "opponent.spent").exists()


def test_stored_samples_get_the_same_rewards_without_the_judge(example: Path) -> None:
    report = json.loads(
        command(example, "score", "first.jsonl", "--config", "config.yaml", "--json", "endpoints.judge.replay=answers")
    )
    first = rewards_of(written(example / "first.jsonl"))
    assert len(first) == NUM
    assert rewards_of(report["lines"]) == first
    assert len({value for rewards in first.values() for name, value in rewards if name == "judged"}) == NUM, "noise"


def test_a_repeated_rollout_gets_the_same_rewards_without_judge_and_opponent(example: Path) -> None:
    command(example, "rollout", "config.yaml", "-n", NUM, "--out", "second.jsonl", "--run-dir", "second", *REPLAYED)
    first, second = written(example / "first.jsonl"), written(example / "second.jsonl")
    assert rewards_of(second) == rewards_of(first)
    assert {use["replayed"] for line in second for use in line["endpoints"]} == {1}
    assert {use.get("price", 0) for line in second for use in line["endpoints"]} == {0}


def test_a_repeated_training_in_one_process_gets_the_same_rewards_without_the_judge(example: Path) -> None:
    command(example, "train", *IN_ORDER, "--out", "again", "endpoints.judge.replay=answers")
    runs = [json.loads(command(example, "show", run, "--json", "--limit", 10_000)) for run in ("ordered", "again")]
    first, again = ({name: found for name, found in rewards_of(run).items() if found} for run in runs)
    both = first.keys() & again.keys()  # the end of the run interrupts the episodes of a next update
    assert len(both) >= 3 * 32
    assert {name: first[name] for name in both} == {name: again[name] for name in both}


def test_a_request_without_a_recorded_answer_fails_and_names_the_endpoint(example: Path) -> None:
    other = example / "other.jsonl"
    line = written(example / "first.jsonl")[0]
    line["messages"][-1]["content"] = "<answer>not recorded</answer>"
    other.write_text(json.dumps(line) + "\n")
    words = [sys.executable, "-m", "rollmesh.cli", "score", "other.jsonl", "--config", "config.yaml", "endpoints.judge.replay=answers"]  # fmt: skip
    done = subprocess.run(words, cwd=example, env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "endpoint `judge`: no answer is recorded in `replay` = 'answers'" in " ".join(done.stdout.split())
