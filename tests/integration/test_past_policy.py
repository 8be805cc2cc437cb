"""Self-play: the opponent is the policy as it was two updates ago, on the inference nodes of the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from rollmesh.cli.__main__ import app
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import END, SPECIAL_TOKENS, build_tokenizer
from rollmesh.trainer.model_files import write_model_folder

PLUGINS = Path(__file__).parent / "endpoint_plugins.py"
SHAPE = TinyModelConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32)
CONFIG: dict[str, Any] = {
    "run": {"name": "past", "max_staleness": 0, "batch_groups": 2, "group_size": 4, "updates_max": 3, "eval_every": 0,
            "success_reward": "length"},
    "model": "model",
    "endpoints": {"past": {"kind": "policy_step", "step": 0, "record": "answers"}},
    "data": {"source": {"name": "calc", "options": {"level_max": 1, "num_train": 16, "num_validation": 0, "num_test": 0}}},
    "rollout": {"agent": f"{PLUGINS}:PlaysPast", "limits": {"turns_max": 2, "tokens_max": 64, "context_tokens_max": 256}},
    "reward": {"scorers": [{"name": f"{PLUGINS}:Characters", "reward": "length"}]},
    "inference": {"engine": {"name": "torch", "options": {"slots_max": 16, "context_max": 256, "versions_max": 2}}},
    "counts": {"sandbox": 0},
    "processes": {"enabled": False},
    "learner": {"optimizer": {"lr": 0.05, "warmup_updates": 0}},
}  # fmt: skip


def command(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "rollmesh.cli", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False)


def greedy(model: Path, messages: list[dict[str, str]], num: int) -> str:
    """What the weights in a folder say to the messages, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    said: list[int] = []
    while len(said) < num and said[-1:] != [SPECIAL_TOKENS.index(END)]:
        with torch.no_grad():
            said.append(int(weights(torch.tensor([ids + said])).logits[0, -1].argmax()))
    return str(tokenizer.decode(said)).removesuffix(END)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_opponent_is_the_policy_of_two_updates_ago(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_model_folder(build_tiny_model(SHAPE, seed=3), build_tokenizer(), tmp_path / "model")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    done = command(tmp_path, "train", "config.yaml", "--out", "run")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(command(tmp_path, "audit", "run", "--json").stdout)
    assert (report["holds"], report["samples"]["trained"]) == (True, 3 * 8)

    lines = [line for path in (tmp_path / "answers").glob("*.jsonl") for line in path.read_text().splitlines()]
    answers = [json.loads(line) for line in lines]
    assert len(answers) == 3 * 8
    newest = tmp_path / "run" / "checkpoints" / "update-00000003.0"
    changed = 0
    for answer in {json.dumps(answer["asked"]["messages"]): answer for answer in answers}.values():
        messages, said = answer["asked"]["messages"], answer["reply"]["text"]
        assert said == greedy(tmp_path / "model", messages, 6), "the weights of step 0, also while step 2 is served"
        changed += said != greedy(newest, messages, 6)
    assert changed, "the updates changed what the policy says"
    assert not (tmp_path / "run" / "endpoints" / "past.spent").exists()

    with_prices = command(
        tmp_path, "rollout", "config.yaml", "data.source.options.num_test=8", "-n", 2, "--out", "samples.jsonl"
    )
    assert with_prices.returncode == 0, with_prices.stderr[-3000:]
    for line in map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines()):
        (use,) = line["endpoints"]
        assert (use["endpoint"], use["calls"], use["price"]) == ("past", 1, 0)
        assert min(use["prompt_tokens"], use["completion_tokens"], use["latency_s"]) > 0


def test_an_engine_that_holds_one_version_is_named_with_the_setting_to_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    write_model_folder(build_tiny_model(SHAPE, seed=3), build_tokenizer(), tmp_path / "model")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    settings = ["--out", "run", "inference.engine.options.versions_max=1"]
    done = CliRunner().invoke(app, ["train", "config.yaml", *settings])
    assert done.exit_code == 2
    said = " ".join(done.stderr.split())
    assert (
        "`endpoints.past.kind` policy_step needs an engine with several sets of weights, and this one has one" in said
    )
    assert "set inference.engine.options.versions_max to 2 or more" in said
    assert not (tmp_path / "run").exists()
