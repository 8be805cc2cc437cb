"""A model to train on: the small demo's, warm-started on demonstrations by `rollmesh train` itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).parent / "demo_small.yaml"
TIMEOUT_S = 900


def warm_model(out: Path, seed: int) -> Path:
    """The model that a run of the same seed makes. `out` is a folder for it that does not exist."""
    rollmesh(
        "train", str(CONFIG), "--out", str(out), "--json", f"run.seed={seed}", "run.updates_max=1", "run.eval_every=0"
    )
    return out / "model"


def rollmesh(*arguments: str) -> None:
    """Runs the command to its end, within `TIMEOUT_S`; what it prints is dropped. CalledProcessError if it fails."""
    command = [sys.executable, "-m", "rollmesh.cli", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
