"""The torch engine, with a trap in the middle of a generation."""

from __future__ import annotations

from rollmesh.services.inference.engine import Emit, GenerateRequest
from rollmesh.services.inference.engines.torch import engine as torch_engine

from .engine import trapped


class TorchEngine(torch_engine.TorchEngine):
    """Passes `inference-generating`. It has the name of the real engine, so that the mesh passes it the model."""

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        super().submit(request, trapped(emit))
