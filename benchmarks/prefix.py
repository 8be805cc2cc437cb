"""Savings of prefix reuse in multi-turn sessions: computed prefix tokens and time, with and without resident sequences.

Sessions run concurrently, as agents do: a prompt, then turns of new tokens and an observation, each turn sending the
whole conversation. Both engines decode the same number of tokens; only the prefix work differs. The baseline is the
same engine with `resident_slots_max = 0`, in turns with it.

How to read it: `prefilled` counts tokens whose keys and values were computed for a prefix, from the counters of the
engine. It is exact and reproducible. `new in all turns` is the minimum: prompt and observations. The remainder with
reuse is one token per turn (the last sampled one, which was never an input), minus tokens shared by sessions that start
with the same token. Time savings grow with the turns and with the share of prefill; this model is so small that
decoding dominates.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from benchmarks.interleave import Lap, interleave, ratios
from benchmarks.report import Report, spread
from benchmarks.torch_engine import EngineBench, prompts, tiny_folder
from rollmesh.shared.domain.trajectory import SamplingParams

NUM_SESSIONS = 32
NUM_TURNS = 6
PROMPT_TOKENS, NEW_TOKENS, OBSERVED_TOKENS = 64, 24, 12


def run(quick: bool) -> Report:
    report = Report(
        "prefix",
        f"{NUM_SESSIONS} sessions of {NUM_TURNS} turns: prompt {PROMPT_TOKENS}, {NEW_TOKENS} sampled and "
        f"{OBSERVED_TOKENS} observed tokens per turn",
    )
    with tiny_folder() as (folder, _):
        benches = {
            name: EngineBench(folder, slots_max=NUM_SESSIONS, context_max=320, resident_slots_max=residents)
            for name, residents in (("reuse", NUM_SESSIONS), ("no reuse", 0))
        }
        laps = interleave(
            {name: lambda repetition, bench=bench: _sessions(bench, repetition) for name, bench in benches.items()},
            1 if quick else 7,
        )
        loads = {name: bench.engine.load() for name, bench in benches.items()}
        for bench in benches.values():
            bench.close()
    num_runs = len(laps["reuse"]) + 1
    report.rows = [_row(name, laps, loads[name].tokens_prefilled // num_runs) for name in benches]
    fewest = NUM_SESSIONS * (PROMPT_TOKENS + (NUM_TURNS - 1) * OBSERVED_TOKENS)
    report.notes.append(
        f"new in all turns: {fewest:,} tokens; plus one per later turn: {NUM_SESSIONS * (NUM_TURNS - 1)}"
    )
    return report


def _row(name: str, laps: dict[str, list[Lap]], prefilled: int) -> dict[str, Any]:
    wall, cpu = ratios(laps["reuse"], laps[name])
    return {
        "engine": name,
        "prefilled per run": prefilled,
        "sampled tok/CPU s": spread([lap.per_cpu_s for lap in laps[name]]),
        "reuse is, wall": spread(wall, 2),
        "reuse is, CPU": spread(cpu, 2),
    }


def _sessions(bench: EngineBench, repetition: int) -> int:
    async def session(index: int, token_ids: list[int]) -> int:
        observed = np.random.default_rng([repetition + 1, index]).integers(20, 100, (NUM_TURNS, OBSERVED_TOKENS))
        name = f"{repetition}.{index}"
        for turn in range(NUM_TURNS):
            params = SamplingParams(max_tokens=NEW_TOKENS, seed=index * NUM_TURNS + turn)
            answer = bench.submit(token_ids, params, session=name)
            await answer.ended.wait()
            token_ids = token_ids + answer.token_ids + [int(token) for token in observed[turn]]
        return NUM_TURNS * NEW_TOKENS

    async def all_of_them() -> int:
        rows = prompts(NUM_SESSIONS, PROMPT_TOKENS, seed=repetition + 1)
        return sum(await asyncio.gather(*(session(index, row) for index, row in enumerate(rows))))

    return int(bench.drive(asyncio.wait_for(all_of_them(), 300)))
