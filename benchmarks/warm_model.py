"""Create the model of the small demo, warm-started on demonstrations by `rollmesh train`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).parents[1] / "configs" / "demo_small.yaml"
TIMEOUT_S = 900


def warm_model(out: Path, seed: int) -> Path:
    """Create the model that a run of the same seed creates. `out` is a new folder for it."""
    rollmesh(
        "train", str(CONFIG), "--out", str(out), "--json", f"run.seed={seed}", "run.updates_max=1", "run.eval_every=0"
    )
    return out / "model"


def rollmesh(*arguments: str) -> None:
    """Run the command within `TIMEOUT_S` and drop its output. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", "rollmesh.cli", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
