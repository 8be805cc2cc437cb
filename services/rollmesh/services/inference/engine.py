"""The port between an inference node and the engine that runs the model.

It fits an embedded torch engine, vLLM's AsyncLLM (`generate`, `abort`, `pause_generation`, weight-transfer API) and
SGLang's server (`/generate`, `/abort_request`, `/update_weights_from_disk`). One conformance suite
(`tests/conformance`) tests every engine. The servicer handles targets, versions and streams; the engine handles tokens
and weights.

Threads: every method is called on the event loop and must not block it. The model runs in the engine's own thread or
process, so that a busy engine never expires a lease. `emit` is called on the event loop. Every method except `load`,
`cancel` and `discard` raises EngineBroken if the engine does not run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.shared.config.plugin import Plugin, required, required_attribute
from rollmesh.shared.config.registry import Extension, Registry
from rollmesh.shared.domain.engine_capabilities import EngineCapabilities
from rollmesh.shared.domain.outputs import NUM_TOP
from rollmesh.shared.domain.trajectory import (
    Columns,
    FinishReason,
    FloatArray,
    IntArray,
    SamplingParams,
    Segment,
    sampled_segment,
)
from rollmesh.shared.domain.versions import PolicyVersion

NO_VERSION = PolicyVersion(policy="", step=0)
"""Version of a delta without tokens that is sent before any version was active."""


class KvPolicy(Enum):
    """How the key-value cache of running sequences is treated when weights change."""

    RECOMPUTE = "recompute"
    """Rebuild cached keys and values under the new weights, so that log-probs equal a teacher-forced forward."""
    KEEP = "keep"
    """Keep the cache, without a pause. Later tokens attend to old keys and values; log-probs are the true behavior
    log-probs."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation request. `token_ids` [n] is the whole prefix; the engine looks up how much of it is cached."""

    request_id: str
    token_ids: IntArray
    params: SamplingParams
    session: str = ""
    """Requests of one session share a prefix. The engine may use it to retain the cache; results do not depend on
    it."""
    priority: int = 0
    """Requests with a higher priority run first when the batch is full."""
    outputs: tuple[str, ...] = ()
    """Names of further per-token outputs, each one of the capabilities; `rollmesh.shared.domain.outputs` defines
    them."""
    num_top: int = NUM_TOP
    """k of the output `top_k`."""
    version: PolicyVersion | None = None
    """The only version that may sample the request, one of `Engine.held`. None: the active one at each step."""
    num_resumed: int = 0
    """Number of tokens at the end of `token_ids` that another node sampled for this request. A stop string may begin in
    them."""


class GenerateDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request, all sampled by one version. Only the last delta has a `finish`, and only it may have
    no tokens; its version is then the active one and has no meaning.

    `logprobs` are under the sampling distribution, `logprobs_model` under the plain softmax; both are [n] float32.
    `kv_step_oldest` is the step of the oldest weights whose keys and values the tokens attended to, above
    `version.step` if a roll-back has made them void. Under RECOMPUTE it equals `version.step`.
    """

    request_id: str
    token_ids: IntArray
    logprobs: FloatArray
    logprobs_model: FloatArray | None
    version: PolicyVersion
    kv_step_oldest: int
    arrays: Columns = msgspec.field(default_factory=dict)
    """Exactly the arrays of the requested outputs by name, each [n] or [n, k], float32, float16, int32 or uint8, floats
    finite."""
    finish: FinishReason | None = None
    error: str = ""
    """Cause of the failure; set with FinishReason.ERROR. The node reports it as an infra failure."""
    num_prompt_cached: int = 0
    """Prefix tokens found in the cache; set in the first delta only."""
    num_prompt_prefilled: int = 0
    """Prefix tokens computed for this request; set in the first delta only. In the next turn of a session these are its
    new tokens and the last sampled one, which was never fed to the model."""
    queued_s: float = 0.0
    """Time that the request waited for a slot, in seconds; set in the first delta only."""

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


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """`logprobs` [n] has the log-prob of token i given tokens < i under the plain softmax; entry 0 is 0."""

    logprobs: FloatArray
    version: PolicyVersion
    arrays: Columns = msgspec.field(default_factory=dict)
    """The arrays of the requested outputs, [n] or [n, k], of the plain softmax; row 0 is 0, and -1 for ids."""


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Current load, and counters since the start."""

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
    """Total duration of these steps, in seconds."""
    held_s: float = 0.0
    """Total time that due steps waited for further requests, in seconds. It is not part of `step_s`."""
    kv_tokens_reusable: int = 0
    """Part of `kv_tokens_used` that belongs to ended requests and is evicted when a new one needs the memory."""
    num_preempted: int = 0
    """Requests that lost their key-value cache because it was full, and were computed again."""
    forward: str = ""
    """Name of the forward in use, for an engine with several ones; else empty."""

    @property
    def kv_pressure(self) -> float:
        """Share of the key-value cache that running requests hold; 0 if its size is not known."""
        return (self.kv_tokens_used - self.kv_tokens_reusable) / self.kv_tokens_max if self.kv_tokens_max else 0.0


class EngineBusy(Exception):
    """The waiting queue is full. The servicer returns RESOURCE_EXHAUSTED with RetryInfo."""


class EngineBroken(Exception):
    """The engine does not run: it is not started, it is closed, or its compute failed with the cause in the message."""


class WeightsMismatch(Exception):
    """The prepared weights do not fit the model (names, shapes, dtype, non-finite values)."""


Emit = Callable[[GenerateDelta], None]


class Engine(Plugin):
    """Base of inference engines: continuous batching over one model, with a second buffer for the next weights.

    Constructed as `cls(options=...)`, or as `cls()` if the class has no `Options`. An engine that runs the model of the
    run declares it by the fields of its `Options`: `model` (the folder, which the mesh sets unless the configuration
    does), `context_max` (as below) and, if it uses torch, `device`. An option `folder` is set to a folder for the
    engine's files, on the file system of the weights.
    """

    @classmethod
    def check_model(cls, options: Any) -> None:
        """Raise ConfigError for a model that the engine cannot serve. `rollmesh check` calls it."""

    @required_attribute
    def capabilities(self) -> EngineCapabilities:
        """What it can do, known once it is constructed. Construction has no other effects, and does not import a large
        library."""
        raise NotImplementedError

    @required_attribute
    def active(self) -> PolicyVersion | None:
        """The version that samples now. None until the first `activate`."""
        raise NotImplementedError

    @required_attribute
    def held(self) -> tuple[PolicyVersion, ...]:
        """The versions that can sample now: the active one, then older ones from the newest on. Empty until the first
        `activate`."""
        raise NotImplementedError

    @required_attribute
    def context_max(self) -> int:
        """Most tokens of a sequence, prefix and new tokens together."""
        raise NotImplementedError

    @required
    async def start(self) -> None:
        """Load everything except the weights. Raises ConfigError for a model that the engine cannot serve."""
        raise NotImplementedError

    @required
    async def close(self) -> None:
        """Stop within seconds. Running requests end with CANCELLED."""
        raise NotImplementedError

    @required
    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        """Queue a request. The engine calls `emit` with its deltas in order, at most once per step; `emit` must not
        block or raise. A request whose prefix and `max_tokens` exceed the context ends with LENGTH when the context is
        full.

        Raises ValueError for a request that can never run (empty or too long prefix, unknown token or output, duplicate
        id, a version that is not held), and EngineBusy if the queue is full.
        """
        raise NotImplementedError

    @required
    def cancel(self, request_id: str) -> None:
        """End a request. Its last delta has CANCELLED and the tokens that were not emitted yet. Unknown ids are
        ignored."""
        raise NotImplementedError

    @required
    async def score(
        self,
        sequences: Sequence[IntArray],
        *,
        version: PolicyVersion | None = None,
        outputs: tuple[str, ...] = (),
        num_top: int = NUM_TOP,
    ) -> list[ScoreResult]:
        """Return teacher-forced log-probs and `outputs` under the active weights, or under a held `version`, never
        under a mix of two.

        Raises ValueError for an empty or too long sequence, for an unknown token or output, and if no version is active
        or `version` is not held.
        """
        raise NotImplementedError

    @required
    async def prepare(self, version: PolicyVersion, tensors: Mapping[str, Path]) -> None:
        """Load the safetensors files into the second buffer while serving. Idempotent. Raises WeightsMismatch. The
        buffer is bounded, and an engine may drop the oldest prepared version for a newer one.

        `tensors` maps the name of a file to its verified local path. Together the files contain one whole state dict.
        """
        raise NotImplementedError

    @required
    async def activate(self, version: PolicyVersion, kv: KvPolicy, retain: Collection[PolicyVersion] = ()) -> None:
        """Swap the prepared weights in between two steps. Returns at once if they are active already. The tokens that
        the old weights sampled are emitted before this returns. Raises KeyError if the version is not prepared.

        The held versions of `retain`, at most `versions_max` - 1, stay held. All others are dropped, and their requests
        end with CANCELLED.
        """
        raise NotImplementedError

    @required
    def discard(self, version: PolicyVersion) -> None:
        """Drop a prepared version, or a held one that is not active. Unknown versions are ignored."""
        raise NotImplementedError

    @required
    def load(self) -> EngineLoad:
        """Return the current load."""
        raise NotImplementedError

    async def failed(self) -> None:
        """Raise EngineBroken when the engine cannot run again in this process; the node then exits, and a supervisor
        restarts it."""
        await asyncio.Event().wait()

    async def activate_scored(
        self, version: PolicyVersion, kv: KvPolicy, probes: Sequence[IntArray], retain: Collection[PolicyVersion] = ()
    ) -> list[ScoreResult]:
        """Do what `activate` does, and score the token rows `probes` under the new weights, before these sample where
        the engine can. Clients wait for these scores."""
        await self.activate(version, kv, retain)
        return await self.score(probes) if probes else []


INFERENCE_ENGINES = Registry(
    "inference engine",
    {
        "torch": "rollmesh.services.inference.engines.torch.engine:TorchEngine",
        "vllm": "rollmesh.services.inference.engines.vllm.engine:VllmEngine",
        "sglang": "rollmesh.services.inference.engines.attached.sglang:SglangEngine",
        "vllm_server": "rollmesh.services.inference.engines.attached.vllm_server:VllmServerEngine",
        "fake": "rollmesh.testing.fake_engine:FakeEngine",
    },
    Engine,
)


def takes_option(options: type[msgspec.Struct] | None, name: str) -> bool:
    """Return whether the `Options` of an engine declare a field."""
    return options is not None and name in options.__struct_fields__


def with_model(engine: Extension, base_dir: str | Path | None, folder: Callable[[], Path]) -> Extension:
    """Return the choice of an engine with `folder()` as its model, if it takes one and the configuration names none."""
    return _with_option(engine, base_dir, "model", folder)


def with_folder(engine: Extension, base_dir: str | Path | None, folder: Path) -> Extension:
    """Return the choice of an engine with `folder` for its files, if it takes one and the configuration names none."""
    return _with_option(engine, base_dir, "folder", lambda: folder)


def _with_option(engine: Extension, base_dir: str | Path | None, option: str, value: Callable[[], Path]) -> Extension:
    if option in engine.options or not takes_option(INFERENCE_ENGINES.options_type(engine.name, base_dir), option):
        return engine
    return msgspec.structs.replace(engine, options={option: str(value()), **engine.options})
