"""Make one update: train on leased samples and their groups, and return a verdict per sample.

    drop untrainable samples -> table of tokens -> features -> advantages -> steps of the update rule -> micro-batches -> guarded steps

Invariants:
- Update k makes step k, APPLIED or SKIPPED; k follows k - 1.
- Updates are deterministic, because every random draw is a function of (seed, k). Equal weights, optimizer state, seed and inputs
  give equal weights bit for bit (one compute thread, same machine type). So there is no random-generator state to save.
- One optimizer step normalizes over all trained tokens of its minibatch, independent of the split into micro-batches.
- A minibatch with a non-finite loss or gradient changes nothing, and its samples are reported as dropped. If no minibatch of an update
  was taken, the update is SKIPPED, and weights and optimizer do not change.

Collaborators: `samples`, `batch`, `feature_pass`, `plugins` (estimator, loss terms, update rule), `reference`, `packing`, `self_test`,
`optim`, `metrics`; `checkpoint` saves a trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh.shared.trajectory import FloatArray, GroupContext, IntArray, TrainedGroup, TrainingSample
from rollmesh.trainer import forward
from rollmesh.trainer.batch import UpdateBatch, check_membership
from rollmesh.trainer.config import UpdateConfig
from rollmesh.trainer.estimators import Estimate
from rollmesh.trainer.estimators.base import reward_sums
from rollmesh.trainer.feature_pass import computed_features, current_features, feature_inputs, gradient_squares
from rollmesh.trainer.losses import LossInputs, token_weights
from rollmesh.trainer.metrics import length_metrics, reward_metrics
from rollmesh.trainer.model_config import context_length, hidden_size, vocab_size
from rollmesh.trainer.model_files import write_weights
from rollmesh.trainer.optim import guarded_step, lr_at, make_adamw, set_lr
from rollmesh.trainer.packing import MicroBatch, fill_ratio, pack
from rollmesh.trainer.plugins import Plugins
from rollmesh.trainer.reference import open_reference
from rollmesh.trainer.samples import DropReason, TokenTable, build_table, drop_reason
from rollmesh.trainer.self_test import choose_forward
from rollmesh.trainer.trace import StepTrace, UpdateTrace
from rollmesh.trainer.update_rules import OptimizerStep


class UpdateOutcome(IntEnum):
    """Result of an update. Numbers equal `rollmesh.v1.UpdateOutcome`."""

    APPLIED = 1
    SKIPPED = 2


@dataclass(frozen=True, slots=True)
class SampleVerdict:
    """Result of one sample. `reason` is None exactly if the sample is in the gradient of the update."""

    sample_id: str
    reason: str | None
    """A `DropReason`, or the estimator's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """One verdict per leased sample, in the given order, and metrics by name (see `metrics`)."""

    update: int
    outcome: UpdateOutcome
    verdicts: tuple[SampleVerdict, ...]
    metrics: dict[str, float]
    groups: tuple[TrainedGroup, ...] = ()
    """Measurements on the groups with samples in the gradient."""

    @property
    def used_ids(self) -> list[str]:
        """Ids of the samples in the gradient, over which the commit digest is computed."""
        return [v.sample_id for v in self.verdicts if v.reason is None]


class BatchTrainer:
    """Owns a model, its optimizer and the replaceable parts of an update. Not thread-safe."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: UpdateConfig,
        *,
        seed: int,
        step: int = 0,
        outputs: Collection[str] = (),
        reward_weights: Mapping[str, float] | None = None,
        initial_model: Callable[[], PreTrainedModel] | None = None,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        """`step` is the number of updates already in the weights; `outputs` are the engine outputs that samples carry. `reward_weights`
        are the estimator's, all 1 by default. `initial_model` loads the weights with which the run began, for a reference of kind
        `initial`; by default they are those of `model`. `encode` is the model's tokenizer for features that read text, without special
        tokens around the text.

        The model always runs in evaluation mode, because the engine whose log-probs it compares with has no dropout. A few short
        sequences are run through it to choose `forward_choice` (see `self_test`).
        Raises ValueError for a model that cannot be trained and for a part that needs another output, and ConfigError for an
        estimator, a loss term, an update rule or a feature.
        """
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        self.model = model
        self.forward_choice = choose_forward(model)
        self.config = config
        self.seed = seed
        self.step = step
        self.plugins = Plugins(config, reward_weights=reward_weights)
        self.plugins.check_outputs(outputs)
        self.plugins.use_tokenizer(encode)
        self.modules = self.plugins.make_modules(lambda: hidden_size(model), seed).to(model.device)
        self.optimizer = make_adamw(model, config.optimizer, self.modules)
        self.reference = None
        if self.plugins.under("reference"):
            self.reference = open_reference(config.reference, model, initial_model)
        self._reward_weights = dict(reward_weights or {})
        self._last: dict[str, float] = {}

    def update(self, k: int, samples: Sequence[TrainingSample], groups: Sequence[GroupContext]) -> UpdateResult:
        """Make update k. Raises ValueError if k does not follow the last one, or a sample's group is missing."""
        if k != self.step + 1:
            raise ValueError(f"update {k} does not follow step {self.step}")
        check_membership(groups, samples)
        context_max, vocabulary = context_length(self.model), vocab_size(self.model)
        reasons: list[str | None] = [
            drop_reason(
                s,
                context_max=context_max,
                vocab_size=vocabulary,
                outputs=self.plugins.outputs,
                rewrites=self.plugins.rewrites,
                external=self.plugins.takes_external,
            )
            for s in samples
        ]
        names = list(dict.fromkeys(s.group for s, reason in zip(samples, reasons, strict=True) if reason is None))
        trace = UpdateTrace()
        metrics = self._train(k, samples, groups, reasons, trace)
        self.step = k
        verdicts = tuple(SampleVerdict(s.sample.sample_id, r) for s, r in zip(samples, reasons, strict=True))
        metrics |= self._metrics(k, samples, groups, verdicts, trace)
        outcome = UpdateOutcome.APPLIED if trace.steps else UpdateOutcome.SKIPPED
        if trace.steps:
            self._last = metrics
            if self.reference is not None:
                self.reference.follow(self.model)
        return UpdateResult(
            update=k, outcome=outcome, verdicts=verdicts, metrics=metrics, groups=tuple(trace.groups(names))
        )

    def score(self, token_ids: IntArray) -> FloatArray:
        """Return the log-prob [n] of each token of one sequence, see `scores`."""
        return self.scores([token_ids])[0]

    def scores(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """Return the log-prob [n] of each token of each sequence given those before it; entry 0 is 0. Nodes must reproduce it on these
        weights."""
        self.model.train(False)
        return forward.scores(self.model, sequences)

    def export_weights(self, path: Path) -> None:
        """Write the weights for publishing to one safetensors file, with tied weights once."""
        write_weights(self.model, path)

    def memory(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside weights and optimizer: memory and modules of the parts, the reference, last metrics."""
        return {
            "plugins": self.plugins.state(),
            "modules": self.modules.state_dict(),
            "reference": None if self.reference is None else self.reference.state(),
            "last": self._last,
        }

    def load_memory(self, memory: Mapping[str, Any]) -> None:
        """Restore `memory`. Raises ValueError, KeyError or RuntimeError if it does not fit, e.g. because it is that of another recipe."""
        found, expected = _owners(memory), _owners(self.memory())
        if found != expected:
            raise ValueError(
                f"it has the memory of {', '.join(found) or 'no part'}, and the configured recipe needs that of "
                f"{', '.join(expected) or 'no part'}; resume with the recipe with which it was written, or begin a new run from its model"
            )
        self.plugins.load_state(memory["plugins"])
        self.modules.load_state_dict(memory["modules"])
        if self.reference is not None and memory["reference"] is not None:
            self.reference.load_state(memory["reference"])
        self._last = dict(memory["last"])

    def _train(
        self,
        k: int,
        samples: Sequence[TrainingSample],
        groups: Sequence[GroupContext],
        reasons: list[str | None],
        trace: UpdateTrace,
    ) -> dict[str, float]:
        """Take the optimizer steps. Sets `reasons` of the samples that are not trained. Returns the metrics of the estimator."""
        numbers = [i for i, reason in enumerate(reasons) if reason is None]
        if not numbers:
            return {}
        kept = [samples[i] for i in numbers]
        table = build_table(kept, update=k, outputs=self.plugins.outputs, rewrites=self.plugins.rewrites)
        batch = UpdateBatch(update=k, samples=tuple(kept), groups=tuple(groups), table=table, last=self._last)
        table.columns["reward"] = batch.per_token(_reward_sums(batch, self._reward_weights))
        self.model.train(False)
        table.columns.update(self._computed(table, "reference"))
        estimate = self._estimate(batch)
        metrics = {f"estimator/{name}": float(value) for name, value in estimate.metrics.items()}
        for number, reason in estimate.dropped.items():
            reasons[numbers[number]] = str(reason)
        lr = lr_at(self.config.optimizer, k)
        trained = self.plugins.loss.tokens(
            {name: torch.as_tensor(table.columns[name]) for name in ("behavior", "source")}
        )
        usable = None if bool(trained.all()) else trained.numpy()
        taken: set[int] = set()
        failed: set[int] = set()
        for step in self.plugins.rule.steps(batch, np.random.default_rng([self.seed, k])):
            if step.refresh:
                batch = replace(batch, repeat=batch.repeat + 1)
                estimate = self._estimate(batch)
            chosen = [n for n in step.samples if n not in estimate.dropped]
            part = _weighted(table, estimate, step).select(chosen, _all_of(step.tokens, estimate.token_mask, usable))
            if not len(part.lengths):
                continue
            set_lr(self.optimizer, lr * step.lr_factor, self.config.optimizer.modules_factor)
            done = taken if self._optimizer_step(part, trace, step.lr_factor) else failed
            done.update(np.unique(part.columns["sample"]).tolist())
        for number, place in enumerate(numbers):
            if reasons[place] is None and number not in taken:
                reasons[place] = DropReason.NON_FINITE if number in failed else DropReason.LEFT_OUT
        return metrics

    def _estimate(self, batch: UpdateBatch) -> Estimate:
        """Compute the features under the current weights, and the advantages, into the batch. Return a well-formed estimate."""
        columns = batch.table.columns
        columns.update(self._computed(batch.table, "start"))
        if self.plugins.needs_gradients:
            columns["gradient_square"] = gradient_squares(
                self.model, batch.table, self.config.packing, self.forward_choice.mode
            )
        estimate = checked_estimate(self.plugins.estimator(batch), batch, self.plugins.columns)
        columns.update(estimate.columns)
        columns["advantages"] = estimate.advantages
        return estimate

    def _computed(self, table: TokenTable, under: str) -> dict[str, FloatArray]:
        model = self.model if under != "reference" or self.reference is None else self.reference.model
        requests = self.plugins.under(under)
        return computed_features(model, table, requests, self.config.packing, self.forward_choice.mode)

    def _optimizer_step(self, table: TokenTable, trace: UpdateTrace, lr_factor: float) -> bool:
        """Accumulate one minibatch over micro-batches, then step. Return False if it was not finite and nothing changed."""
        device = self.model.device
        known = table.columns | self._computed(table, "step")
        columns = {name: torch.as_tensor(values, device=device) for name, values in known.items()}
        weight = token_weights(
            table.lengths.tolist(),
            table.sample_weights,
            self.config.normalization,
            self.config.normalization_tokens,
        )
        columns["token_weight"] = weight.to(device)
        columns |= self.plugins.loss.prepare(columns)
        policy = np.zeros(len(weight), dtype=np.float32)
        stats: dict[str, FloatArray] = {}
        packing = self.forward_choice.mode.packing(self.config.packing)
        batches = pack(table.sequences, packing, device=device)
        loss = sum(self._accumulate(batch, table, columns, policy, stats) for batch in batches)
        norm = guarded_step(self.optimizer, clip_norm=self.config.optimizer.clip_norm, loss=loss)
        if norm is None:
            return False
        trace.steps.append(StepTrace(table, policy, stats, loss, norm, fill_ratio(batches), lr_factor))
        return True

    def _accumulate(
        self,
        batch: MicroBatch,
        table: TokenTable,
        columns: dict[str, Tensor],
        policy: FloatArray,
        stats: dict[str, FloatArray],
    ) -> float:
        """Run forward and backward of one micro-batch and fill its part of `policy` and `stats`. Return its part of the loss."""
        if not len(batch.target_index):
            return 0.0
        requests = self.plugins.under("current")
        hidden = bool(self.modules) or any(request.reads_hidden for request in requests.values())
        mode = self.forward_choice.mode
        inputs = feature_inputs(self.model, batch, columns, mode, hidden=hidden)
        features = current_features(self.model, batch, inputs, table, requests, self.config.packing, mode)
        loss, token_stats = self.plugins.loss(
            LossInputs(inputs.logprobs, {**inputs.columns, **features}, inputs.hidden, inputs.after)
        )
        if loss.requires_grad:  # not if the micro-batch has no token of any term
            loss.backward()  # type: ignore[no-untyped-call]
        places = batch.target_index.cpu().numpy()
        policy[places] = inputs.logprobs.detach().cpu().numpy()
        extra = {"entropy": forward.entropy(inputs.logits)} if self.config.report_entropy else {}
        for name, values in {**token_stats, **extra}.items():
            stats.setdefault(name, np.full_like(policy, np.nan))[places] = values.detach().cpu().numpy()
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


def _owners(memory: Mapping[str, Any]) -> list[str]:
    """Return the parts whose memory `BatchTrainer.memory` returned, sorted."""
    modules = {f"the module of {key.partition('.')[0]}" for key in memory["modules"]}
    average = {"the moving average"} if memory["reference"] is not None else set()
    return sorted({*memory["plugins"], *modules, *average})


def _reward_sums(batch: UpdateBatch, weights: Mapping[str, float]) -> FloatArray:
    """Return [S]: the weighted sum of each sample's usable rewards, 0 without any."""
    found: dict[tuple[str, str], float] = {}
    for group in batch.groups:
        members, sums = reward_sums(group, weights)
        found |= {(group.group, member.sample_id): value for member, value in zip(members, sums.tolist(), strict=True)}
    return np.array([found.get((s.group, s.sample.sample_id), 0.0) for s in batch.samples], dtype=np.float32)


def checked_estimate(estimate: Estimate, batch: UpdateBatch, names: Sequence[str] = ()) -> Estimate:
    """Return the estimate without the samples whose numbers cannot be used: not finite, or, for all samples, of the wrong shape.

    `names` are those of the columns that it must have. One wrong value must not stop a run, so these samples are dropped as NOT_FINITE_ADVANTAGE and counted in the metric `malformed`.
    """
    num_tokens, num_samples = int(batch.lengths.sum()), len(batch.samples)
    advantages = np.asarray(estimate.advantages, dtype=np.float32)
    weights = np.ones(num_samples) if estimate.sample_weights is None else np.asarray(estimate.sample_weights)
    mask = np.ones(num_tokens, bool) if estimate.token_mask is None else np.asarray(estimate.token_mask)
    columns = {name: np.asarray(estimate.columns.get(name, ()), dtype=np.float32) for name in names}
    shapes = (advantages.shape, weights.shape, mask.shape, *(values.shape for values in columns.values()))
    if shapes != ((num_tokens,), (num_samples,), *((num_tokens,) for _ in (mask, *columns))):
        columns = {name: np.zeros(num_tokens, np.float32) for name in names}
        advantages, weights, mask = np.zeros(num_tokens, np.float32), np.ones(num_samples), np.ones(num_tokens, bool)
        bad = set(range(num_samples))
    else:
        finite = np.logical_and.reduce([np.isfinite(values) for values in (advantages, *columns.values())])
        bad = set(np.unique(batch["sample"][~finite]).tolist())
        bad |= set(np.flatnonzero(~np.isfinite(weights)).tolist())
        advantages = np.nan_to_num(advantages, nan=0.0, posinf=0.0, neginf=0.0)
        columns = {n: np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0) for n, values in columns.items()}
    bad -= set(estimate.dropped)
    return Estimate(
        advantages=advantages,
        sample_weights=weights.astype(np.float32) if estimate.sample_weights is not None else None,
        dropped={**estimate.dropped, **dict.fromkeys(bad, DropReason.NOT_FINITE_ADVANTAGE)},
        token_mask=mask.astype(bool) if estimate.token_mask is not None else None,
        columns=columns,
        metrics={**estimate.metrics, **({"malformed": float(len(bad))} if bad else {})},
    )


def _weighted(table: TokenTable, estimate: Estimate, step: OptimizerStep) -> TokenTable:
    """Return the table with the sample weights multiplied by those of the estimate, and the advantages by the factors of the step."""
    if estimate.sample_weights is not None:
        factors = estimate.sample_weights.tolist()
        weights = tuple(w * f for w, f in zip(table.sample_weights, factors, strict=True))
        table = replace(table, sample_weights=weights)
    if step.advantage_factors is not None:
        advantages = (table.columns["advantages"] * step.advantage_factors).astype(np.float32)
        table = replace(table, columns=table.columns | {"advantages": advantages})
    return table


def _all_of(*masks: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    given = [mask for mask in masks if mask is not None]
    return np.logical_and.reduce(given) if given else None
