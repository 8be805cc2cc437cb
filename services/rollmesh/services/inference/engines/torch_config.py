"""Configuration of the embedded torch engine. Importable without torch, so that `check` and `--help` stay fast."""

from __future__ import annotations

from typing import Literal

import msgspec

Forward = Literal["auto", "built_in", "cached", "recompute"]


class TorchEngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the torch engine runs and how much memory it may take.

    The key-value cache takes `2 * layers * slots_max * kv_heads * context_max * head_dim` numbers of `dtype`, allocated
    once at start.
    """

    model: str
    """Folder with `config.json` and, if stop strings are used, `tokenizer.json`. Weights come through `prepare`."""
    forward: Forward = "auto"
    """How the model runs. `auto` takes the first of the others whose log-probs equal the plain transformers forward: `built_in` is
    the engine's decoder, `cached` is transformers with the model's cache, one sequence at a time, and `recompute` is transformers
    with the whole sequence at every step. The others are tools for tests."""
    device: str = "cpu"
    """Torch device, e.g. `cpu` or `cuda:0`."""
    dtype: str = "float32"
    """`float32`, `bfloat16` or `float16`. Log-probs match a trainer only as far as this precision goes."""
    slots_max: int = 64
    """Sequences in the cache at once, running and resident together: the largest decode batch."""
    context_max: int = 1024
    """Tokens per sequence, prefix and new ones together."""
    queue_max: int = 1024
    """Requests that may wait for a slot; one more is EngineBusy."""
    resident_slots_max: int = 64
    """Ended sequences whose cache is kept for reuse, least recently used out first; 0 turns reuse across requests off.
    Residents never hold up a request: they leave when a slot is needed."""
    prefill_tokens_max: int = 2048
    """Most prefix tokens computed per step: longer prefixes are cut into chunks, between which running sequences go on.
    Larger is more throughput, smaller is a steadier token rate for the others. Also the batch of `score`."""
    flush_tokens: int = 8
    """A running request emits every so many tokens; the first token is emitted at once. Larger costs less per token,
    smaller loses less when the node dies."""
    prepared_max: int = 2
    """Prepared versions held at once; preparing one more drops the oldest of them."""
    threads: int = 1
    """Torch threads of the compute thread. More than one collapses where cores are shared (OpenMP barriers spin)."""
    torchscript: bool = True
    """Run each step as one TorchScript call. Eager torch asks for the interpreter lock back after every operator: beside a
    thread that never rests, a step took 390 ms instead of 14. False is for debugging."""

    def __post_init__(self) -> None:
        for name in (
            "slots_max",
            "context_max",
            "queue_max",
            "prefill_tokens_max",
            "flush_tokens",
            "prepared_max",
            "threads",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.resident_slots_max < 0:
            raise ValueError(f"resident_slots_max must be at least 0, got {self.resident_slots_max}")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {self.dtype!r}")
