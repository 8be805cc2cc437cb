"""Execute the section of README about a user's own model and tasks: its files, its commands, and nothing else.

The models are created with transformers and tokenizers, in the style of a Qwen (ChatML) and of a Llama 3.1.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.newcomer.chat_models import save_chat_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

README = Path(__file__).parents[2] / "README.md"
SMALL = [
    "model=model",
    "run.batch_groups=4",
    "run.group_size=8",
    "run.updates_max=3",
    "run.eval_every=3",
    "run.eval_tasks=16",
    "learner.optimizer.lr=1e-4",
]
STOPS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}


def rollmesh(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "rollmesh"), *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


@pytest.fixture(scope="module", params=list(STOPS))
def mine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A folder with the files of README, tasks, and a model that solves some of them."""
    folder = tmp_path_factory.mktemp(request.param)
    for name, text in re.findall(r"```\w+\n# (\S+)\n(.*?)```", README.read_text(), re.DOTALL):
        (folder / name).write_text(text)
    rng = random.Random(1)
    answers = ["".join(sorted(rng.sample("abcdef", 4))) for _ in range(2000)]
    pairs = [("sort: " + "".join(rng.sample(answer, len(answer))), answer) for answer in answers]
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in pairs]
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    save_chat_model(request.param, folder / "model", pairs[:1000], steps=150)
    return request.param, folder


def test_check_says_what_is_in_force(mine: tuple[str, Path]) -> None:
    name, folder = mine
    done = rollmesh(folder, "check", "mine.yaml", "model=model")
    assert done.returncode == 0, done.stderr
    assert f"lr 1e-06, stop token {STOPS[name]}" in done.stderr
    assert "tasks; all" in done.stderr, "the held-out split is smaller than an evaluation: " + done.stderr


def test_a_dry_run_shows_an_episode_that_ends_at_the_models_own_stop_token(mine: tuple[str, Path]) -> None:
    _, folder = mine
    done = rollmesh(folder, "check", "mine.yaml", "--dry-run", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "sort: " in done.stderr
    assert re.search(r"\d tokens, main@0.0, mean log-prob .*, stop", done.stderr), done.stderr
    assert "correct" in done.stderr


def test_training_ends_and_its_audit_holds(mine: tuple[str, Path]) -> None:
    _, folder = mine
    trained = rollmesh(folder, "train", "mine.yaml", "--out", "run", *SMALL)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["updates"], summary["outcome"]) == (3, "finished")
    assert 0 < summary["tokens_generated"] < 12 * summary["samples"]["reserved"], "turns end at the stop token"
    audit = rollmesh(folder, "audit", "run")
    assert audit.returncode == 0, audit.stdout
    _answers(Path(summary["checkpoint"]))


def _answers(checkpoint: Path) -> None:
    """Transformers loads the checkpoint as a chat model, with chat template and stop token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    turns = [{"role": "user", "content": "sort: dbca"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    said = model.generate(prompt, max_new_tokens=32, do_sample=False)[0, prompt.shape[1] :]
    assert 1 < len(said) < 32, "it ends by itself"
