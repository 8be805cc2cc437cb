"""Make one update: train on leased samples and their groups, and return a verdict per sample.

    drop untrainable samples -> table of tokens -> features -> advantages -> steps of the update rule -> micro-batches
    -> guarded steps

Invariants:
- Update k makes step k, APPLIED or SKIPPED; k follows k - 1.
- Updates are deterministic, because every random draw is a function of (seed, k). Equal weights, optimizer state, seed
  and inputs give equal weights bit for bit (one compute thread, same machine type). So there is no random-generator
  state to save.
- One optimizer step normalizes over all trained tokens of its minibatch, independent of the split into micro-batches.
- A minibatch with a non-finite loss or gradient changes nothing, and its samples are reported as dropped. If no
  minibatch of an update was taken, the update is SKIPPED, and weights and optimizer do not change.

Collaborators: `samples`, `batch`, `feature_pass`, `plugins` (estimator, loss terms, update rule), `reference`,
`packing`, `self_test`, `optim`, `metrics`; `checkpoint` saves a trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import noop_context_fn
from transformers import PreTrainedModel

from rollmesh.shared.codec.checks import MEASURES_MAX, WORD_FORM, is_word
from rollmesh.shared.config.user_code import reported
from rollmesh.shared.domain.trajectory import (
    TRAINED_MEASURES,
    FloatArray,
    GroupContext,
    IntArray,
    Source,
    TrainedGroup,
    TrainingSample,
)
from rollmesh.shared.errors import ConfigError, LearnerCodeFailed
from rollmesh.trainer import forward
from rollmesh.trainer.batch import UpdateBatch, check_membership
from rollmesh.trainer.config import UpdateConfig
from rollmesh.trainer.estimators import Estimate
from rollmesh.trainer.estimators.base import reward_sums
from rollmesh.trainer.feature_pass import computed_features, current_features, gradient_squares
from rollmesh.trainer.features import FeatureRequest
from rollmesh.trainer.forward import ForwardMode, ForwardPlan
from rollmesh.trainer.lora import Adapters
from rollmesh.trainer.losses import LossInputs, TokenStats, equal_groups, token_weights
from rollmesh.trainer.metrics import length_metrics, reward_metrics, source_metrics
from rollmesh.trainer.model_config import choose_attention, context_length, hidden_size, vocab_size
from rollmesh.trainer.model_files import write_weights
from rollmesh.trainer.model_layers import checkpoint_layers
from rollmesh.trainer.optim import guarded_step, lr_at, make_optimizer, set_lr
from rollmesh.trainer.packing import MicroBatch, fill_ratio, saved_ratio
from rollmesh.trainer.plugins import Plugins
from rollmesh.trainer.ranks import ONE_RANK, Ranks
from rollmesh.trainer.reference import Reference, open_reference
from rollmesh.trainer.router import check_router
from rollmesh.trainer.router_replay import DIFFERING, RouterReplay
from rollmesh.trainer.samples import DropReason, TokenTable, build_table, drop_reason
from rollmesh.trainer.self_test import check_rounded, check_shared, choose_forward, known_logprobs, prepare
from rollmesh.trainer.sharding import join_alone, leave_alone, release, shard
from rollmesh.trainer.shared_prefix import square_tokens
from rollmesh.trainer.spread_model import SpreadCopy
from rollmesh.trainer.trace import StepTrace, UpdateTrace
from rollmesh.trainer.update_rules import OptimizerStep, checked_step
from rollmesh.trainer.vocabulary_features import Entropy

_log = logging.getLogger(__name__)

_ENTROPY = "report/entropy"
"""Name of the reported entropy among the features; no column has it, because names of columns have no slash."""


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
        sources: Collection[Source] = (),
        reward_weights: Mapping[str, float] | None = None,
        initial_model: Callable[[], PreTrainedModel] | None = None,
        encode: Callable[[str], list[int]] | None = None,
        ranks: Ranks = ONE_RANK,
        device: torch.device | None = None,
    ) -> None:
        """`step` is the number of updates already in the weights; `outputs` are the engine outputs that samples carry,
        and `sources` those other than POLICY whose tokens are trained, see `run.external_sources`. `reward_weights` are
        the estimator's, all 1 by default. `initial_model` loads the weights with which the run began, for a reference
        of kind `initial`; by default they are those of `model`. `encode` is the model's tokenizer for features that
        read text, without special tokens around the text. With several `ranks`, each of them makes a trainer with equal
        arguments and makes the same calls, and the model of rank 0 is divided between them. Those of the others may be
        without values (`model_files.open_model`). `device` is that of the computation, by default that of the model.

        With `config.lora` the model gets adapters, see `lora`. The model always runs in evaluation mode, because the
        engine whose log-probs it compares with has no dropout. A few short sequences are run through it to choose
        `forward_choice` (see `self_test`). Raises ValueError for a model that cannot be trained and for a part that
        needs another output, and ConfigError for an estimator, a loss term, an update rule or a feature, and for a
        precision or an attention that does not work for the model.
        """
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        self.model = model
        compute = config.compute
        spread = SpreadCopy(model)
        self.forward_choice = ranks.from_first(lambda: choose_forward(model, spread))
        if config.packing.shared_row_tokens:
            ranks.from_first(lambda: check_shared(model, self.forward_choice, spread))
        if ranks.rank > 0:
            prepare(model)
        self.device = device or model.device
        """Device of the computation."""
        if config.lora.rank and ranks.size > 1:
            raise ConfigError(
                f"`learner.lora.rank` must be 0 with {ranks.size} ranks, got {config.lora.rank}: adapters train on one "
                "rank",
                key="learner.lora.rank",
            )
        self.adapters = Adapters(model, config.lora, seed) if config.lora.rank else None
        self.replay = RouterReplay(model, ranks) if config.router_replay else None
        if compute.gradient_checkpointing:
            checkpoint_layers(model, noop_context_fn if self.replay is None else self.replay.contexts)
        self.config = config
        self.forward_plan = ForwardPlan(
            self.forward_choice.mode, config.packing, compute.logprob_chunk_tokens, ranks, replay=self.replay
        )
        if config.packing.shared_row_tokens:
            self.forward_plan = replace(self.forward_plan, square=square_tokens(hidden_size(model)))
        self.seed = seed
        self.step = step
        self.sources = sources
        self.plugins = Plugins(config, reward_weights=reward_weights)
        self.plugins.check_outputs(outputs)
        self.plugins.use_tokenizer(encode)
        self.modules = self.plugins.make_modules(lambda: hidden_size(model), seed).to(self.device)
        if any(request.feature.reads_router for request in self.plugins.requests.values()):
            ranks.from_first(lambda: check_router(model, spread))
        self.ranks = ranks
        self.reference: Reference | None = None
        self.sharded = compute.shards or ranks.size > 1
        """Whether FSDP holds the weights of the policy."""
        with ExitStack() as undo:
            undo.callback(self.close)
            self._divide(initial_model)
            self.optimizer = make_optimizer(model, config.optimizer, self.modules)
            undo.pop_all()
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
                sources=self.sources,
                routes=None if self.replay is None else self.replay.shape,
            )
            for s in samples
        ]
        names = list(dict.fromkeys(s.group for s, reason in zip(samples, reasons, strict=True) if reason is None))
        trace = UpdateTrace()
        self.plugins.loss.without_gradient.clear()
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
        """Return the log-prob [n] of each token of each sequence given those before it; entry 0 is 0. Nodes must
        reproduce it on these weights."""
        self.model.train(False)
        scored = forward.scores(self.model, sequences)
        release(self.model)
        return scored

    def close(self) -> None:
        """End the process group of a single rank, if no other trainer of this process uses it."""
        leave_alone(self)

    def export_weights(self, path: Path, dtype: torch.dtype | None = None) -> None:
        """Write the weights for publishing to one safetensors file, with tied weights once and adapters merged, rounded
        to `dtype`. Only rank 0 writes."""
        write_weights(self.model, path if self.ranks.rank == 0 else None, dtype=dtype)

    def memory(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside weights and optimizer: memory and modules of the parts, the reference,
        last metrics.

        Every rank must call it. Only rank 0 gets the weights of a moving average."""
        return {
            "plugins": self.plugins.state(),
            "modules": self.modules.state_dict(),
            "reference": None if self.reference is None else self.reference.state(keep=self.ranks.rank == 0),
            "last": self._last,
        }

    def load_memory(self, memory: Mapping[str, Any]) -> None:
        """Restore `memory`. Raises ValueError, KeyError or RuntimeError if it does not fit, e.g. because it is that of
        another recipe."""
        averages = self.reference is not None and self.reference.averages
        found = _owners(memory["plugins"], memory["modules"], memory["reference"] is not None)
        expected = _owners(self.plugins.state(), self.modules.state_dict(), averages)
        if found != expected:
            raise ValueError(
                f"it has the memory of {', '.join(found) or 'no part'}, and the configured recipe needs that of "
                f"{', '.join(expected) or 'no part'}; resume with the recipe with which it was written, or begin a new "
                "run from its model"
            )
        self.plugins.load_state(memory["plugins"])
        self.modules.load_state_dict(memory["modules"])
        if self.reference is not None and memory["reference"] is not None:
            self.reference.load_state(memory["reference"])
        self._last = dict(memory["last"])

    def _divide(self, initial_model: Callable[[], PreTrainedModel] | None) -> None:
        """Open the reference, select the attention, and let FSDP hold the models whose weights are divided, rounded or
        on the host.

        A single rank copies the policy for its reference while it is whole. Several divide the policy before they load
        the reference, so that rank 0 has one whole model at a time. Raises ConfigError."""
        compute, mode, several = self.config.compute, self.forward_choice.mode, self.ranks.size > 1
        has_reference = bool(self.plugins.under("reference"))
        divides_reference = has_reference and (self.sharded or compute.offload != "none")
        exact = None
        if compute.precision != "float32":
            exact = self.ranks.from_first(lambda: known_logprobs(self.model, mode).cpu()).to(self.device)
        if not several:
            if has_reference:
                self._open_reference(initial_model)
            if self.sharded or divides_reference:
                join_alone(self, self.device)
            if divides_reference:
                self._shard_reference(initial_model)
        self._choose_attention(self.model)
        if self.sharded:
            shard(self.model, compute, self.device, to_host=compute.offload == "optimizer")
        if exact is not None:
            check_rounded(self.model, mode, exact)
            release(self.model)
        if several and has_reference:
            self._open_reference(initial_model)
            self._shard_reference(initial_model)

    def _open_reference(self, initial_model: Callable[[], PreTrainedModel] | None) -> None:
        config = self.config
        self.reference = open_reference(config.reference, self.model, initial_model, self.adapters, self.ranks)
        self._choose_attention(self.reference.model)

    def _choose_attention(self, model: PreTrainedModel) -> None:
        masked = self.config.packing.shared_row_tokens > 0
        choose_attention(model, self.config.compute, self.device, masked=masked)

    def _shard_reference(self, initial_model: Callable[[], PreTrainedModel] | None) -> None:
        assert self.reference is not None
        compute, kind = self.config.compute, self.config.reference.kind
        is_copy = kind == "average" or (kind == "initial" and initial_model is None)
        source = self.model if self.ranks.size > 1 and is_copy else None
        shard(self.reference.model, compute, self.device, to_host=compute.offload != "none", source=source)

    def _train(
        self,
        k: int,
        samples: Sequence[TrainingSample],
        groups: Sequence[GroupContext],
        reasons: list[str | None],
        trace: UpdateTrace,
    ) -> dict[str, float]:
        """Take the optimizer steps. Sets `reasons` of the samples that are not trained. Returns the metrics of the
        estimator."""
        numbers = [i for i, reason in enumerate(reasons) if reason is None]
        if not numbers:
            return {}
        kept = [samples[i] for i in numbers]
        table = build_table(
            kept,
            update=k,
            outputs=self.plugins.outputs,
            rewrites=self.plugins.rewrites,
            routes=None if self.replay is None else self.replay.shape,
        )
        batch = UpdateBatch(update=k, samples=tuple(kept), groups=tuple(groups), table=table, last=self._last)
        table.columns["reward"] = batch.per_token(_reward_sums(batch, self._reward_weights))
        self.model.train(False)
        table.columns.update(self._computed(table, "reference"))
        estimate = self._estimate(batch)
        trace.measures = estimate.measures
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
        for step in self._steps(batch, k):
            if step.refresh:
                batch = replace(batch, repeat=batch.repeat + 1)
                estimate = self._estimate(batch)
            chosen = [n for n in step.samples if n not in estimate.dropped]
            weighted = _weighted(table, estimate, step, self._group_factors(batch, estimate))
            part = weighted.select(chosen, _all_of(step.tokens, estimate.token_mask, usable))
            if not len(part.lengths):
                continue
            set_lr(self.optimizer, lr * step.lr_factor)
            done = taken if self._optimizer_step(part, trace, step.lr_factor) else failed
            done.update(np.unique(part.columns["sample"]).tolist())
        for number, place in enumerate(numbers):
            if reasons[place] is None and number not in taken:
                reasons[place] = DropReason.NON_FINITE if number in failed else DropReason.LEFT_OUT
        return metrics

    def _steps(self, batch: UpdateBatch, k: int) -> Iterator[OptimizerStep]:
        """Yield the steps of the update rule. Raises LearnerCodeFailed for an error of the rule, and for a step that
        cannot be taken."""
        name, sizes = self.config.update_rule.short_name, (len(batch.samples), int(batch.lengths.sum()))
        with reported(f"the update rule {name}", LearnerCodeFailed):
            steps = iter(self.plugins.rule.steps(batch, np.random.default_rng([self.seed, k])))
        while True:
            with reported(f"the update rule {name}", LearnerCodeFailed):
                step = next(steps, None)
                if step is None:
                    return
                step = checked_step(step, *sizes)
            yield step

    def _group_factors(self, batch: UpdateBatch, estimate: Estimate) -> NDArray[np.float64] | None:
        """Return the factors [S] of `learner.group_weight`. Dropped samples do not count; None without factors."""
        if self.config.group_weight != "equal":
            return None
        weights = np.array(batch.table.sample_weights, dtype=np.float64)
        if estimate.sample_weights is not None:
            weights = weights * estimate.sample_weights
        weights[list(estimate.dropped)] = 0.0
        return equal_groups(batch.first(batch["group"]), weights)

    def _estimate(self, batch: UpdateBatch) -> Estimate:
        """Compute the features under the current weights, and the advantages, into the batch. Return a well-formed
        estimate."""
        columns = batch.table.columns
        columns.update(self._computed(batch.table, "start"))
        if self.plugins.needs_gradients:
            columns["gradient_square"] = gradient_squares(self.model, batch.table, self.forward_plan)
        with reported(f"the estimator {self.config.estimator.short_name}", LearnerCodeFailed):
            estimate = self.plugins.estimator(batch)
            if not isinstance(estimate, Estimate):
                raise TypeError(f"it returned {type(estimate).__name__}, expected an Estimate")
            estimate = checked_estimate(estimate, batch, self.plugins.columns)
        columns.update(estimate.columns)
        columns["advantages"] = estimate.advantages
        return estimate

    def _computed(self, table: TokenTable, under: str) -> dict[str, FloatArray]:
        requests = self.plugins.under(under)
        if under != "reference" or self.reference is None:
            return computed_features(self.model, table, requests, self.forward_plan)
        with self.reference.used() as model:
            return computed_features(model, table, requests, replace(self.forward_plan, replay=None))

    def _optimizer_step(self, table: TokenTable, trace: UpdateTrace, lr_factor: float) -> bool:
        """Accumulate one minibatch over micro-batches, then step. Return False if it was not finite and nothing
        changed."""
        device = self.device
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
        self.ranks.agree("the tokens, advantages and weights of an optimizer step", *_values(columns))
        policy = np.zeros(len(weight), dtype=np.float32)
        stats: dict[str, FloatArray] = {}
        batches = self.forward_plan.micro_batches(table.sequences, device)
        mine = self.ranks.share(batches)
        loss = self.ranks.total(sum(self._accumulate(batch, table, columns, policy, stats) for batch in mine))
        self._exchange(mine, policy, stats)
        norm = guarded_step(self.optimizer, clip_norm=self.config.optimizer.clip_norm, loss=loss)
        if norm is None:
            return False
        saved = saved_ratio(batches, table.sequences)
        trace.steps.append(StepTrace(table, policy, stats, loss, norm, fill_ratio(batches), saved, lr_factor))
        return True

    def _accumulate(
        self,
        batch: MicroBatch,
        table: TokenTable,
        columns: dict[str, Tensor],
        policy: FloatArray,
        stats: dict[str, FloatArray],
    ) -> float:
        """Run forward and backward of one micro-batch and fill its part of `policy` and `stats`. Return its part of the
        loss.

        With sharded weights, every forward has a backward on every rank, also where the loss does not depend on it."""
        if not len(batch.target_index) and not self.sharded:
            return 0.0
        requests = self.plugins.under("current")
        if self.config.report_entropy:
            requests[_ENTROPY] = FeatureRequest(Entropy(), "current")
        inputs, features, with_gradient = current_features(
            self.model, batch, columns, table, requests, self.forward_plan, hidden=bool(self.modules)
        )
        extra = {"entropy": features.pop(_ENTROPY)} if _ENTROPY in features else {}
        if DIFFERING in inputs.columns and len(batch.target_index):
            extra[DIFFERING] = inputs.columns[DIFFERING]
        loss: Tensor = inputs.logprobs.new_zeros(())
        token_stats: TokenStats = {}
        if len(batch.target_index):
            loss, token_stats = self.plugins.loss(
                LossInputs(inputs.logprobs, {**inputs.columns, **features}, inputs.hidden, inputs.after)
            )
        if self.sharded:
            loss = loss + sum(0.0 * values.nan_to_num().sum() for values in with_gradient)
        if loss.requires_grad:  # not if the micro-batch has no token of any term
            loss.backward()  # type: ignore[no-untyped-call]
        places = batch.target_index.cpu().numpy()
        policy[places] = inputs.logprobs.detach().cpu().numpy()
        for name, values in {**token_stats, **extra}.items():
            stats.setdefault(name, np.full_like(policy, np.nan))[places] = values.detach().cpu().numpy()
        return float(loss.detach())

    def _exchange(self, mine: Sequence[MicroBatch], policy: FloatArray, stats: dict[str, FloatArray]) -> None:
        """Give every rank the values of all tokens of an optimizer step, and the gradients of the modules."""
        at = np.zeros(len(policy), bool)
        for batch in mine:
            at[batch.target_index.cpu().numpy()] = True
        (policy[:],) = self.ranks.merged([policy], len(policy))
        stats.update(self.ranks.merged_by_name(stats, at))
        self.ranks.sum_gradients(self.modules.parameters())
        for term in self.plugins.loss.terms.values():
            term.exchange(self.ranks.in_order)

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
            "packed": float(self.forward_choice.mode is ForwardMode.PACKED),
            "samples/leased": float(len(samples)),
            "samples/used": float(len(used)),
            **reward_metrics(groups),
            **source_metrics(groups),
            **length_metrics(samples, used),
            **trace.summary(),
            **({"terms_without_gradient": float(len(found))} if (found := self.plugins.loss.without_gradient) else {}),
        }


def _values(columns: Mapping[str, Tensor]) -> Iterator[object]:
    for name in sorted(columns):
        yield from (name, columns[name].detach().cpu().numpy())


def _owners(plugins: Mapping[str, Any], modules: Mapping[str, Any], averages: bool) -> list[str]:
    """Return the parts of which `BatchTrainer.memory` returns something, sorted."""
    of_modules = {f"the module of {key.partition('.')[0]}" for key in modules}
    return sorted({*plugins, *of_modules, *({"the moving average"} if averages else ())})


def _reward_sums(batch: UpdateBatch, weights: Mapping[str, float]) -> FloatArray:
    """Return [S]: the weighted sum of each sample's usable rewards, 0 without any."""
    found: dict[tuple[str, str], float] = {}
    for group in batch.groups:
        members, sums = reward_sums(group, weights)
        found |= {(group.group, member.sample_id): value for member, value in zip(members, sums.tolist(), strict=True)}
    return np.array([found.get((s.group, s.sample.sample_id), 0.0) for s in batch.samples], dtype=np.float32)


def checked_estimate(estimate: Estimate, batch: UpdateBatch, names: Sequence[str] = ()) -> Estimate:
    """Return the estimate without the samples whose numbers cannot be used: not finite, or, for all samples, of the
    wrong shape.

    `names` are those of the columns that it must have. One wrong value must not stop a run, so these samples are
    dropped as NOT_FINITE_ADVANTAGE or WRONG_SHAPE and counted in the metric `malformed`.
    """
    num_tokens, num_samples = int(batch.lengths.sum()), len(batch.samples)
    advantages = np.asarray(estimate.advantages, dtype=np.float32)
    weights = np.ones(num_samples) if estimate.sample_weights is None else np.asarray(estimate.sample_weights)
    mask = np.ones(num_tokens, bool) if estimate.token_mask is None else np.asarray(estimate.token_mask)
    columns = {name: np.asarray(estimate.columns.get(name, ()), dtype=np.float32) for name in names}
    arrays = {"advantages": advantages, "token_mask": mask, **{f"columns[{n}]": v for n, v in columns.items()}}
    expected = {"sample_weights": (weights, num_samples), **{n: (values, num_tokens) for n, values in arrays.items()}}
    wrong = [f"`{n}` {list(v.shape)}, expected [{size}]" for n, (v, size) in expected.items() if v.shape != (size,)]
    reason = DropReason.NOT_FINITE_ADVANTAGE
    if wrong:
        reason = DropReason.WRONG_SHAPE
        _log.error(
            "the estimator returned arrays of the wrong shape, so that the update trains nothing: update=%s %s; "
            "advantages, masks and columns "
            "have one entry per trained token (`batch.per_token` makes it of one per sample), weights one per sample",
            batch.update,
            ", ".join(wrong),
        )
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
        dropped={**estimate.dropped, **dict.fromkeys(bad, reason)},
        token_mask=mask.astype(bool) if estimate.token_mask is not None else None,
        columns=columns,
        metrics={**estimate.metrics, **({"malformed": float(len(bad))} if bad else {})},
        measures=_checked_measures(estimate.measures, batch),
    )


def _checked_measures(measures: Mapping[str, Mapping[str, float]], batch: UpdateBatch) -> dict[str, dict[str, float]]:
    """Return the measures of an estimator without those that are not finite. Raises ValueError for a group or a name
    that a commit cannot have."""
    if unknown := sorted(set(measures) - {group.group for group in batch.groups}):
        raise ValueError(f"`measures` must name groups of the batch, got {unknown[0]!r}")
    room = MEASURES_MAX - len(TRAINED_MEASURES)
    for group, numbers in measures.items():
        if len(numbers) > room:
            raise ValueError(f"`measures[{group}]` must have at most {room} entries, got {len(numbers)}")
        for name in numbers:
            if not is_word(name):
                raise ValueError(f"a name in `measures[{group}]` must {WORD_FORM}, got {name!r}")
            if name in TRAINED_MEASURES:
                raise ValueError(
                    f"`measures[{group}]` must not have {name!r}, which the trainer measures; choose another name"
                )
    return {
        group: {name: float(value) for name, value in numbers.items() if np.isfinite(value)}
        for group, numbers in measures.items()
    }


def _weighted(
    table: TokenTable, estimate: Estimate, step: OptimizerStep, of_groups: NDArray[np.float64] | None
) -> TokenTable:
    """Return the table with the sample weights multiplied by those of the estimate and `of_groups` [S], and the
    advantages by the factors of the step."""
    for factors in (estimate.sample_weights, of_groups):
        if factors is not None:
            weights = tuple(w * f for w, f in zip(table.sample_weights, factors.tolist(), strict=True))
            table = replace(table, sample_weights=weights)
    if step.advantage_factors is not None:
        advantages = (table.columns["advantages"] * step.advantage_factors).astype(np.float32)
        table = replace(table, columns=table.columns | {"advantages": advantages})
    return table


def _all_of(*masks: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    given = [mask for mask in masks if mask is not None]
    return np.logical_and.reduce(given) if given else None
