"""The real demo. It trains for minutes; the fast suites cover the same path with engines that need no model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def rollmesh(*arguments: str) -> dict[str, Any]:
    """Run a command in a separate process and return its summary."""
    done = subprocess.run(
        [sys.executable, "-m", "rollmesh.cli", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_small_demo_rises(tmp_path: Path) -> None:
    summary = rollmesh("train", str(ROOT / "configs" / "demo_small.yaml"), "--out", str(tmp_path / "run"))
    assert summary["heldout_success_after"] >= summary["heldout_success_before"] + 0.1
    assert summary["lag_max"] <= summary["eta"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_demo_reaches_its_success_on_held_out_tasks(seed: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    summary = rollmesh("demo", "--seed", str(seed), "--out", str(out))
    assert summary["heldout_success_after"] >= 0.85
    assert summary["heldout_success_after"] > summary["heldout_success_before"] + 0.15
    assert rollmesh("audit", str(out))["holds"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_own_tasks_agent_and_scorer_train_by_configuration_alone(tmp_path: Path) -> None:
    summary = rollmesh("train", str(ROOT / "configs" / "jsonl_example.yaml"), "--out", str(tmp_path / "run"))
    assert summary["heldout_success_after"] >= summary["heldout_success_before"] + 0.1
    assert set(summary["heldout_by_label_after"]) == {f"steps={n}" for n in (1, 2, 3, 4)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_checkpoint_of_the_small_demo_generates_with_plain_transformers(tmp_path: Path) -> None:
    summary = rollmesh(
        "train", str(ROOT / "configs" / "demo_small.yaml"), "run.updates_max=2", "run.eval_every=0", "--out", str(tmp_path / "run")
    )  # fmt: skip
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "m, t = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "tool = {'type': 'function', 'function': {'name': 'calculator'}}\n"
        "x = t.apply_chat_template([{'role': 'user', 'content': '12+7'}], tools=[tool], add_generation_prompt=True, "
        "return_tensors='pt', return_dict=True)\n"
        "print(t.decode(m.generate(**x, max_new_tokens=24, do_sample=False)[0][x['input_ids'].shape[1]:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, summary["checkpoint"]], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip().startswith("<tool_call>")
    assert done.stdout.strip().endswith("<|end|>")
