"""Configuration of the embedded torch engine. Importable without torch, so that `check` and `--help` stay fast."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from rollmesh.shared.config.settings import NonNegativeInt, PositiveInt, Settings

Forward = Literal["auto", "built_in", "cached", "recompute"]


class TorchEngineConfig(Settings):
    """Model, sizes and memory of the torch engine.

    The key-value cache has `2 * layers * slots_max * kv_heads * context_max * head_dim` numbers of `dtype`, allocated
    once at the start. All versions share it. The weights need at most `versions_max + prepared_max` times the size of
    one set in `dtype`, and one further set while a version is loaded.
    """

    model: str
    """Folder with `config.json`, and with `tokenizer.json` if stop strings are used. Weights are loaded by `prepare`.
    A mesh sets it to the model of the run."""
    forward: Forward = "auto"
    """How the model runs. `auto` takes the first of the others whose log-probs equal the plain transformers forward:
    `built_in` is the engine's decoder, `cached` is transformers with the model's cache, one sequence at a time, and
    `recompute` is transformers with the whole sequence at every step. The others are tools for tests."""
    device: str = "cpu"
    """Torch device, e.g. `cpu` or `cuda:0`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """`float32`, `bfloat16` or `float16`. Log-probs agree with a trainer's within this precision."""
    slots_max: PositiveInt = 64
    """Most sequences in the cache at once, running and resident together. This is the largest decode batch."""
    context_max: PositiveInt = 1024
    """Most tokens of a sequence, prefix and new tokens together."""
    queue_max: PositiveInt = 1024
    """Most requests that wait for a slot; one more is rejected with EngineBusy."""
    resident_slots_max: NonNegativeInt = 64
    """Most ended sequences whose cache is kept for reuse; the least recently used is evicted first, or when a request
    needs its slot. 0 turns reuse across requests off."""
    prefill_tokens_max: PositiveInt = 2048
    """Most prefix tokens computed per step. Longer prefixes are cut into chunks, between which running sequences
    continue. A larger value gives more throughput, a smaller one a steadier token rate for the others. It also limits
    the batch of `score`."""
    flush_tokens: PositiveInt = 8
    """Number of tokens after which a running request emits a delta; the first token is emitted at once. A larger value
    costs less per token, a smaller one loses less if the node crashes."""
    hold_ms: Annotated[float, Meta(ge=0, le=100)] = 5.0
    """Longest time that a step waits for further requests, in milliseconds, less the CPU time of the step before it. A
    step waits while few sequences are live and others are expected soon, because steps with more sequences cost less
    CPU per token. A token comes at most this much later. A client that is alone does not wait. 0 turns it off, for the
    lowest latency."""
    prepared_max: PositiveInt = 2
    """Most prepared versions; preparing one more drops the oldest of them."""
    versions_max: PositiveInt = 1
    """Most sets of weights from which requests are sampled at once: the active one, and older ones for evaluations and
    for pinned requests. Each one more needs the memory of one set. With 1, an evaluation delays the activation of newer
    weights. A step runs one forward per version in use."""
    threads: PositiveInt = 1
    """Torch threads of the compute thread. More than one is very slow on shared cores, because OpenMP barriers spin."""
    removed = {"torchscript": "the forward is eager code"}
