"""A process that trains a model for two updates and prints the growth of its peak resident size, in bytes.

python -m tests.unit.trainer.measured_peak CHUNK_TOKENS [VOCABULARY LENGTH PRECISION PROMPT SHARED_ROW_TOKENS]

Each sequence has PROMPT tokens of a common prompt, 1 by default.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rollmesh.shared.config.registry import Extension
from rollmesh.trainer.config import ComputeConfig, PackingConfig, UpdateConfig
from rollmesh.trainer.update import BatchTrainer

from .builders import action, group, member, prompt, training_sample

ROWS, LENGTH, VOCABULARY = 4, 257, 16000
CONFIG = Qwen3Config(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=False,
)


def settings(
    chunk_tokens: int = 1024, length: int = LENGTH, precision: str = "float32", shared_row_tokens: int = 0
) -> UpdateConfig:
    """Return settings whose largest micro-batch has `ROWS` rows of one sequence of `length` tokens, or rows with a
    shared prefix."""
    packing = PackingConfig(row_tokens=length, micro_batch_tokens=ROWS * length, shared_row_tokens=shared_row_tokens)
    compute = msgspec.convert({"logprob_chunk_tokens": chunk_tokens, "precision": precision}, ComputeConfig)
    rule = Extension("minibatches", {"num_minibatches": 1})
    return UpdateConfig(packing=packing, update_rule=rule, compute=compute)


def train(config: UpdateConfig, *, length: int, count: int, updates: int, prompt_tokens: int = 1) -> None:
    torch.manual_seed(0)
    vocabulary = CONFIG.vocab_size
    model = AutoModelForCausalLM.from_config(CONFIG)  # type: ignore[no-untyped-call]
    trainer = BatchTrainer(model, config, seed=0)
    rng = np.random.default_rng(0)
    samples, members = [], []
    question, num_new = prompt([7, *rng.integers(5, vocabulary, prompt_tokens - 1).tolist()]), length - prompt_tokens
    for number in range(count):
        answer = action(rng.integers(5, vocabulary, num_new).tolist(), [-9.7] * num_new)
        samples.append(training_sample(f"s{number}", [question, answer]))
        members.append(member(f"s{number}", {"correct": float(number % 2)}, of=samples[-1]))
    for k in range(1, updates + 1):
        trainer.update(k, samples, [group("g0", *members)])


def peak() -> int:
    """Return the peak of this program. `ru_maxrss` would include the process that started it."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(
    chunk_tokens: int,
    vocabulary: int = VOCABULARY,
    length: int = LENGTH,
    precision: str = "float32",
    prompt_tokens: int = 1,
    shared_row_tokens: int = 0,
) -> None:
    torch.set_num_threads(1)
    CONFIG.vocab_size = vocabulary
    config = settings(chunk_tokens, length, precision, shared_row_tokens)
    train(config, length=8, count=2, updates=1)  # loads the libraries
    before = resident()
    train(config, length=length, count=2 * ROWS, updates=2, prompt_tokens=prompt_tokens)
    print(peak() - before)


if __name__ == "__main__":
    given = sys.argv[1:]
    main(*map(int, given[:3]), *given[3:4], *map(int, given[4:]))  # type: ignore[arg-type]
