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
import threading
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
LOG_S = 10.0
"""Time for which the last lines of a command that has exited are awaited, in seconds."""
RESPONDS = b"live page: "
"""Begin of the line of `rollmesh train` once the gateway has sent a state of the run."""


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

        def begin(name: str, *arguments: str) -> Command:
            command = Command(folder / f"{name}.log", *arguments)
            stack.callback(command.close)
            return command

        ends = ("run.updates_max=100000", "run.eval_every=0")
        source = begin(
            "strong", "train", str(CONFIG), f"model={strong}", "--out", str(folder / "strong"), "--json", *keys, *ends
        )
        target = begin(
            "weak", "train", str(CONFIG), f"model={weak}", "recipe=sapo_swarm", "learner.optimizer.lr=7.0e-4",
            f"learner.optimizer.decay_updates={updates}", f"run.updates_max={updates}", f"run.eval_every={updates}",
            *keys, "--out", str(folder / "weak"), "--json",
        )  # fmt: skip
        if shares:
            source.until_it_responds()
            target.until_it_responds()
            begin("exchange", "exchange", str(folder / "strong"), str(folder / "weak"), "--mesh", "strong", "--json")
        target.finish()
    lines = [json.loads(line) for line in (folder / "weak" / "series.jsonl").read_text().splitlines()]
    evals = sorted((line for line in lines if "success" in line), key=lambda line: line["step"])
    before, after = evals[0]["success"], evals[-1]["success"]
    audit = subprocess.run(
        [sys.executable, "-m", "rollmesh.cli", "audit", str(folder / "weak"), "--json"],
        check=True, capture_output=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    peers = json.loads(audit.stdout)["submitted"].get("peer", {}).get("trained", 0)
    return {"before": before, "after": after, "rise": after - before, "peer samples": peers}


class Command:
    """A command of rollmesh, whose output goes to a log."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        self._has_begun = False
        self._received = threading.Event()
        """Set when its run has begun, or when its output has ended."""
        command = [sys.executable, "-m", "rollmesh.cli", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._copying = threading.Thread(target=self._copy, name=f"log of {log.stem}", daemon=True)
        self._copying.start()

    def _copy(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        with self.log.open("wb", buffering=0) as file:
            for line in self._process.stdout:  # until it and its processes have closed the pipe
                file.write(line)
                if line.startswith(RESPONDS):
                    self._has_begun = True
                    self._received.set()
        self._received.set()

    def until_it_responds(self) -> None:
        """Wait until its run has begun. Raises RuntimeError with the end of its log."""
        self._received.wait(START_S)
        if not self._has_begun:
            raise RuntimeError(f"the run has not begun within {START_S:g} s: {_end_of(self.log)}")

    def finish(self) -> None:
        """Wait for its end. Raises RuntimeError with the end of its log if it failed."""
        if code := self._process.wait(TIMEOUT_S):
            raise RuntimeError(f"{self.log.stem} exited with {code}: {_end_of(self.log)}")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(TIMEOUT_S)
        self._copying.join(LOG_S)


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-1000:]
