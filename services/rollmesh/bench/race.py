"""The cost of the mesh: training in one process and in one process per service, against the same engine and trainer in a bare loop.

All arms train the small demo from one warm-started model: same tasks in the same order, same agent, batch and recipe, every
group kept, no checkpoints and evaluations, and a learning rate so low that the policy, and with it the work, stays the same.
The bare loop (`bare_loop.py`) generates a batch, trains and swaps, all in one process; tools and scores are plain function
calls. The mesh (`Mesh`, `Supervisor`) runs at eta = 0, which is the same schedule, and at eta = 2, where generation continues
during training. Arms take turns, each lap in new processes. Start-up and the first updates are not counted.

How to read it:
- `over bare` rows are ratios of laps of the same turn: above 1 is the cost of the mesh. CPU is the sum of all processes. At
  eta = 0 both sides wait for each other, so wall time includes latency; at eta = 2 it shows the gain of overlapping, if enough cores
  are free.
- The cost is per episode (leases, jail, streams, ledger) more than per token, so `CPU ms per episode over bare` applies to other
  models. The ratio does not: this model has 359k parameters, about the worst case for a mesh.
- `tokens per update` and `success` are checks: arms that differ in them did not do the same work.
- `CPU share` is by service, in percent, with model compute in `inference` and `learner`. `model compute` is its share where it can be
  measured. In one process the libraries and `shared` have their own rows; with processes they belong to the service that called them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from rollmesh.bench.mesh_modes_arm import LIMIT_S, Measured, Mode, Work, run_config
from rollmesh.bench.report import Report, spread
from rollmesh.bench.warm_model import CONFIG, warm_model

BARE = "bare loop"
ARMS: dict[str, tuple[Mode, int]] = {
    BARE: ("bare", 0),
    "one process, eta 0": ("mesh", 0),
    "processes, eta 0": ("processes", 0),
    "one process, eta 2": ("mesh", 2),
    "processes, eta 2": ("processes", 2),
}
WARM = 3
"""Uncounted updates: caches, the first weights, and at eta = 2 the filling of the pipeline."""
END_S = 60.0
"""Longest time to stop an arm, in seconds."""
SHOWN = 0.005
"""Services below this share in every arm are omitted."""

Laps = Mapping[str, Sequence[Measured]]


def run(quick: bool) -> Report:
    laps, num, num_profiled = (1, 2, 2) if quick else (3, 12, 8)
    run = run_config(Work(mode="bare", eta=0, model=".", warm=0, num=0, num_profiled=0)).run
    batch = f"batches of {run.batch_groups} x {run.group_size} episodes"
    report = Report("mesh_modes", f"{CONFIG.name}, {batch}; {num} updates after {WARM}, {laps} laps in turns")
    with TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        model = str(warm_model(Path(folder) / "warm", seed=0))
        measured: dict[str, list[Measured]] = {name: [] for name in ARMS}
        for _ in range(laps):
            for name, (mode, eta) in ARMS.items():
                work = Work(mode=mode, eta=eta, model=model, warm=WARM, num=num, num_profiled=num_profiled)
                measured[name].append(_lap(work))
    report.rows = [*_rates(measured), *_prices(measured), *_checks(measured), *_shares(measured)]
    return report


def _lap(work: Work) -> Measured:
    command = [sys.executable, "-m", "rollmesh.bench.mesh_modes_arm"]
    quiet = {**os.environ, "TQDM_DISABLE": "1"}
    done = subprocess.run(
        command,
        input=msgspec.json.encode(work),
        stdout=subprocess.PIPE,
        env=quiet,
        check=True,
        timeout=LIMIT_S + END_S,
    )
    return msgspec.json.decode(done.stdout, type=Measured)


def _rates(laps: Laps) -> list[dict[str, Any]]:
    return [
        _spreads("wall s per update", laps, lambda m: m.wall_s, 2),
        _spreads("CPU s per update", laps, lambda m: m.cpu_s, 2),
        _spreads("trained samples/s", laps, lambda m: m.samples / m.wall_s, 1),
        _spreads("sampled tokens/s", laps, lambda m: m.tokens / m.wall_s),
    ]


def _prices(laps: Laps) -> list[dict[str, Any]]:
    return [
        _against_bare("wall over bare", laps, lambda ours, bare: ours.wall_s / bare.wall_s, 2),
        _against_bare("CPU over bare", laps, lambda ours, bare: ours.cpu_s / bare.cpu_s, 2),
        _against_bare("CPU ms per episode over bare", laps, _extra_ms, 1),
    ]


def _extra_ms(ours: Measured, bare: Measured) -> float:
    return 1e3 * (ours.cpu_s / ours.samples - bare.cpu_s / bare.samples)


def _checks(laps: Laps) -> list[dict[str, Any]]:
    return [
        _spreads("samples per update", laps, lambda m: m.samples),
        _spreads("tokens per update", laps, lambda m: m.tokens),
        _spreads("success", laps, lambda m: m.success, 2),
    ]


def _shares(laps: Laps) -> list[dict[str, Any]]:
    shares = {name: _mean_shares(measured) for name, measured in laps.items()}
    parts = sorted(
        {part for arm in shares.values() for part in arm}, key=lambda p: -max(a.get(p, 0) for a in shares.values())
    )
    shown = [part for part in parts if any(arm.get(part, 0.0) >= SHOWN for arm in shares.values())]
    rows = [
        _row(f"CPU share: {part}", {name: f"{100 * arm.get(part, 0.0):.1f}" for name, arm in shares.items()})
        for part in shown
    ]
    known = {name: [m.model_share for m in measured if m.model_share is not None] for name, measured in laps.items()}
    cells = {name: f"{100 * mean(values):.1f}" if values else "" for name, values in known.items()}
    return [*rows, _row("CPU share: model compute", cells)]


def _mean_shares(measured: Sequence[Measured]) -> dict[str, float]:
    parts = {part for lap in measured for part in lap.hops}
    return {part: mean(lap.hops.get(part, 0.0) for lap in measured) for part in parts}


def _spreads(what: str, laps: Laps, value: Callable[[Measured], float], digits: int = 0) -> dict[str, Any]:
    return _row(what, {name: spread([value(lap) for lap in measured], digits) for name, measured in laps.items()})


def _against_bare(what: str, laps: Laps, value: Callable[[Measured, Measured], float], digits: int) -> dict[str, Any]:
    pairs = {name: zip(measured, laps[BARE], strict=True) for name, measured in laps.items()}
    cells = {name: spread([value(*pair) for pair in found], digits) for name, found in pairs.items() if name != BARE}
    return _row(what, {BARE: ""} | cells)


def _row(what: str, cells: Mapping[str, Any]) -> dict[str, Any]:
    return {"": what} | dict(cells)
