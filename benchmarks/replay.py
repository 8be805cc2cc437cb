"""A sparse task with a success buffer, with replay of half of each batch, and without either, for three seeds.

The shortened demo with a model of low initial success on a small pool, so that tasks come again and many groups fail
entirely. Arms differ in `run.replay` only: none, `success_per_task` (a group without a success gets the stored one of
its task), and `fifo` (half of each batch is replayed). All arms train the same number of updates from the model of
their seed.

How to read it: `after` is held-out success, and `gain` the difference from before, per seed. `generated` are tokens:
`fifo` generates about half of the others. `replayed` are trained samples of the log with their largest staleness. Three
seeds and short runs show a large effect only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.report import Report

ARMS = {
    "none": "null",
    "success_per_task": "{max_staleness: unlimited, share: 0.25, capacity_groups: 256, priority: success_per_task}",
    "fifo": "{max_staleness: 16, share: 0.5, capacity_groups: 64, priority: fifo, options: {advantage_min: 1.0e-6}}",
}
SEEDS = (0, 1, 2)
TASKS = "{level_max: 4, num_train: 64, num_validation: 240, num_test: 240}"
SPARSE = (
    "made_model.warm_start.target_success=0.15", f"data.source.options={TASKS}", "reward.finalizers=[keep_all]",
    "processes.enabled=false", "learner.checkpoint_every=1",
)  # fmt: skip
TIMEOUT_S = 1800
CONFIG = Path(__file__).parents[1] / "configs" / "demo_small.yaml"


def run(quick: bool) -> Report:
    updates, seeds = (3, SEEDS[:1]) if quick else (40, SEEDS)
    report = Report("replay", f"{CONFIG.name} with low success on 64 tasks, {updates} updates of 8x8, seeds {seeds}")
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        for seed in seeds:
            model = _warm_start(Path(folder), seed)
            for arm in ARMS:
                report.rows.append(_row(arm, seed, _train(Path(folder) / f"{arm}-{seed}", model, arm, seed, updates)))
    for arm in ARMS:
        gains = [row["gain"] for row in report.rows if row["arm"] == arm]
        report.notes.append(f"{arm}: mean gain {fmean(gains):+.3f}, from {min(gains):+.3f} to {max(gains):+.3f}")
    return report


def _warm_start(folder: Path, seed: int) -> Path:
    """Return the model that a run of the seed creates."""
    out = folder / f"warm-{seed}"
    _rollmesh(out, f"run.seed={seed}", "run.updates_max=1", "run.eval_every=0", *SPARSE)
    return out / "model"


def _train(out: Path, model: Path, arm: str, seed: int, updates: int) -> dict[str, Any]:
    sparse = [setting for setting in SPARSE if not setting.startswith("made_model")]
    keys = [f"model={model}", "made_model=null", f"run.seed={seed}", f"run.replay={ARMS[arm]}"]
    _rollmesh(out, *keys, f"run.updates_max={updates}", f"run.eval_every={updates}", *sparse)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def _rollmesh(out: Path, *settings: str) -> None:
    command = [sys.executable, "-m", "rollmesh.cli", "train", str(CONFIG), "--out", str(out), "--json", *settings]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)


def _row(arm: str, seed: int, summary: dict[str, Any]) -> dict[str, Any]:
    before, after = summary["heldout_success_before"], summary["heldout_success_after"]
    lags = [int(lag) for lag, num in summary["replayed_by_staleness"].items() if num]
    return {
        "arm": arm,
        "seed": seed,
        "before": before,
        "after": after,
        "gain": round(after - before, 4),
        "generated": summary["tokens_generated"],
        "trained": summary["samples"]["trained"],
        "replayed": summary["replay"].get("trained", 0),
        "staleness": max(lags, default=0),
        "train s": round(summary["train_s"], 1),
    }
