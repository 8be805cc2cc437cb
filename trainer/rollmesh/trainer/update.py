"""Make one update: train on leased samples and their groups, and return a verdict per sample.

    advantages -> drop untrainable samples -> [proximal log-probs] -> minibatches -> micro-batches -> guarded steps

Invariants:
- Update k makes step k, APPLIED or SKIPPED; k follows k - 1.
- Updates are deterministic, because every random draw is a function of (seed, k). Equal weights, optimizer state, seed and inputs
  give equal weights bit for bit (one compute thread, same machine type). So there is no random-generator state to save.
- One optimizer step normalizes over all trained tokens of its minibatch, independent of the split into micro-batches.
- A minibatch with a non-finite loss or gradient changes nothing, and its samples are reported as dropped. If no minibatch of an update
  was taken, the update is SKIPPED, and weights and optimizer do not change.

Collaborators: `samples`, `packing`, `self_test`, `forward`, `estimators`, `losses`, `optim`, `metrics`; `checkpoint` saves a Trainer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh.shared.trajectory import FloatArray, GroupContext, IntArray, TrainingSample
from rollmesh.trainer import forward
from rollmesh.trainer.config import UpdateConfig
from rollmesh.trainer.estimators import SegmentAdvantages, make_estimator
from rollmesh.trainer.losses import LossInputs, LossSum, check_outputs, engine_outputs, token_weights
from rollmesh.trainer.metrics import length_metrics, reward_metrics
from rollmesh.trainer.model_config import context_length, vocab_size
from rollmesh.trainer.model_files import write_weights
from rollmesh.trainer.optim import guarded_step, lr_at, make_adamw, set_lr
from rollmesh.trainer.packing import MicroBatch, fill_ratio, pack
from rollmesh.trainer.samples import DropReason, TokenTable, build_table, drop_reason
from rollmesh.trainer.self_test import choose_forward
from rollmesh.trainer.trace import StepTrace, UpdateTrace


class UpdateOutcome(IntEnum):
    """Result of an update. Numbers equal `rollmesh.v1.UpdateOutcome`."""

    APPLIED = 1
    SKIPPED = 2


@dataclass(frozen=True, slots=True)
class SampleVerdict:
    """Result of one sample. `reason` is None exactly if the sample is in the gradient of the update."""

    sample_id: str
    reason: DropReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """One verdict per leased sample, in the given order, and metrics by name (see `metrics`)."""

    update: int
    outcome: UpdateOutcome
    verdicts: tuple[SampleVerdict, ...]
    metrics: dict[str, float]

    @property
    def used_ids(self) -> list[str]:
        """Ids of the samples in the gradient, over which the commit digest is computed."""
        return [v.sample_id for v in self.verdicts if v.reason is None]


class BatchTrainer:
    """Owns a model and its optimizer. Not thread-safe."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: UpdateConfig,
        *,
        seed: int,
        step: int = 0,
        outputs: Collection[str] = (),
        reward_weights: Mapping[str, float] | None = None,
    ) -> None:
        """`step` is the number of updates already in the weights; `outputs` are the engine outputs that samples carry. `reward_weights`
        are the estimator's, all 1 by default.

        The model always runs in evaluation mode, because the engine whose log-probs it compares with has no dropout. A few short
        sequences are run through it to choose `forward_choice` (see `self_test`).
        Raises ValueError for a model that cannot be trained and for a loss that needs another output, and ConfigError for an
        estimator or a loss term.
        """
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        self.model = model
        self.forward_choice = choose_forward(model)
        self.config = config
        self.seed = seed
        self.step = step
        self.optimizer = make_adamw(model, config.optimizer)
        self._estimator = make_estimator(config.estimator, reward_weights)
        self._loss = LossSum(config.loss)
        check_outputs(self._loss, outputs)
        self._outputs = engine_outputs(self._loss)

    def update(self, k: int, samples: Sequence[TrainingSample], groups: Sequence[GroupContext]) -> UpdateResult:
        """Make update k. Raises ValueError if k does not follow the last one, or a sample's group is missing."""
        if k != self.step + 1:
            raise ValueError(f"update {k} does not follow step {self.step}")
        advantages = self._estimator(groups, samples)
        context_max, vocabulary = context_length(self.model), vocab_size(self.model)
        reasons = [
            drop_reason(s, a, context_max=context_max, vocab_size=vocabulary, outputs=self._outputs)
            for s, a in zip(samples, advantages, strict=True)
        ]
        trace = UpdateTrace()
        self._train(k, samples, advantages, reasons, trace)
        self.step = k
        verdicts = tuple(SampleVerdict(s.sample.sample_id, r) for s, r in zip(samples, reasons, strict=True))
        metrics = self._metrics(k, samples, groups, verdicts, trace)
        outcome = UpdateOutcome.APPLIED if trace.steps else UpdateOutcome.SKIPPED
        return UpdateResult(update=k, outcome=outcome, verdicts=verdicts, metrics=metrics)

    def score(self, token_ids: IntArray) -> FloatArray:
        """Return the log-prob [n] of each token given those before it; entry 0 is 0. Nodes must reproduce it on these weights."""
        self.model.train(False)
        return forward.score(self.model, token_ids)

    def export_weights(self, path: Path) -> None:
        """Write the weights for publishing to one safetensors file, with tied weights once."""
        write_weights(self.model, path)

    def _train(
        self,
        k: int,
        samples: Sequence[TrainingSample],
        advantages: Sequence[SegmentAdvantages | None],
        reasons: list[DropReason | None],
        trace: UpdateTrace,
    ) -> None:
        """Take the optimizer steps. Sets `reasons` of the samples whose step was not taken."""
        kept = [i for i, reason in enumerate(reasons) if reason is None]
        if not kept:
            return
        table = build_table(
            [samples[i] for i in kept],
            [a for i in kept if (a := advantages[i]) is not None],
            update=k,
            outputs=self._outputs,
        )
        set_lr(self.optimizer, lr_at(self.config.optimizer, k))
        order = np.random.default_rng([self.seed, k]).permutation(len(kept))
        self.model.train(False)
        if "proximal" in self._loss.needs:
            table.columns["proximal"] = self._logprobs(table)
        for part in np.array_split(order, min(self.config.num_minibatches, len(kept))):
            if not self._optimizer_step(table.select(part.tolist()), trace):
                for i in part:
                    reasons[kept[i]] = DropReason.NON_FINITE

    def _logprobs(self, table: TokenTable) -> FloatArray:
        """Return the log-probs [M] under the current weights."""
        temperature = torch.as_tensor(table.columns["temperature"], device=self.model.device)
        mode = self.forward_choice.mode
        logprobs = forward.logprobs_of(self.model, table.sequences, self.config.packing, temperature, mode)
        values: FloatArray = logprobs.cpu().numpy()
        return values

    def _optimizer_step(self, table: TokenTable, trace: UpdateTrace) -> bool:
        """Accumulate one minibatch over micro-batches, then step. Return False if it was not finite and nothing changed."""
        device = self.model.device
        columns = {name: torch.as_tensor(values, device=device) for name, values in table.columns.items()}
        weight = token_weights(table.lengths.tolist(), table.sample_weights, self.config.normalization)
        columns["token_weight"] = weight.to(device)
        columns |= self._loss.prepare(columns)
        policy = np.zeros(len(weight), dtype=np.float32)
        stats: dict[str, FloatArray] = {}
        packing = self.forward_choice.mode.packing(self.config.packing)
        batches = pack(table.sequences, packing, device=device)
        loss = sum(self._accumulate(batch, columns, policy, stats) for batch in batches)
        norm = guarded_step(self.optimizer, clip_norm=self.config.optimizer.clip_norm, loss=loss)
        if norm is None:
            return False
        trace.steps.append(StepTrace(table, policy, stats, loss, norm, fill_ratio(batches)))
        return True

    def _accumulate(
        self, batch: MicroBatch, columns: dict[str, Tensor], policy: FloatArray, stats: dict[str, FloatArray]
    ) -> float:
        """Run forward and backward of one micro-batch and fill its part of `policy` and `stats`. Return its part of the loss."""
        at = batch.target_index
        if not len(at):
            return 0.0
        tokens = {name: values[at] for name, values in columns.items()}
        logits = forward.at_temperature(
            forward.target_logits(self.model, batch, self.forward_choice.mode), tokens["temperature"]
        )
        logprobs = forward.target_logprobs(logits, batch)
        loss, token_stats = self._loss(LossInputs(logprobs, tokens))
        loss.backward()  # type: ignore[no-untyped-call]
        places = at.cpu().numpy()
        policy[places] = logprobs.detach().cpu().numpy()
        extra = {"entropy": forward.entropy(logits)} if self.config.report_entropy else {}
        for name, values in {**token_stats, **extra}.items():
            stats.setdefault(name, np.zeros_like(policy))[places] = values.cpu().numpy()
        return float(loss.detach())

    def _metrics(
        self,
        k: int,
        samples: Sequence[TrainingSample],
        groups: Sequence[GroupContext],
        verdicts: Sequence[SampleVerdict],
        trace: UpdateTrace,
    ) -> dict[str, float]:
        used = [s for s, v in zip(samples, verdicts, strict=True) if v.reason is None]
        return {
            "lr": lr_at(self.config.optimizer, k),
            "packed": float(self.forward_choice.mode is forward.ForwardMode.PACKED),
            "samples/leased": float(len(samples)),
            "samples/used": float(len(used)),
            **reward_metrics(groups),
            **length_metrics(samples, used),
            **trace.summary(),
        }
