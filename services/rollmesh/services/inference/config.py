"""Configuration of an inference node."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rollmesh.shared.membership import MembershipConfig
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.weights.transfer import TransferConfig


class InferenceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one inference node: engine, folder of the weights, limits."""

    directory: str = "inference"
    """Folder for fetched chunks, used by this node alone. On the depot's file system, chunks are linked and not copied."""
    engine: str = "rollmesh.services.inference.engines.torch_engine:TorchEngine"
    """Engine class, by dotted name or as file.py:Name. It is called with its options."""
    engine_config: str = "rollmesh.services.inference.engines.torch_config:TorchEngineConfig"
    """Type of `engine_options`, by dotted name or as file.py:Name."""
    engine_options: dict[str, Any] = {}
    """Settings of the engine, of the type `engine_config`."""
    policy: str = "main"
    """The policy whose weights this node serves."""
    kv: Literal["recompute", "keep"] = "recompute"
    """What happens to the key-value cache of running sequences when weights change. `recompute` rebuilds it, so that log-probs equal
    a forward; `keep` keeps it, without a pause."""
    quota_bytes: int = 64 << 30
    """Limit of `directory`, in bytes. Two versions, and the files assembled from their chunks, must fit."""
    capacity: int = 64
    """Number of sequences that the node reports as its capacity. Routers divide its load by it."""
    streams_max: int = 256
    """Most Generate streams at once; one more is rejected. A client needs one stream for all its requests."""
    requests_per_stream_max: int = 4096
    """Most live requests of one stream; one more is rejected with OVERLOADED."""
    outbox_tokens_max: int = 1 << 20
    """Most tokens that wait for a client that does not read; beyond it, its stream ends. A token takes about 12 bytes."""
    frame_tokens_max: int = 1 << 16
    """Most tokens in one frame, which keeps a backlog below the message limit."""
    prepare_s: float = 600.0
    """Limit of fetching and loading one version, in seconds."""
    activate_s: float = 60.0
    """Limit of swapping and scoring the probes, in seconds; beyond it, the node quarantines itself."""
    drain_s: float = 30.0
    """Time that running requests have after a drain command, in seconds; then they end with DRAINING."""
    server: ServerConfig = ServerConfig()
    """The gRPC server."""
    membership: MembershipConfig = MembershipConfig()
    """The stream to the coordinator."""
    transfer: TransferConfig = TransferConfig()
    """How chunks are fetched."""

    def __post_init__(self) -> None:
        if not self.directory:
            raise ValueError("directory must not be empty, got ''")
        for name in (
            "quota_bytes",
            "capacity",
            "streams_max",
            "requests_per_stream_max",
            "outbox_tokens_max",
            "frame_tokens_max",
            "prepare_s",
            "activate_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.drain_s < 0:
            raise ValueError(f"drain_s must be >= 0, got {self.drain_s}")
