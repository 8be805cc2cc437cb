"""The step loop of the torch engine, without its thread: take commands, run one `step` at a time, return deltas.

Before each step, `control` runs one unit of control work: a weight swap with the first micro-batch of its probes, or a
micro-batch of scoring. A step admits waiting requests, computes prefixes, and decodes one token for every ready
sequence, with one batch per version in use. Invariants: a request gets at most one delta per step, except that a swap
first emits the tokens that the old weights sampled; a delta never spans versions; a request ends exactly once. The
prefix of a sequence is computed in the step that admits it, and its first token in that step or the next.

A request with a version is sampled by that version alone, and a swap that retains the version does not touch it. Every
other sequence moves to the new weights. Under `recompute`, the swap drops its cache, and the ordinary prefill rebuilds
it, sharing common prefixes. Collaborators: `scheduler` decides, `slots` holds the state, a `runner` computes. Not
thread-safe.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.services.inference.engine import (
    NO_VERSION,
    EngineLoad,
    GenerateDelta,
    GenerateRequest,
    KvPolicy,
    ScoreResult,
)
from rollmesh.services.inference.engines.common.stop import STOP_ID, StopRules
from rollmesh.services.inference.engines.torch.config import TorchEngineConfig
from rollmesh.services.inference.engines.torch.row_rules import SlotRules
from rollmesh.services.inference.engines.torch.runner import Drawn, LoadedWeights, Runner, Span
from rollmesh.services.inference.engines.torch.scheduler import Copy, Scheduler, Sequence
from rollmesh.services.inference.engines.torch.slots import PrefixReuse, Slots
from rollmesh.shared.domain.outputs import NUM_TOP, array_names
from rollmesh.shared.domain.trajectory import FinishReason, IntArray
from rollmesh.shared.domain.versions import PolicyVersion

_DONE = object()
ScoreDone = Callable[[list[ScoreResult] | ValueError], None]


@dataclass(frozen=True, slots=True)
class _WeightSet:
    """One set of weights that can sample."""

    version: PolicyVersion
    weights: LoadedWeights
    number: int
    """Number by which `Slots.sampler` names it."""


class TorchCore:
    """Continuous batching over one runner."""

    def __init__(self, config: TorchEngineConfig, runner: Runner, stop_rules: StopRules) -> None:
        self._config, self._runner, self._stop_rules = config, runner, stop_rules
        self._slots = Slots(config.slots_max, config.context_max, config.resident_slots_max, runner.reuse)
        self._rules = SlotRules(config.slots_max, runner.vocab_size)
        self._columns: dict[str, NDArray[Any]] = {}
        """Columns by name of the sampled tokens that are not emitted yet, [slots, flush_tokens] or [slots,
        flush_tokens, k]. A token is at the remainder of its position, and so takes the entry of one that was
        emitted."""
        self._scheduler = Scheduler(self._slots, config.prefill_tokens_max)
        self._sequences: dict[str, Sequence] = {}
        self._control: deque[Iterator[object]] = deque()
        self._answers: list[Callable[[], None]] = []
        self._deltas: list[GenerateDelta] = []
        self._held: dict[PolicyVersion, _WeightSet] = {}
        self._numbers = itertools.count()
        self.version: PolicyVersion = NO_VERSION
        """The active version."""
        self._num_steps = self._num_generated = self._num_prefilled = self._num_hit = 0
        self._step_s = 0.0

    @property
    def idle(self) -> bool:
        """Whether there is no work until the next command."""
        return not self._control and (not self._held or not self._sequences)

    @property
    def has_deltas(self) -> bool:
        """Whether deltas wait for the next step to return them."""
        return bool(self._deltas)

    @property
    def has_control(self) -> bool:
        """Whether control work waits: a weight swap or scoring."""
        return bool(self._control)

    @property
    def num_live(self) -> int:
        """Number of requests that have not ended, running or waiting."""
        return len(self._sequences)

    def submit(self, request: GenerateRequest) -> None:
        sequence = self._sequences[request.request_id] = self._scheduler.enqueue(request)
        sequence.submitted_s = time.perf_counter()
        if request.version is not None and request.version not in self._held:
            self._finish(sequence, FinishReason.CANCELLED)  # it was dropped since the request was checked

    def cancel(self, request_id: str) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.CANCELLED)

    def cancel_all(self) -> None:
        for request_id in list(self._sequences):
            self.cancel(request_id)

    def activate(
        self,
        version: PolicyVersion,
        weights: LoadedWeights | None,
        kv: KvPolicy,
        done: Callable[[], None],
        retain: Collection[PolicyVersion] = (),
        probes: list[IntArray] | None = None,
        scored: ScoreDone | None = None,
    ) -> None:
        """Swap after the control work queued before. Without `weights`, `version` is a held one.

        The `probes` are scored under the new weights at once, and `scored` gets the result. If they fit into one
        micro-batch, the new weights sample nothing before.
        """
        self._control.append(self._swap(version, weights, kv, done, retain, probes or [], scored))

    def discard(self, version: PolicyVersion) -> None:
        """Drop a held version that is not active. Its requests end with CANCELLED."""
        if version != self.version:
            self._keep(set(self._held) - {version})

    def score(
        self,
        sequences: list[IntArray],
        outputs: tuple[str, ...],
        num_top: int,
        done: ScoreDone,
        version: PolicyVersion | None = None,
    ) -> None:
        """Score after the control work queued before, under `version` or the weights active then, without a swap in
        between."""
        self._control.append(self._score(sequences, outputs, num_top, done, version))

    def control(self) -> bool:
        """Run one unit of control work, if any waits. Return whether callers wait for a result: take the deltas, then
        call `answer`."""
        if self._control and next(self._control[0], _DONE) is _DONE:
            self._control.popleft()
        return bool(self._answers)

    def step(self) -> list[GenerateDelta]:
        """Run one step. Return the deltas due since the last one, in order."""
        if self._held and self._sequences:
            start_s = time.perf_counter()
            self._step_model()
            self._num_steps += 1
            self._step_s += time.perf_counter() - start_s
        return self.take_deltas()

    def take_deltas(self) -> list[GenerateDelta]:
        """Return the deltas due since the last call, in order."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def answer(self) -> None:
        """Call the callbacks of finished control work. Call this after the deltas were sent, so that callers see the
        tokens of the old weights before the swap."""
        answers, self._answers = self._answers, []
        for done in answers:
            done()

    def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            slots_max=self._config.slots_max,
            kv_tokens_used=self._slots.kv_tokens_used,
            kv_tokens_max=self._config.slots_max * self._config.context_max,
            kv_tokens_reusable=self._slots.kv_tokens_reusable,
            tokens_generated=self._num_generated,
            tokens_prefilled=self._num_prefilled,
            tokens_prefix_hit=self._num_hit,
            steps=self._num_steps,
            step_s=self._step_s,
        )

    def _step_model(self) -> None:
        for sequence in self._scheduler.admit(self.version):
            self._begin(sequence)
        for held in list(self._held.values()):
            sampled = self._prefill(held)
            ready = self._scheduler.ready(held.number)
            if sampled.size:
                ready = ready[~np.isin(ready, sampled)]
            if ready.size:
                self._decode(held, ready)

    def _begin(self, sequence: Sequence) -> None:
        request, slot = sequence.request, sequence.slot
        length_max = min(sequence.num_prompt + request.params.max_tokens, self._config.context_max)
        self._rules.set(slot, request, length_max=length_max, marks=self._stop_rules.marks(request.params))
        self._slots.sampler[slot] = self._held[request.version or self.version].number
        self._num_hit += sequence.num_cached
        sequence.queued_s = time.perf_counter() - sequence.submitted_s

    def _prefill(self, held: _WeightSet) -> NDArray[np.int64]:
        """Carry out the prefill plan of a version. Return the slots that got a token."""
        slots, plan = self._slots, self._scheduler.plan_prefill(held.version, held.number)
        self._copy(plan.copies)
        sampled = np.empty(0, np.int64)
        if plan.chunks:
            rows, counts = (np.array(column, np.int64) for column in zip(*plan.chunks, strict=True))
            starts = slots.kv_len[rows]
            spans = [
                Span(slot=slot, start=start, tokens=slots.tokens[slot, start : start + count])
                for slot, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True)
            ]
            complete = np.flatnonzero(starts + counts == slots.length[rows])
            sampled = rows[complete]
            rules = self._rules.sampling(sampled, slots.length[sampled])
            drawn = self._runner.prefill(held.weights, spans, complete, rules)
            self._computed(held.version, rows, counts)
            self._num_prefilled += int(counts.sum())
            self._accept(sampled, drawn)
        self._copy(plan.copies_after)
        return sampled

    def _decode(self, held: _WeightSet, ready: NDArray[np.int64]) -> None:
        slots = self._slots
        positions = slots.length[ready] - 1
        tokens = slots.tokens[ready, positions].astype(np.int64)
        rules = self._rules.sampling(ready, positions + 1)
        drawn = self._runner.decode(held.weights, tokens, positions, ready, rules)
        self._computed(held.version, ready, np.ones_like(ready))
        self._num_prefilled += int((self._rules.flush_at[ready] == 0).sum())
        self._accept(ready, drawn)

    def _copy(self, copies: list[Copy]) -> None:
        groups: dict[tuple[int, int], list[int]] = {}
        for copy in copies:
            groups.setdefault((copy.source, copy.num_tokens), []).append(copy.slot)
        for (source, num_tokens), targets in groups.items():
            self._runner.copy_prefix(source, targets, num_tokens)
            for slot in targets:
                self._slots.adopt(slot, source, num_tokens)
                self._num_hit += num_tokens
                if self._rules.flush_at[slot] == 0:
                    self._scheduler.running[slot].num_cached = num_tokens

    def _computed(self, version: PolicyVersion, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        for slot in rows[self._slots.kv_len[rows] == 0].tolist():
            self._slots.stamp(slot, version)
        self._slots.kv_len[rows] += counts

    def _accept(self, rows: NDArray[np.int64], drawn: Drawn) -> None:
        """Append one drawn token per row. Only rows that end or are due for a delta are handled one by one."""
        slots, rules = self._slots, self._rules
        positions = slots.length[rows]
        slots.tokens[rows, positions] = drawn.tokens
        self._store(rows, positions % self._config.flush_tokens, drawn)
        slots.length[rows] = lengths = positions + 1
        self._num_generated += len(rows)
        marks = rules.ends[rows, drawn.tokens]
        full = lengths >= rules.length_max[rows]
        events = np.flatnonzero((marks != 0) | full | (lengths >= rules.flush_at[rows]))
        for event in events.tolist():
            self._after_token(self._scheduler.running[int(rows[event])], int(marks[event]), bool(full[event]))

    def _store(self, rows: NDArray[np.int64], places: NDArray[np.int64], drawn: Drawn) -> None:
        for name, values in drawn.columns.items():
            size = (self._config.slots_max, self._config.flush_tokens, *values.shape[1:])
            held = self._columns.get(name)
            if held is None or held.shape[2:] < size[2:]:  # top_k is as wide as the largest k so far
                wider = np.zeros(size, values.dtype)
                if held is not None:
                    wider[:, :, : held.shape[2]] = held
                held = self._columns[name] = wider
            if values.ndim == 1:
                held[rows, places] = values
            else:
                held[rows, places, : values.shape[1]] = values

    def _after_token(self, sequence: Sequence, mark: int, full: bool) -> None:
        if mark & STOP_ID or (mark and self._ends_text(sequence)):
            self._finish(sequence, FinishReason.STOP)
        elif full:
            self._finish(sequence, FinishReason.LENGTH)
        elif self._slots.length[sequence.slot] >= self._rules.flush_at[sequence.slot]:
            self._emit(sequence, None)

    def _ends_text(self, sequence: Sequence) -> bool:
        start = sequence.num_prompt - sequence.request.num_resumed
        answer = self._slots.tokens[sequence.slot, start : int(self._slots.length[sequence.slot])]
        return self._stop_rules.ends_text(answer, sequence.request.params.stop)

    def _finish(self, sequence: Sequence, finish: FinishReason) -> None:
        request = sequence.request
        del self._sequences[request.request_id]
        self._emit(sequence, finish)
        if sequence.slot < 0:
            self._scheduler.withdraw(sequence)
            return
        del self._scheduler.running[sequence.slot]
        reusable = self._slots.kv_version[sequence.slot] in self._held
        self._slots.release(sequence.slot, request.session, keep=reusable)

    def _emit(self, sequence: Sequence, finish: FinishReason | None) -> None:
        slot, start = sequence.slot, sequence.num_emitted
        version = sequence.request.version or self.version
        end = int(self._slots.length[slot]) if slot >= 0 else start
        first = slot >= 0 and start == sequence.num_prompt and end > start
        if slot >= 0:
            self._rules.flush_at[slot] = end + self._config.flush_tokens
        sequence.num_emitted = end
        names = ("logprobs", "logprobs_model", *array_names(sequence.request.outputs)) if end > start else ()
        places = np.arange(start, end) % self._config.flush_tokens
        arrays = {name: self._columns[name][slot, places] for name in names}
        for name in array_names(("top_k",)):
            if name in arrays:
                arrays[name] = arrays[name][:, : sequence.request.num_top].copy()
        none = np.empty(0, np.float32)
        self._deltas.append(
            GenerateDelta(
                request_id=sequence.request.request_id,
                token_ids=self._slots.tokens[slot, start:end].copy(),
                logprobs=arrays.pop("logprobs", none),
                logprobs_model=arrays.pop("logprobs_model", none),
                arrays=arrays,
                version=version,
                kv_step_oldest=int(self._slots.kv_step_oldest[slot]) if end > start else version.step,
                finish=finish,
                num_prompt_cached=sequence.num_cached if first else 0,
                num_prompt_prefilled=sequence.num_prompt - sequence.num_cached if first else 0,
                queued_s=sequence.queued_s if first else 0.0,
            )
        )

    def _swap(
        self,
        version: PolicyVersion,
        weights: LoadedWeights | None,
        kv: KvPolicy,
        done: Callable[[], None],
        retain: Collection[PolicyVersion],
        probes: list[IntArray],
        scored: ScoreDone | None,
    ) -> Iterator[None]:
        new = self._held[version] if weights is None else _WeightSet(version, weights, next(self._numbers))
        for slot, sequence in self._scheduler.running.items():
            if sequence.request.version is None:
                self._move(slot, sequence, new, kv)
        self.version, self._held = version, {version: new, **self._held}
        self._keep({version, *retain})
        self._answers.append(done)
        if scored is not None:
            yield from self._score(probes, (), NUM_TOP, scored, version)

    def _move(self, slot: int, sequence: Sequence, new: _WeightSet, kv: KvPolicy) -> None:
        """Let other weights continue a sequence, after the tokens that the old ones sampled."""
        if self._slots.length[slot] > sequence.num_emitted:
            self._emit(sequence, None)
        if kv is KvPolicy.RECOMPUTE or self._slots.reuse is PrefixReuse.NONE:
            self._slots.kv_len[slot] = 0
            sequence.num_cached = 0
        elif self._slots.kv_len[slot]:
            self._slots.kv_version[slot] = None
        self._slots.sampler[slot] = new.number

    def _keep(self, versions: Collection[PolicyVersion]) -> None:
        """Drop the other held versions, their cached prefixes and their requests."""
        self._held = {version: held for version, held in self._held.items() if version in versions}
        for sequence in list(self._sequences.values()):
            if sequence.request.version is not None and sequence.request.version not in self._held:
                self._finish(sequence, FinishReason.CANCELLED)
        self._slots.keep_residents(self._held)

    def _score(
        self,
        sequences: list[IntArray],
        outputs: tuple[str, ...],
        num_top: int,
        done: ScoreDone,
        version: PolicyVersion | None,
    ) -> Iterator[None]:
        held = self._held.get(version or self.version)
        if held is None:
            error = ValueError(f"{version} is not held any more: it was dropped at an update")
            self._answers.append(lambda: done(error))
            return
        scores: list[ScoreResult] = []
        for number, part in enumerate(micro_batches(sequences, self._config.prefill_tokens_max)):
            if number:
                yield
            for columns in self._runner.score(held.weights, part, outputs, num_top):
                arrays = {name: rows for name, rows in columns.items() if name != "logprobs"}
                scores.append(ScoreResult(logprobs=columns["logprobs"], version=held.version, arrays=arrays))
        self._answers.append(lambda: done(scores))


def micro_batches(sequences: list[IntArray], padded_max: int) -> Iterator[list[IntArray]]:
    """Yield consecutive sequences whose padded size is at most `padded_max`. A longer sequence comes alone."""
    part: list[IntArray] = []
    width = 0
    for sequence in sequences:
        width = max(width, len(sequence))
        if part and width * (len(part) + 1) > padded_max:
            yield part
            part, width = [], len(sequence)
        part.append(sequence)
    if part:
        yield part
