"""The torch engine against the vLLM engine, each behind the engine port in a separate process.

Same model (359k parameters, Qwen3, float32), same prompts, one OpenMP thread, no stop tokens, temperature 1. The two
take turns, and a ratio compares laps that ran right after each other. CPU seconds are those of the process and of all
processes that it started, because vLLM runs the model in others. `start` is the time from the start of the process to
the first token, with imports; memory is the sum of the proportional set sizes (PSS) of these processes after the laps.
Run it with the interpreter of `make setup-vllm`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.interleave import Lap, ratios
from benchmarks.report import Report, spread
from benchmarks.torch_engine import tiny_folder
from benchmarks.vllm.arm import NUM_NEW
from rollmesh.shared.errors import InvalidInput
from rollmesh.shared.process.process_launch import bound_to_parent

TORCH, VLLM = "torch", "vllm"
BATCHES = {1: 7, 32: 5, 64: 5}
"""Requests at once -> laps."""


class EngineArm:
    """An engine in its process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.start_s = float(self._answer()["start_s"])

    def lap(self, batch: int, repetition: int) -> Lap:
        answer = self._ask({"batch": batch, "repetition": repetition})
        return Lap(answer["units"], answer["wall_s"], answer["cpu_s"])

    def memory_bytes(self) -> int:
        return int(self._ask({"memory": True})["pss_bytes"])

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine's process ended with {self._process.wait(30)}; its messages are above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def _arm(name: str, folder: Path) -> Iterator[EngineArm]:
    command = [sys.executable, "-m", "benchmarks.vllm.arm", name, str(folder)]
    process = subprocess.Popen(
        bound_to_parent(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        yield EngineArm(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()  # the arm closes its engine and exits
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def run(quick: bool) -> Report:
    if importlib.util.find_spec("vllm") is None:
        raise InvalidInput(
            "the bench `vllm` needs vLLM in this environment; run make setup-vllm, then .venv-vllm/bin/python -m "
            "benchmarks vllm"
        )
    report = Report("vllm", f"359k parameters, float32, 1 thread, prompt 32, {NUM_NEW} new tokens, temperature 1")
    with tiny_folder() as (folder, _), ExitStack() as stack:
        arms = {name: stack.enter_context(_arm(name, folder)) for name in (TORCH, VLLM)}
        for batch, repetitions in BATCHES.items():
            laps: dict[str, list[Lap]] = {name: [] for name in arms}
            for repetition in range(-1, 1 if quick else repetitions):
                for name, arm in arms.items():
                    one = arm.lap(batch, repetition)
                    if repetition >= 0:
                        laps[name].append(one)
            report.rows += [_row(batch, name, laps) for name in arms]
        for name, arm in arms.items():
            report.notes.append(
                f"{name}: first token {arm.start_s:.1f} s after the start of the process, "
                f"{arm.memory_bytes() / 2**20:,.0f} MiB"
            )
    report.notes.append("median (lowest-highest) of the laps; ratios are medians over pairs of consecutive laps")
    return report


def _row(batch: int, name: str, laps: dict[str, list[Lap]]) -> dict[str, Any]:
    wall, cpu = ratios(laps[TORCH], laps[name])
    return {
        "requests": str(batch),
        "engine": name,
        "tok/s": spread([lap.per_wall_s for lap in laps[name]]),
        "CPU us/tok": spread([1e6 / lap.per_cpu_s for lap in laps[name]]),
        "torch is, wall": spread(wall, 2),
        "torch is, CPU": spread(cpu, 2),
    }
