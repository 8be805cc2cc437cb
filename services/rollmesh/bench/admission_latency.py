"""Engine steps until the first token of a request that arrives while 31 others decode.

With continuous batching a new request waits for the current step and its own prefix, not for the end of a batch. Latency is counted in
engine steps, which do not depend on the machine. The baseline is a static batch, where the request would wait for the longest remaining
of the 31 (the mean number of steps left is given beside it).

How to read it: the target is at most 2 steps plus the steps of its prefix. A prefix longer than `prefill_tokens_max` (here 256) is
computed in chunks, one per step, so that the other requests continue. Steps are read when the event loop receives the token, so a loop
without a free core counts a step or two too many. Milliseconds are informational and depend on the machine.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from benchmarks.report import Report, spread
from benchmarks.torch_engine import Answer, EngineBench, prompts, tiny_folder
from rollmesh.shared.domain.trajectory import SamplingParams

NUM_OTHERS = 31
CHUNK = 256
PREFIXES = (16, 128, 480)
OTHERS_NEW = 160
WARM_TOKENS = 20


def run(quick: bool) -> Report:
    report = Report(
        "admission_latency", f"{NUM_OTHERS} requests decode, 32 slots, {CHUNK} prefix tokens per step at most"
    )
    with tiny_folder() as (folder, _):
        bench = EngineBench(
            folder, slots_max=32, context_max=512, resident_slots_max=0, prefill_tokens_max=CHUNK, flush_tokens=1
        )
        for num_tokens in PREFIXES:
            bench.drive(_arrivals(bench, num_tokens, 1))  # warm
            report.rows.append(_row(num_tokens, bench.drive(_arrivals(bench, num_tokens, 2 if quick else 12))))
        bench.close()
    return report


def _row(num_tokens: int, arrivals: list[tuple[int, float, int]]) -> dict[str, Any]:
    steps, seconds, left = zip(*arrivals, strict=True)
    return {
        "prefix tokens": num_tokens,
        "chunks of it": -(-num_tokens // CHUNK),
        "steps to first token": spread(steps),
        "ms to first token": spread([1e3 * s for s in seconds], 1),
        "steps left to the batch": spread(left),
    }


async def _arrivals(bench: EngineBench, num_tokens: int, num: int) -> list[tuple[int, float, int]]:
    return [await asyncio.wait_for(_arrival(bench, num_tokens, seed), 60) for seed in range(num)]


async def _arrival(bench: EngineBench, num_tokens: int, seed: int) -> tuple[int, float, int]:
    """Return steps and seconds from submit to first token, and the steps left of the longest other request."""
    others = [Answer() for _ in range(NUM_OTHERS)]
    for index, row in enumerate(prompts(NUM_OTHERS, 16, seed=100 + seed)):
        bench.submit(row, SamplingParams(max_tokens=OTHERS_NEW, seed=index), answer=others[index])
    await _under_way(others)
    steps, start_s = bench.engine.load().steps, time.perf_counter()
    left = OTHERS_NEW - min(len(other.token_ids) for other in others)
    first: asyncio.Future[tuple[int, float]] = asyncio.get_running_loop().create_future()

    def on_delta() -> None:
        if not first.done():
            first.set_result((bench.engine.load().steps - steps, time.perf_counter() - start_s))

    newcomer = Answer(on_delta=on_delta)
    bench.submit(prompts(1, num_tokens, seed=seed)[0], SamplingParams(max_tokens=4), answer=newcomer)
    num_steps, seconds = await first
    for answer in [newcomer, *others]:
        await answer.ended.wait()
    return num_steps, seconds, left


async def _under_way(answers: list[Answer]) -> None:
    """Wait until each request has some tokens."""
    reached = asyncio.Event()

    def on_delta() -> None:
        if all(len(answer.deltas) >= WARM_TOKENS for answer in answers):
            reached.set()

    for answer in answers:
        answer.on_delta = on_delta
    await reached.wait()
    for answer in answers:
        answer.on_delta = None
