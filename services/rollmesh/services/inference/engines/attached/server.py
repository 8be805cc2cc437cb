"""What `engine` needs of a server, whatever API the server has, and the messages in between.

A request is sent to the server in one or more parts. A part is one HTTP request under one set of weights: the engine
ends all parts before an update of the weights and begins new ones after it, so that each token has exactly one version.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollmesh.services.inference.engine import GenerateRequest
from rollmesh.shared.domain.engine_capabilities import EngineCapabilities
from rollmesh.shared.domain.trajectory import Columns, FloatArray, IntArray, SamplingParams

ABORTED = "abort"
"""Finish of a part that was aborted."""
STOPPED = "stop"
"""Finish of a part at a stop token, one of the request or one of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPart:
    """One request to the server. `token_ids` [n] is the prefix with the tokens that earlier parts sampled."""

    part_id: str
    """Unique, and not the beginning of another id."""
    token_ids: IntArray
    params: SamplingParams
    max_tokens: int
    outputs: tuple[str, ...]
    num_top: int
    label: str
    """Name of the weights at the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerChunk:
    """New tokens of a part. The arrays are as in a `GenerateDelta`."""

    tokens: IntArray
    logprobs: FloatArray
    logprobs_model: FloatArray | None
    arrays: Columns = field(default_factory=dict)
    num_cached: int | None = None
    """Prefix tokens found in the server's cache; None if the server does not tell."""
    finish: str = ""
    """Why the part ended; empty if it goes on."""
    message: str = ""
    """The server's words about the end."""
    labels: tuple[str, ...] = ()
    """Names of all weights that sampled the part, in the last chunk; empty if the server does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerScore:
    """Log-probs [n] of given tokens under the plain softmax; row 0 is 0, and -1 for ids."""

    logprobs: FloatArray
    arrays: Columns
    labels: tuple[str, ...]
    """As in a ServerChunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """Current state of the server."""

    label: str
    """Name of its weights."""
    kv_tokens_used: int = 0
    kv_tokens_max: int = 0


class AttachedServer(Protocol):
    """One running server. Methods raise MeshError; nothing is repeated inside."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Known without a connection."""
        ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def status(self) -> ServerStatus: ...

    async def check(self, model: Mapping[str, Any], vocab_size: int) -> None:
        """Raise ConfigError with the remedy if the server runs another model than the fields of `config.json` describe,
        or lacks a flag."""
        ...

    def check_request(self, request: GenerateRequest) -> None:
        """Raise ValueError for a request that this server cannot run."""
        ...

    def stream(self, part: ServerPart) -> AsyncGenerator[ServerChunk, None]:
        """Run a part. The last chunk has a `finish`. Closing the generator closes the connection."""
        ...

    async def abort(self, part_ids: Sequence[str]) -> None:
        """End parts. Their streams end with `ABORTED`. Unknown ids are ignored."""
        ...

    async def update(self, folder: str, label: str) -> None:
        """Load the weights of a model folder (path at the server), name them, and drop all keys and values of the old
        ones."""
        ...

    async def score(self, token_ids: IntArray, *, num_top: int) -> ServerScore:
        """Score [n] tokens. `num_top` 0 means no `top_k`."""
        ...
