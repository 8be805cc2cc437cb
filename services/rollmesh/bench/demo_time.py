"""Time of the whole demo, beside that of another checkout: `rollmesh bench demo_time --old TREE`.

For each seed, the demo of both trees runs from nothing to the report, one after the other; every second seed begins with this tree. Each uses
the interpreter of its `.venv` and its shipped configuration. Wall and CPU seconds are those of the whole command, with imports, warm start,
evaluations and report; CPU is that of all processes.

How to read it: `wall, new / old` is the ratio of the same seed. Held-out success must reach the thresholds in every seed, because a
shorter demo that learns less is not a faster one.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks.report import BenchTarget, Report

SEEDS = (0, 1, 2)
QUICK = ("run.updates_max=2", "run.eval_every=2", "run.eval_tasks=8")
DEMO_S_MAX = 3600.0
OF_OLD = 0.55
"""Most wall time, relative to the other checkout."""
SUCCESS, RISE = 0.85, 0.15
"""Least held-out success at the end, and least rise of it."""


@dataclass(frozen=True, slots=True)
class DemoLap:
    """One run of the command."""

    wall_s: float
    cpu_s: float
    summary: dict[str, Any]


def run(quick: bool, *, seeds: Sequence[int] = SEEDS, old: Path | None = None) -> Report:
    """Without `old`, only this tree runs."""
    seeds = tuple(seeds)[:1] if quick else tuple(seeds)
    trees = {"new": Path(sys.executable).parent / "rollmesh"}
    if old is not None:
        trees = {"old": old / ".venv" / "bin" / "rollmesh", **trees}
    report = Report("demo_time", f"rollmesh demo, {len(seeds)} seeds in turns")
    laps: dict[str, list[DemoLap]] = {name: [] for name in trees}
    with TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        for number, seed in enumerate(seeds):
            for name in sorted(trees, reverse=number % 2 == 0):
                lap = _demo(trees[name], seed, Path(folder) / f"{name}-{seed}", QUICK if quick else ())
                laps[name].append(lap)
                report.rows.append(_row(seed, name, lap))
                print(f"seed {seed}, {name}: {lap.wall_s:.0f} s", file=sys.stderr, flush=True)
    _judge(report, laps)
    return report


def _demo(command: Path, seed: int, out: Path, changes: Sequence[str]) -> DemoLap:
    begin_s, begin_cpu_s = time.perf_counter(), _cpu_s()
    done = subprocess.run(
        [str(command), "demo", "--seed", str(seed), "--out", str(out), "--json", *changes],
        stdout=subprocess.PIPE,
        cwd=out.parent,
        env={**os.environ, "TQDM_DISABLE": "1"},
        check=True,
        timeout=DEMO_S_MAX,
    )
    return DemoLap(time.perf_counter() - begin_s, _cpu_s() - begin_cpu_s, msgspec.json.decode(done.stdout))


def _cpu_s() -> float:
    """Return the CPU seconds of all exited descendants whose parents waited for them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _row(seed: int, tree: str, lap: DemoLap) -> dict[str, Any]:
    samples, before, after = (
        lap.summary["samples"],
        lap.summary["heldout_success_before"],
        lap.summary["heldout_success_after"],
    )
    return {
        "seed": seed,
        "tree": tree,
        "wall s": f"{lap.wall_s:.0f}",
        "CPU s": f"{lap.cpu_s:.0f}",
        "warm start s": f"{lap.summary['warm_start_s']:.0f}",
        "before": before,
        "after": after,
        "updates": lap.summary["updates"],
        "trained": samples["trained"],
        "filtered": samples["filtered"],
        "stale": samples["stale"],
    }


def _judge(report: Report, laps: dict[str, list[DemoLap]]) -> None:
    after = [lap.summary["heldout_success_after"] for lap in laps["new"]]
    rises = [lap.summary["heldout_success_after"] - lap.summary["heldout_success_before"] for lap in laps["new"]]
    report.targets += [
        BenchTarget("least held-out success at the end", min(after), SUCCESS, at_most=False),
        BenchTarget("least rise of held-out success", min(rises), RISE, at_most=False),
    ]
    if "old" in laps:
        pairs = list(zip(laps["new"], laps["old"], strict=True))
        walls = [new.wall_s / old.wall_s for new, old in pairs]
        report.targets.append(BenchTarget("wall time of the demo, new / old", median(walls), OF_OLD))
        report.notes.append(f"wall, new / old: {', '.join(f'{ratio:.2f}' for ratio in walls)}")
        report.notes.append(f"CPU, new / old: {', '.join(f'{new.cpu_s / old.cpu_s:.2f}' for new, old in pairs)}")
