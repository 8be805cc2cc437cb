"""What the engine of an inference node can do, as the node, the coordinator and the routers know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """The fields of `EngineCapabilities` in coordinator.proto."""

    engine: str = ""
    """Name of the engine in the configuration. The node sets it."""
    outputs: tuple[str, ...] = ()
    """Per-token outputs that a generation can request; `outputs` defines them."""
    scores: bool = True
    """Whether it can score."""
    score_outputs: tuple[str, ...] = ()
    """Per-token outputs that a call of `score` can request."""
    versions_max: int = 1
    """Most sets of weights from which it can sample at once."""
    dtype: str = ""
    """Element type in which it computes; empty if it does not report it."""
