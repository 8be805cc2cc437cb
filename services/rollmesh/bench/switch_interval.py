"""Slowdown of a compute thread by a busy event loop in the same process, by the switch interval of the interpreter.

One thread makes small tensor operations, as the update of a tiny model does. Another thread runs Python all the time, as a busy event loop
does. The baseline is the same work without the other thread, in turns. How to read it: `slowdown` is time beside the busy thread over time
alone; 2 would be the fair share on one core, 1 on two. Python's default is 5 ms; the mesh uses `tuning.SWITCH_INTERVAL_S`.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time

from benchmarks.report import Report, spread
from rollmesh.mesh.interpreter_tuning import SWITCH_INTERVAL_S

INTERVALS_S = (0.005, 0.001, SWITCH_INTERVAL_S)
NUM_OPERATIONS = 400


def run(quick: bool) -> Report:
    report = Report("switch_interval", f"{NUM_OPERATIONS} products of 64x128 by 128x128, one compute thread")
    default = sys.getswitchinterval()
    try:
        for interval_s in INTERVALS_S:
            sys.setswitchinterval(interval_s)
            report.rows.append(_row(interval_s, 2 if quick else 9))
    finally:
        sys.setswitchinterval(default)
    return report


def _row(interval_s: float, repetitions: int) -> dict[str, object]:
    alone, beside = [], []
    _compute_s()
    for _ in range(repetitions):
        alone.append(_compute_s())
        beside.append(_compute_beside_busy_s())
    slowdowns = [b / a for a, b in zip(alone, beside, strict=True)]
    return {
        "interval ms": interval_s * 1000,
        "alone ms": statistics.median(alone) * 1000,
        "beside a busy loop ms": statistics.median(beside) * 1000,
        "slowdown": spread(slowdowns, 1),
    }


def _compute_s() -> float:
    import torch

    torch.set_num_threads(1)
    x, w = torch.randn(64, 128), torch.randn(128, 128)
    start = time.perf_counter()
    for _ in range(NUM_OPERATIONS):
        x = torch.tanh(x @ w)
    return time.perf_counter() - start


def _compute_beside_busy_s() -> float:
    done = threading.Event()

    def spin() -> None:
        while not done.is_set():
            sum(range(100))

    busy = threading.Thread(target=spin)
    busy.start()
    try:
        return _compute_s()
    finally:
        done.set()
        busy.join()
