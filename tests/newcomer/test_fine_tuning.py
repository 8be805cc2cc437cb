"""Execute the commands of docs/sft.md: fine-tuning of a plain transformers model, and reinforcement learning on its
result."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


def test_the_example_of_the_guide(tmp_path: Path) -> None:
    folder = tmp_path / "sft"
    shutil.copytree(ROOT / "examples" / "sft", folder, ignore=shutil.ignore_patterns("runs", "model", "*.jsonl"))
    commands = re.findall(r"```sh\ncd examples/sft\n(.*?)```", (ROOT / "docs" / "sft.md").read_text(), re.DOTALL)
    assert len(commands) == 1
    bin_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = commands[0].replace("--out runs/rl", "--out runs/rl run.updates_max=10")
    subprocess.run(["bash", "-ec", script], cwd=folder, env={**os.environ, "PATH": bin_path}, check=True, timeout=800)
    tuned = json.loads((folder / "runs" / "sft" / "summary.json").read_text())
    trained = json.loads((folder / "runs" / "rl" / "summary.json").read_text())
    assert tuned["outcome"] == trained["outcome"] == "finished"
    assert tuned["heldout_loss"] < 0.1 * tuned["heldout_loss_before"]
    assert trained["heldout_success_before"] > 0.3
    assert trained["heldout_success_after"] > trained["heldout_success_before"]
    again = subprocess.run(
        ["bash", "-ec", "rollmesh sft runs/sft && rollmesh audit runs/rl"],
        cwd=folder, env={**os.environ, "PATH": bin_path}, check=True, timeout=100, capture_output=True, text=True,
    )  # fmt: skip
    assert "resuming after update 60" in again.stdout
