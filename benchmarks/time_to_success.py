"""Seconds and updates to a fixed held-out success, asynchronous against synchronous, under long-tailed tool latency.

The small demo from one warm-started model per seed; tool calls take extra time from a Pareto distribution. eta = 0
(synchronous: every batch waits for its slowest episode) and eta = 2 take turns, seed by seed. A run stops at the
evaluation that reaches the target.

How to read it: `s to target` is training time without warm start; `ratio` is synchronous over asynchronous, so above 1
asynchrony wins. A run that did not reach the target within its updates counts with its whole time, marked by `>`; check
its success.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Report
from benchmarks.warm_model import CONFIG, rollmesh, warm_model

ETAS = (0, 2)
SEEDS = (0, 1, 2)
TARGET = 0.65
"""Held-out success that ends a run; the warm-started model has about 0.5."""
UPDATES_MAX = 40
EVAL_EVERY = 4
LATENCY = ("distribution=pareto", "mean_s=0.4", "shape=1.3", "max_s=6")


@dataclass(frozen=True, slots=True)
class Course:
    """Run until the target, or until the last update."""

    seconds: float
    update: int
    before: float
    success: float
    reached: bool


def run(quick: bool) -> Report:
    updates = EVAL_EVERY if quick else UPDATES_MAX
    setting = f"{CONFIG.name}, until held-out success {TARGET}, at most {updates} updates, tools {', '.join(LATENCY)}"
    report = Report("time_to_success", setting)
    ratios = []
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        for seed in SEEDS[:1] if quick else SEEDS:
            model = warm_model(Path(folder) / f"warm{seed}", seed)
            courses = {eta: _train(Path(folder) / f"{seed}-{eta}", model, seed, eta, updates) for eta in ETAS}
            ratios.append(courses[0].seconds / courses[2].seconds)
            report.rows += [_row(seed, eta, course, ratios[-1]) for eta, course in courses.items()]
    report.notes.append(f"median ratio {median(ratios):.2f} over {len(ratios)} seeds")
    return report


def _row(seed: int, eta: int, course: Course, ratio: float) -> dict[str, Any]:
    return {
        "seed": seed,
        "eta": eta,
        "s to target": f"{'' if course.reached else '>'}{course.seconds:.0f}",
        "at update": course.update,
        "before": course.before,
        "success then": course.success,
        "ratio": f"{ratio:.2f}" if eta else "",
    }


def _train(out: Path, model: Path, seed: int, eta: int, updates: int) -> Course:
    latency = [f"rollout.tool_latency.{setting}" for setting in LATENCY]
    run_keys = [
        f"run.seed={seed}",
        f"run.max_staleness={eta}",
        f"run.updates_max={updates}",
        f"run.eval_every={EVAL_EVERY}",
        f"run.success_target={TARGET}",
    ]
    rollmesh(
        "train", str(CONFIG), f"model={model}", "made_model=null", *run_keys, *latency, "--out", str(out), "--json"
    )
    return _course((out / "series.jsonl").read_text())


def _course(series: str) -> Course:
    evals = sorted((e for e in map(json.loads, series.splitlines()) if "success" in e), key=lambda e: e["step"])
    before = evals[0]
    after = next((e for e in evals if e["success"] >= TARGET), evals[-1])
    return Course(
        seconds=after["time_s"] - before["time_s"],
        update=after["step"],
        before=before["success"],
        success=after["success"],
        reached=after["success"] >= TARGET,
    )
