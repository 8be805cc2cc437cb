"""Configuration of the vLLM engine. Importable without vLLM, so that `check` and `--help` work in an environment that
lacks it."""

from __future__ import annotations

from typing import Any, Literal

from rollmesh.shared.config.settings import NonNegativeInt, PositiveFloat, PositiveInt, Settings

SET_BY_ENGINE = (
    "model", "tokenizer", "skip_tokenizer_init", "load_format", "dtype", "max_model_len", "max_num_seqs",
    "max_logprobs",
    "logprobs_mode", "weight_transfer_config", "worker_extension_cls", "scheduling_policy", "enforce_eager",
    "kv_cache_memory_bytes", "speculative_config", "pipeline_parallel_size", "data_parallel_size",
)  # fmt: skip
"""Arguments of vLLM that `arguments` must not contain: they follow from the other options, or the engine relies on
their value."""


class VllmEngineConfig(Settings):
    """Model, sizes and memory of the vLLM engine.

    vLLM runs the model in separate processes, which this engine starts and stops. It needs an environment that has
    vLLM: `make setup-vllm` creates one for a host without a GPU, and `inference.python` names its interpreter.
    """

    model: str
    """Folder with `config.json`, and with `tokenizer.json` if stop strings are used. Weights are loaded by `prepare`.
    A mesh sets it to the model of the run."""
    folder: str = ""
    """Folder for the weight files of prepared versions, used by this engine alone. The node sets it to a folder beside
    its chunks, so that files are linked and not copied. Empty: a temporary folder."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """`float32`, `bfloat16` or `float16`. Log-probs agree with a trainer's within this precision."""
    slots_max: PositiveInt = 64
    """Most requests that vLLM runs at once. This is the largest decode batch."""
    context_max: NonNegativeInt = 0
    """Most tokens of a sequence, prefix and new tokens together. 0: the positions of the model
    (max_position_embeddings)."""
    queue_max: PositiveInt = 1024
    """Most requests that wait for a slot; one more is rejected with EngineBusy."""
    score_slots: PositiveInt = 8
    """Sequences that are scored at once, beside the running requests."""
    kv_bytes: NonNegativeInt = 0
    """Memory of the key-value cache, in bytes. 0: 1 GiB on a CPU; on a GPU, what vLLM measures as free (see
    `memory_share`)."""
    memory_share: PositiveFloat = 0.9
    """Share of the GPU's memory that vLLM may use for weights and cache. Without effect if `kv_bytes` is set."""
    flush_tokens: PositiveInt = 8
    """Number of tokens after which a running request emits a delta; the first token is emitted at once. A larger value
    costs less per token, a smaller one loses less if the node crashes."""
    prepared_max: PositiveInt = 2
    """Most prepared versions; preparing one more drops the oldest of them."""
    threads: PositiveInt = 1
    """OpenMP threads of a worker on a CPU. More than one is very slow on shared cores, because OpenMP barriers spin."""
    eager: bool = True
    """Run the model without compilation and CUDA graphs. False starts more slowly and decodes faster on a GPU."""
    tied_repair: bool = True
    """Pack the output layer again after an update of a model with tied embeddings, and verify it. vLLM 0.32 on a CPU
    keeps the packed copy of the old weights otherwise. False is for a test of the probes, which then reject every
    version."""
    start_s: PositiveFloat = 600.0
    """Limit of the start of vLLM, in seconds."""
    close_s: PositiveFloat = 10.0
    """Time that the processes of vLLM have to exit, in seconds; then they are killed."""
    arguments: dict[str, Any] = {}
    """Further arguments of vLLM's `AsyncEngineArgs`, for example `{tensor_parallel_size: 2, block_size: 32}`."""

    def check_fields(self) -> None:
        if fixed := sorted(set(self.arguments) & set(SET_BY_ENGINE)):
            raise ValueError(
                f"`arguments` must not contain {', '.join(fixed)}: the engine sets them from its other options"
            )
