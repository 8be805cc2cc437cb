"""Time from an update until its weights serve, and the pause that a generating client sees: a part of the bench
`weights`.

The demo trains in a real mesh with the torch engine: with all services in one process, as `rollmesh demo` runs (the
learner in one process, all others in another), and with a process per service. A client in another process generates
all the time and records when its tokens arrive, and which weights sampled them. Tokens leave the engine one by one, so
that a gap is a decode step.

How to read it: `publish to active` begins when the update is committed, and ends when the client has the first token of
its weights. So it includes the announcement, the load, the check of the probes, and a decode step. The learner copies
and uploads the weights while the update is committed. The demo is off-policy: the next update and the rollouts run
meanwhile, and the time includes their share of the cores. In the meshes that are `on-policy`, nothing is trained
meanwhile, and the rollouts of the next update begin with the announcement.

`step to active` begins when the weights in memory contain the update. `swap` is the gap between the last token of the
old weights and the first one of the new weights in one response, `step` is any other gap. `fetch`, `commit` and
`publish` are times per update in which the learner does nothing else.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec
import numpy as np

from benchmarks.report import BenchTarget, Report
from benchmarks.warm_model import warm_model
from benchmarks.weights.publish_arm import PublishSeen, PublishWork
from benchmarks.weights.publish_client import Arrival

CONFIG = Path(__file__).parents[2] / "configs" / "demo.yaml"
"""The demo."""
NUM_VERSIONS = 50
ARM_S_MAX = 900.0
ACTIVE_MS, PAUSE_MS, PUBLISH_MS, FETCH_MS = 50.0, 20.0, 50.0, 60.0
"""Targets: median of publish to active; p99 of a swap under `keep` beyond a decode step; median in the learner's
way."""
NUM_WARM = 2
"""First updates, which are not counted."""
Mode = Literal["one process", "learner apart", "processes"]
Kv = Literal["keep", "recompute"]
MODES: Sequence[Mode] = ("one process", "learner apart", "processes")
ARMS: Sequence[tuple[Mode, Kv, bool]] = (
    *((mode, kv, False) for mode in MODES for kv in ("keep", "recompute")),
    *((mode, "keep", True) for mode in MODES),
)
"""Layouts with their mode of the cache, and whether they are on-policy."""


def run(quick: bool, *, model: Path | None = None) -> Report:
    """`model` is the folder of the model; without it, one is created and warm-started."""
    updates = NUM_WARM + (4 if quick else NUM_VERSIONS)
    report = Report(
        "publish_to_active", f"the demo, {updates - NUM_WARM} versions, times in ms as median / p90 (gaps: / p99)"
    )
    with TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        model = model or warm_model(Path(folder) / "warm", 0)
        for number, (mode, kv, on_policy) in enumerate(ARMS):
            work = PublishWork(
                config=str(CONFIG),
                model=str(model),
                folder=f"{folder}/{number}",
                mode=mode,
                kv=kv,
                updates=updates,
                on_policy=on_policy,
            )
            seen, name = publish_arm(work), f"{mode}, on-policy" if on_policy else mode
            report.rows.append({"mesh": name, "kv": kv, **row_of(seen)})
            report.targets += targets_of(f"{name}, {kv}", kv, seen)
    return report


def publish_arm(work: PublishWork) -> PublishSeen:
    """Run one mesh in another process."""
    Path(work.folder).mkdir(parents=True)
    command = [sys.executable, "-m", "benchmarks.weights.publish_arm"]
    done = subprocess.run(
        command, input=msgspec.json.encode(work), stdout=subprocess.PIPE, check=True, timeout=ARM_S_MAX
    )
    return msgspec.json.decode(done.stdout, type=PublishSeen)


def row_of(seen: PublishSeen) -> dict[str, Any]:
    """Return the cells of one mesh."""
    swaps, steps = gaps_ms(seen.arrivals)
    return {
        "step to active": _pair(active_ms(seen, seen.stepped), 90),
        "publish to active": _pair(active_ms(seen, seen.committed), 90),
        "to announced": _pair(announced_ms(seen), 90),
        **{name: _pair(phase_ms(seen, name), 90) for name in ("publish", "commit", "fetch")},
        "step": _pair(steps, 99),
        "swap": _pair(swaps, 99),
        "swaps seen": len(swaps),
    }


def targets_of(name: str, kv: Kv, seen: PublishSeen) -> list[BenchTarget]:
    """Return the targets of one mesh."""
    found = [
        BenchTarget(f"{name}: median of publish to active, "
                    "ms", _quantile(active_ms(seen, seen.committed), 50), ACTIVE_MS),
        BenchTarget(f"{name}: median of a publication in the learner's way, "
                    "ms", _quantile(phase_ms(seen, "publish"), 50), PUBLISH_MS),
        BenchTarget(f"{name}: median of a fetch, ms", _quantile(phase_ms(seen, "fetch"), 50), FETCH_MS),
    ]  # fmt: skip
    if kv == "keep":
        swaps, steps = gaps_ms(seen.arrivals)
        over = _quantile(swaps, 99) - _quantile(steps, 99)
        found.append(BenchTarget(f"{name}: p99 of a swap beyond the p99 of a step, ms", over, PAUSE_MS))
    return found


def active_ms(seen: PublishSeen, begins: Sequence[float]) -> list[float]:
    """Return the time to the first token of each counted update's weights from `begins`, which has a time for update 1,
    2, ... Versions that were overtaken by the next are left out."""
    firsts: dict[int, float] = {}
    for arrival in seen.arrivals:
        firsts.setdefault(arrival.step, arrival.time_s)
    begun = dict(enumerate(begins, start=1))
    return [(firsts[step] - at_s) * 1e3 for step, at_s in begun.items() if step > NUM_WARM and step in firsts]


def announced_ms(seen: PublishSeen) -> list[float]:
    """Return the time from each counted commit to the announcement of its weights."""
    pairs = zip(seen.committed, seen.announced[1:], strict=False)
    return [(announced - committed) * 1e3 for committed, announced in itertools.islice(pairs, NUM_WARM, None)]


def phase_ms(seen: PublishSeen, phase: str) -> list[float]:
    """Return the time of a phase of the learner per counted update."""
    return [_ms_of(seconds, phase) for seconds in seen.seconds[NUM_WARM:]]


def gaps_ms(arrivals: Sequence[Arrival]) -> tuple[list[float], list[float]]:
    """Return the gaps between two consecutive deltas of one response, with a change of weights and without one."""
    swaps: list[float] = []
    steps: list[float] = []
    for before, after in itertools.pairwise(arrivals):
        if before.request == after.request and after.step > NUM_WARM:
            (steps if before.step == after.step else swaps).append((after.time_s - before.time_s) * 1e3)
    return swaps, steps


def _ms_of(seconds: Mapping[str, float], phase: str) -> float:
    return seconds.get(phase, 0.0) * 1e3


def _pair(values: Sequence[float], high: int) -> str:
    return f"{_quantile(values, 50):.1f} / {_quantile(values, high):.1f}"


def _quantile(values: Sequence[float], percent: int) -> float:
    return float(np.percentile(values, percent)) if values else float("nan")
