"""One engine of the bench `vllm`: `python -m benchmarks.vllm.arm NAME FOLDER`, with a question per line of standard
input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.torch_engine import EngineBench, prompts
from rollmesh.services.inference.engine import INFERENCE_ENGINES
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import SamplingParams

PROMPT_TOKENS = 32
NUM_NEW = 96
LAP_S_MAX = 300.0


def processes() -> list[psutil.Process]:
    """Return this process and all that it started."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def cpu_s() -> float:
    total = 0.0
    for process in processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def lap(bench: EngineBench, batch: int, repetition: int) -> dict[str, float]:
    """Run `batch` requests at once. Return tokens, wall and CPU seconds."""
    rows = prompts(batch, PROMPT_TOKENS, seed=100 + repetition)

    async def all_of_them() -> int:
        answers = [
            bench.submit(row, SamplingParams(max_tokens=NUM_NEW, seed=1000 * (repetition + 2) + index))
            for index, row in enumerate(rows)
        ]
        for answer in answers:
            await answer.ended.wait()
        return sum(len(answer.token_ids) for answer in answers)

    wall, cpu = time.perf_counter(), cpu_s()
    units = bench.drive(asyncio.wait_for(all_of_them(), LAP_S_MAX))
    assert units == batch * NUM_NEW, f"{units} tokens came back of {batch * NUM_NEW}"
    return {"units": units, "wall_s": time.perf_counter() - wall, "cpu_s": cpu_s() - cpu}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    options: dict[str, Any] = {"model": str(folder), "slots_max": 64, "context_max": 256}
    engine = INFERENCE_ENGINES.make(Extension(name, options))
    bench = EngineBench(folder, engine)
    try:
        lap(bench, 1, -2)
        say(answers, {"start_s": time.time() - psutil.Process().create_time()})
        for line in sys.stdin:
            question = json.loads(line)
            if "memory" in question:
                say(answers, {"pss_bytes": sum(p.memory_full_info().pss for p in processes())})
            else:
                say(answers, lap(bench, question["batch"], question["repetition"]))
    finally:
        bench.close()


def say(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
