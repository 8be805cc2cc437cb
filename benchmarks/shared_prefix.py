"""Updates and log-probs of groups whose samples share the prompt's forward (`learner.packing.shared_row_tokens`),
against separate ones.

The trainer of the baseline has the same model, samples and tokens per micro-batch, and computes the prompt for every
sample. Both take turns. A `pass` computes log-probs without gradient, as those of the reference model.

How to read it: `tokens` are those that an update computes, without padding; they follow from the lengths. `update, CPU`
and `pass, CPU` are the CPU time of separate samples over that of shared prompts, lap by lap. Above 1, sharing is
faster. The ratio of tokens is the most that the linear layers can save. Attention costs the square of a row, which
takes a part of it back. Where it would take all of it, samples do not share, and the ratio shows the cost of that
decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.interleave import Contender, interleave, ratios
from benchmarks.report import Report, spread
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    GroupContext,
    MemberOutcome,
    Outcome,
    Reward,
    Role,
    Sample,
    SamplingParams,
    Segment,
    Source,
    TrainingSample,
)
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.trainer.config import ComputeConfig, PackingConfig, UpdateConfig
from rollmesh.trainer.feature_pass import computed_features
from rollmesh.trainer.features import BUILT_IN
from rollmesh.trainer.samples import build_table
from rollmesh.trainer.update import BatchTrainer

GROUP_SIZE = 8
DEMO = TinyModelConfig()
WIDER = TinyModelConfig(hidden_size=256, num_heads=8, intermediate_size=768, context_max=1024)


@dataclass(frozen=True, slots=True)
class SharedPrefixWork:
    """Groups of one size, and how they are packed with and without sharing."""

    name: str
    model: TinyModelConfig
    num_groups: int
    prompt_tokens: int
    response_tokens: int
    packing: PackingConfig
    """Without sharing. With it, rows with a shared prefix may be as long as a micro-batch."""


WORKS = (
    SharedPrefixWork("long prompt", WIDER, 1, 512, 128, PackingConfig(row_tokens=640, micro_batch_tokens=2560)),
    SharedPrefixWork("longer response", WIDER, 1, 512, 256, PackingConfig(row_tokens=768, micro_batch_tokens=3072)),
    SharedPrefixWork("short prompt", WIDER, 1, 128, 384, PackingConfig(row_tokens=512, micro_batch_tokens=3200)),
    SharedPrefixWork("prompts of the demo", DEMO, 8, 24, 24, PackingConfig()),
)


def run(quick: bool) -> Report:
    laps = 1 if quick else 4
    torch.set_num_threads(1)
    report = Report("shared_prefix", f"groups of {GROUP_SIZE} in float32, 1 thread, {laps} laps in turns")
    report.rows = [_row(work, laps) for work in (WORKS[-1:] if quick else WORKS)]
    return report


def _row(work: SharedPrefixWork, laps: int) -> dict[str, Any]:
    samples, groups = _batch(work)
    shared, separate = _trainer(work, work.packing.micro_batch_tokens), _trainer(work, 0)
    updates = interleave(
        {"shared": _updates(shared, samples, groups), "separate": _updates(separate, samples, groups)}, laps
    )
    passes = interleave({"shared": _passes(shared, samples), "separate": _passes(separate, samples)}, laps)
    wall, cpu = ratios(updates["shared"], updates["separate"])
    total = len(samples) * (work.prompt_tokens + work.response_tokens)
    saved = shared.update(shared.step + 1, samples, groups).metrics["tokens/prefix_saved_share"]
    return {
        "work": work.name,
        "prompt + response": f"{work.prompt_tokens} + {work.response_tokens}",
        "tokens": f"{round(total * (1 - saved)):,} of {total:,}",
        "update, CPU": spread(cpu, 2),
        "update, wall": spread(wall, 2),
        "pass, CPU": spread(ratios(passes["shared"], passes["separate"])[1], 2),
    }


def _trainer(work: SharedPrefixWork, shared_row_tokens: int) -> BatchTrainer:
    packing = msgspec.structs.replace(work.packing, shared_row_tokens=shared_row_tokens)
    rule = Extension("minibatches", {"num_minibatches": 1})
    config = UpdateConfig(packing=packing, update_rule=rule, compute=ComputeConfig(logprob_chunk_tokens=1024))
    return BatchTrainer(build_tiny_model(work.model, seed=0), config, seed=0)


def _updates(trainer: BatchTrainer, samples: Sequence[TrainingSample], groups: Sequence[GroupContext]) -> Contender:
    def one_lap(repetition: int) -> int:
        return len(trainer.update(trainer.step + 1, samples, groups).used_ids)

    return one_lap


def _passes(trainer: BatchTrainer, samples: Sequence[TrainingSample]) -> Contender:
    table = build_table(samples, update=1)

    def one_lap(repetition: int) -> int:
        found = computed_features(trainer.model, table, {"logprob": BUILT_IN["proximal"]}, trainer.forward_plan)
        return len(found["logprob"])

    return one_lap


def _batch(work: SharedPrefixWork) -> tuple[list[TrainingSample], list[GroupContext]]:
    """Return groups of random tokens. Every second sample has the reward 1."""
    rng = np.random.default_rng(0)
    samples, groups = [], []
    for number in range(work.num_groups):
        name, members = f"g{number}", []
        prompt = rng.integers(13, 109, work.prompt_tokens).astype(np.int32)
        for place in range(GROUP_SIZE):
            samples.append(_sample(f"{name}-{place}", name, prompt, rng.integers(13, 109, work.response_tokens)))
            reward = Reward(name="correct", value=float(place % 2), outcome=Outcome.OK)
            members.append(MemberOutcome(sample_id=f"{name}-{place}", rewards=(reward,), end="ready"))
        groups.append(GroupContext(group=name, task=name, members=tuple(members)))
    return samples, groups


def _sample(sample_id: str, group: str, prompt: Any, response: Any) -> TrainingSample:
    asked = Segment(parent=-1, role=Role.CONTEXT, source=Source.PROMPT, token_ids=prompt)
    answered = Segment(
        parent=0,
        role=Role.ACTION,
        source=Source.POLICY,
        token_ids=response.astype(np.int32),
        logprobs=np.full(len(response), -4.7, np.float32),
        loss_mask=np.ones(len(response), np.uint8),
        version=PolicyVersion(policy="main", step=0),
        kv_step_oldest=0,
        sampling=0,
    )
    return TrainingSample(
        sample=Sample(sample_id=sample_id, leaf=1, trainable=True, weight=1.0),
        segments=(asked, answered),
        group=group,
        task=group,
        staleness=0,
        sampling_params=(SamplingParams(),),
    )
