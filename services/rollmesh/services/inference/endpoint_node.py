"""`EndpointNode`: an inference node whose weights are those of an endpoint and never change.

It loads them from a folder when it starts, joins with its own kind, and gets no weight commands. Clients address it by
the name of the endpoint, which is also the policy of its only version.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rollmesh.services.inference.engine import EngineBroken, KvPolicy, WeightsMismatch
from rollmesh.services.inference.node import InferenceNode
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import ConfigError, EngineFailed
from rollmesh.v1 import coordinator_pb2


class EndpointNode(InferenceNode):
    """One node of an endpoint of kind `frozen`."""

    kind = coordinator_pb2.NODE_KIND_ENDPOINT

    def __init__(self, *args: Any, endpoint: str, weights: Path, **options: Any) -> None:
        """`weights` is a folder with files *.safetensors. Other arguments as for `InferenceNode`. Raises
        ConfigError."""
        super().__init__(*args, endpoint=endpoint, **options)
        self._endpoint = endpoint
        self._weights = weights

    async def build(self, stack: AsyncExitStack) -> None:
        """Load the weights, so that the node joins with them. Raises ConfigError, or EngineFailed."""
        await super().build(stack)
        files = {path.name: path for path in sorted(self._weights.glob("*.safetensors"))}
        if not files:
            raise ConfigError(
                f"`endpoints.{self._endpoint}.model`: {self._weights} has no file *.safetensors; name a folder with "
                "weights",
                key=f"endpoints.{self._endpoint}.model",
            )
        digest = await asyncio.to_thread(_digest, files)
        version = PolicyVersion(policy=self._endpoint, step=0, weights_digest=digest)
        try:
            await self.engine.prepare(version, files)
            await self.engine.activate(version, KvPolicy.RECOMPUTE)
        except WeightsMismatch as err:
            raise ConfigError(
                f"`endpoints.{self._endpoint}.model`: the engine rejects the weights in {self._weights}: {err}",
                key=f"endpoints.{self._endpoint}.model",
            ) from err
        except EngineBroken as err:
            raise EngineFailed(f"endpoint `{self._endpoint}`: the engine cannot serve {self._weights}: {err}") from err


def _digest(files: Mapping[str, Path]) -> str:
    """Return a hash of the names and contents of the files."""
    digest = hashlib.sha256()
    for name, path in files.items():
        with path.open("rb") as file:
            digest.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
