"""One process of the bench `versions`: a torch engine over several updates. Prints its resident memory as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np

from rollmesh.services.inference.engine import GenerateDelta, GenerateRequest, KvPolicy
from rollmesh.services.inference.engines.torch.config import TorchEngineConfig
from rollmesh.services.inference.engines.torch.engine import TorchEngine
from rollmesh.shared.domain.trajectory import SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.trainer.model_files import WEIGHTS_NAME

NUM_UPDATES = 6


def resident_bytes(field: str = "VmRSS") -> int:
    """Return a memory field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


async def measure(folder: Path, versions_max: int) -> dict[str, int]:
    """Return bytes before the first weights, after the updates while every held version samples, and at the peak."""
    options = TorchEngineConfig(
        model=str(folder), slots_max=4, context_max=128, versions_max=versions_max, prepared_max=1, forward="built_in"
    )
    engine = TorchEngine(options)
    await engine.start()
    before = resident_bytes()
    for step in range(NUM_UPDATES):
        version = PolicyVersion(policy="main", step=step)
        await engine.prepare(version, {WEIGHTS_NAME: folder / WEIGHTS_NAME})
        await engine.activate(version, KvPolicy.RECOMPUTE, engine.held[: versions_max - 1])
        for held in engine.held:
            await _generate(engine, held)
    assert len(engine.held) == versions_max
    measured = {"before": before, "serving": resident_bytes(), "peak": resident_bytes("VmHWM")}
    await engine.close()
    return measured


async def _generate(engine: TorchEngine, version: PolicyVersion) -> None:
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def emit(delta: GenerateDelta) -> None:
        if delta.finish is not None:
            ended.set_result(None)

    prompt, params = np.arange(8, dtype=np.int32), SamplingParams(max_tokens=8)
    engine.submit(GenerateRequest(request_id=str(version), token_ids=prompt, params=params, version=version), emit)
    await ended


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(Path(sys.argv[1]), int(sys.argv[2])))))
