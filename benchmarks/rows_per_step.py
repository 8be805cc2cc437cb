"""Rows per engine step and CPU per token of the torch engine, with and without holds, under clients that arrive one by
one.

Each client is a session of several turns, as of an agent: it sends its history, waits for the answer, and pauses before
the next turn (a tool, other work). The pauses are random, so that turns do not begin together. With long pauses few of
the clients wait for the engine at once, with short ones most of them do.

How to read it: `hold_ms` 0 is the engine without holds. CPU is that of the whole process, with the event loop and the
clients. `CPU over no hold` and `wall over no hold` are medians over pairs of consecutive laps, below 1 is better. `ms
per token` includes the wait for the first token of a turn. All rows of a work have the same number of tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.interleave import Contender, interleave, ratios
from benchmarks.report import Report, spread
from benchmarks.torch_engine import EngineBench, prompts, tiny_folder
from rollmesh.shared.domain.trajectory import SamplingParams

HOLDS_MS = (0.0, 5.0, 10.0)
PROMPT_TOKENS = 24
OBSERVATION_TOKENS = 8
LAP_S_MAX = 120.0


@dataclass(frozen=True, slots=True)
class ClientWork:
    """Clients at once, and what each of them does."""

    name: str
    num_clients: int
    num_turns: int
    pause_s: float
    """Mean pause between two turns, in seconds."""


WORKS = (
    ClientWork("64 clients, pauses of 300 ms", 64, 6, 0.3),
    ClientWork("16 clients, pauses of 30 ms", 16, 8, 0.03),
    ClientWork("1 client, no pauses", 1, 40, 0.0),
)


@dataclass(slots=True)
class _Taken:
    """What the laps of one contender measured beside time and CPU."""

    rows: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)


def run(quick: bool) -> Report:
    laps = 1 if quick else 4
    report = Report("rows_per_step", f"359k parameters, 1 thread, answers of 4 to 16 tokens, {laps} laps in turns")
    with tiny_folder() as (folder, _):
        for work in WORKS:
            report.rows += _rows(folder, work, laps)
    return report


def _rows(folder: Path, work: ClientWork, repetitions: int) -> list[dict[str, Any]]:
    with _contenders(folder, work) as (contenders, taken):
        laps = interleave(contenders, repetitions)
    first = laps[next(iter(laps))]
    rows = []
    for name, found in laps.items():
        wall, cpu = ratios(first, found)
        rows.append(
            {
                "work": work.name,
                "hold_ms": name,
                "rows per step": spread(taken[name].rows[-repetitions:], 1),
                "CPU us per token": spread([1e6 / lap.per_cpu_s for lap in found]),
                "CPU over no hold": spread(cpu, 2),
                "wall over no hold": spread(wall, 2),
                "ms per token": spread(taken[name].token_ms[-repetitions:], 2),
            }
        )
    return rows


@contextmanager
def _contenders(folder: Path, work: ClientWork) -> Iterator[tuple[dict[str, Contender], dict[str, _Taken]]]:
    engines = {
        f"{hold_ms:g}": EngineBench(folder, slots_max=128, context_max=256, resident_slots_max=128, hold_ms=hold_ms)
        for hold_ms in HOLDS_MS
    }
    taken = {name: _Taken() for name in engines}
    try:
        yield {name: _contender(bench, work, taken[name]) for name, bench in engines.items()}, taken
    finally:
        for bench in engines.values():
            bench.close()


def _contender(bench: EngineBench, work: ClientWork, taken: _Taken) -> Contender:
    def one_lap(repetition: int) -> int:
        before = bench.engine.load()
        taken.token_ms.append(bench.drive(asyncio.wait_for(_clients(bench, work, repetition), LAP_S_MAX)))
        after = bench.engine.load()
        num_tokens = after.tokens_generated - before.tokens_generated
        taken.rows.append(num_tokens / (after.steps - before.steps))
        return num_tokens

    return one_lap


async def _clients(bench: EngineBench, work: ClientWork, repetition: int) -> float:
    """Run all clients to their end. Return the median over turns of the milliseconds per token."""
    found = await asyncio.gather(*(_client(bench, work, repetition, index) for index in range(work.num_clients)))
    return median(ms for turns in found for ms in turns)


async def _client(bench: EngineBench, work: ClientWork, repetition: int, index: int) -> list[float]:
    rng = np.random.default_rng((repetition + 1, index))
    history = prompts(1, PROMPT_TOKENS, seed=1000 * (repetition + 1) + index)[0]
    turns = []
    for turn in range(work.num_turns):
        await asyncio.sleep(rng.exponential(work.pause_s))
        begin_s, num_new = perf_counter(), int(rng.integers(4, 17))
        params = SamplingParams(max_tokens=num_new, seed=index)
        answer = bench.submit(history, params, session=f"{repetition}/{index}")
        await answer.ended.wait()
        turns.append(1e3 * (perf_counter() - begin_s) / num_new)
        history += answer.token_ids + prompts(1, OBSERVATION_TOKENS, seed=turn)[0]
        history = history[:PROMPT_TOKENS] if len(history) > 200 else history
    return turns
