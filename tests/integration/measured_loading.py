"""Open a trainer on ranks, and print as JSON the peak resident size of each of them, and the current one without pages
of files, in MiB.

python -m tests.integration.measured_loading DIRECTORY MODEL RANKS [update]

The trainer resumes from the newest checkpoint in DIRECTORY, or opens MODEL, and publishes its weights. With `update` it
also makes an update and saves a checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.engine import Position
from rollmesh.services.learner.engines import torch_trainer
from rollmesh.services.learner.engines.torch_trainer import TorchTrainer
from rollmesh.trainer.config import ComputeConfig
from tests.conformance.test_trainer_engine import HEAD, batch


def peaks() -> dict[str, tuple[float, float]]:
    """Return by rank the peak so far, which includes mapped pages of files, and the current size without them."""
    group = torch_trainer._group
    pids = {0: os.getpid()} | ({} if group is None else {r: p.pid for r, p in group._started.items()})
    return {str(rank): _peak(pid) for rank, pid in pids.items()}


def _peak(pid: int) -> tuple[float, float]:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    peak, held = (round(int(lines[name].split()[0]) / 1024, 1) for name in ("VmHWM", "RssAnon"))
    return peak, held


def main(directory: str, model: str, ranks: str, then: str = "") -> None:
    config = LearnerConfig(directory=directory, model=model, tensorboard=False, compute=ComputeConfig(ranks=int(ranks)))
    restored = TorchTrainer.open(config)
    engine = restored.engine
    found = {"opened": peaks()}
    folder = Path(directory) / "exported"
    folder.mkdir(parents=True, exist_ok=True)
    engine.export_weights(folder)
    found["exported"] = peaks()
    if then == "update":
        result = engine.update(1, *batch(1))
        digest = restored.log.append(1, result.used_ids, incarnation=0, outcome="APPLIED")
        engine.save(restored.log, Position(update=1, digest=digest, head=HEAD), data_snapshot=b"")
        found["saved"] = peaks()
    print(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
