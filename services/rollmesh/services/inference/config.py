"""Configuration of an inference node."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rollmesh.shared.membership import MembershipConfig
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.weights.transfer import TransferConfig


class InferenceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node: its engine, its weights' folder, its limits."""

    directory: str = "inference"
    """Folder for fetched chunks, the node's own. Best on the depot's file system: chunks are linked then, not copied."""
    engine: str = "rollmesh.services.inference.engines.torch_engine:TorchEngine"
    """The engine class by dotted name or file.py:Name; called with its config."""
    engine_config: str = "rollmesh.services.inference.engines.torch_config:TorchEngineConfig"
    """Type of `engine_options`, by dotted name or file.py:Name."""
    engine_options: dict[str, Any] = {}
    """Settings of the engine, checked against `engine_config`."""
    policy: str = "main"
    """The policy whose weights this node serves."""
    kv: Literal["recompute", "keep"] = "recompute"
    """Key-value cache of running sequences when weights change: rebuilt (log-probs equal a forward) or kept (no pause)."""
    quota_bytes: int = 64 << 30
    """Most bytes in `directory`. Two versions and the files put together from their chunks must fit."""
    capacity: int = 64
    """Sequences the node claims to hold at once; routers weigh their load by it."""
    streams_max: int = 256
    """Generate streams at once; one more is refused. Clients multiplex and need one each."""
    requests_per_stream_max: int = 4096
    """Live requests of one stream; one more is refused as OVERLOADED."""
    outbox_tokens_max: int = 1 << 20
    """Tokens that may wait for a client which does not read; beyond, its stream is ended. 12 bytes each."""
    frame_tokens_max: int = 1 << 16
    """Most tokens in one frame, so that a backlog stays below the message limit."""
    prepare_s: float = 600.0
    """Limit of fetching and loading one version."""
    activate_s: float = 60.0
    """Limit of swapping and scoring the probes; beyond, the node counts as broken and quarantines itself."""
    drain_s: float = 30.0
    """How long running requests may go on after a drain command; then they end with DRAINING."""
    server: ServerConfig = ServerConfig()
    """The gRPC server."""
    membership: MembershipConfig = MembershipConfig()
    """The stream to the coordinator."""
    transfer: TransferConfig = TransferConfig()
    """How chunks are fetched."""

    def __post_init__(self) -> None:
        if not self.directory:
            raise ValueError("directory must not be empty")
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
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.drain_s < 0:
            raise ValueError(f"drain_s must not be negative, got {self.drain_s}")
