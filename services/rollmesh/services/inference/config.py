"""Configuration of an inference node."""

from __future__ import annotations

from typing import Literal

from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import (
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
)
from rollmesh.shared.membership.membership import MembershipConfig
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.weights.transfer import TransferConfig


class InferenceConfig(Settings):
    """Settings of one inference node: engine, folder of the weights, limits."""

    directory: NonEmptyStr = "inference"
    """Folder for fetched chunks, used by this node alone. On the depot's file system, chunks are linked and not
    copied."""
    engine: Extension = Extension("torch")
    """The engine that runs the model: `torch`, `vllm`, `sglang` and `vllm_server` (a running server, see
    docs/engines.md), `fake` (no model, for tests), or your own as `file.py:Name`."""
    python: str = ""
    """Python interpreter of the node's process, relative to the configuration's folder, for an engine that needs
    another environment. Empty: this interpreter; for the engine `vllm`, if this one has no vLLM,
    `.venv-vllm/bin/python` in the working directory. A node that joins from another host runs with the interpreter of
    its command."""
    policy: str = "main"
    """The policy whose weights this node serves."""
    kv: Literal["recompute", "keep"] = "recompute"
    """What happens to the key-value cache of running sequences when weights change. `recompute` rebuilds it, so that
    log-probs equal a forward; `keep` keeps it, without a pause."""
    cast_weights: bool = False
    """Whether weights may be rounded to the engine's `dtype`, such as float32 weights for an engine in bfloat16. If
    false, a version that would be rounded is rejected. Conversions that keep every value, such as bfloat16 to float32,
    are always allowed. The probes of a rounded version have a tolerance of 1 nat."""
    quota_bytes: PositiveInt = 64 << 30
    """Limit of `directory`, in bytes. Two versions, and the files assembled from their chunks, must fit."""
    capacity: PositiveInt = 64
    """Number of sequences that the node reports as its capacity. Routers divide its load by it."""
    streams_max: PositiveInt = 256
    """Most Generate streams at once; one more is rejected. A client needs one stream for all its requests."""
    requests_per_stream_max: PositiveInt = 4096
    """Most live requests of one stream; one more is rejected with OVERLOADED."""
    outbox_tokens_max: PositiveInt = 1 << 20
    """Most tokens that wait for a client that does not read; beyond it, its stream ends. A token takes about 12
    bytes."""
    frame_tokens_max: PositiveInt = 1 << 16
    """Most tokens in one frame, which keeps a backlog below the message limit."""
    prepare_s: PositiveFloat = 600.0
    """Limit of fetching and loading one version, in seconds."""
    activate_s: PositiveFloat = 60.0
    """Limit of swapping and scoring the probes, in seconds; beyond it, the node quarantines itself."""
    drain_s: NonNegativeFloat = 30.0
    """Time that running requests have after a drain command, in seconds; then they end with DRAINING."""
    server: ServerConfig = ServerConfig()
    """The gRPC server."""
    membership: MembershipConfig = MembershipConfig()
    """The stream to the coordinator."""
    delta_bytes_max: NonNegativeInt = 256 << 20
    """Memory for deltas that arrived, for other nodes. 0 keeps none."""
    egress_bytes_per_s: NonNegativeFloat = 0.0
    """Limit of what this node sends to other nodes, in bytes per second; 0 means unlimited."""
    transfer: TransferConfig = TransferConfig()
    """How chunks are fetched."""
