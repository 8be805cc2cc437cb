"""The demo, shortened, under long-tailed tool latency, with eta = 0, 1, 2, 4: trained staleness, dropped samples and
time of each bound.

One warm-started model for all; only `run.max_staleness` differs. Tool calls take extra time from a Pareto distribution,
so that a few episodes delay their groups and others overtake them: lag eta is reached and, with a small eta, slow
samples are dropped. The baseline is eta = 0, synchronous training.

How to read it: `lags` is the share of trained samples by staleness, never above eta; `stale` is the number of dropped
samples. `wall s` decreases with eta, because no batch waits for the slowest episode. `after` of this short run shows
that training works, not which eta is best.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import Report

ETAS = (0, 1, 2, 4)
LATENCY = ("distribution=pareto", "mean_s=0.4", "shape=1.3", "max_s=6")
TIMEOUT_S = 600
CONFIG = Path(__file__).parents[1] / "configs" / "demo_small.yaml"


def run(quick: bool) -> Report:
    updates = 4 if quick else 16
    report = Report("staleness", f"{CONFIG.name}, {updates} updates of 8x8, tool latency {', '.join(LATENCY)}")
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        model = _warm_start(Path(folder))
        for eta in ETAS:
            report.rows.append(_row(eta, _train(Path(folder) / f"eta{eta}", model, eta, updates)))
    return report


def _warm_start(folder: Path) -> Path:
    """Return the model that a run of the same seed creates."""
    out = folder / "warm"
    _rollmesh("train", str(CONFIG), "--out", str(out), "--json", "run.updates_max=1", "run.eval_every=0")
    return out / "model"


def _train(out: Path, model: Path, eta: int, updates: int) -> dict[str, Any]:
    latency = [f"rollout.tool_latency.{setting}" for setting in LATENCY]
    keys = [f"model={model}", "made_model=null", f"run.max_staleness={eta}", f"run.updates_max={updates}", *latency]
    _rollmesh("train", str(CONFIG), *keys, "--out", str(out), "--json")
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def _rollmesh(*arguments: str) -> None:
    command = [sys.executable, "-m", "rollmesh.cli", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)


def _row(eta: int, summary: dict[str, Any]) -> dict[str, Any]:
    lags = {int(lag): num for lag, num in summary["trained_by_staleness"].items() if int(lag) >= 0}
    total = sum(lags.values())
    samples = summary["samples"]
    assert max(lags) <= eta, f"a sample was trained {max(lags)} updates late under eta = {eta}"
    return {
        "eta": eta,
        "lags": " ".join(f"{lag}:{num / total:.0%}" for lag, num in sorted(lags.items())),
        "stale": samples["stale"],
        "trained": samples["trained"],
        "wall s": round(summary["train_s"], 1),
        "before": summary["heldout_success_before"],
        "after": summary["heldout_success_after"],
    }
