"""The engine port: what an inference node asks of whatever runs the model.

Shaped so that an embedded torch engine, vLLM's AsyncLLM (`generate`, `abort`, `pause_generation`, weight-transfer API) and
SGLang's server (`/generate`, `/abort_request`, `/update_weights_from_disk`) fit behind it. One conformance suite
(`tests/conformance`) runs on every engine. The servicer above knows leases, versions and streams; the engine knows
tokens and weights.

Threads: every method is called on the event loop and must not block it; model compute runs in the engine's own thread
or process, so that a busy engine never expires a lease. `emit` is called on the event loop. Every method but `load`, `cancel` and
`discard` raises EngineBroken on an engine that does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from rollmesh.shared.trajectory import (
    Columns,
    FinishReason,
    FloatArray,
    IntArray,
    SamplingParams,
    Segment,
    sampled_segment,
)
from rollmesh.shared.versions import PolicyVersion

NO_VERSION = PolicyVersion(policy="", step=0)
"""Stands in a delta without tokens that is sent before any version was active."""


class KvPolicy(Enum):
    """What happens to the key-value cache of running sequences when weights change."""

    RECOMPUTE = "recompute"
    """Cached keys and values are rebuilt under the new weights: log-probs equal a teacher-forced forward."""
    KEEP = "keep"
    """No pause and no recompute: later tokens attend to old keys and values; log-probs are the true behaviour ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One continuation. `token_ids` [n] is the whole prefix; the engine finds out how much of it is cached."""

    request_id: str
    token_ids: IntArray
    params: SamplingParams
    session: str = ""
    """Turns of one session share their prefix; a hint for cache retention, never needed for correctness."""
    priority: int = 0
    """Higher runs first when the batch is full."""
    outputs: tuple[str, ...] = ()
    """Names of the further per-token arrays that the deltas must have, each one of `Engine.outputs`."""
    num_resumed: int = 0
    """The last so many of `token_ids` are the answer so far, sampled elsewhere: a stop string may begin in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateDelta:
    """New tokens of one request, all sampled by one version. The last delta has a `finish`, and may have no tokens: its
    version is then the active one, and says nothing.

    `logprobs` are under the sampling distribution, `logprobs_model` under the plain softmax; both [n] float32.
    `kv_step_oldest` is the oldest step behind the cache attended to (equals `version.step` under RECOMPUTE).
    """

    request_id: str
    token_ids: IntArray
    logprobs: FloatArray
    logprobs_model: FloatArray | None
    version: PolicyVersion
    kv_step_oldest: int
    arrays: Columns = field(default_factory=dict)
    """Exactly the requested outputs by name, each [n] or [n, k], of type float32, float16, int32 or uint8, floats finite."""
    finish: FinishReason | None = None
    error: str = ""
    """Set with FinishReason.ERROR: what broke, for an infra failure."""
    num_prompt_cached: int = 0
    """Prefix tokens found in the cache; on the first delta only."""
    num_prompt_prefilled: int = 0
    """Prefix tokens computed for this request; on the first delta only. In the next turn of a session these are its new
    tokens and the last sampled one, which was never fed."""
    queued_s: float = 0.0
    """Seconds it waited for a slot; on the first delta only."""

    def segment(self) -> Segment:
        """Return the new tokens as a segment."""
        return sampled_segment(
            self.token_ids,
            self.logprobs,
            self.version,
            kv_step_oldest=self.kv_step_oldest,
            logprobs_model=self.logprobs_model,
            arrays=self.arrays,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """`logprobs` [n]: log-prob of token i given tokens < i under the plain softmax; entry 0 is 0."""

    logprobs: FloatArray
    version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """A moment's load, and counters since start."""

    num_running: int
    num_waiting: int
    slots_max: int
    kv_tokens_used: int
    kv_tokens_max: int
    tokens_generated: int
    tokens_prefilled: int
    tokens_prefix_hit: int
    steps: int
    step_s: float = 0.0
    """Seconds in these steps."""
    forward: str = ""
    """How the model is run, where the engine knows several ways: a name of its settings."""


class EngineBusy(Exception):
    """The waiting queue is full; the servicer answers RESOURCE_EXHAUSTED with RetryInfo."""


class EngineBroken(Exception):
    """The engine does not run (not started, closed, or its compute ended with the cause in the message)."""


class WeightsRejected(Exception):
    """The prepared weights do not fit the model (names, shapes, dtype, non-finite values)."""


Emit = Callable[[GenerateDelta], None]


class Engine(Protocol):
    """Continuous batching over one model, with a second buffer for the next weights."""

    @property
    def outputs(self) -> frozenset[str]:
        """Names of the per-token arrays that it can return beside log-probs; an attribute of the class, which `check` reads."""
        ...

    @property
    def active(self) -> PolicyVersion | None:
        """The version that samples now; None until the first `activate`."""
        ...

    @property
    def context_max(self) -> int:
        """Most tokens a sequence may have, prefix and new ones together."""
        ...

    async def start(self) -> None:
        """Load what can be loaded. Raises ConfigError for a model that the engine cannot serve."""
        ...

    async def close(self) -> None:
        """Stop within seconds; running requests end CANCELLED."""
        ...

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        """Queue a request; `emit` is called with its deltas in order, at most one per engine step. It must neither block
        nor raise. A request whose prefix and `max_tokens` exceed the context ends with LENGTH when the context is full.

        Raises ValueError for a request that can never run (empty or too long prefix, unknown token, duplicate id),
        EngineBusy when the queue is full.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """End a request: its last delta carries the partial tokens not yet emitted and CANCELLED. Unknown ids are ignored."""
        ...

    async def score(self, sequences: Sequence[IntArray]) -> list[ScoreResult]:
        """Teacher-forced log-probs under the active weights; never under a mix of two versions.

        Raises ValueError for an empty or too long sequence, an unknown token, or while no version is active.
        """
        ...

    async def prepare(self, version: PolicyVersion, tensors: Mapping[str, Path]) -> None:
        """Load the safetensors files into the second buffer while serving. Idempotent. Raises WeightsRejected. The buffer
        is bounded: engines may drop the oldest prepared version for a newer one.

        `tensors` maps a file's name to its verified local path; together they hold one whole state dict.
        """
        ...

    async def activate(self, version: PolicyVersion, kv: KvPolicy) -> None:
        """Swap the prepared weights in between two steps; returns at once if they are active already. Deltas with what the
        old weights sampled are emitted before this returns. Raises KeyError if that version is not prepared."""
        ...

    def discard(self, version: PolicyVersion) -> None:
        """Drop a prepared version; unknown ones are ignored."""
        ...

    def load(self) -> EngineLoad: ...
