"""Does a weak model learn faster with the rollouts of a strong one? Two meshes of the small demo, with and without
`rollmesh exchange`.

A swarm of two nodes (SAPO, arXiv:2509.08721): the strong node has the usual warm start, and the weak one stops its warm
start earlier. Both train at the same time. In the arm `J > 0` an exchange gives the strong node's rollouts to the weak
one, whose recipe is `sapo_swarm`, and in the arm `J = 0` it does not run, so that a batch has own groups alone. Both
arms begin with the same models and have the same number of updates.

How to read it: `before` and `after` are held-out success of the weak node, and `rise` their difference. `peer samples`
are those of the strong node that it trained on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.report import Report
from benchmarks.warm_model import CONFIG, TIMEOUT_S, rollmesh, warm_model

SEEDS = (0, 1, 2)
UPDATES = 24
WEAK = ("made_model.warm_start.target_success=0.2",)
START_S = 600.0


def run(quick: bool) -> Report:
    updates = 2 if quick else UPDATES
    report = Report("swarm", f"{CONFIG.name}, recipe sapo_swarm, {updates} updates, the weak node warm-started to 0.2")
    rises: dict[str, list[float]] = {"J = 0": [], "J > 0": []}
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as name:
        folder = Path(name)
        for seed in SEEDS[:1] if quick else SEEDS:
            strong = warm_model(folder / f"strong{seed}", seed)
            weak = _weak_model(folder / f"weak{seed}", seed)
            for arm, found in rises.items():
                row = _arm(folder / f"{seed}{arm[2]}", strong, weak, seed, updates, shares=arm == "J > 0")
                report.rows.append({"seed": seed, "arm": arm} | row)
                found.append(row["rise"])
    without, shared = (mean(values) for values in rises.values())
    report.notes.append(f"mean rise {shared:.3f} with and {without:.3f} without the strong node's rollouts")
    return report


def _weak_model(out: Path, seed: int) -> Path:
    keys = (f"run.seed={seed}", "run.updates_max=1", "run.eval_every=0", *WEAK)
    rollmesh("train", str(CONFIG), "--out", str(out), "--json", *keys)
    return out / "model"


def _arm(folder: Path, strong: Path, weak: Path, seed: int, updates: int, *, shares: bool) -> dict[str, Any]:
    """Train both nodes at once, and return the row of the weak one."""
    folder.mkdir()
    keys = ("made_model=null", f"run.seed={seed}", "run.max_staleness=2")
    with ExitStack() as stack:

        def begin(name: str, *arguments: str) -> subprocess.Popen[bytes]:
            process = _command(folder / f"{name}.log", *arguments)
            stack.callback(_stop, process)
            return process

        ends = ("run.updates_max=100000", "run.eval_every=0")
        begin(
            "strong", "train", str(CONFIG), f"model={strong}", "--out", str(folder / "strong"), "--json", *keys, *ends
        )
        target = begin(
            "weak", "train", str(CONFIG), f"model={weak}", "recipe=sapo_swarm", "learner.optimizer.lr=7.0e-4",
            f"learner.optimizer.decay_updates={updates}", f"run.updates_max={updates}", f"run.eval_every={updates}",
            *keys, "--out", str(folder / "weak"), "--json",
        )  # fmt: skip
        if shares:
            _wait_for_runs(folder)
            begin("exchange", "exchange", str(folder / "strong"), str(folder / "weak"), "--mesh", "strong", "--json")
        target.wait(TIMEOUT_S)
    if target.returncode:
        raise RuntimeError(f"the weak node exited with {target.returncode}: {_end_of(folder / 'weak.log')}")
    lines = [json.loads(line) for line in (folder / "weak" / "series.jsonl").read_text().splitlines()]
    evals = sorted((line for line in lines if "success" in line), key=lambda line: line["step"])
    before, after = evals[0]["success"], evals[-1]["success"]
    audit = subprocess.run(
        [sys.executable, "-m", "rollmesh.cli", "audit", str(folder / "weak"), "--json"],
        check=True, capture_output=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    peers = json.loads(audit.stdout)["submitted"].get("peer", {}).get("trained", 0)
    return {"before": before, "after": after, "rise": after - before, "peer samples": peers}


def _wait_for_runs(folder: Path) -> None:
    """Wait until both runs have a folder with a token, which an exchange reads."""
    end_s = time.monotonic() + START_S
    while missing := [name for name in ("strong", "weak") if not (folder / name / "token").is_file()]:
        if time.monotonic() > end_s:
            said = _end_of(folder / f"{missing[0]}.log")
            raise RuntimeError(f"the {missing[0]} node has not started within {START_S:g} s: {said}")
        time.sleep(0.5)


def _command(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", "rollmesh.cli", *arguments], stdout=file, stderr=file)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(TIMEOUT_S)


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-1000:]
