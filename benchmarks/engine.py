"""Tokens per second of the torch engine against transformers `generate` and transformers' continuous batching.

Same model (359k parameters, Qwen3, float32), same prompts, one torch thread, no stop tokens, sampling at temperature 1.
The three take turns, and a ratio compares laps that ran right after each other. Loading, buffers and a first lap are
excluded for all three.

How to read it: `even` gives every request the same number of tokens, which suits `generate`. `uneven` requests 8 to 160
tokens with 32 requests at a time. `generate` cannot refill a batch, so each batch lasts as long as its longest row, and
only requested tokens are counted. Ours returns two log-probs per token and streams deltas through an event loop. The
others do neither (both could return log-probs at a cost). `per CPU s` is the steadier figure on a busy machine; on an
idle one the two agree.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.interleave import Contender, Lap, interleave, ratios
from benchmarks.report import Report, spread
from benchmarks.torch_engine import EngineBench, prompts, tiny_folder
from rollmesh.shared.domain.trajectory import SamplingParams

OURS, GENERATE, CONTINUOUS = "rollmesh", "transformers generate", "transformers continuous"
PROMPT_TOKENS = 32
PAGE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class EngineWork:
    """Requests that arrive together. `batch` is the number that may run at once."""

    name: str
    batch: int
    num_new: tuple[int, ...]
    """Number of new tokens per request."""
    repetitions: int

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new)


def works(quick: bool) -> list[EngineWork]:
    lengths = np.random.default_rng(1).integers(8, 161, 96)
    even = [(1, 96, 7), (32, 96, 5), (128, 48, 5)]
    made = [EngineWork(f"even, batch {n}", n, (new,) * n, 1 if quick else laps) for n, new, laps in even]
    return [*made, EngineWork("uneven, batch 32", 32, tuple(int(n) for n in lengths), 1 if quick else 3)]


def run(quick: bool) -> Report:
    report = Report("engine", f"359k parameters, float32, 1 thread, prompt {PROMPT_TOKENS}, temperature 1")
    with tiny_folder() as (folder, model):
        for work in works(quick):
            with _contenders(folder, model, work) as contenders:
                laps = interleave(contenders, work.repetitions)
            report.rows += [_row(work, name, laps) for name in laps]
    report.notes.append("median (lowest-highest) of the laps; ratios are medians over pairs of consecutive laps")
    return report


def _row(work: EngineWork, name: str, laps: dict[str, list[Lap]]) -> dict[str, Any]:
    wall, cpu = ratios(laps[OURS], laps[name])
    return {
        "work": work.name,
        "engine": name,
        "tok/s": spread([lap.per_wall_s for lap in laps[name]]),
        "tok/CPU s": spread([lap.per_cpu_s for lap in laps[name]]),
        "ours is, wall": spread(wall, 2),
        "ours is, CPU": spread(cpu, 2),
    }


@contextmanager
def _contenders(folder: Path, model: Any, work: EngineWork) -> Iterator[dict[str, Contender]]:
    rows = prompts(len(work.num_new), PROMPT_TOKENS)
    bench = EngineBench(folder, slots_max=work.batch, context_max=256, resident_slots_max=0)
    manager = _manager(model, work)
    try:
        yield {
            OURS: lambda repetition: _ours(bench, rows, work, repetition),
            GENERATE: lambda repetition: _generate(model, rows, work),
            CONTINUOUS: lambda repetition: _continuous(manager, rows, work),
        }
    finally:
        manager.stop(block=True)
        bench.close()


def _ours(bench: EngineBench, rows: list[list[int]], work: EngineWork, repetition: int) -> int:
    async def all_of_them() -> int:
        answers = [
            bench.submit(row, SamplingParams(max_tokens=new, seed=1000 * (repetition + 1) + index))
            for index, (row, new) in enumerate(zip(rows, work.num_new, strict=True))
        ]
        for answer in answers:
            await answer.ended.wait()
        return sum(len(delta.token_ids) for answer in answers for delta in answer.deltas)

    return _checked(bench.drive(asyncio.wait_for(all_of_them(), 300)), work)


def _generation_config(num_new: int, eos: int | None = None) -> Any:
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=num_new, eos_token_id=eos, pad_token_id=0
    )


def _generate(model: Any, rows: list[list[int]], work: EngineWork) -> int:
    for start in range(0, len(rows), work.batch):
        batch, num_new = rows[start : start + work.batch], work.num_new[start : start + work.batch]
        ids = torch.tensor(batch)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=_generation_config(max(num_new))
            )
        assert out.shape[1] == PROMPT_TOKENS + max(num_new)
    return work.num_tokens


def _manager(model: Any, work: EngineWork) -> Any:
    """Start it with memory for the whole batch at its longest, on a copy of the model, because it changes the
    attention."""
    blocks = work.batch * -(-(PROMPT_TOKENS + max(work.num_new)) // PAGE_TOKENS) + 1
    config = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=blocks,
        max_batch_tokens=max(512, work.batch * PROMPT_TOKENS),
        max_requests_per_batch=work.batch,
        allow_block_sharing=False,
    )
    manager = copy.deepcopy(model).init_continuous_batching(_generation_config(max(work.num_new), eos=-1), config)
    manager.start()
    return manager


def _continuous(manager: Any, rows: list[list[int]], work: EngineWork) -> int:
    for row, new in zip(rows, work.num_new, strict=True):
        manager.add_request(row, max_new_tokens=new)
    num_tokens = 0
    for _ in rows:
        result = manager.get_result(timeout=300)
        assert result is not None, "the manager of transformers returned no result"
        assert result.error is None, result.error
        num_tokens += len(result.generated_tokens)
    return _checked(num_tokens, work)


def _checked(num_tokens: int, work: EngineWork) -> int:
    assert num_tokens == work.num_tokens, f"{num_tokens} tokens came back of {work.num_tokens}"
    return num_tokens
