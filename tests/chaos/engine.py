"""The fake engine, with a trap in the middle of a generation."""

from __future__ import annotations

from rollmesh.services.inference.engine import Emit, GenerateDelta, GenerateRequest
from rollmesh.testing.fake_engine import FakeEngine

from .traps import passes


class TrappedEngine(FakeEngine):
    """Passes `inference-generating` each time a request has some of its tokens and needs more."""

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        super().submit(request, trapped(emit))


def trapped(emit: Emit) -> Emit:
    """Call `emit`, and pass `inference-generating` after tokens that are not the last."""

    def watched(delta: GenerateDelta) -> None:
        emit(delta)
        if delta.finish is None:
            passes("inference-generating")

    return watched
